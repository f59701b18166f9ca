"""What both sides of hotkv must agree on, and nothing else: keys, groups, layouts, the block table,
the wire."""

import os

# Before gRPC is imported, whose handlers of fork stop its threads and may wait for them for ever: a
# process hung so. No channel of ours is used in a process that was forked.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
