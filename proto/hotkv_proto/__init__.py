"""The definitions that client and server share: keys, groups, layouts, the block table, messages.
Also reads the machine's limits, such as the limit of locked memory (`limits`)."""

import os

# The two environment variables below must be set before gRPC is imported.
#
# Turns off gRPC's fork handlers: at a fork they stop gRPC's threads and may wait for ever. hotkv
# needs no handlers, because it uses no channel after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Makes gRPC print only errors to stderr. By default it also prints failed handshakes, and the bytes
# that peers send at the end of a connection, between the errors of `hotkv` and the lines of the
# server's log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
