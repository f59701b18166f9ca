"""Seals: the 64-bit XXH3 of all stored bytes of a block, because a disk may lose any sector. The
seed comes from the block's key, so another block's bytes don't match. A seal shows damage,
not forgery."""

from collections.abc import Sequence

import numpy as np
import xxhash

from hotkv_server.tiers.protocol import Seals

SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint64,
)
"""The XXH3 specification's default secret."""


def seal(key: bytes, content: "bytes | memoryview") -> int:
    """Never 0."""
    return xxhash.xxh3_64_intdigest(content, xxhash.xxh3_64_intdigest(key)) or 1


def secrets(keys: Sequence[bytes]) -> Seals:
    """XXH3's secret for each key, uint64 [n, 24]: derived from its seed, the XXH3 of the key."""
    seeds = np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)
    # XXH3 adds the seed to the default secret's even 64-bit words and subtracts it from the odd
    # ones, modulo 2**64.
    signs = np.where(np.arange(len(SECRET)) % 2 == 0, 1, -1).astype(np.int64).view(np.uint64)
    return SECRET + signs * seeds[:, None]
