"""Tests `ZmqPublisher`: full queues, replay, and malformed requests for it."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from hotkv_proto.blocks import BlockResult, RunContent
from hotkv_server.cache.values import EvictionNotice, Medium, Run
from hotkv_server.events import publisher as publisher_module
from hotkv_server.events import wire
from hotkv_server.events.drive import (
    Event,
    KeySpaceCleared,
    RemovedEvent,
    StoredEvent,
    removed_events,
    stored_events,
)
from hotkv_server.events.publisher import ZmqPublisher, binds
from hotkv_server.events.wire import Translator
from tests.core.support import hash_of as whole_hash
from tests.core.support import make_key_space, words_of
from tests.robustness.raw_client import Footprint
from tests.support.ports import free_port
from tests.support.routers import replay
from tests.support.waiting import wait_for

MIB = 1 << 20
LATER_S = 2.0
KEY_SPACE = make_key_space("one", 4096, 4096)


class Reader:
    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(f"ipc://{folder}/events")
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")

    def read(self) -> tuple[int, list[object]]:
        number, batch = self.read_batch()
        return number, list(batch.events)

    def read_batch(self) -> tuple[int, KVEventBatch]:
        assert self.sub.poll(60_000), "nothing came"
        _, sequence, payload = self.sub.recv_multipart()
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        return int.from_bytes(sequence, "big"), batch

    def wait_subscribed(self, publisher: ZmqPublisher) -> int:
        """Publishes until messages arrive, then one with a later time. Its number."""
        for _ in range(1000):
            publisher.publish(1.0, [KeySpaceCleared(1)])
            if self.sub.poll(50):
                break
        publisher.publish(LATER_S, [KeySpaceCleared(1)])
        while True:
            last, batch = self.read_batch()
            assert set(map(type, batch.events)) == {AllBlocksCleared}
            if batch.ts == LATER_S:
                return last


def hash_of(number: int) -> int:
    return int.from_bytes(whole_hash(number)[-8:], "big")


def publishing(folder: Path, endpoint: str = "", **settings: Any) -> ZmqPublisher:
    made = ZmqPublisher(
        endpoint or f"ipc://{folder}/events",
        f"ipc://{folder}/replay",
        lambda number, key_space, model: model,
        buffer_steps=3,
        buffer_bytes=MIB,
        **settings,
    )
    made.add_key_space(1, KEY_SPACE)
    return made


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ZmqPublisher]:
    made = publishing(tmp_path)
    yield made
    made.close()
    wait_for(lambda: not made.is_alive(), "the thread does not end")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.sub.close(0)
    made.context.term()


def stored(numbers: list[int]) -> StoredEvent:
    return StoredEvent(1, 0, words_of(numbers), None, 0, RunContent(np.zeros(0, np.int32)))


def removed(numbers: list[int]) -> RemovedEvent:
    return RemovedEvent(1, 0, words_of(numbers))


TOO_MANY = list(range(MIB // 32 + 1))


def test_lost_removal_clears_topic_lost_stores_dont(
    publisher: ZmqPublisher, reader: Reader
) -> None:
    last = reader.wait_subscribed(publisher)
    publisher.publish(1.0, [stored(TOO_MANY)])
    assert publisher.lost_events == 1
    publisher.publish(1.0, [stored([1])])
    number, events = reader.read()
    assert number == last + 1, "what is lost has no number"
    assert [type(event) for event in events] == [BlockStored]
    publisher.publish(1.0, [removed(TOO_MANY), stored([2])])
    assert publisher.lost_events == 3
    publisher.publish(1.0, [stored([3])])
    number, events = reader.read()
    assert number == last + 2
    assert [type(event) for event in events] == [AllBlocksCleared, BlockStored]
    # A clear goes with the next event. Without one, `settle` sends it, once.
    publisher.publish(1.0, [removed(TOO_MANY)])
    publisher.settle()
    publisher.settle()
    assert reader.read() == (last + 3, [AllBlocksCleared()])
    assert not reader.sub.poll(200)


@pytest.mark.parametrize("per_endpoint", [False, True])
def test_block_of_another_key_space_stays_known(
    reader: Reader, tmp_path: Path, per_endpoint: bool
) -> None:
    """Readers can't tell the key spaces of a topic or endpoint apart."""
    cached = {1: {7, 8}, 2: {7, 8, 9}}

    def has_blocks(number: int, event: RemovedEvent) -> Any:
        mine = words_of(sorted(cached[number])) if event.medium is Medium.CPU else words_of([7])[:0]
        return np.array([any((one == row).all() for row in mine) for one in event.hashes], np.bool_)

    publisher = publishing(tmp_path, per_endpoint=per_endpoint, has_blocks=has_blocks)
    reader.wait_subscribed(publisher)
    publisher.add_key_space(2, replace(KEY_SPACE, model="other") if per_endpoint else KEY_SPACE)
    disk = replace(removed([7]), medium=Medium.DISK, tier="disk")

    def told(event: Event) -> list[Any]:
        publisher.publish(1.0, [event, disk])
        *gone, last = reader.read()[1]
        assert last.medium == "STORAGE" and last.block_hashes == [hash_of(7)]
        return [block_hash for one in gone for block_hash in one.block_hashes]

    cached[1] = set()
    disk = replace(disk, key_space_id=1)
    assert told(removed([7, 8, 10])) == [hash_of(10)]
    flushed, cached[2] = replace(removed([7, 9]), key_space_id=2), {8}
    cached[1] = {9}
    disk = replace(disk, key_space_id=2)
    assert told(KeySpaceCleared(2, (flushed,))) == [hash_of(7)]
    assert told(replace(removed([8]), key_space_id=2)) == [hash_of(8)]
    publisher.close()


