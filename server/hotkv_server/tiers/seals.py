"""Seals: 64 bits that a block's key and all its bytes must reproduce, for tiers below host memory.

XXH3 over all bytes, with a seed made of the key, so another block's bytes never pass. No byte is
left out, because a disk loses whole sectors. No defence against an adversary.
"""

import xxhash


def seal(key: bytes, content: "bytes | memoryview") -> int:
    """The seal of a block's bytes, never 0."""
    return xxhash.xxh3_64_intdigest(content, xxhash.xxh3_64_intdigest(key)) or 1
