"""`StorePlanner` alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_client.types import BlockResult, BlockRun
from hotkv_proto.blocks import MAX_PRIORITY, Retention, StoreOptions
from hotkv_proto.groups import GroupSpec
from hotkv_proto.messages.fields import MAX_LISTS
from hotkv_vllm.scheduler.store import stores_in_flight
from hotkv_vllm.scheduler.store.stores import ANSWER_BLOCKS, portions
from tests.vllm.parts import (
    BLOCK_BYTES,
    FULL,
    STATES,
    TOKENS,
    WINDOW,
    Parts,
    plan,
    report,
    request,
    stored,
)

STORED, PRESENT, WRITTEN = BlockResult.STORED, BlockResult.PRESENT, BlockResult.WRITTEN
REFUSED = BlockResult.ABORTED


def planned(parts: Parts, name: str, num_blocks: int, *table: int, **more: Any) -> Any:
    state = parts.state(request(name, TOKENS * num_blocks))
    tables = [list(table)] if table else None
    return state, plan(parts, (state, TOKENS * num_blocks), tables=tables, **more)[0]


def test_request_is_examined_at_each_full_block() -> None:
    parts = Parts()
    one = request("a", 100)
    state = parts.state(one)
    states = {"a": state}
    assert not parts.planner.due(states, {"a": 15}, (), {})
    assert parts.planner.due(states, {"a": 16}, (), {}) == [(state, 16)]
    # Unknown table: stored later.
    assert not parts.planner.plan([(state, 20)], lambda _: None, {}, lambda: ())[0]
    assert state.store.stored_blocks == [0]
    plan(parts, (state, 20))
    assert state.store.due_tokens == 32 and state.store.stored_blocks == [1]
    one.num_computed_tokens = 20
    assert not parts.planner.due(states, {"a": 11}, (), {})
    assert parts.planner.due(states, {"a": 12}, (), {})
    # vLLM offers a state.
    assert parts.planner.due(states, {"a": 1}, (), {"a": [(0, 1, 16)]})
    # Unknown, delayed, or not allowed to store.
    assert not parts.planner.due({}, {"a": 16}, (), {})
    assert not parts.planner.due(states, {"a": 16}, {"a"}, {})
    state.store.may_store = False
    assert not parts.planner.due(states, {"a": 16}, (), {})


def test_tokens_next_step_may_change_arent_stored() -> None:
    parts = Parts(unfinished=2)
    one = request("a", 100)
    state = parts.state(one)
    assert not parts.planner.due({"a": state}, {"a": 15}, (), {})
    assert stored(plan(parts, (state, 33))[0]) == [(0, [1])]
    assert state.store.due_tokens == 34
    assert stored(plan(parts, (state, 34))[0]) == [(0, [2])]
    # 97 tokens, the last two perhaps incomplete: 3 to 5 are stored, 6 is not.
    parts.planner.finish(state, [list(range(1, 40))], 97)
    assert stored(plan(parts)[0]) == [(0, [3, 4, 5])]


class AllKept:
    group = 0

    def keeps(self, request_id: str) -> bool:
        return True

    def names(self, state: Any, num_blocks: int) -> list[bytes]:
        return list(state.request.block_hashes[:num_blocks])

    def private_from(self, request_id: str) -> int:
        return 1 << 40

    def kept_as(self, request_id: str) -> str:
        return request_id

    def storing(self, request_id: str, job: Any) -> None:
        pass

    def stored(self, store: Any) -> None:
        pass


class WithPrivateNames(AllKept):
    """From `first` on, names are no other request's."""

    def __init__(self, first: int) -> None:
        self._first = first

    def private_from(self, request_id: str) -> int:
        return self._first

    def names(self, state: Any, num_blocks: int) -> list[bytes]:
        names = super().names(state, num_blocks)
        private = (b"private" + name[:25] for name in names[self._first :])
        return [*names[: self._first], *private]


@pytest.mark.parametrize("private_from", [0, 2, 4, 9])
def test_unshared_blocks_are_the_first_to_go(private_from: int) -> None:
    """Such blocks are useless after the request. Tokens would tell routers of a hit."""
    parts = Parts(keeper=WithPrivateNames(private_from))
    parts.server.wants_token_ids = True
    state = parts.state(request("a", 9 * TOKENS))
    state.retention = Retention(priority=3, ttl_s=60.0, pin=True)
    unshared = Retention(priority=-MAX_PRIORITY)
    for begin, end in ((0, 4), (4, 9)):
        jobs = plan(parts, (state, end * TOKENS))[0]
        cut = min(max(begin, private_from), end)
        assert [
            (run.depth, len(run.hashes), len(run.token_ids), job.options)
            for job in jobs
            for run in job.runs
        ] == [
            (first, stop - first, num_tokens, options)
            for first, stop, num_tokens, options in (
                (begin, cut, (cut - begin) * TOKENS, StoreOptions(state.retention, "a")),
                (cut, end, 0, StoreOptions(unshared, "a", is_private=True)),
            )
            if first < stop
        ]


