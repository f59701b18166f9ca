"""What both sides of hotkv must agree on, and nothing else: keys, groups, layouts, the block table,
the wire."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of `hotkv.v1` as spoken; client and server must be equal."""
