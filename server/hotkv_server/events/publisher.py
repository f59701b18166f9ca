"""Publishes events over ZMQ in vLLM's frames (topic, sequence number, payload), and replays them.

A *clear* is vLLM's AllBlocksCleared; the *state* is events for all cached blocks. Always true:

- the first sequence number is the start time in µs since 1970: routers drop messages whose numbers
  go back, also over restarts;
- numbers have no gaps, per topic, or with `per_endpoint` over all topics together;
- the event loop only queues; a thread translates, encodes and sends. Queue and replay are bounded;
- a full queue loses new events. If a removal or clear is lost, the topic's next message begins with
  a clear and the state follows;
- readers can't tell a topic's key spaces apart, so a removal is not sent for a hash that another
  key space of the topic still has;
- a replay that reaches behind the kept messages is a clear and the state, under the last numbers
  sent.
"""

import itertools
import logging
import operator
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq

from hotkv_proto.keys import KeySpace
from hotkv_server.cache.values import BoolMask
from hotkv_server.events.drive import Event, KeySpaceCleared, RemovedEvent, StoredEvent
from hotkv_server.events.wire import RANK, AllBlocksCleared, KVEventBatch, Translator

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES = 8
POLL_S = 0.05
GATHER_S = 0.01
MOST_AT_ONCE = 1000
"""Items that the thread takes from its queue before it looks for replay requests."""
STOP_TIMEOUT_S = 2.0
LINGER_MS = 200
"""How long a closed socket still sends."""
HIGH_WATER_MESSAGES = 10_000
"""Queued by ZMQ per slow reader; further ones are dropped, as in vLLM's publisher."""
REPLAY_MESSAGES = 64
"""Of an answer, queued by ZMQ per reader; the publisher keeps the rest."""
REQUEST_BYTES = 128 << 10
"""Longest frame of a replay request; ZMQ disconnects a reader that sends more."""
MOST_ANSWERS = 4
"""Replays under way at a time; further requests wait."""
ANSWER_S = 60.0
"""A replay that takes longer is dropped."""
STALLED_S = 2.0
"""A replay whose reader takes nothing for this time makes way for a waiting request."""
STATE_BYTES = 1 << 20
"""Approximate size of a message of the state."""
MESSAGE_BYTES = 1 << 20
"""Queued events are merged into messages of at most this size."""
EVENT_BYTES = 64
"""Estimated memory of an event, without its arrays."""


HasBlocks = Callable[[int, RemovedEvent], BoolMask]
"""(key space number, removal of n blocks of another key space) → mask [n] of the hashes that the
key space has ready in the same medium and group."""


def binds(endpoint: str) -> bool:
    """Whether to bind the endpoint rather than connect: wildcards, ipc and inproc, as vLLM's
    publisher; also 0.0.0.0, where a connection would reach no reader."""
    wildcards = ("*", "::", "//0.0.0.0:")
    return any(one in endpoint for one in wildcards) or endpoint.startswith(("ipc://", "inproc://"))


@dataclass(slots=True, eq=False)
class _Topic:
    """The event loop owns the first five fields, the thread the others.

    `must_clear`: a removal was lost; the next message must begin with a clear.
    `must_announce`: the state must follow the topic's first clear.
    `announcement`: the last one queued.
    `sequence`: None before the first message.
    `last_sent`: -1 before the first message.
    `last_forgotten`: newest number no longer kept for replay; -1 if all are kept.
    `sent`: (number, payload) kept for replay, oldest first.
    """

    name: bytes
    key_spaces: set[int] = field(default_factory=set)
    must_clear: bool = False
    must_announce: bool = False
    announcement: "_Announcement | None" = None
    sequence: "itertools.count[int] | None" = None
    last_sent: int = -1
    last_forgotten: int = -1
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)
    sent_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Answer:
    """A replay under way.

    `messages`: not taken yet.
    `moved_s`: when the reader last took one.
    """

    messages: deque[tuple[bytes, ...]]
    until_s: float
    moved_s: float


@dataclass(frozen=True, slots=True)
class _Item:
    """Events of one key space for one topic.

    `is_alone`: see `ZmqPublisher._is_alone`.
    `num_bytes`: estimated memory.
    """

    topic: _Topic
    unix_time_s: float
    events: tuple[Event, ...]
    clears_first: bool
    is_alone: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """The server has forgotten a key space. `topics` had only this one; their messages are
    dropped."""

    number: int
    topics: tuple[_Topic, ...]


@dataclass(frozen=True, slots=True)
class _Announcement:
    """An order to send topics the state. A topic with a later announcement in the queue is
    skipped, so that many clears cost one state."""

    topics: tuple[_Topic, ...]