def test_beside_kept_blocks_exact_ones_are_stored_for_all() -> None:
    """Of four blocks two are exact, and the fourth gets a private name."""
    keeper = WithPrivateNames(3)
    keeper.group = 1
    parts = Parts([FULL, FULL], attached=[1], keeper=keeper)
    parts.exactness.is_watching = True
    parts.exactness.exact_tokens = lambda _: 2 * TOKENS  # type: ignore[method-assign]
    state = parts.state(request("a", 9 * TOKENS))
    tables = [1, 2, 3, 4], [11, 12, 13, 14]
    jobs, _ = parts.planner.plan([(state, 4 * TOKENS)], lambda _: tables, {}, lambda: ())
    assert [(job.request_id, job.options.is_private, stored([job])) for job in jobs] == [
        ("", False, [(0, [1, 2])]),
        ("a", False, [(1, [11, 12, 13])]),
        ("a", True, [(1, [14])]),
    ]
    assert [[run.block_ids.tolist() for run in job.attached] for job in jobs] == [
        [],
        [[11, 12, 13]],
        [[14]],
    ]
    assert state.store.due_tokens == 5 * TOKENS


@pytest.mark.parametrize(
    ("specs", "kind"),
    [
        ([FULL], "plain"),
        ([FULL], "draft"),
        ([FULL], "kept"),
        ([FULL, FULL], "plain"),
        ([FULL, WINDOW], "plain"),
        ([STATES], "plain"),
    ],
)
@given(prompt=st.integers(1, 150), chunk=st.integers(1, 70), answer=st.integers(0, 300))
def test_answer_takes_few_stores_omits_nothing(
    specs: list[GroupSpec], kind: str, prompt: int, chunk: int, answer: int
) -> None:
    """An answer's blocks wait for each other, unless the request is kept or loses blocks. With
    a drafter the next token must be known.

    chunk: prompt tokens in a step.
    """
    keeper = AllKept() if kind == "kept" else None
    parts = Parts(specs, drafts=[0] if kind == "draft" else [], keeper=keeper)
    tables = [list(range(1, 40)), list(range(41, 80))]
    never_waits = kind == "kept" or WINDOW in specs or STATES in specs
    state = parts.state(one := request("a", prompt, decoded=answer))
    found: list[list[int]] = [[] for _ in specs]
    num_stores = 0

    def step(num_tokens: int) -> None:
        nonlocal num_stores
        due = parts.planner.due({"a": state}, {"a": num_tokens}, (), {})
        jobs, _ = parts.planner.plan(due, lambda _: tuple(tables[: len(specs)]), {}, lambda: ())
        for job in jobs:
            num_stores += 1
            for group, blocks in stored([job]):
                found[group] += blocks
            results = [STORED] * sum(len(run.hashes) for run in job.runs)
            parts.planner.reported(report((job.store_id, results)))
        one.num_computed_tokens += num_tokens

    while one.num_computed_tokens < prompt:
        step(min(chunk, prompt - one.num_computed_tokens))
        assert len(found[0]) == one.num_computed_tokens // TOKENS
    num_stores = 0
    for _ in range(answer):
        before = len(found[0])
        step(1)
        filled = one.num_computed_tokens // TOKENS
        assert kind != "draft" or len(found[0]) in (before, filled - 1)
        assert not never_waits or len(found[0]) == filled
    filled = (prompt + answer) // TOKENS
    if kind == "plain" and not never_waits:
        # An answer's first block is stored alone if the prompt fills none.
        alone = prompt < TOKENS <= prompt + answer
        assert num_stores == alone + (filled - prompt // TOKENS - alone) // ANSWER_BLOCKS
    parts.planner.finish(state, tables[: len(specs)], prompt + answer)
    step(0)
    assert all(found[at] == tables[at][:filled] for at in range(len(specs)))


@pytest.mark.parametrize("has_tokens", [False, True])
def test_tail_ends_before_a_block_being_written(has_tokens: bool) -> None:
    parts = Parts()
    parts.server.wants_token_ids = has_tokens
    salted = request("a", 80)
    salted.cache_salt = "salt"
    parts.planner.finish(parts.state(salted), [[1, 2, 3, 4, 5]], 80)
    parts.planner.finish(parts.state(request("b", 32)), [[6, 7]], 32)
    parts.planner.finish(parts.state(request("c", 32)), [[8, 9]], 32)
    jobs, _ = plan(parts, written=[5, 4, 6])
    assert stored(jobs) == [(0, [1, 2, 3]), (0, [8, 9])]
    run = jobs[0].runs[0]
    assert [*run.hashes] == request("a", 48).block_hashes
    assert [*run.token_ids] == ([*range(48)] if has_tokens else [])
    assert len(run.extra_keys) == (3 if has_tokens else 0)


@pytest.mark.parametrize("written", [2, 11, 12])
def test_tail_of_several_groups_is_all_or_nothing(written: int) -> None:
    parts = Parts([FULL, FULL])
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2], [11, 12]], 32)
    assert plan(parts, written=[written]) == ((), ())
    parts.planner.finish(parts.state(request("b", 32)), [[1, 2], [11, 12]], 32)
    assert stored(plan(parts, written=[3])[0]) == [(0, [1, 2]), (1, [11, 12])]


