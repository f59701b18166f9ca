"""Epochs of key spaces as numbers: each says when it began or was raised.

Always true: of two epochs of a key space in one store, the later one is greater. An epoch has the
wall clock's time, but is above all that are known to whoever makes it. So an epoch that a store has
lost does not come again, neither after a restart nor from an old copy of its data.
"""

RAISES = 1 << 16
"""One epoch and the next one that may begin lie so far apart, unless they begin within TICK_US."""
TICK_US = 64


def begun(now_us: int) -> int:
    """The epoch that begins at a time in microseconds of the wall clock. Of 19 digits, less than
    2^63."""
    return now_us // TICK_US * RAISES


def raised(now_us: int, *known: int) -> int:
    """The epoch that follows all that are known, at a time in microseconds of the wall clock."""
    return max([begun(now_us), *(epoch + 1 for epoch in known)])
