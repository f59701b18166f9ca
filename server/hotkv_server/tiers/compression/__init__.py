"""Lossless compression of bfloat16 keys and values, 12 bits per value, for tiers below host
memory."""
