"""`SharedEvents`: an engine also publishes the server's blocks."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from hotkv_client.types import EventsRead
from hotkv_client.wire import answers
from hotkv_proto.blocks import RunContent
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.cache.values import Medium
from hotkv_server.events.drive import EventHub, KeySpaceCleared, RemovedEvent, StoredEvent
from hotkv_server.events.service import EngineReader
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.scheduler import events
from hotkv_vllm.scheduler.events import ABSENCE_PATIENCE_S, READ_S, SharedEvents
from tests.core.support import make_key_space, words_of
from tests.offloading.engines import door_config
from tests.server.routers import external
from tests.support.ports import free_ports
from tests.support.routers import Indexer
from tests.support.waiting import wait_for
from tests.vllm.processes import EngineProcess
from tests.vllm.tiny import BLOCK_TOKENS, VOCAB, write_model

KEY_SPACE = make_key_space("one", 4096, 4096)
GROUPS = [CacheGroup(number, GroupKind.FULL_ATTENTION, 16) for number in range(2)]
MEDIA = st.sampled_from([(Medium.CPU, ""), (Medium.DISK, "disk")])
BLOCKS = st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True)
Location = tuple[int, Medium, str, int]
"""Group, medium, tier, block number."""


class Wire:
    """Answers as the server's `EngineReader`."""

    def __init__(self, hub: EventHub, state: Any) -> None:
        self.connected = self.has_events = True
        self.is_failing = False
        self._reader = EngineReader(hub, 1, state)

    def read_events(self, *, begins_state: bool) -> Future[EventsRead]:
        future: Future[EventsRead] = Future()
        if self.is_failing:
            self.is_failing = False
            future.set_exception(HotKVError(Reason.INTERNAL, "no"))
            return future
        read = self._reader.read(3, begins_state=begins_state).read_events
        assert len(read.events) <= 3, "the engine asked for fewer"
        future.set_result(answers._events(read, KEY_SPACE.hash_bytes))
        return future


