"""Epochs of key spaces as numbers: when they began and how often flushes have raised them since.

An epoch begins at the wall clock's time, so one that was lost does not begin again with a number
that was used before. Its lowest 16 bits are 0 then, and a flush adds one.
"""

RAISES = 1 << 16
"""One epoch and the next one that may begin lie so far apart, unless they begin within TICK_US."""
TICK_US = 64
_EARLIEST = 1_700_000_000_000_000 // TICK_US * RAISES
"""An epoch that is less has begun otherwise: older servers began with the microseconds."""


def begun(now_us: int) -> int:
    """The epoch that begins at a time in microseconds of the wall clock. Of 19 digits, less than
    2^63."""
    return now_us // TICK_US * RAISES


def may_be_raised(epoch: int) -> bool:
    """Whether a flush may have raised this epoch since it began: False says that none has, short of
    65,536 of them."""
    return epoch < _EARLIEST or bool(epoch % RAISES)
