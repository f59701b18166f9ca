"""Residency in the scheduler side: who may begin, and what of a hit is loaded."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import CUDAGraphMode

from hotkv_proto.reports import Miss
from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.scheduler import companion as scheduler_companion
from hotkv_sparse.vllm.scheduler.companion import SparseScheduler
from hotkv_vllm.scheduler.request import ASK_AGAIN, NO_HIT
from tests.sparse.engines.companions import companion
from tests.vllm.desks import LONG, WithAdapter, desk, granted
from tests.vllm.parts import FULL, TOKENS, Parts, request

__all__ = ["desk"]

LEFT_OUT = range(1, 3)
"""Blocks of a hit of four that stay in host memory."""


def test_residents_server_blocks_are_neither_leased() -> None:
    parts = Parts(left_out=LEFT_OUT, attached=[0])
    parts.put("a", range(4))
    parts.put("a", range(4), group=1)
    state = granted(parts)
    lease = parts.server.leases[state.hit.lease_id]
    named = [request("a", LONG).block_hashes[block] for block in (0, 3)]
    assert [hashes for _, hashes in lease] == [named, named]
    job = parts.load(state, 4 * TOKENS, [[1, 0, 0, 4]])
    for run in (*job.runs, *job.attached):
        assert run.lease_positions.tolist() == [0, 1] and run.block_ids.tolist() == [1, 4]
    assert parts.finder.end_load(state, False) == (4,)


def test_blocks_of_other_groups_are_all_loaded() -> None:
    parts = Parts([FULL, FULL], left_out=LEFT_OUT)
    parts.groups.kept = 1
    for group in range(2):
        parts.put("a", range(4), group=group)
    state = granted(parts)
    lease = parts.server.leases[state.hit.lease_id]
    assert [len(hashes) for _, hashes in lease] == [4, 2]
    job = parts.load(state, 4 * TOKENS, [[1, 2, 3, 4], [11, 0, 0, 14]])
    assert [run.block_ids.tolist() for run in job.runs] == [[1, 2, 3, 4], [11, 14]]
    assert parts.load(state, 4 * TOKENS, [[1, 0, 3, 4], [11, 0, 0, 14]]) is None
    assert parts.finder.end_load(state, False) == (4, 4)


@pytest.mark.parametrize("is_named", [True, False])
def test_failed_load_hides_only_its_blocks(is_named: bool) -> None:
    """is_named: False while the ranks check the adapter: its blocks have no keys."""
    parts = Parts(left_out=LEFT_OUT)
    state = granted(parts)
    assert parts.load(state, 4 * TOKENS, [[1, 0, 0, 4]])
    if not is_named:
        parts.finder.groups.keys = lambda _: ()
    parts.finder.end_load(state, True)
    hashes = request("a", LONG).block_hashes
    is_hidden = [parts.finder.hidden.has(0, [one]) for one in hashes[:4]]
    assert is_hidden == [is_named, False, False, is_named] and not parts.server.leases


@pytest.mark.parametrize("table", [[1, 2, 0, 4], [1, 0, 3, 4], [1, 2, 3, 4]])
def test_blocks_left_out_of_lease_cant_load(table: list[int]) -> None:
    parts = Parts(left_out=LEFT_OUT)
    assert parts.load(granted(parts), 4 * TOKENS, [table]) is None


def test_resident_block_without_sketch_is_reexamined() -> None:
    parts = Parts(left_out=LEFT_OUT, attached=[0])
    parts.put("a", [0], group=1)
    state = granted(parts)
    assert parts.load(state, 4 * TOKENS, [[1, 0, 0, 4]])
    assert parts.finder.end_load(state, False) == (3,)


def test_behind_a_local_hit_less_is_left_out() -> None:
    parts = Parts(left_out=LEFT_OUT)
    state = granted(parts, computed=2 * TOKENS)
    (lease,) = parts.server.leases[state.hit.lease_id]
    assert lease[1] == [request("a", LONG).block_hashes[3]]


@pytest.mark.parametrize("num_blocks", [0, 2, 4])
def test_hit_offers_no_more_than_usable(desk: Any, num_blocks: int) -> None:
    one = desk()
    resident = SimpleNamespace(
        arrived=lambda *_: None, usable_tokens=lambda _, device, hit: min(hit, num_blocks * TOKENS)
    )
    one.desk.answers._companion = companion(one.edge, SimpleNamespace(), resident)
    one.parts.put("a", range(4))
    first = request("a", LONG)
    state = one.arrive(first)
    assert one.hit(first) == num_blocks * TOKENS
    assert state.hit.miss is (Miss.PARTIAL_BLOCK if num_blocks == 4 else Miss.NOT_ASKED)
    assert list(one.parts.server.leases) == [state.hit.lease_id] * bool(num_blocks)
    if num_blocks:
        assert state.hit.leased == [range(num_blocks)]


class SmallPool:
    """Too small for any context."""

    spec = object()

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def was_preempted(self, _: str) -> bool:
        return False

    def heed_wait(self, request: Any, waits: bool) -> bool:
        return waits

    def stays_whole(self, _: Any) -> bool:
        return False

    def holds_whole(self, one: Any) -> bool:
        return False

    def fail(self, request_id: str, why: str) -> None:
        self.failed[request_id] = why

    def could_be_whole(self, _: Any) -> bool:
        return False

    def begin_whole(self, request_id: str, is_meant: bool) -> None:
        assert not is_meant


@pytest.mark.parametrize("why", ["off", "unknown"])
def test_outgrowing_without_keeper_ends_as_error(desk: Any, why: str) -> None:
    one = desk()
    first = request("a", LONG)
    one.arrive(first)
    pool = SmallPool()
    one.desk._companion = companion(one.edge, pool, Mock() if why == "unknown" else None)
    if why == "off":
        one.sharing.cache = None
    elif why == "unknown":
        one.desk.states.clear()
    assert one.desk.match(first, 0) == ASK_AGAIN
    assert "outgrows the device" in pool.failed["a"]


def test_resident_streamed_input_ends_as_error(desk: Any) -> None:
    """vLLM asks nothing about later input: the request would wait for ever."""
    one = desk()
    first = request("a", 20)
    first.resumable = True
    one.arrive(first)
    assert one.desk.match(first, 0) == NO_HIT
    pool = SmallPool()
    one.desk._companion = companion(one.edge, pool)
    assert one.desk.match(first, 0) == ASK_AGAIN
    assert "streamed input" in pool.failed["a"]


def test_broken_callback_ends_the_resident_request(desk: Any) -> None:
    one = desk()
    one.arrive(request("a", LONG))
    pool = SmallPool()
    one.desk._companion = companion(one.edge, pool)
    one.desk.request_broke("a")
    assert "broke" in pool.failed["a"]


def test_last_block_of_outgrowing_request_isnt_stored(desk: Any) -> None:
    """Steps under way may have failed to read its old blocks."""
    one = desk()
    first = request("a", 32, computed=32)
    one.arrive(first)
    one.desk._companion = companion(one.edge, SmallPool())
    one.desk.finished(first, [[1, 2]])
    assert not one.tails()


@pytest.mark.parametrize(
    ("mode", "replays"),
    [("FULL_AND_PIECEWISE", True), ("FULL_DECODE_ONLY", True), ("PIECEWISE", False)],
)
def test_cuda_rows_are_decided_within_kernel_limits(
    monkeypatch: pytest.MonkeyPatch, mode: str, replays: bool
) -> None:
    pool = SimpleNamespace(
        spec=SimpleNamespace(begins_whole=False),
        has_away={"away"}.__contains__,
        is_moved={"a", "b"}.__contains__,
        left_out=lambda hit_tokens: range(0),
        distrust=lambda: None,
    )
    monkeypatch.setattr(scheduler_companion, "DevicePool", lambda *_: pool)

    def made(device: str) -> Any:
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
            device_config=SimpleNamespace(device_type=device),
            compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]),
            num_speculative_tokens=0,
        )
        settings: Any = SimpleNamespace(sparse=SparseConfig())
        nothing: Any = SimpleNamespace()
        kv: Any = SimpleNamespace(kv_cache_groups=[])
        return SparseScheduler(settings, vllm_config, kv, nothing, nothing, nothing)

    assert made("cpu").rows._limits is None
    one = made("cuda")
    found = one.rows._limits
    assert found.replays_decode is replays
    assert not found.has_moved("a"), "nobody keeps its old blocks"
    one.residents = SimpleNamespace(keeps={"a", "c"}.__contains__)
    assert [found.has_moved(name) for name in "abc"] == [True, False, False]
    pool.spec = None  # type: ignore[assignment]
    assert made("cuda").rows._limits is None


class Calls:
    """Records the calls of `RowNames` or `SparseSequences`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    def arrived(self, one: Any) -> None:
        self.sent.append(("arrived", one.request_id))

    def ended(self, request_id: str, now_s: float = 0.0) -> None:
        self.sent.append(("ended", request_id))


def test_rows_follow_all_requests_sequences_the_named(desk: Any) -> None:
    one = desk()
    rows, sequences = Calls(), Calls()
    one.desk._companion = companion(one.edge, sequences=sequences)
    one.desk._companion.rows = rows
    plain, other = request("a", LONG), request("c", LONG)
    for asks in (plain, WithAdapter("b")):
        one.desk.arrived(asks)
    one.sharing.cache = None
    one.desk.arrived(other)
    assert sequences.sent == [("arrived", "a")]
    one.desk.finished(other, [[]])
    assert rows.sent == [*(("arrived", name) for name in "abc"), ("ended", "c")]
    assert not one.edge.broken