def test_replay_keeps_the_last_steps_and_survives_nonsense(
    publisher: ZmqPublisher, reader: Reader, tmp_path: Path
) -> None:
    last = reader.wait_subscribed(publisher)
    for number in range(5):
        publisher.publish(1.0, [removed([number])])
        reader.read()
    nonsense = [
        [b""],
        [b"x", bytes(8)],
        [b"", bytes(9)],
        [b"", bytes(8), b"", b""],
        [b"x" * 100_000],
    ]
    messages = replay(f"ipc://{tmp_path}/replay", before=nonsense)
    assert [number for _, number, _ in messages] == [last + 3, last + 4, last + 5]
    assert [event.block_hashes for *_, (event,) in messages] == [[hash_of(n)] for n in (2, 3, 4)]


@pytest.mark.parametrize(("answer_s", "stalled_s"), [(1.0, 600.0), (600.0, 0.2)])
def test_slow_readers_and_long_requests_cost_little(
    publisher: ZmqPublisher,
    reader: Reader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer_s: float,
    stalled_s: float,
) -> None:
    monkeypatch.setattr(publisher_module, "ANSWER_S", answer_s)
    monkeypatch.setattr(publisher_module, "STALLED_S", stalled_s)
    reader.wait_subscribed(publisher)
    for number in range(3):
        publisher.publish(1.0, [removed(TOO_MANY[number:9000])])
        reader.read()
    before = Footprint(os.getpid()).anonymous_bytes
    with contextlib.ExitStack() as held:
        greedy = [held.enter_context(reader.context.socket(zmq.DEALER)) for _ in range(6)]
        for one in greedy:
            one.rcvhwm, one.linger = 1, 0
            one.connect(f"ipc://{tmp_path}/replay")
            for _ in range(200):
                one.send_multipart([b"", bytes(8)])
        wait_for(lambda: len(publisher._answers) == publisher_module.MOST_ANSWERS)
        # Answers that nobody reads are dropped.
        assert len(replay(f"ipc://{tmp_path}/replay")) == 3
        assert Footprint(os.getpid()).anonymous_bytes < before + 100 * MIB
        long = held.enter_context(reader.context.socket(zmq.DEALER))
        monitor = held.enter_context(long.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        long.linger = 0
        long.connect(f"ipc://{tmp_path}/replay")
        long.send(bytes(MIB))
        assert monitor.poll(10_000), "a long request is read"
        long.disable_monitor()


def test_topic_ends_with_its_last_key_space(
    publisher: ZmqPublisher, reader: Reader, tmp_path: Path
) -> None:
    """Queued events are sent, replays dropped. If the topic returns, its numbers go on."""
    last = reader.wait_subscribed(publisher)
    assert abs(last / 1e6 - time.time()) < 60, "numbers grow over a restart"
    publisher.publish(1.0, [stored([1])])
    publisher.forget_key_space(1)
    assert reader.read()[0] == last + 1
    # The last event, a removal, is lost, so readers get a clear.
    publisher.add_key_space(6, KEY_SPACE)
    publisher.publish(1.0, [replace(removed(TOO_MANY), key_space_id=6)])
    publisher.forget_key_space(6)
    number, events = reader.read()
    assert number > last + 1 and events == [AllBlocksCleared()]
    last = number - 1
    publisher.add_key_space(7, KEY_SPACE)
    publisher.publish(1.0, [replace(removed([2]), key_space_id=7)])
    number, (event,) = reader.read()
    assert number > last + 1
    assert isinstance(event, BlockRemoved)
    assert [kept for _, kept, _ in replay(f"ipc://{tmp_path}/replay")] == [number]
    publisher.add_key_space(8, KEY_SPACE)
    publisher.forget_key_space(7)
    publisher.publish(1.0, [replace(removed([3]), key_space_id=8)])
    assert reader.read()[0] == number + 1


def test_topics_may_share_the_numbers_of_the_endpoint(reader: Reader, tmp_path: Path) -> None:
    publisher = publishing(tmp_path, per_endpoint=True)
    last = reader.wait_subscribed(publisher)
    publisher.add_key_space(2, replace(KEY_SPACE, model="other"))
    # With shared numbers, readers would apply a clear to all topics.
    publisher.publish(1.0, [KeySpaceCleared(2)])
    for number, key_space_id in enumerate((1, 2, 2, 1)):
        publisher.publish(1.0, [replace(removed([number]), key_space_id=key_space_id)])
        assert reader.read()[0] == last + 1 + number
    publisher.forget_key_space(2)
    publisher.add_key_space(3, replace(KEY_SPACE, model="other"))
    publisher.publish(1.0, [replace(removed([5]), key_space_id=3)])
    assert reader.read()[0] == last + 5
    kept = [number for _, number, _ in replay(f"ipc://{tmp_path}/replay", last + 1)]
    assert kept == [last + 1, last + 4, last + 5]
    # The clear of the ended topic goes to another.
    publisher.publish(1.0, [replace(removed(TOO_MANY), key_space_id=3)])
    publisher.forget_key_space(3)
    publisher.settle()
    assert reader.read() == (last + 6, [AllBlocksCleared()])
    publisher.close()


@pytest.mark.parametrize("per_endpoint", [False, True])
def test_reader_with_lost_messages_gets_state(
    reader: Reader, tmp_path: Path, per_endpoint: bool
) -> None:
    cached: dict[int, list[int]] = {1: [], 2: []}

    def state() -> Iterator[StoredEvent]:
        for key_space_id, numbers in cached.items():
            for number in numbers:
                yield replace(stored([number]), key_space_id=key_space_id)

    publisher = publishing(tmp_path, state=state, per_endpoint=per_endpoint)
    last = reader.wait_subscribed(publisher)
    publisher.add_key_space(2, replace(KEY_SPACE, model="other"), ("other", "alias"))
    for number in range(40):
        mine = cached[1 + number % 2]
        event: Event = stored([number])
        if number % 5 == 4:
            event = removed([mine.pop(0)])
        else:
            mine.append(number)
        publisher.publish(1.0, [replace(event, key_space_id=1 + number % 2)])
        for _ in range(1 + number % 2):
            last, _ = reader.read()
    known: dict[bytes, set[Any]] = {}
    messages = replay(f"ipc://{tmp_path}/replay")
    for topic, _, events in messages:
        for one in events:
            if isinstance(one, AllBlocksCleared):
                known = {} if per_endpoint else known | {topic: set()}
            elif isinstance(one, BlockStored):
                known.setdefault(topic, set()).update(one.block_hashes)
    assert known == {
        name: {hash_of(number) for number in cached[key_space_id]}
        for name, key_space_id in ((b"one", 1), (b"other", 2), (b"alias", 2))
    }
    of_one = replay(f"ipc://{tmp_path}/replay", topic=b"other")
    assert {topic for topic, *_ in of_one} == {b"other"} and of_one[0][2][0] == AllBlocksCleared()
    numbers = [number for _, number, _ in messages]
    assert numbers[-1] == last, "the state ends where the messages are"
    if per_endpoint:
        assert numbers == list(range(numbers[0], last + 1))
    # Readers may know blocks of an earlier server, so a clear comes first.
    publisher.add_name(2, "late")
    wait_for(lambda: replay(f"ipc://{tmp_path}/replay", topic=b"late"))
    first = replay(f"ipc://{tmp_path}/replay", topic=b"late")[0][2][0]
    assert (first == AllBlocksCleared()) == (not per_endpoint)
    publisher.close()


EDGES = [n + d for n in (-(1 << 15), -(1 << 7), -32, 0, 1 << 7, 1 << 8, 1 << 15, 1 << 16)
         for d in (-1, 0, 1)]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 15, 16, 0xFFFF, 0x10000])
