"""The parts on which client and server must agree: keys, groups, layouts, the block table, the
wire."""

import os

# Must be set before gRPC is imported: gRPC's fork handlers stop its threads and may wait for them
# for ever. No process uses our channels after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
