"""An epoch's number says when it began, and whether a flush may have raised it."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.tiers.epoch_numbers import RAISES, TICK_US, begun, may_be_raised

NOW_US = 1_790_000_000_000_000
times = st.integers(NOW_US, 4 * NOW_US)


@given(times, st.integers(0, RAISES - 1), times)
def test_an_epoch_that_begins_later_is_above_all_before(
    now_us: int, raises: int, later_us: int
) -> None:
    epoch = begun(now_us) + raises
    assert may_be_raised(epoch) == (raises > 0)
    assert 10**18 < epoch < 2**63
    if later_us >= now_us + TICK_US:
        assert begun(later_us) > epoch


@given(st.integers(1, NOW_US))
def test_of_numbers_that_began_otherwise_nothing_is_known(epoch: int) -> None:
    """Older servers began with the microseconds, and an INCR of what is not there gives 1."""
    assert may_be_raised(epoch)