class Telling(RuleBasedStateMachine):
    """A router's `index` must equal the server's blocks (`cached`)."""

    @initialize()
    def begin(self) -> None:
        self.hub = EventHub()
        for number, name in ((1, "one"), (2, "other")):
            self.hub.add_key_space(number, make_key_space(name, 4096, 4096))
        self.cached: dict[Location, None] = {}
        self.index: set[Any] = set()
        self.teller = SharedEvents()
        self.session: Wire | None = Wire(self.hub, self.state)
        self.now_s = 0.0

    def state(self) -> Iterator[StoredEvent]:
        for group, medium, tier, number in list(self.cached):
            if (group, medium, tier, number) in self.cached:
                yield self.run(group, [number], medium, tier)

    @staticmethod
    def run(group: int, numbers: list[int], medium: Medium, tier: str) -> StoredEvent:
        tokens = RunContent(np.zeros(16 * len(numbers), np.int32))
        return StoredEvent(1, group, words_of(numbers), None, 0, tokens, medium, tier)

    @rule(group=st.integers(0, 1), numbers=BLOCKS, medium=MEDIA)
    def store(self, group: int, numbers: list[int], medium: tuple[Medium, str]) -> None:
        self.cached |= dict.fromkeys((group, *medium, number) for number in numbers)
        self.hub.publish([self.run(group, numbers, *medium)])

    @rule(group=st.integers(0, 1), numbers=BLOCKS, medium=MEDIA)
    def remove(self, group: int, numbers: list[int], medium: tuple[Medium, str]) -> None:
        for number in numbers:
            self.cached.pop((group, *medium, number), None)
        self.hub.publish([RemovedEvent(1, group, words_of(numbers), *medium)])

    @rule()
    def clear_the_device(self) -> None:
        """Routers then forget all of the engine."""
        self.index.clear()
        self.teller.device_was_cleared()

    @rule(kind=st.sampled_from(["other", "full", "restart", "off", "weights"]))
    def disturb(self, kind: str) -> None:
        match kind:
            case "other":
                self.hub.publish([KeySpaceCleared(2)])
            case "full":
                # The engine read too late: events were dropped.
                self.change_unheard()
                for feed in self.hub.feeds._open:
                    feed._lost += 1
            case "restart" if self.session is not None:
                self.session.connected = False
                self.step(0.01)
                self.change_unheard()
                vars(self.session).update(vars(Wire(self.hub, self.state)))
            case "off":
                self.session = None
            case "weights":
                self.session = Wire(self.hub, self.state)

    @rule()
    def flush(self) -> None:
        self.settle()
        self.cached.clear()
        self.hub.publish([KeySpaceCleared(1)])
        self.settle()

    @rule()
    def fail_a_read(self) -> None:
        if self.session is not None:
            self.session.is_failing = True

    def change_unheard(self) -> None:
        self.cached = dict.fromkeys(list(self.cached)[::2])

    @rule(lacking=st.sampled_from(["connected", "has_events"]))
    def be_alone(self, lacking: str) -> None:
        """The connection is broken, or the server came back without events."""
        if self.session is not None and self.session.connected:
            self.store(0, [1], (Medium.CPU, ""))
            self.settle()
            setattr(self.session, lacking, False)
            self.step(0.01)
            self.step(ABSENCE_PATIENCE_S)
            assert not self.index
            vars(self.session).update(vars(Wire(self.hub, self.state)))

    @rule(seconds=st.sampled_from([0.01, READ_S]))
    def step(self, seconds: float) -> None:
        self.now_s += seconds
        session: Any = self.session
        for event in self.teller.take(session, GROUPS, self.now_s):
            medium = (event.group_idx, event.medium, event.locality)
            keys = {(*medium, block_hash) for block_hash in event.block_hashes}
            assert len(keys) == len(event.block_hashes) > 0
            if isinstance(event, BlockStored):
                assert not keys & self.index, "a block was told twice"
                assert len(event.token_ids) == 16 * len(keys) and event.block_size == 16
                self.index |= keys
            else:
                assert isinstance(event, BlockRemoved) and keys <= self.index
                self.index -= keys

    @rule()
    def settle(self) -> None:
        for _ in range(100):
            self.step(READ_S)
        named = {Medium.CPU: ("CPU", None), Medium.DISK: ("STORAGE", "LOCAL")}
        assert self.index == {
            (group, *named[medium], external(words_of([number]).tobytes()))
            for group, medium, _, number in self.cached
            if self.session is not None
        }

    def teardown(self) -> None:
        self.settle()


TestTelling = Telling.TestCase


