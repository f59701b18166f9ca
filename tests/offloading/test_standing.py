"""The server stands still at any moment: nothing waits beyond a bound, no late write changes a
row of other KV."""

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult

from hotkv_vllm.compat.primary_rows import PrimaryRows
from hotkv_vllm.offloading.tier import HELD_STEPS
from tests.offloading.rig import keys_of, row_of
from tests.offloading.standing import STEP_S, Clock, Server, standing_rig

PROMPTS = {name: keys_of(name, count) for name, count in (("a", 5), ("b", 9), ("c", 3))}
NUM_ROWS = 14
SETTINGS = {
    "hotkv.lookup_timeout_s": 0.2,
    "hotkv.load_timeout_s": 2.0,
    "hotkv.store_timeout_s": 0.5,
    "hotkv.reset_timeout_s": 1.0,
}
BOUND_S = 12.0
"""Another request's loads, then its own: each a lease (1 s; 2 s with tiers), a load (2 s) and
its cancellation (2 s)."""
RESET_S = 2.5


class Walk:
    """asking: by request, its keys and since when it waits."""

    def __init__(self, patch: pytest.MonkeyPatch, stands_at: int | None, **settings: bool) -> None:
        self.server, self.clock = Server(), Clock(patch)
        for name in "ab":
            for key in PROMPTS[name]:
                self.server.blocks[0, key[:-4]] = np.array(row_of(key))
        more: Any = settings
        self.rig = standing_rig(self.server, patch, self.clock, NUM_ROWS, **SETTINGS, **more)
        self.server.num_moments, self.server.stands_at = 0, stands_at
        self.asking: dict[Any, tuple[Any, Any, float]] = {}

    def ask(self, name: str) -> None:
        context = self.rig.request(PROMPTS[name])
        self.asking[context.req_id] = context, PROMPTS[name], self.clock.now_s

    def compute(self, name: str) -> None:
        context = self.rig.request(PROMPTS[name])
        self.rig.offer(context, PROMPTS[name])
        self.rig.manager.on_request_finished(context)

    def step(self) -> None:
        for name, (context, keys, since_s) in list(self.asking.items()):
            hits = self.rig.lookup_once(context, keys)
            if hits is not None:
                self.rig.load(context, keys[:hits])
                del self.asking[name]
            else:
                assert self.clock.now_s < since_s + BOUND_S, "a request waits for ever"
        self.rig.step()
        self.clock.now_s += STEP_S
        self.check_rows()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def reset(self) -> None:
        began_s = self.clock.now_s
        self.rig.manager.reset_cache()
        assert self.clock.now_s < began_s + RESET_S
        for name, (context, keys, _) in self.asking.items():
            self.asking[name] = context, keys, self.clock.now_s

    def check_rows(self) -> None:
        primary: Any = self.rig.primary
        for keys in PROMPTS.values():
            for key in keys:
                if primary.lookup(key, None) is LookupResult.HIT:
                    row = primary._policy.get(key).chunk_id
                    assert np.array_equal(self.rig.rows[row], row_of(key)), "a late write"

    def settle(self) -> None:
        while self.asking or self.rig.manager.has_pending_work():
            self.step()

    def end(self) -> None:
        """Rows are usable again, and hits come back."""
        self.settle()
        for name in PROMPTS:
            self.compute(name)
        self.settle()
        self.server.go_on()
        self.check_rows()
        self.settle()
        self.step()
        assert not self.rig.tier._rows.num_held
        primary: Any = self.rig.primary
        usable = primary._get_num_free_chunks() + primary._num_evictable_cache_chunks
        assert usable == NUM_ROWS
        self.compute("c")
        self.settle()
        self.reset()
        self.steps(HELD_STEPS)
        assert self.rig.hits(PROMPTS["c"]) == 3
        assert not self.rig.tier.edge.broken

    def close(self) -> None:
        self.rig.rows = None
        self.rig.manager.shutdown()


OPS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from("abc"))
    | st.tuples(st.just("compute"), st.sampled_from("abc"))
    | st.tuples(st.just("steps"), st.sampled_from([1, 1, 2, 30, 70]))
    | st.tuples(st.just("reset")),
    max_size=12,
)


@given(
    ops=OPS,
    stands_at=st.none() | st.integers(0, 12),
    has_table=st.booleans(),
    has_tiers=st.booleans(),
)
def test_whenever_the_server_stands_still_requests_go_on(
    ops: list[Any], stands_at: int | None, has_table: bool, has_tiers: bool
) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(Walk(patch, stands_at, has_table=has_table, has_tiers=has_tiers)) as one,
    ):
        for name, *arguments in ops:
            getattr(one, name)(*arguments)
        one.end()


@pytest.mark.parametrize(("has_table", "is_reset"), [(False, False), (True, True)])
@pytest.mark.parametrize("stands_at", range(10))
def test_a_load_at_each_moment_in_turn(
    monkeypatch: pytest.MonkeyPatch, stands_at: int, has_table: bool, is_reset: bool
) -> None:
    with closing(Walk(monkeypatch, stands_at, has_table=has_table)) as one:
        for op in ("ask", "compute", "ask"):
            getattr(one, op)("c" if op == "compute" else "b")
            one.step()
        if is_reset:
            one.reset()
        one.ask("a")
        one.end()


def test_rows_held_twice_free_with_the_last() -> None:
    """Two loads into one row can hang."""
    freed: list[int] = []
    rows = PrimaryRows()
    primary: Any = FakePrimary(freed)
    rows.bind(SimpleNamespace(_m=SimpleNamespace(primary_tier=primary)))  # type: ignore[arg-type]
    rows.bind(None)  # type: ignore[arg-type]
    rows.hold([1, 2])
    rows.hold([2])
    for row in (2, 3):
        primary._free_chunk(SimpleNamespace(chunk_id=row))
    assert freed == [3]
    rows.over([2])
    rows.over([1])
    assert rows.num_held == 2
    rows.collect()
    assert rows.num_held == 1 and primary._free_list == []
    primary.reset_cache()
    assert primary._free_list == [3, 1, 0] and primary._num_allocated_chunks == 4
    rows.release([2])
    assert primary._free_list == [3, 1, 0, 2] and not rows.num_held
    primary.reset_cache()
    assert primary._free_list == [] and primary._num_allocated_chunks == 0


class FakePrimary:
    def __init__(self, freed: list[int]) -> None:
        self._num_chunks, self._num_allocated_chunks = 4, 4
        self._free_list: list[int] = []
        self._free_chunk = lambda chunk: freed.append(chunk.chunk_id)

    def reset_cache(self) -> None:
        self._free_list.clear()
        self._num_allocated_chunks = 0