def test_token_ids_are_encoded_as_the_encoder_would(count: int) -> None:
    tokens = np.random.default_rng(count).integers(-(1 << 31), 1 << 31, count, np.int32)
    tokens[: len(EDGES)] = EDGES[:count]
    # In a message they are a read-only array over its bytes, as here.
    tokens = np.frombuffer(tokens.tobytes(), np.int32)
    event = replace(stored([1]), content=RunContent(tokens))
    (translated,) = Translator({1: KEY_SPACE}).translate([event], is_alone=True)
    assert isinstance(translated, wire.BlockStored)
    encoder = msgspec.msgpack.Encoder()
    assert bytes(translated.token_ids) == encoder.encode(tokens.tolist())
    (decoded,) = msgspec.msgpack.decode(encoder.encode([translated]), type=list[BlockStored])
    assert decoded.token_ids == tokens.tolist()


@pytest.mark.parametrize("hash_bytes", [16, 32])
def test_hashes_are_numbers_of_their_last_bytes(hash_bytes: int) -> None:
    words = words_of([1, 2, 300])
    rows = [row.tobytes()[:hash_bytes] for row in words]
    numbers = [int.from_bytes(row[-8:], "big") for row in rows]
    assert wire.external_hashes(words, hash_bytes) == numbers
    assert wire.external_hashes(words[1], hash_bytes) == numbers[1:2]


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:5557",
        "tcp://host:5557",
        "tcp://[::]:5557",
        "ipc:///x",
        "tcp://10.0.0.1:1",
        "inproc://x",
    ],
)
def test_endpoints_are_bound_where_vllm_binds_them(endpoint: str) -> None:
    assert binds(endpoint) == ZmqEventPublisher._is_bind_endpoint(endpoint)


