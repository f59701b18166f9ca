"""Messages about sequences and selected blocks, against a naive model."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_client.types import Role, SessionConfig
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, group_hashes
from hotkv_sparse.vllm.scheduler import sequences as memory_module
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.scheduler.sequences import SparseGroup, SparseSequences, StreamCount
from hotkv_sparse.vllm.worker.reporter import REPORT_INTERVAL_S, SparseReport, SparseReporter
from hotkv_vllm.scheduler.request import RequestState, StoreState
from tests.doubles.fake import FakeServer
from tests.sparse.engines.sparse_workers import Engine

BLOCK = 4
MIN_TOKENS = 16
SEQUENCE_CALLS = {"create_sequence", "append_blocks", "delete_sequence"}
GROUPS = (SparseGroup(0, BLOCK),)


@dataclass(eq=False)
class Request:
    """Contexts of one family are prefixes of each other."""

    request_id: str
    family: int
    num_tokens: int
    max_tokens: int = 100

    @property
    def block_hashes(self) -> list[bytes]:
        return [
            bytes([self.family, place % 256, place // 256, 0]) * 8
            for place in range(self.num_tokens // BLOCK)
        ]


class Side:
    def __init__(self, groups: Sequence[SparseGroup] = GROUPS) -> None:
        self.server = FakeServer()
        self.said: list[str] = []
        self.streams = StreamCount(lambda state, _: self.said.append(state.value))
        specs = tuple(
            GroupSpec(GroupKind.FULL_ATTENTION, group.block_tokens, (64,)) for group in groups
        )
        space = KeySpace("m", "r", "bfloat16", specs, BLOCK)
        self.session = self.server.open(
            SessionConfig("unix:/none", "e", Role.SCHEDULER, space, on_state=self.streams)
        )
        self.memory = SparseSequences(
            self.session, self.streams, groups, self._hashes, MIN_TOKENS, "p"
        )
        self.requests: dict[str, Request] = {}
        self.now_s = 0.0

    def _hashes(self, request: Request, index: int) -> Sequence[bytes]:
        return group_hashes(request.block_hashes, BLOCK, self.memory._groups[index].block_tokens)

    def arrive(self, name: str, family: int, num_tokens: int, **more: Any) -> Request:
        self.requests[name] = Request(name, family, num_tokens, **more)
        self.memory.arrived(self.requests[name])
        return self.requests[name]

    def step(self, *names: str) -> tuple[str, ...]:
        """Ended requests whose last selections workers must report.

        names: sparse in this step.
        """
        self.now_s += 0.01
        states = {
            name: RequestState(request, StoreState([0], 0))
            for name, request in self.requests.items()
        }
        found = self.memory.step(SparseRows(tuple(range(len(names))), names), states, self.now_s)
        for name in names:
            self.requests[name].num_tokens += 1
        return found

    def end(self, name: str) -> None:
        self.memory.ended(name, self.now_s)
        del self.requests[name]

    def known(self) -> dict[str, list[bytes]]:
        """Block hashes by sequence id."""
        return {name: hashes for (_, name), (_, _, hashes) in self.server.sequences.items()}

    def reports(self) -> list[tuple[dict[str, Any], dict[int, dict[str, float]]]]:
        return [what for kind, what in self.server.calls if kind == "report_sparse"]


# ---------------------------------------------------------------------------------------- scheduler


class SparseMemoryMachine(RuleBasedStateMachine):
    """The server answers late, dies and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = mock.patch.object(memory_module, "MAX_UNANSWERED", 4)
        self.bound.start()
        self.side = Side()
        self.numbers = itertools.count()
        self.decoded: set[str] = set()
        self.named: list[str] = []
        self.num_ended = 0
        self.selects = 0
        self.steady = False
        """The last event was a step with a server that answers at once."""

    @property
    def server(self) -> FakeServer:
        return self.side.server

    def teardown(self) -> None:
        self.bound.stop()

    @rule(
        family=st.integers(0, 1),
        num_tokens=st.integers(1, 40),
        max_tokens=st.sampled_from([1, 2, 100]),
    )
    def arrive(self, family: int, num_tokens: int, max_tokens: int) -> None:
        self.side.arrive(f"r{next(self.numbers)}", family, num_tokens, max_tokens=max_tokens)
        self.steady = False

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        able = [
            name
            for name, request in self.side.requests.items()
            if request.num_tokens + 1 >= MIN_TOKENS
        ]
        names = data.draw(st.lists(st.sampled_from(able), unique=True)) if able else []
        self.named += self.side.step(*names)
        self.decoded.update(names)
        self.steady = self.server.up and not self.server.hold and not self.server.held
        if self.steady:
            for name in names:
                (sequence_id,) = self.side.memory._followed[name].ids
                request = self.side.requests[name]
                # A block completed now is sent with the next step.
                told = Request("", request.family, request.num_tokens - 1).block_hashes
                assert self.side.known()[sequence_id] == told

    @rule()
    def report(self) -> None:
        """As workers do."""
        live = [name for name in self.side.requests if name in self.decoded]
        ended = frozenset(self.named)
        memory, stream = self.side.memory, self.side.streams.number
        known = [memory._followed[name] for name in live if name in memory._followed]
        last = [memory._ending[name] for name in ended if name in memory._ending]
        ids, last_ids = (
            {sequence_id for one in ones if one.stream == stream for sequence_id in one.ids}
            for ones in (known, last)
        )
        num_reports, num_deleted = len(self.side.reports()), self.server.count("delete_sequence")
        self.side.memory.reported(
            SparseReport(
                dict.fromkeys((*live, *ended), np.array([0, 2], np.int32)),
                {1: {"selects": 1.0}},
                ended,
            )
        )
        if self.server.up:
            assert self.server.count("delete_sequence") == num_deleted + len(last_ids)
        if self.steady:
            (positions, _), *_ = self.side.reports()[num_reports:]
            assert positions.keys() == ids | last_ids and not last_ids & self.side.known().keys()
        self.named.clear()
        self.selects += 1
        self.steady = False

    @precondition(lambda self: self.side.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.side.requests)))
        self.num_ended += 1
        self.side.end(name)
        self.steady = False

    @rule()
    def wait(self) -> None:
        """Sequences are deleted even without the workers' last report."""
        self.side.now_s += memory_module.ENDING_S
        self.named += self.side.step()
        assert not self.side.memory._ending
        self.steady = False

    @rule(steps=st.integers(1, 200))
    def hang(self, steps: int) -> None:
        self.server.hold = set(SEQUENCE_CALLS)
        able = [name for name, one in self.side.requests.items() if one.num_tokens >= MIN_TOKENS]
        for _ in range(steps):
            self.named += self.side.step(*able[:1])
            self.decoded.update(able[:1])
        self.steady = False

    @rule(empty=st.booleans())
    def die(self, empty: bool) -> None:
        self.server.die(empty=empty)
        self.steady = False

    @precondition(lambda self: not self.server.up)
    @rule()
    def come_back(self) -> None:
        self.server.come_back()
        self.steady = False

    @rule(slow=st.booleans())
    def answer_late(self, slow: bool) -> None:
        self.server.settle()
        self.server.hold = set(SEQUENCE_CALLS) if slow else set()
        self.steady = False

    @invariant()
    def what_the_server_knows_is_live(self) -> None:
        if self.steady:
            memory = self.side.memory
            live = {
                sequence_id
                for one in (*memory._followed.values(), *memory._ending.values())
                for sequence_id in one.ids
            }
            assert set(self.side.known()) <= live
            assert {one.request.request_id for one in memory._followed.values()} <= set(
                self.side.requests
            )

    @invariant()
    def no_counter_is_lost(self) -> None:
        told = sum(counters.get(1, {}).get("selects", 0) for _, counters in self.side.reports())
        assert told + self.side.memory._counters.get(1, {}).get("selects", 0) == self.selects

    @invariant()
    def all_is_bounded(self) -> None:
        memory = self.side.memory
        assert (
            len(memory._unanswered)
            <= memory_module.MAX_UNANSWERED
            + memory_module.MAX_CREATED_PER_STEP
            + 2 * self.num_ended
        )
        assert set(memory._to_create) | set(memory._awaited) <= set(memory._followed)