def test_two_requests_never_store_one_block() -> None:
    parts = Parts()
    assert stored(planned(parts, "a", 2)[1]) == [(0, [1, 2])]
    assert stored(planned(parts, "a", 3)[1]) == [(0, [3])]
    # Not twice in a step, nor after another request's end.
    parts = Parts()
    parts.planner.finish(parts.state(request("a", 32)), [[1, 2]], 32)
    parts.planner.finish(parts.state(request("b", 48)), [[1, 2, 3]], 48)
    both = (parts.state(request("c", 64)), 64), (parts.state(request("d", 80)), 80)
    wanted = [(0, [1, 2]), (0, [3]), (0, [4]), (0, [5])]
    assert stored(plan(parts, *both)[0]) == wanted


@pytest.mark.parametrize(
    "group, boundary, exact_tokens, is_stored",
    [
        (0, 16, 64, True),
        (0, 64, 64, True),
        # Not at 0, beyond the known tokens, or inside a block.
        (0, 0, 64, False),
        (0, 80, 64, False),
        (0, 40, 64, False),
        # vLLM offers states of group 0 only.
        (1, 48, 64, False),
        # All tokens up to it must be exact.
        (0, 48, 48, True),
        (0, 48, 47, False),
    ],
)
def test_state_has_its_boundary_blocks_hash(
    group: int, boundary: int, exact_tokens: int, is_stored: bool
) -> None:
    parts = Parts([STATES], by_handoff=[0])
    parts.exactness.is_watching = True
    parts.exactness._exact_tokens = {"a": exact_tokens}
    state, jobs = planned(parts, "a", 4, handoffs={"a": [(group, 7, boundary)]})
    # No other block of the table.
    assert stored(jobs) == ([(0, [7])] if is_stored else [])
    if is_stored:
        (run,) = jobs[0].runs
        depth = boundary // TOKENS - 1
        assert (run.depth, [*run.hashes]) == (depth, [state.request.block_hashes[depth]])


def test_excess_stores_wait_the_last_is_dropped() -> None:
    """Blocks above the limit are dropped if their request ends first."""
    parts = Parts(max_inflight_store_mib=1)
    _, jobs = planned(parts, "a", 4)
    assert len(jobs) == 1 and parts.planner.in_flight.num_bytes == 4 * BLOCK_BYTES
    second, waiting = planned(parts, "b", 2, 11, 12)
    assert waiting == () and second.store.stored_blocks == [0]
    assert not parts.count("dropped_blocks")
    parts.planner.finish(second, [[11, 12]], 32)
    assert parts.count("dropped_blocks") == 2
    parts.planner.reported(report((jobs[0].store_id, [STORED] * 4)))
    assert not parts.planner.in_flight.num_bytes
    assert stored(plan(parts, (second, 32), tables=[[11, 12]])[0]) == [(0, [11, 12])]
    # Two are being stored and two planned.
    tables = {"c": ([21, 22],), "d": ([31],)}
    third, fourth = parts.state(request("c", 32)), parts.state(request("d", 16))
    jobs, _ = parts.planner.plan([(third, 32), (fourth, 16)], tables.get, {}, lambda: ())
    assert stored(jobs) == [(0, [21, 22])] and fourth.store.stored_blocks == [0]