def test_the_address_of_all_interfaces_is_bound(tmp_path: Path) -> None:
    """vLLM's publisher would connect to the address, and have no readers."""
    port = free_port()
    with contextlib.closing(publishing(tmp_path, f"tcp://0.0.0.0:{port}")) as publisher:
        reader = Reader(tmp_path)
        reader.sub.connect(f"tcp://127.0.0.1:{port}")
        reader.wait_subscribed(publisher)
        reader.sub.close(0)
        reader.context.term()


@given(
    results=st.lists(
        st.sampled_from([BlockResult.STORED, BlockResult.PRESENT, BlockResult.NO_SPACE]),
        min_size=1,
        max_size=12,
    ),
    depth=st.integers(0, 3),
    has_tokens=st.booleans(),
    has_keys=st.booleans(),
)
def test_a_store_is_told_as_its_unbroken_runs(
    results: list[BlockResult], depth: int, has_tokens: bool, has_keys: bool
) -> None:
    """Blocks without room divide them."""
    n = len(results)
    run = Run(0, words_of(range(n)), words_of([99])[0] if depth else None, depth)
    tokens = np.arange(16 * n, dtype=np.int32) if has_tokens else np.zeros(0, np.int32)
    content = RunContent(
        tokens, "adapter", tuple((f"salt {i}",) for i in range(n)) if has_keys else ()
    )
    events = stored_events(1, [run], [content], [np.array(results, np.uint8)])
    told: list[int] = []
    for event in events:
        assert isinstance(event, StoredEvent)
        first = event.depth - depth
        numbers = list(range(first, first + len(event.hashes)))
        assert np.array_equal(event.hashes, words_of(numbers))
        before = run.parent if first == 0 else words_of([first - 1])[0]
        assert (before is None) == (event.parent is None) and np.array_equal(before, event.parent)  # type: ignore[arg-type]
        assert event.content.token_ids.tolist() == (
            list(range(16 * first, 16 * (numbers[-1] + 1))) if has_tokens else []
        )
        assert event.content.extra_keys == (
            tuple((f"salt {i}",) for i in numbers) if has_keys else ()
        )
        assert not told or first > told[-1] + 1, "one run was told as two"
        told += numbers
    assert told == [i for i, result in enumerate(results) if result == BlockResult.STORED]


def test_flush_is_one_event_among_evictions() -> None:
    notices = [
        EvictionNotice(1, 0, words_of([1])),
        EvictionNotice(2, 0, words_of([2])),
        EvictionNotice(1, 1, words_of([3])),
    ]
    events: list[Event] = removed_events(notices, 1)
    assert [type(event) for event in events] == [RemovedEvent, KeySpaceCleared]
    cleared = events[-1]
    assert isinstance(cleared, KeySpaceCleared)
    assert [(event.key_space_id, event.group_index) for event in cleared.removed] == [
        (1, 0),
        (1, 1),
    ]
    assert [event.key_space_id for event in removed_events(notices, 0)] == [1, 2, 1]
    assert removed_events([], 3) == [KeySpaceCleared(3)]