TestSparseMemory = SparseMemoryMachine.TestCase
TestSparseMemory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_sequence_ends_with_its_requests_last_selections() -> None:
    side = Side()
    side.arrive("a", 7, 20)
    assert side.step() == ()
    side.step("a")
    assert len(side.known()) == 1
    side.end("a")
    assert side.step() == ("a",) and len(side.known()) == 1
    side.memory.reported(SparseReport({"a": np.array([1], np.int32)}, {}, frozenset({"a"})))
    ((positions, counters),) = side.reports()
    assert [at.tolist() for at in positions.values()] == [[1]]
    assert counters == {}
    assert not side.known()
    side.arrive("b", 7, 30)
    side.arrive("short", 7, 14)
    side.arrive("one", 7, 30, max_tokens=1)
    assert side.step() == () and len(side.known()) == 1
    # No decode step, no report.
    side.end("b")
    assert side.step() == () and not side.known()


def test_a_refused_sequence_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()

    def refused(*_: Any) -> Any:
        raise HotKVError(Reason.OVERLOADED, "told to refuse")

    monkeypatch.setattr(
        side.session,
        "create_sequence",
        lambda *a: side.session._call("create_sequence", "", None, refused),
    )
    side.arrive("a", 1, 20)
    for _ in range(9):
        side.step("a")
    assert side.server.count("create_sequence") == 1 and side.server.count("append_blocks") == 0
    side.end("a")
    assert side.step() == () and side.server.count("delete_sequence") == 1
    assert side.memory._ending == {}


