"""Tests hints on a node in this process: bounds, sessions, and an outcome for each action."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hotkv_proto.blocks import NO_RETENTION
from hotkv_proto.hints import Action, ActionType, Hints, Rejection, Status
from hotkv_proto.reports import LoadEnd, RequestReport
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.hints import capability, figures
from hotkv_server.hints import drive as hints_module
from hotkv_server.hints import work as hint_work
from hotkv_server.hints.book.outcomes import HintOutcome
from hotkv_server.hints.book.sessions import SessionReceipt
from hotkv_server.hints.capability import HintsCapability
from hotkv_server.node import event_loop
from hotkv_server.node.capability import Filters, Report
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from tests.core.support import make_key_space, words_of
from tests.server.capable import capability_of, capable
from tests.server.nodes import local_node

KEY_SPACE = make_key_space("turns", SLOT_ALIGN, SLOT_ALIGN)
PROMPT = words_of(range(8))
RELEASE = Hints("m", (Action("a", ActionType.RELEASE),))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    no_copies: Any = object()
    with local_node(tmp_path, copies=no_copies) as made:
        yield capable(made)


class Desk:
    """A node's session, and a count of the event loop's turns."""

    def __init__(self, node: Node, session: LiveSession) -> None:
        self.node = node
        self.session = session
        self.desk = capability_of(node, HintsCapability).desk
        self.turns = 0
        self.ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def note(self, *reports: Report) -> None:
        await self.node.reports.note(self.session, list(reports))

    def origin(self, hashes: Words = PROMPT, session_id: str = "") -> hint_work.Origin:
        number = self.session.record.key_space_id
        return hint_work.Origin(KEY_SPACE.tenant, number, hashes, session_id)

    def outcome(self, message_id: str = "m", action_id: str = "a") -> HintOutcome:
        known = self.desk.book.known(KEY_SPACE.tenant)
        assert known is not None
        return known.outcomes[message_id, action_id]

    async def settled(self, message_id: str = "m", action_id: str = "a") -> HintOutcome:
        while self.outcome(message_id, action_id).status is Status.DEFERRED:
            await asyncio.sleep(0)
        return self.outcome(message_id, action_id)


async def opened(node: Node) -> Desk:
    return Desk(node, await node.sessions.open("engine", "rank", KEY_SPACE, "test"))


def report(hashes: Words = PROMPT, hints: Hints | None = None, session_id: str = "") -> Report:
    tokens = len(hashes) * KEY_SPACE.hash_block_tokens
    return RequestReport(hashes, tokens, 0, tokens, 0.0, NO_RETENTION, session_id, hints or Hints())


def demotes(count: int, message_id: str = "m") -> Hints:
    return Hints(message_id, tuple(Action(str(i), ActionType.DEMOTE) for i in range(count)))


class Tiers:
    """Each call waits for `go_on`."""

    names = ("disk",)

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.num_calls = 0

    async def prefetch(self, key_space_id: int, groups: list[Any], until_s: float) -> None:
        self.num_calls += 1
        await self.go_on.wait()


async def test_prefetches_are_bounded_and_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fill the tenant's share of memory, the third waits until its deadline, and a fourth is
    one too many."""
    now_s, one, tiers = [10.0], await opened(node), Tiers()
    for module in (hints_module, hint_work):
        monkeypatch.setattr(module, "time", Mock(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(hint_work, "PREFETCH_PAUSE_S", 0.0)
    monkeypatch.setattr(hint_work, "PREFETCH_BLOCKS", 4)
    monkeypatch.setattr(hint_work, "MAX_PREFETCHES", 3)
    # Room for two parts, of 4 blocks in each of two groups.
    monkeypatch.setattr(hint_work, "PREFETCH_SHARE", 2 * 4 * 2 * SLOT_ALIGN / (1 << 20))
    one.desk._work._below = tiers  # type: ignore[assignment]

    async def ask(message: str, deadline_s: float) -> HintOutcome:
        hints = Hints(message, (Action("a", ActionType.PREFETCH, deadline_s=deadline_s),))
        (outcome,) = await one.desk.act(one.origin(), hints)
        await asyncio.sleep(0)
        return outcome

    first, second, third = [await ask(message, 60.0 + (message < "c")) for message in "abc"]
    assert (await ask("d", 1.0)).reason == "too many prefetches of this tenant"
    now_s[0] += 60.0
    assert (await one.settled("c")).status is Status.REJECTED and "deadline" in third.reason
    assert first.status is second.status is Status.DEFERRED and tiers.num_calls == 2
    tiers.go_on.set()
    assert (await one.settled("a")).status is (await one.settled("b")).status is Status.MISSING
    assert tiers.num_calls == 4
    # A part larger than the share is fetched once no other is.
    monkeypatch.setattr(hint_work, "PREFETCH_SHARE", 0.0)
    await ask("e", 1.0)
    assert (await one.settled("e")).status is Status.MISSING and tiers.num_calls == 6


async def test_tenant_without_sessions_keeps_the_shared_prompt(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "END_DELAY_S", 0.0)
    mine, theirs = words_of([*range(4), 10, 11]), words_of([*range(4), 20, 21, 22])
    one = await opened(node)
    for first, second, message in ((mine, theirs, "m"), (theirs, mine, "n")):
        await one.note(report(first, demotes(1, message)))
        await one.note(report(second))
        one.desk.ended(one.origin(first), demotes(1, message))
        assert "4 blocks are kept" in (await one.settled(message, "0")).reason


async def test_retain_is_noted_although_pin_is_shorter(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = Action("p", ActionType.PIN, ttl_s=10.0)
    keep = Action("r", ActionType.RETAIN, priority=1, ttl_s=86_400.0)
    done = Mock(wraps=hint_work.hint_actions.keep)
    monkeypatch.setattr(hint_work.hint_actions, "keep", done)
    one = await opened(node)
    for actions in ((keep, pin), (pin,), (keep,)):
        hints = Hints("", actions)
        await one.note(replace(report(hints=hints), retention=hints.retention()))
    assert [(call.args[3], call.kwargs["is_use"]) for call in done.call_args_list] == [
        (keep.retention, True),
        (pin.retention, False),
        (pin.retention, False),
        (keep.retention, False),
    ]


async def test_a_repeated_id_leaves_the_good_action(node: Node) -> None:
    one = await opened(node)
    for rejected_id in ("0", "#1"):
        message = f"m {rejected_id}"
        twice = Hints(message, demotes(1).actions, (Rejection(rejected_id, "demote", "twice"),))
        rejected, done = await one.desk.act(one.origin(), twice)
        assert one.outcome(message, "0").status is Status.MISSING is done.status
        assert rejected is one.outcome(message, rejected_id)
        assert rejected_id == "0" or rejected.status is Status.REJECTED
    counters = capability_of(node, HintsCapability).counters()
    assert {name: count for name, count in counters.items() if count} == {
        "hints_missing_total": 2,
        "hints_rejected_total": 1,
    }


@pytest.mark.parametrize(("message", "goes_on"), [("m", False), ("m", True), ("", True)])
async def test_several_samples_of_a_prompt_release_their_session(
    node: Node, monkeypatch: pytest.MonkeyPatch, message: str, *, goes_on: bool
) -> None:
    monkeypatch.setattr(event_loop, "SLICE_S", 0.0)
    monkeypatch.setattr(hints_module, "END_DELAY_S", 0.0)
    one, release = await opened(node), Hints(message, RELEASE.actions)
    await one.note(*[report(PROMPT, release, "s")] * 2)
    for last in (50, 60):
        one.desk.ended(one.origin(words_of([*range(8), last]), "s"), release)
        if goes_on:
            one.desk.scheduled(one.origin(session_id="s"), SessionReceipt(), 0.0)
    outcome = await one.settled(message)
    await asyncio.gather(*one.desk._tasks)
    await asyncio.sleep(0)
    assert not one.desk._tasks and not one.desk._waiting_bytes
    reason = "the session has gone on" if goes_on else "none of the blocks is in host memory"
    assert outcome.reason == reason
    # The release happens once, for nine blocks in each group, or not at all.
    assert outcome.num_blocks == (0 if goes_on else 2 * 9)
    known = one.desk.book.known(KEY_SPACE.tenant)
    assert known is not None
    assert (known.sessions.get("s") is not None) == goes_on


@pytest.mark.parametrize("ends_with", [Hints(), RELEASE])
async def test_sessions_blocks_stay_until_its_expected_return(
    node: Node, monkeypatch: pytest.MonkeyPatch, ends_with: Hints
) -> None:
    """That is one and a half pauses of two seconds. Requests without a session hold nothing."""
    now_s, one, held = [0.0], await opened(node), Mock()
    monkeypatch.setattr(hints_module, "time", Mock(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(node.core.space.policy, "hold", held)
    for begin_s in (10.0, 13.0):
        now_s[0] = begin_s
        one.desk.scheduled(one.origin(session_id="s"), SessionReceipt(1), 0.0)
        now_s[0] = begin_s + 1.0
        one.desk.ended(one.origin(session_id="s"), ends_with if begin_s > 10.0 else Hints())
        one.desk.ended(one.origin(), Hints())
    if ends_with is RELEASE:
        await asyncio.sleep(0)
        assert not held.called
    else:
        await asyncio.gather(*one.desk._tasks)
        untils_s = {call.args[1] for call in held.call_args_list}
        assert held.call_count == 2 and untils_s == {14.0 + 1.5 * 2.0}
    await one.desk.close()
    (row,) = figures.hints(one.desk.book, Filters({"session_id": "s"}))["sessions"]
    assert row["expected_pause_s"] == 2.0


async def test_receipts_take_back_failed_or_closed_loads(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads 1 and 2 fail, 3 succeeds, 4 is open. The hit of 1 stays, as only three loads are
    remembered."""
    monkeypatch.setattr(capability, "MAX_OPEN_LOADS", 3)
    one = await opened(node)
    of_router = replace(report(session_id="s"), saved_s=1.0)
    # Requests without a hit have no load that could end.
    reports = [replace(of_router, report_id=number) for number in (1, 2, 3, 4)]
    missed = [replace(of_router, report_id=number, hit_tokens=0, saved_s=0.0) for number in (5, 6)]
    await one.note(*reports, *missed)
    ends = [LoadEnd(1, 0.0, failed=True), LoadEnd(2, 0.0, failed=True), LoadEnd(3, 0.0)]
    node.reports.ended(one.session, [], ends * 2)
    known = one.desk.book.known(KEY_SPACE.tenant)
    assert known and (session := known.sessions.get("s"))
    assert session.receipt.hit_tokens == 3 * of_router.hit_tokens and session.receipt.saved_s == 3.0
    await node.sessions.close(one.session)
    assert session.receipt.hit_tokens == 2 * of_router.hit_tokens and session.receipt.saved_s == 2.0
