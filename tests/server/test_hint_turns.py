"""Hints in bulk: others are served between their parts, and each action comes to its end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.hints import Action, ActionType, Hints, Rejection, Status
from hotkv_proto.reports import RequestReport
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.hints import drive as hints_module
from hotkv_server.hints import work as hint_work
from hotkv_server.hints.book.outcomes import HintOutcome
from hotkv_server.hints.capability import HintsCapability
from hotkv_server.hints.drive import HintDesk
from hotkv_server.node import event_loop as slices
from hotkv_server.node.capability import Report
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from tests.core.support import make_key_space, words_of
from tests.server.capable import capable
from tests.server.nodes import local_node

KEY_SPACE = make_key_space("turns", SLOT_ALIGN, SLOT_ALIGN)
PROMPT = words_of(range(8))


class EmptyTiers:
    """Tiers that have nothing, and say so at once."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def prefetch(self, key_space_id: int, groups: list[Any], until_s: float) -> None:
        self.num_asked += 1


class Desk:
    """A node with one engine's session, and how often others were served."""

    def __init__(self, node: Node, session: LiveSession) -> None:
        self.node = node
        self.session = session
        self.turns = 0
        self.ticker = asyncio.create_task(self._tick())

    @property
    def desk(self) -> HintDesk:
        return self.node.capability(HintsCapability).desk

    async def _tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    def origin(self, hashes: Words = PROMPT, session_id: str = "") -> hint_work.Origin:
        tenant, number = KEY_SPACE.tenant, self.session.record.key_space_id
        return hint_work.Origin(tenant, number, hashes, session_id)

    def outcome(self, message_id: str, action_id: str = "a") -> HintOutcome:
        known = self.desk.book.known(KEY_SPACE.tenant)
        assert known is not None
        return known.outcomes[message_id, action_id]

    def status(self, message_id: str, action_id: str = "a") -> Status:
        return self.outcome(message_id, action_id).status


Scenario = Callable[[Desk], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a scenario over a desk."""

    async def whole(node: Node, scenario: Scenario) -> None:
        one = Desk(node, await node.sessions.open("engine", "rank", KEY_SPACE, "test"))
        await scenario(one)
        one.ticker.cancel()

    def run_(scenario: Scenario) -> None:
        no_copies: Any = object()
        with local_node(tmp_path, copies=no_copies) as node:
            asyncio.run(whole(capable(node), scenario))

    return run_


def report(hashes: Words = PROMPT, hints: Hints | None = None, session_id: str = "") -> Report:
    tokens = len(hashes) * KEY_SPACE.hash_block_tokens
    return RequestReport(hashes, tokens, 0, tokens, 0.0, NO_RETENTION, session_id, hints or Hints())


def demotes(count: int, message_id: str = "m") -> Hints:
    return Hints(message_id, tuple(Action(str(i), ActionType.DEMOTE) for i in range(count)))


@pytest.fixture
def every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is a slice."""
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


@pytest.mark.usefixtures("every_part")
def test_others_are_served_between_reports(run: Run) -> None:
    async def scenario(one: Desk) -> None:
        one.desk.scheduled(one.origin(session_id="s"), 0, 0, 0.0)
        before = one.turns
        await one.node.reports.note(one.session, [report()] * 20)
        with_reports = one.turns - before
        before = one.turns
        async for _ in slices.slices(slices_of_uses(one)):
            pass
        assert with_reports >= one.turns - before + 19

    run(scenario)


def slices_of_uses(one: Desk) -> Any:
    """What notes the blocks that 20 reports used: it served others before."""
    return one.node.reports._uses(one.session, [report()] * 20, 0.0)


@pytest.mark.usefixtures("every_part")
def test_others_are_served_between_actions(run: Run) -> None:
    async def scenario(one: Desk) -> None:
        origin = hint_work.Origin(KEY_SPACE.tenant)
        before = one.turns
        found = await one.desk.act(origin, demotes(64))
        assert {outcome.status for outcome in found} == {Status.MISSING}
        assert one.turns - before >= 63

    run(scenario)


@pytest.mark.usefixtures("every_part")
def test_others_are_served_while_a_prefetch_finds_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_work, "PREFETCH_BLOCKS", 1)

    async def scenario(one: Desk) -> None:
        tiers = EmptyTiers()
        one.desk._work._below = tiers  # type: ignore[assignment]
        prompt = words_of(range(100, 140))
        ask = Hints("m", (Action("a", ActionType.PREFETCH, deadline_s=60.0),))
        await one.desk.act(one.origin(prompt), ask)
        assert one.status("m") is Status.DEFERRED
        before = one.turns
        while one.status("m") is Status.DEFERRED:
            await asyncio.sleep(0)
        assert one.status("m") is Status.MISSING and tiers.num_asked == 40
        assert one.turns - before >= 40

    run(scenario)


