"""Lossless compression of bfloat16 blocks in tiers, 12 bits per value."""