def test_once_refused_blocks_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the server could accept no later block."""
    side = Side()

    def refused(*_: Any) -> Any:
        raise HotKVError(Reason.OVERLOADED, "told to refuse")

    one = side.arrive("a", 1, 20)
    with monkeypatch.context() as patch:
        patch.setattr(
            side.session,
            "append_blocks",
            lambda *a: side.session._call("append_blocks", "", None, refused),
        )
        for _ in range(3 * BLOCK):
            side.step("a")
    assert side.server.count("append_blocks") > 1
    for _ in range(2 * BLOCK):
        side.step("a")
    side.step()
    (hashes,) = side.known().values()
    assert len(hashes) >= (one.num_tokens - BLOCK) // BLOCK


def test_too_many_requests_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "MAX_FOLLOWED", 40)
    side = Side()
    for number in range(100):
        side.arrive(f"r{number}", 1, 20)
    side.step()
    assert len(side.known()) == memory_module.MAX_CREATED_PER_STEP
    for _ in range(5):
        side.step("r90", "r2")
    assert len(side.known()) == 40
    side.end("r2")
    side.step("r90")
    side.memory.reported(SparseReport(ended=frozenset({"r2"})))
    side.step("r90")
    assert len(side.known()) == 40 and "r90" in side.memory._followed


@pytest.mark.parametrize("second_tokens", [BLOCK, 2 * BLOCK])
def test_each_group_has_a_sequence_of_its_own(second_tokens: int) -> None:
    """A block's index would mean other tokens."""
    side = Side((SparseGroup(0, BLOCK), SparseGroup(1, second_tokens)))
    side.arrive("a", 1, 20)
    side.step()
    side.step("a")
    assert sorted(len(hashes) for hashes in side.known().values()) == sorted(
        [5, 20 // second_tokens]
    )
    side.end("a")
    side.step()
    side.memory.reported(SparseReport({"a": np.array([1], np.int32)}, {}, frozenset({"a"})))
    assert len(side.reports()) == (second_tokens == BLOCK)
    assert not side.known()


# ------------------------------------------------------------------------------------------- worker


def test_reports_omit_nothing_and_most_are_none() -> None:
    engine, reference = Engine(), Engine()
    reporter = SparseReporter(engine.worker)
    gathered, expected = SparseReport(), SparseReport()
    num_reports, names = 0, "ab"
    for number in range(100):
        ended = ("b",) if number == 50 else ()
        names = "a" if number >= 50 else "ab"
        reporter.before_step(ended)
        engine.step(names, ended)
        reference.step(names, ended)
        expected = expected.join(
            SparseReport(reference.worker.take_steps(), reference.worker.take_layer_counters())
        )
        report = reporter.after_step(number * REPORT_INTERVAL_S / 10)
        if report is not None:
            num_reports += 1
            gathered = gathered.join(report)
            assert report.ended == frozenset(ended)
    reporter.before_step(("a", "nobody"))
    last = reporter.after_step(0.0)
    assert last is not None and last.ended == {"a", "nobody"}
    gathered = gathered.join(last)
    assert 10 <= num_reports <= 12
    assert {name: at.tolist() for name, at in gathered.positions.items()} == {
        name: at.tolist() for name, at in expected.positions.items()
    }
    for layer, counters in expected.layers.items():
        for name, value in counters.items():
            if not name.endswith("_s"):
                assert gathered.layers[layer][name] == pytest.approx(value)
    assert reporter.after_step(1000.0) is None
