"""The definitions that client and server share: keys, groups, layouts, the block table, messages.
Also reads the machine's limits, such as the limit of locked memory (`limits`)."""

import os

# Turns off gRPC's fork handlers: at a fork they stop gRPC's threads and may wait for ever. Must be
# set before gRPC is imported. hotkv needs no handlers, because it uses no channel after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
