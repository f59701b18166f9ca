"""The parts on which client and server must agree: keys, groups, layouts, the block table, the
wire."""

import os

# Turns off gRPC's fork handlers, which stop its threads and may wait for them for ever. Must be set
# before gRPC is imported. No process uses our channels after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