def test_irrevocable_store_is_not_sent() -> None:
    parts = Parts()
    parts.planner.in_flight.fence.revocations = SimpleNamespace(take=lambda: 0)  # type: ignore[assignment]
    assert plan(parts, (parts.state(request("a", 32)), 32)) == ((), ())
    assert parts.count("dropped_blocks") == 2 and not parts.count("stores")
    assert not parts.planner.in_flight


@pytest.mark.parametrize("why", ["is_held", "is_rekeying"])
def test_no_store_begins_during_reset_or_update(why: str) -> None:
    parts = Parts()
    _, (under_way,) = planned(parts, "a", 2)
    setattr(parts.planner, why, True)
    parts.planner.finish(parts.state(request("b", 32)), [[6, 7]], 32)
    state = parts.state(request("c", 32))
    assert plan(parts, (state, 32)) == ((), (under_way.store_id,))
    setattr(parts.planner, why, False)
    assert stored(plan(parts, (state, 32), tables=[[8, 9]])[0]) == [(0, [8, 9])]


def test_step_waits_for_stores_it_overwrites() -> None:
    parts = Parts()
    _, (one,) = planned(parts, "a", 2)
    _, (two,) = planned(parts, "b", 2, 11, 12)
    assert plan(parts, written=[5]) == ((), ())
    assert plan(parts, written=[12, 5]) == ((), (two.store_id,))
    # A store is waited for once.
    assert plan(parts, written=[11]) == ((), ())
    assert plan(parts, written=[1, 2, 11]) == ((), (one.store_id,))


@pytest.mark.parametrize("is_held", [False, True])
def test_unreported_store_is_listed_once_then_forgotten(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """A pause between steps counts as MOST_STEP_S at most."""
    now_s = [100.0]
    monkeypatch.setattr(stores_in_flight.time, "monotonic", lambda: now_s[0])
    parts = Parts()
    _, (job,) = planned(parts, "a", 2)
    now_s[0] += stores_in_flight.UNREPORTED_S
    assert plan(parts) == ((), ())
    for _ in range(round(stores_in_flight.UNREPORTED_S / stores_in_flight.MOST_STEP_S) - 2):
        now_s[0] += stores_in_flight.MOST_STEP_S
        assert plan(parts) == ((), ())
    now_s[0] += stores_in_flight.MOST_STEP_S
    parts.planner.is_held = is_held
    assert plan(parts) == ((), (job.store_id,))
    assert parts.count("dropped_blocks") == 2 and not parts.planner.in_flight.num_bytes
    assert plan(parts) == ((), ())


@pytest.mark.parametrize(
    "ranks, counts",
    [
        ([[STORED, PRESENT, REFUSED]], (1, 1, 1)),
        # Other ranks' shards are missing: refused.
        ([[WRITTEN] * 3], (0, 0, 3)),
        ([[WRITTEN, PRESENT, STORED], [STORED, WRITTEN, REFUSED]], (1, 1, 1)),
        ([[STORED] * 3, []], (0, 0, 3)),
        ([[STORED] * 3, [PRESENT] * 2], (2, 0, 1)),
    ],
)
def test_block_is_stored_once_every_rank_stored(
    ranks: list[list[BlockResult]], counts: tuple[int, int, int]
) -> None:
    parts = Parts(num_ranks=len(ranks))
    parts.finder.hidden.hide(0, hashes := request("a", 48).block_hashes)
    _, (job,) = planned(parts, "a", 3)
    for rank, answers in enumerate(ranks):
        assert len(parts.planner.in_flight) == 1
        # Only the first report counts, and none of an unknown store.
        for told in [report((job.store_id, answers), (1 << 40, [STORED]), rank=rank)] * 2:
            parts.planner.reported(told)
    assert not parts.planner.in_flight.stores and not parts.planner.in_flight.reading
    names = ("stored_blocks", "present_blocks", "refused_blocks")
    assert tuple(parts.count(name) for name in names) == counts
    assert all(parts.stats.data.get(name, 1) for name in names)
    # Only what every rank has stored or found.
    mask = parts.finder.hidden.mask(0, hashes, np.ones(3, np.bool_))
    assert mask.sum() == counts[0] + counts[1]


def test_store_has_at_most_the_accepted_runs() -> None:
    runs = [BlockRun(0, [b"%032d" % n], np.array([n], np.int32)) for n in range(3 * MAX_LISTS)]
    parts = portions(runs)
    assert [run for part in parts for run in part] == runs
    assert max(map(len, parts)) <= MAX_LISTS