def test_the_newest_blocks_of_a_store_stay_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared store evicts without events: the oldest are published as removed."""
    monkeypatch.setattr(events, "MOST_IN_STORE", 8)
    monkeypatch.setattr(events, "REMOVED_AT_ONCE", 3)
    hub, teller, told = EventHub(), SharedEvents(), dict[Any, int]()
    hub.add_key_space(1, KEY_SPACE)
    session: Any = Wire(hub, lambda: iter(()))
    for step in range(40):
        for medium, tier in ((Medium.CPU, ""), (Medium.REMOTE, "store")):
            hub.publish([Telling.run(0, [3 * step, 3 * step + 1, 3 * step + 2], medium, tier)])
        for event in teller.take(session, GROUPS, float(step)):
            for block_hash in event.block_hashes:
                if isinstance(event, BlockStored):
                    told[event.medium, block_hash] = step
                else:
                    gone = told.pop((event.medium, block_hash))
                    assert gone <= min(at for (name, _), at in told.items() if name == "STORAGE")
        assert sum(name == "STORAGE" for name, _ in told) <= 8
    assert sum(name == "STORAGE" for name, _ in told) > 5
    assert sum(name == "CPU" for name, _ in told) > 100


def test_answers_fit_a_message_however_much_has_happened() -> None:
    runs = [
        Telling.run(0, list(range(first, first + 2000)), Medium.CPU, "")
        for first in range(0, 80_000, 2000)
    ]
    hub = EventHub()
    hub.add_key_space(1, KEY_SPACE)
    reader = EngineReader(hub, 1, lambda: iter(runs))
    hub.publish(runs)
    read = [reader.read(0) for _ in range(40)]
    assert max(answer.ByteSize() for answer in read) <= MAX_MESSAGE_BYTES
    told = [event.stored.hashes for one in read for event in one.read_events.events]
    assert told == 2 * [run.hashes.tobytes() for run in runs]


@pytest.fixture
def server() -> Iterator[Server]:
    with (
        runtime_folder(256 << 20) as folder,
        Server(folder, "64MiB", "--events.identity", "engine") as running,
    ):
        running.wait_ready()
        yield running


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("connector", ["HotKVConnector", "HotKVOffloadingConnector"])
def test_dynamo_credits_engines_with_shared_stores(
    server: Server, tmp_path: Path, connector: str
) -> None:
    """A late router learns from the replay."""
    is_own = connector == "HotKVConnector"
    door = door_config(server.target, **{"hotkv.weights_identity": "events"})
    model = write_model(tmp_path / "model", "llama")
    ports = free_ports(4)
    workers = [
        (f"tcp://127.0.0.1:{ports[at]}", f"tcp://127.0.0.1:{ports[at + 1]}") for at in (0, 2)
    ]
    engines = [
        EngineProcess(
            model,
            tmp_path / f"engine{at}.log",
            server.target if is_own else None,
            **({} if is_own else {"kv_transfer_config": door}),
            kv_events_config={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": workers[at][0].replace("127.0.0.1", "*"),
                "replay_endpoint": workers[at][1].replace("127.0.0.1", "*"),
            },
        )
        for at in range(2)
    ]
    others = itertools.cycle(range(1, 400))

    def step(engine: EngineProcess) -> None:
        """8 tokens fill no block. With one or two vLLM 0.32 dies of an illegal instruction on
        CPUs with AMX."""
        engine.ask("generate", prompts=[[next(others)] * 8], max_tokens=6)

    def prompt(first: int) -> list[int]:
        return [first + (at * 7) % (VOCAB - first) for at in range(10 * BLOCK_TOKENS)]

    def store(engine: EngineProcess, tokens: list[int]) -> None:
        """A door copies to the server in steps after the one that made the blocks."""
        expected = server.counter("stored_blocks_total") + len(tokens) // BLOCK_TOKENS
        engine.ask("generate", prompts=[tokens], max_tokens=2)

        def is_stored() -> bool:
            step(engine)
            return server.counter("stored_blocks_total") >= expected

        wait_for(is_stored, "the stores")

    try:
        for engine in engines:
            assert all(engine.ask("wait", connected=True, timeout_s=60)["connected"])
        with closing(Indexer(tmp_path / "indexer.log", BLOCK_TOKENS, *workers)) as indexer:

            def credited(tokens: list[int], worker: int, expected: int) -> bool:
                """The blocks are not on this engine's device."""
                step(engines[worker - 1])
                return indexer.credits(tokens, worker)[0] == expected

            first, second = prompt(3), prompt(500)
            store(engines[0], first)
            wait_for(lambda: credited(first, 2, len(first)))
            # vLLM has published AllBlocksCleared.
            assert engines[1].ask("reset")["done"]
            third = prompt(300)
            store(engines[1], third)
            wait_for(lambda: credited(third, 2, len(third)))
            wait_for(lambda: credited(first, 2, len(first)))
            with AdminClient(server.target) as admin:
                admin.flush(1)
            wait_for(lambda: credited(first, 2, 0))
            store(engines[1], second)
            wait_for(lambda: credited(second, 1, len(second)))
            with closing(Indexer(tmp_path / "late.log", BLOCK_TOKENS, *workers)) as late:
                # A late router asks for the replay at its first message.
                for engine in engines:
                    engine.ask("generate", prompts=[prompt(700)], max_tokens=2)
                wait_for(lambda: late.credits(second)[0] == len(second))
                wait_for(lambda: late.credits(second, 2)[0] == len(second))
                assert late.credits(first, 2)[0] == 0
    finally:
        for engine in engines:
            engine.stop()
