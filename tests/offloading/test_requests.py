"""`Promotions` and `PromotionRoom`, which bound promotions."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_vllm.offloading.promotions import (
    MAX_WAVES,
    SHARE_ALONE,
    SHARE_TOGETHER,
    PromotionRoom,
    Promotions,
)

KEYS = [bytes([number]) * 8 + (number % 2).to_bytes(4, "big") for number in range(12)]
ENDS = {key: 16 * (number // 2 + 1) for number, key in enumerate(KEYS)}
subsets = st.sets(st.sampled_from(KEYS))


@given(st.lists(st.tuples(subsets, subsets)))
def test_promotions_are_bounded_within_the_first_reach(waves):
    """Else a request might promote for ever."""
    promotions, allowed, num_submitted = Promotions(), set(KEYS), 0
    for asked, loaded in waves:
        now = {key for key in KEYS if promotions.may_promote(key, ENDS[key])}
        assert now <= allowed
        allowed, submitted = now, asked & now
        if not submitted:
            continue
        num_submitted += 1
        assert num_submitted <= MAX_WAVES
        promotions.submitted({key: ENDS[key] for key in submitted})
        promotions.ended(submitted, loaded & submitted)
        for key in KEYS:
            if promotions.may_promote(key, ENDS[key]):
                assert key not in submitted - loaded
                ends = [ENDS[k] for k in promotions.promoted]
                own = [ENDS[k] for k in promotions.promoted if k[-4:] == key[-4:]]
                assert ENDS[key] <= max(own or ends)


class RoomMachine(RuleBasedStateMachine):
    """`PromotionRoom` against lists of rows."""

    def __init__(self):
        super().__init__()
        self.room = PromotionRoom(20)
        self.offered: list[str] = []
        self.under_way: list[tuple[str, int]] = []

    @rule(request=st.sampled_from("abc"), count=st.integers(1, 25))
    def offer(self, request, count):
        for _ in range(count):
            others = {*self.offered, *(name for name, _ in self.under_way)} - {request}
            limit = int(20 * (SHARE_TOGETHER if others else SHARE_ALONE))
            taken = len(self.offered) + sum(rows for _, rows in self.under_way)
            assert self.room.offer(request) == (taken < limit)
            if taken < limit:
                self.offered.append(request)

    @rule()
    def end_step(self):
        for request in sorted(set(self.offered)):
            rows = self.offered.count(request)
            self.room.begin(request, rows)
            self.under_way.append((request, rows))
        self.room.end_step()
        self.offered = []

    @rule(place=st.integers(0, 9))
    def end(self, place):
        if self.under_way:
            self.room.end(*self.under_way.pop(place % len(self.under_way)))

    @invariant()
    def books_agree(self):
        self.room.check_invariants()
        assert self.room.num_taken == len(self.offered) + sum(rows for _, rows in self.under_way)


TestRoom = RoomMachine.TestCase
