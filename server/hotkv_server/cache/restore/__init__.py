"""Takes over the block table of an earlier server. Pure."""