class ZmqPublisher:
    """The constructor raises zmq.ZMQError if an endpoint can't be opened. Must be closed.

    `replay_endpoint`: empty: no replay.
    `topic_of`: (number, key space, model name) → topic.
    `buffer_steps`: messages kept for replay, per topic.
    `buffer_bytes`: of the queue, and of all messages kept for replay.
    `per_endpoint`: number all topics in one sequence.
    `state`: yields the state, and None for a step without event; called on the thread. Events
        queued meanwhile follow it. None: unknown, a replay has only kept messages.
    `has_blocks`: called on the thread. None: removals are sent whatever other key spaces have.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        topic_of: Callable[[int, KeySpace, str], str],
        *,
        buffer_steps: int,
        buffer_bytes: int,
        per_endpoint: bool = False,
        state: Callable[[], Iterator[StoredEvent | None]] | None = None,
        has_blocks: HasBlocks | None = None,
    ) -> None:
        self.published_events = 0
        self.lost_events = 0
        self._topic_of = topic_of
        self._state = state
        self._has_blocks = has_blocks
        self._buffer_steps = buffer_steps
        self._buffer_bytes = buffer_bytes
        self._key_spaces: dict[int, KeySpace] = {}
        self._topics: dict[str, _Topic] = {}
        self._by_key_space: dict[int, list[_Topic]] = {}
        self._translator = Translator(self._key_spaces)
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.SimpleQueue[_Item | _Ended | _Announcement | None] = queue.SimpleQueue()
        # One thread writes each counter, so no lock is needed.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._sent_bytes = 0
        # By ZMQ's identity of the reader.
        self._answers: dict[bytes, _Answer] = {}
        # Used as an ordered set: topics with messages kept for replay.
        self._kept: dict[_Topic, None] = {}
        # Of a new topic. Grows, as the numbers of a topic that is made again must not go back.
        self._first_number = time.time_ns() // 1000
        self._of_endpoint = itertools.count(self._first_number) if per_endpoint else None
        # Of any topic; of any topic that has ended.
        self._last_sent = self._last_ended = -1
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, endpoint, HIGH_WATER_MESSAGES, bind=binds(endpoint))
            self._replay = (
                self._open(zmq.ROUTER, replay_endpoint, REPLAY_MESSAGES, bind=True)
                if replay_endpoint
                else None
            )
        except zmq.ZMQError:
            self._context.destroy(0)
            raise
        self._last_turn_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="hotkv-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"ZmqPublisher({len(self._topics)} topics, {self.published_events} sent, "
            f"{self.lost_events} lost, {self.queued_bytes} B wait)"
        )

    def _open(self, kind: int, endpoint: str, most: int, *, bind: bool) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.set_hwm(most)
        made.maxmsgsize = REQUEST_BYTES
        made.linger = LINGER_MS
        # Otherwise the wildcard `*` would listen on IPv6 too.
        made.ipv6 = "[" in endpoint
        if kind == zmq.ROUTER:
            # Raise instead of dropping messages for a slow reader.
            made.router_mandatory = True
        if bind:
            made.bind(endpoint)
        else:
            made.connect(endpoint)
        return made

    # On the event loop

    @property
    def queued_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        self._key_spaces[number] = key_space
        self._by_key_space[number] = []
        for name in names or (key_space.model,):
            self._add_topic(number, name)

    def add_name(self, number: int, name: str) -> None:
        topic = self._add_topic(number, name)
        if topic is not None and self._state is not None:
            topic.must_announce = True
            self._put(topic, time.time(), (KeySpaceCleared(number),))

    def _add_topic(self, number: int, model: str) -> _Topic | None:
        """None if the topic had the key space already."""
        name = self._topic_of(number, self._key_spaces[number], model)
        topic = self._topics.setdefault(name, _Topic(name.encode()))
        if number in topic.key_spaces:
            return None
        topic.key_spaces.add(number)
        self._by_key_space[number].append(topic)
        log.info("events of key space %d have topic %s", number, name)
        return topic

    def forget_key_space(self, number: int) -> None:
        ended = []
        for topic in self._by_key_space.pop(number):
            topic.key_spaces.remove(number)
            if not topic.key_spaces:
                del self._topics[topic.name.decode()]
                ended.append(topic)
        for topic in ended:
            if topic.must_clear and self._of_endpoint is None:
                # Even if the queue is full: nothing else follows under this topic.
                self._queue.put(_Item(topic, time.time(), (), True, True, 0))
        if self._of_endpoint is not None and any(topic.must_clear for topic in ended):
            # With `per_endpoint` a clear of any topic counts for all, so another topic sends the
            # one that is due. If there is none, the next topic begins with a clear anyway.
            for topic in itertools.islice(self._topics.values(), 1):
                topic.must_clear = True
        self._queue.put(_Ended(number, tuple(ended)))

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        for number, part in itertools.groupby(events, _key_space_id):
            of_key_space = tuple(part)
            for topic in self._by_key_space[number]:
                self._put(topic, unix_time_s, of_key_space)

    def clear(self, number: int) -> None:
        """If the queue is full, `settle` queues the clear later."""
        for topic in self._by_key_space[number]:
            topic.must_clear = True
            self._put(topic, time.time(), ())

    def sends_clear(self, number: int) -> bool:
        return all(map(self._is_alone, self._by_key_space[number]))

    def announce(self) -> None:
        self._announce(self._topics.values())

    def _announce(self, topics: Iterable[_Topic]) -> None:
        announcement = _Announcement(tuple(topics))
        for topic in announcement.topics:
            topic.announcement = announcement
        self._queue.put(announcement)

    def settle(self) -> None:
        for topic in self._topics.values():
            if topic.must_clear:
                self._put(topic, time.time(), ())

    def _put(self, topic: _Topic, unix_time_s: float, events: tuple[Event, ...]) -> None:
        num_bytes = EVENT_BYTES + sum(EVENT_BYTES + event.num_bytes for event in events)
        if self.queued_bytes + num_bytes > self._buffer_bytes:
            if not self.lost_events:
                log.warning(
                    "events are lost: %d bytes wait to be sent, and no more may",
                    self.queued_bytes,
                )
            self.lost_events += len(events)
            topic.must_clear |= any(not isinstance(event, StoredEvent) for event in events)
            return
        self._put_bytes += num_bytes
        self._queue.put(
            _Item(topic, unix_time_s, events, topic.must_clear, self._is_alone(topic), num_bytes)
        )
        if topic.must_announce or (topic.must_clear and self._state is not None):
            # With `per_endpoint` a clear counts for all topics, so all need the state.
            self._announce([topic] if self._of_endpoint is None else self._topics.values())
        topic.must_clear = topic.must_announce = False

    def _is_alone(self, topic: _Topic) -> bool:
        """Whether a cleared key space may be sent as a clear: no other shares the topic, or with
        `per_endpoint` the endpoint."""
        others = self._by_key_space if self._of_endpoint is not None else ()
        return len(topic.key_spaces) == 1 and len(others) <= 1

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """An idle thread makes progress too: in each turn of its loop."""
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Waits for the thread for STOP_TIMEOUT_S at most."""
        self._queue.put(None)
        self._thread.join(STOP_TIMEOUT_S)

    # On the thread

    def _run(self) -> None:
        running = True
        while running:
            self._last_turn_s = time.monotonic()
            gathered: dict[_Topic, list[_Item]] = {}
            for item in self._next():
                if isinstance(item, _Item):
                    gathered.setdefault(item.topic, []).append(item)
                    continue
                self._send_gathered(gathered)
                running = item is not None
                if isinstance(item, _Announcement):
                    topics = [topic for topic in item.topics if topic.announcement is item]
                    if topics:
                        self._send_state(topics)
                elif item is not None:
                    self._end(item)
            self._send_gathered(gathered)
            try:
                # One request a turn: an answer can be long.
                if self._replay is not None:
                    self._serve_replays(self._replay)
            except Exception:  # An error must not end the thread.
                log.exception("a replay could not be sent")
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _next(self) -> "Iterator[_Item | _Ended | _Announcement | None]":
        """Waits up to POLL_S for the first item, then GATHER_S for more: without this pause each
        store would wake the thread, which competes with the event loop for the GIL."""
        try:
            item = self._queue.get(timeout=0.001 if self._answers else POLL_S)
        except queue.Empty:
            return
        if item is not None:
            time.sleep(GATHER_S)
        yield item
        for _ in range(MOST_AT_ONCE if item is not None else 0):
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            yield item
            if item is None:
                return

    def _send_gathered(self, gathered: dict[_Topic, list[_Item]]) -> None:
        """Merges a topic's events into few messages: making one holds the GIL."""
        for topic, items in gathered.items():
            events: list[Any] = []
            num_bytes = 0
            for item in items:
                if num_bytes + item.num_bytes > MESSAGE_BYTES:
                    self._send_events(topic, item.unix_time_s, events)
                    events, num_bytes = [], 0
                events += self._translated(item)
                num_bytes += item.num_bytes
            self._send_events(topic, items[-1].unix_time_s, events)
            self._taken_bytes += sum(item.num_bytes for item in items)
        gathered.clear()

    def _translated(self, item: _Item) -> list[Any]:
        try:
            events: list[Any] = self._translator.translate(
                self._without_kept(item), is_alone=item.is_alone
            )
        except Exception:  # One bad event must not end the thread, which sends all others.
            log.exception("events of topic %s could not be sent", item.topic.name.decode())
            events = []
        return [AllBlocksCleared(), *events] if item.clears_first else events

    def _without_kept(self, item: _Item) -> Iterator[Event]:
        """Leaves out of removals what another key space of the topic still has."""
        numbers = item.topic.key_spaces if self._of_endpoint is None else self._by_key_space
        for event in item.events:
            others = [number for number in tuple(numbers) if number != event.key_space_id]
            match event:
                case RemovedEvent() if others:
                    yield from self._of_no_other(event, others)
                case KeySpaceCleared(removed=removed) if others:
                    some = itertools.chain(*(self._of_no_other(one, others) for one in removed))
                    yield replace(event, removed=tuple(some))
                case _:
                    yield event

    def _of_no_other(self, event: RemovedEvent, others: Sequence[int]) -> Iterator[RemovedEvent]:
        left = event.hashes
        if (has_blocks := self._has_blocks) is not None:
            for number in others:
                left = left[~has_blocks(number, replace(event, hashes=left))]
        if len(left):
            yield replace(event, hashes=left)

    def _send_events(self, topic: _Topic, unix_time_s: float, events: list[Any]) -> None:
        if not events:
            return
        try:
            payload = self._encoder.encode(KVEventBatch(unix_time_s, events, RANK))
            self._send(topic, payload, len(events))
        except Exception:  # An error must not end the thread.
            log.exception("events of topic %s could not be sent", topic.name.decode())

    def _send(self, topic: _Topic, payload: bytes, num_events: int) -> None:
        if topic.sequence is None:
            topic.sequence = self._of_endpoint or itertools.count(self._first_number)
        topic.last_sent = next(topic.sequence)
        self._last_sent = max(self._last_sent, topic.last_sent)
        self._pub.send_multipart((topic.name, _sequence(topic.last_sent), payload))
        self.published_events += num_events
        self._keep(topic, topic.last_sent, payload)

    def _end(self, ended: _Ended) -> None:
        del self._key_spaces[ended.number]
        for topic in ended.topics:
            self._last_ended = max(self._last_ended, topic.last_sent)
            self._kept.pop(topic, None)
            while topic.sent:
                self._forget_oldest(topic)
            if topic.sequence is not None and self._of_endpoint is None:
                self._first_number = max(self._first_number, next(topic.sequence))

    def _keep(self, topic: _Topic, number: int, payload: bytes) -> None:
        """Over the limit in bytes, `topic` loses its oldest messages if it has more than an
        equal share, otherwise the topic with the most bytes does. Clients name models, so there
        may be any number of topics."""
        self._kept[topic] = None
        topic.sent.append((number, payload))
        topic.sent_bytes += len(payload)
        self._sent_bytes += len(payload)
        if len(topic.sent) > self._buffer_steps:
            self._forget_oldest(topic)
        while self._sent_bytes > self._buffer_bytes:
            has_its_share = topic.sent_bytes * len(self._kept) <= self._buffer_bytes
            self._forget_oldest(
                max(self._kept, key=lambda one: one.sent_bytes) if has_its_share else topic
            )

    def _forget_oldest(self, topic: _Topic) -> None:
        topic.last_forgotten, payload = topic.sent.popleft()
        num_bytes = len(payload)
        topic.sent_bytes -= num_bytes
        self._sent_bytes -= num_bytes

    def _serve_replays(self, socket: "zmq.Socket[bytes]") -> None:
        """Takes one request if there is one and room for it, then sends as many messages of all
        answers as readers accept now. A reader's new request replaces its last one."""
        now_s, is_asked = time.monotonic(), bool(socket.poll(0))
        if is_asked and len(self._answers) == MOST_ANSWERS:
            slowest = min(self._answers, key=lambda client: self._answers[client].moved_s)
            if now_s >= self._answers[slowest].moved_s + STALLED_S:
                del self._answers[slowest]
        if is_asked and len(self._answers) < MOST_ANSWERS:
            client, *frames = socket.recv_multipart()
            messages = deque((client, b"", *message) for message in self._replayed(frames))
            self._answers[client] = _Answer(messages, now_s + ANSWER_S, now_s)
        for client, one in list(self._answers.items()):
            try:
                while one.messages:
                    socket.send_multipart(one.messages[0], zmq.NOBLOCK)
                    one.messages.popleft()
                    self._last_turn_s = one.moved_s = time.monotonic()
            except zmq.ZMQError as error:
                # EAGAIN: the reader accepts no message now. Otherwise it has disconnected.
                if error.errno == zmq.EAGAIN and time.monotonic() < one.until_s:
                    continue
            del self._answers[client]

    def _replayed(self, frames: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """The last three frames of each message. A request is an empty frame, the first number
        wanted, and optionally a topic; without one, all topics are sent."""
        if len(frames) not in (2, 3) or frames[0] or len(frames[1]) > SEQUENCE_BYTES:
            log.warning(
                "a replay request has %d frames; it takes an empty one, 8 bytes of sequence "
                "number and, at will, a topic",
                len(frames),
            )
            return []
        first = int.from_bytes(frames[1], "big")
        topics = [one for one in self._kept if len(frames) == 2 or frames[2] == one.name]
        partial = [one for one in topics if one.last_forgotten >= first and self._state]
        stale = partial
        if self._of_endpoint is not None and self._state is not None:
            # With `per_endpoint` one missing message makes all topics stale; those of ended
            # topics are missing too.
            stale = topics if partial or self._last_ended >= first else []
        answers = [
            (number, topic.name, payload)
            for topic in topics
            if topic not in stale
            for number, payload in topic.sent
            if number >= first
        ]
        answers.sort(key=lambda one: one[0])
        if stale:
            answers += self._state_messages(stale, first)
        numbered = [(name, _sequence(number), payload) for number, name, payload in answers]
        return [*numbered, (b"", END_OF_REPLAY, b"")]

    # The state

    def _send_state(self, topics: Sequence[_Topic]) -> None:
        """Without a clear before it."""
        try:
            for topic, events in self._encoded_state(topics):
                for part in _parts(events, len(events)):
                    self._send(topic, self._batch(part), len(part))
                    self._last_turn_s = time.monotonic()
        except Exception:  # An error must not end the thread.
            log.exception("the state could not be sent")

    def _state_messages(
        self, topics: Sequence[_Topic], first: int
    ) -> Iterator[tuple[int, bytes, bytes]]:
        """Yields (number, topic, payload): a clear and the state. Reuses the numbers from
        `first` to the last that was sent, and lower ones if these are too few, so that later
        messages have greater numbers."""
        state = self._encoded_state(topics)
        clear = [msgspec.Raw(self._encoder.encode(AllBlocksCleared()))]
        if self._of_endpoint is None:
            series = [(topic.last_sent, [(topic, clear + events)]) for topic, events in state]
        else:
            state[0] = (state[0][0], clear + state[0][1])
            series = [(self._last_sent, state)]
        for last, of_topics in series:
            # At least one message per topic, even if numbers are too few.
            most = max(1, (last - first + 1) // len(of_topics))
            messages = [
                (topic, part) for topic, events in of_topics for part in _parts(events, most)
            ]
            for number, (topic, part) in enumerate(messages, last - len(messages) + 1):
                yield number, topic.name, self._batch(part)

    def _batch(self, events: list[msgspec.Raw]) -> bytes:
        return self._encoder.encode([time.time(), events, RANK])

    def _encoded_state(self, topics: Sequence[_Topic]) -> list[tuple[_Topic, list[msgspec.Raw]]]:
        """Encoded BlockStored events by topic; within a sequence, earlier blocks first."""
        by_key_space = {
            number: [topic for topic in topics if number in topic.key_spaces]
            for number in list(self._key_spaces)
        }
        state: dict[_Topic, list[msgspec.Raw]] = {topic: [] for topic in topics}
        for event in self._state() if self._state is not None else ():
            if event is not None and (of_topics := by_key_space.get(event.key_space_id)):
                (translated,) = self._translator.translate([event], is_alone=False)
                encoded = msgspec.Raw(self._encoder.encode(translated))
                for topic in of_topics:
                    state[topic].append(encoded)
            self._last_turn_s = time.monotonic()
        return list(state.items())


_key_space_id = operator.attrgetter("key_space_id")


def _sequence(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


def _parts(events: list[msgspec.Raw], most: int) -> list[list[msgspec.Raw]]:
    """Parts of about STATE_BYTES; larger ones if there would be more than `most`."""
    num_bytes = sum(len(bytes(event)) for event in events)
    count = max(1, min(most, -(-num_bytes // STATE_BYTES)))
    step = max(1, -(-len(events) // count))
    return [events[start : start + step] for start in range(0, len(events), step)]
