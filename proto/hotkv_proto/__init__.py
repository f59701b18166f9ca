"""What client and server share."""

import os

# Both variables must be set before gRPC is imported.
#
# Turns off gRPC's fork handlers: at a fork they stop gRPC's threads and may wait for ever. hotkv
# uses no channel after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC would also print failed handshakes, and what peers send at the end of a connection,
# between the lines of the server's log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
