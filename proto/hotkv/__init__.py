"""What both sides of hotkv must agree on, and nothing else: keys, groups, layouts, the block table,
the wire."""

__version__ = "0.1.0"
