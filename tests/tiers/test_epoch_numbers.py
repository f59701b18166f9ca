"""An epoch's number tells its time, and is above all numbers known to its maker."""

from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.tiers.protocol import RAISES, TICK_US, begun, raised

NOW_US = 1_790_000_000_000_000
times = st.integers(NOW_US, 4 * NOW_US)


@given(times, st.integers(0, RAISES - 1), times)
def test_an_epoch_that_begins_later_is_above_all_before(
    now_us: int, raises: int, later_us: int
) -> None:
    epoch = begun(now_us) + raises
    assert 10**18 < epoch < 2**63
    if later_us >= now_us + TICK_US:
        assert begun(later_us) > epoch


@given(times, st.lists(st.integers(1, 2**62)))
def test_an_epoch_that_is_raised_is_above_all_that_are_known(now_us: int, known: list[int]) -> None:
    epoch = raised(now_us, *known)
    assert epoch >= begun(now_us) and all(epoch > one for one in known)