@pytest.mark.usefixtures("every_part")
def test_others_are_served_while_blocks_are_counted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hint_work.hint_actions, "BLOCKS", 1)

    async def scenario(one: Desk) -> None:
        blocks, before = one.desk._work.blocks, one.turns
        number = one.session.record.key_space_id
        done = await blocks.count([hint_work.Prompt(number, PROMPT, 0, len(PROMPT))])
        assert (done.num_blocks, done.num_done) == (16, 0) and one.turns - before >= 16

    run(scenario)


# ------------------------------------------------------------------------- with what comes later


def test_a_tenant_without_sessions_keeps_the_prompt_that_all_share(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "END_DELAY_S", 0.0)
    mine, theirs = words_of([*range(4), 10, 11]), words_of([*range(4), 20, 21, 22])

    async def scenario(one: Desk) -> None:
        for first, second, message in ((mine, theirs, "m"), (theirs, mine, "n")):
            await one.node.reports.note(one.session, [report(first, demotes(1, message))])
            await one.node.reports.note(one.session, [report(second)])
            one.desk.ended(one.origin(first), demotes(1, message))
            while one.status(message, "0") is Status.DEFERRED:
                await asyncio.sleep(0)
            assert "4 blocks are kept" in one.outcome(message, "0").reason

    run(scenario)


def test_a_retain_is_noted_although_a_pin_is_shorter(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = Action("p", ActionType.PIN, ttl_s=10.0)
    keep = Action("r", ActionType.RETAIN, priority=1, ttl_s=86_400.0)
    asked: list[tuple[Retention, bool]] = []
    real_keep = hint_work.hint_actions.keep

    def noted(core: Any, number: int, lists: Any, how: Retention, *of: Any, is_use: bool) -> Any:
        asked.append((how, is_use))
        return real_keep(core, number, lists, how, *of, is_use=is_use)

    monkeypatch.setattr(hint_work.hint_actions, "keep", noted)

    async def scenario(one: Desk) -> None:
        for actions in ((keep, pin), (pin,), (keep,)):
            hints = Hints("", actions)
            together = replace(report(hints=hints), retention=hints.retention())
            await one.node.reports.note(one.session, [together])
        both, alone = asked[:2], asked[2:]
        assert both == [(keep.retention, True), (pin.retention, False)]
        assert alone == [(pin.retention, False), (keep.retention, False)]

    run(scenario)


def test_a_repeated_id_leaves_the_good_action(run: Run) -> None:
    async def scenario(one: Desk) -> None:
        for rejected_id in ("0", "#1"):
            message = f"m {rejected_id}"
            twice = Hints(message, demotes(1).actions, (Rejection(rejected_id, "demote", "twice"),))
            rejected, done = await one.desk.act(one.origin(), twice)
            assert one.status(message, "0") is Status.MISSING is done.status
            assert rejected is one.outcome(message, rejected_id)
            assert rejected_id == "0" or rejected.status is Status.REJECTED

    run(scenario)


@pytest.mark.parametrize("goes_on", [False, True])
def test_several_samples_of_a_prompt_release_their_session(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    monkeypatch.setattr(hints_module, "END_DELAY_S", 0.02)
    release = Hints("m", (Action("a", ActionType.RELEASE),))

    async def scenario(one: Desk) -> None:
        await one.node.reports.note(one.session, [report(PROMPT, release, "s")] * 2)
        for last in (50, 60):
            one.desk.ended(one.origin(words_of([*range(8), last]), "s"), release)
            if goes_on:
                one.desk.scheduled(one.origin(session_id="s"), 0, 0, 0.0)
        while one.status("m") is Status.DEFERRED:
            await asyncio.sleep(0)
        known = one.desk.book.known(KEY_SPACE.tenant)
        assert known is not None
        assert (known.sessions.get("s") is not None) == goes_on
        assert ("gone on" in one.outcome("m").reason) == goes_on

    run(scenario)


def test_ends_that_come_at_once_are_bounded_together(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "END_DELAY_S", 0.0)
    each = PROMPT.nbytes + hints_module.BYTES_OF_ENDED
    monkeypatch.setattr(hints_module, "MAX_WAITING_BYTES", 3 * each)

    async def scenario(one: Desk) -> None:
        asked = [demotes(1, str(number)) for number in range(5)]
        await one.node.reports.note(one.session, [report(hints=hints) for hints in asked])
        for hints in asked:
            one.desk.ended(one.origin(), hints)
        assert [one.status(h.message_id, "0") for h in asked[3:]] == [Status.REJECTED] * 2
        assert "too many requests" in one.outcome("4", "0").reason
        await asyncio.gather(*one.desk._tasks)
        assert [one.status(h.message_id, "0") for h in asked[:3]] == [Status.MISSING] * 3
        assert one.desk._waiting_bytes == 0
        one.desk.ended(one.origin(), asked[0])
        await one.desk.close()
        assert one.desk._waiting_bytes == 0

    run(scenario)
