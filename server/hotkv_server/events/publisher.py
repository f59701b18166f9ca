"""Publishes events over ZMQ in vLLM's frames (topic, sequence number, payload), and replays
messages that a reader has missed.

Always true:

- the first sequence number is the clock at the start, in microseconds, so that numbers also grow
  over restarts: a router drops messages whose numbers go back;
- the numbers of each topic form a sequence without gaps, as if the topic were an engine's
  publisher. With `per_endpoint`, the numbers of all topics together form one such sequence;
- the event loop only queues events; a thread translates, encodes and sends them;
- the queue and the messages kept for replay are bounded in bytes;
- if the queue is full, new events are lost. If a lost event was a removal or a clear, the topic's
  next message begins with AllBlocksCleared, so that readers don't count on removed blocks;
- if a reader asks for a replay and some of the messages are no longer kept, it gets the present
  state in place of the topic's messages: AllBlocksCleared and then the cached blocks, in messages
  that carry the last numbers sent.
"""

import itertools
import logging
import operator
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from hotkv_proto.keys import KeySpace
from hotkv_server.events.drive import BlocksStored, Event
from hotkv_server.events.wire import RANK, AllBlocksCleared, KVEventBatch, Translator

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SEQUENCE_BYTES = 8
POLL_S = 0.05
GATHER_S = 0.01
MOST_AT_ONCE = 1000
"""Most queued items to send before the thread checks for requests of readers to replay messages."""
STOP_TIMEOUT_S = 2.0
LINGER_MS = 200
HIGH_WATER_MESSAGES = 100_000
"""Most messages that ZMQ queues for a slow reader. If its queue is full, ZMQ drops new messages for
this reader, as in vLLM's publisher."""
STATE_BYTES = 1 << 20
"""Approximate bytes of events in each message that sends the present state."""
MESSAGE_BYTES = 1 << 20
"""Most bytes of events that are merged into one message if they were queued separately."""
EVENT_BYTES = 64
"""Estimated memory of an event, without its arrays."""


def binds(endpoint: str) -> bool:
    """Returns True if the publisher must bind the endpoint, False if it must connect to it. As in
    vLLM, the publisher binds an endpoint with a wildcard address, `ipc://` or `inproc://`."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


@dataclass(slots=True, eq=False)
class _Topic:
    """The state of a ZMQ topic.

    key_spaces: numbers of the key spaces whose events are sent under the topic.
    must_clear: True if a removal was lost, so that the topic's next message must begin with
        AllBlocksCleared.
    sequence: counter of the topic's sequence numbers; None before its first message.
    last_sent: number of the topic's newest message; -1 if no message was sent.
    last_forgotten: number of the newest message no longer kept for replay; -1 if all are kept.
    sent: number and payload of each message kept for replay, oldest first.
    sent_bytes: bytes of these payloads.

    Only the event loop changes `key_spaces` and `must_clear`, only the thread the other fields.
    """

    name: bytes
    key_spaces: set[int] = field(default_factory=set)
    must_clear: bool = False
    sequence: "itertools.count[int] | None" = None
    last_sent: int = -1
    last_forgotten: int = -1
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Item:
    """Events of one key space, queued for a topic.

    clears_first: True if AllBlocksCleared must precede the events.
    is_alone: True if a clear of the key space may be sent as AllBlocksCleared (see `_is_alone`).
    num_bytes: estimated memory of the events.
    """

    topic: _Topic
    unix_time_s: float
    events: tuple[Event, ...]
    clears_first: bool
    is_alone: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """Queued to end a key space.

    number: number of the key space.
    topics: topics that no other key space has, and that so end too.
    """

    number: int
    topics: tuple[_Topic, ...]


@dataclass(frozen=True, slots=True)
class _Announcement:
    """Queued to send the present state (the cached blocks) to all readers of these topics."""

    topics: tuple[_Topic, ...]


class ZmqPublisher:
    """Publishes events; see the module. Raises zmq.ZMQError if an endpoint can't be bound or
    connected to. Must be closed.

    endpoint, replay_endpoint: ZMQ addresses for events and for replay; an empty `replay_endpoint`
        turns replay off.
    topic_of: returns the topic of a key space, given its number and a name of its model.
    buffer_steps: most messages of a topic to keep for replay.
    buffer_bytes: most bytes of the queue, and most bytes of all messages kept for replay.
    int_hashes: True sends the last 8 bytes of each hash as a number, False all bytes.
    per_endpoint: True numbers messages in one sequence for the whole endpoint, False in one
        sequence for each topic.
    state: yields the cached blocks of all key spaces, and None for a step without one. Runs on the
        thread; events queued meanwhile are sent afterwards. None if the state is not known: a
        replay then sends only the messages that are kept.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        topic_of: Callable[[int, KeySpace, str], str],
        *,
        buffer_steps: int,
        buffer_bytes: int,
        int_hashes: bool,
        per_endpoint: bool = False,
        state: Callable[[], Iterator[BlocksStored | None]] | None = None,
    ) -> None:
        self.published_events = 0
        self.lost_events = 0
        self._topic_of = topic_of
        self._state = state
        self._buffer_steps = buffer_steps
        self._buffer_bytes = buffer_bytes
        self._key_spaces: dict[int, KeySpace] = {}
        self._topics: dict[str, _Topic] = {}
        self._by_key_space: dict[int, list[_Topic]] = {}
        self._translator = Translator(self._key_spaces, as_ints=int_hashes)
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.SimpleQueue[_Item | _Ended | _Announcement | None] = queue.SimpleQueue()
        # Each counter has a single thread that writes it.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._sent_bytes = 0
        # Topics that have messages kept for replay.
        self._kept: dict[_Topic, None] = {}
        # First sequence number of new topics: the numbers of a topic that ends and is made again
        # must not go back.
        self._first_number = time.time_ns() // 1000
        self._of_endpoint = itertools.count(self._first_number) if per_endpoint else None
        # Newest message of all, and newest message of the topics that have ended.
        self._last_sent = self._last_ended = -1
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, endpoint, bind=binds(endpoint))
            self._replay = (
                self._open(zmq.ROUTER, replay_endpoint, bind=True) if replay_endpoint else None
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

    def _open(self, kind: int, endpoint: str, *, bind: bool) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.set_hwm(HIGH_WATER_MESSAGES)
        made.linger = LINGER_MS
        if bind:
            made.bind(endpoint)
        else:
            made.connect(endpoint)
        return made

    # On the event loop

    @property
    def queued_bytes(self) -> int:
        """Bytes of events that wait to be sent."""
        return self._put_bytes - self._taken_bytes

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Declares a key space, before its first event.

        names: names by which requests address the key space's model; if empty, the key space's own
            model name.
        """
        self._key_spaces[number] = key_space
        self._by_key_space[number] = []
        for name in names or (key_space.model,):
            self._add_topic(number, name)

    def add_name(self, number: int, name: str) -> None:
        """Publishes the events of a key space also under another name of its model. The new topic
        begins with the present state."""
        if (topic := self._add_topic(number, name)) is not None:
            self._queue.put(_Announcement((topic,)))

    def _add_topic(self, number: int, model: str) -> _Topic | None:
        """Adds the key space to the topic for a name of its model. Returns the topic; None if the
        topic had this key space already."""
        name = self._topic_of(number, self._key_spaces[number], model)
        topic = self._topics.setdefault(name, _Topic(name.encode()))
        if number in topic.key_spaces:
            return None
        topic.key_spaces.add(number)
        self._by_key_space[number].append(topic)
        log.info("events of key space %d have topic %s", number, name)
        return topic

    def forget_key_space(self, number: int) -> None:
        """Ends a key space, after its last event. A topic without any other key space ends too, and
        its messages are no longer kept for replay."""
        ended = []
        for topic in self._by_key_space.pop(number):
            topic.key_spaces.remove(number)
            if not topic.key_spaces:
                del self._topics[topic.name.decode()]
                ended.append(topic)
        self._queue.put(_Ended(number, tuple(ended)))

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        """Queues events, in order. Drops the events if the queue is full."""
        for number, part in itertools.groupby(events, _key_space_id):
            of_key_space = tuple(part)
            for topic in self._by_key_space[number]:
                self._put(topic, unix_time_s, of_key_space)

    def clear(self, number: int) -> None:
        """Queues a clear of every topic of a key space, also of other key spaces' blocks there. If
        the queue is full, `settle` queues the clear later."""
        for topic in self._by_key_space[number]:
            topic.must_clear = True
            self._put(topic, time.time(), ())

    def announce(self) -> None:
        """Queues the present state (the cached blocks) for all topics, behind all queued events."""
        self._queue.put(_Announcement(tuple(self._topics.values())))

    def settle(self) -> None:
        """Queues a clear for each topic that has lost a removal, if the queue has room."""
        for topic in self._topics.values():
            if topic.must_clear:
                self._put(topic, time.time(), ())

    def _put(self, topic: _Topic, unix_time_s: float, events: tuple[Event, ...]) -> None:
        num_bytes = EVENT_BYTES + sum(EVENT_BYTES + event.num_bytes for event in events)
        if self.queued_bytes + num_bytes > self._buffer_bytes:
            if not self.lost_events:
                log.warning(
                    "events are lost: %d bytes wait to be sent, events.buffer_bytes allows no more",
                    self.queued_bytes,
                )
            self.lost_events += len(events)
            topic.must_clear |= any(not isinstance(event, BlocksStored) for event in events)
            return
        self._put_bytes += num_bytes
        self._queue.put(
            _Item(topic, unix_time_s, events, topic.must_clear, self._is_alone(topic), num_bytes)
        )
        topic.must_clear = False

    def _is_alone(self, topic: _Topic) -> bool:
        """Returns True if a clear of the topic's key space may be sent as AllBlocksCleared: the
        topic must have no other key space. With `per_endpoint` the endpoint must have no other key
        space either, because readers then apply a clear to all of its topics."""
        others = self._by_key_space if self._of_endpoint is not None else ()
        return len(topic.key_spaces) == 1 and len(others) <= 1

    def is_alive(self) -> bool:
        """Returns False if the thread has died."""
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """Returns how long ago the thread last began work or an idle turn."""
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Sends queued events for a short time, then closes the sockets."""
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
                    self._send_state(item.topics)
                elif item is not None:
                    self._end(item)
            self._send_gathered(gathered)
            try:
                # A request at a time: an answer can be long, and events wait for it.
                if self._replay is not None and self._replay.poll(0):
                    self._serve_replay(self._replay)
            except zmq.ZMQError:
                log.exception("a replay could not be sent")
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _next(self) -> "Iterator[_Item | _Ended | _Announcement | None]":
        """Yields the queued items; waits for the first at most POLL_S. Gathers items for a moment:
        otherwise each store would wake this thread, which competes for the interpreter with the
        event loop."""
        try:
            item = self._queue.get(timeout=POLL_S)
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
        """Sends the events of each topic, and empties the dictionary. Puts many events of a topic
        into one message, because each message takes time of this thread and so of the event
        loop."""
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
            events: list[Any] = self._translator.translate(item.events, is_alone=item.is_alone)
        except Exception:  # The effect executor's edge: one bad event must not end all others.
            log.exception("events of topic %s could not be sent", item.topic.name.decode())
            events = []
        return [AllBlocksCleared(), *events] if item.clears_first else events

    def _send_events(self, topic: _Topic, unix_time_s: float, events: list[Any]) -> None:
        if not events:
            return
        try:
            payload = self._encoder.encode(KVEventBatch(unix_time_s, events, RANK))
            self._send(topic, payload, len(events))
        except Exception:  # As above.
            log.exception("events of topic %s could not be sent", topic.name.decode())

    def _send(self, topic: _Topic, payload: bytes, num_events: int) -> None:
        """Sends a message with the next sequence number, and keeps it for replay."""
        if topic.sequence is None:
            topic.sequence = self._of_endpoint or itertools.count(self._first_number)
        topic.last_sent = next(topic.sequence)
        self._last_sent = max(self._last_sent, topic.last_sent)
        number = topic.last_sent.to_bytes(SEQUENCE_BYTES, "big")
        self._pub.send_multipart((topic.name, number, payload))
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
        """Keeps a message for replay, and drops old messages beyond the limits.

        If all topics together exceed the limit in bytes, this topic drops its oldest messages if
        it has more than an equal share, otherwise the topic with the most bytes does. The number of
        topics is not bounded here, because clients choose the names of models.
        """
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

    def _serve_replay(self, socket: "zmq.Socket[bytes]") -> None:
        """Answers a request for replay. The request's frames: an empty frame, the first sequence
        number wanted, and optionally the name of a topic; without a name, all topics are sent."""
        client, *frames = socket.recv_multipart()
        if len(frames) not in (2, 3) or frames[0] or len(frames[1]) > SEQUENCE_BYTES:
            log.warning(
                "a replay request has %d frames; it takes an empty one, 8 bytes of sequence "
                "number and, at will, a topic",
                len(frames),
            )
            return
        first = int.from_bytes(frames[1], "big")
        topics = [one for one in self._kept if len(frames) == 2 or frames[2] == one.name]
        partial = [one for one in topics if one.last_forgotten >= first and self._state]
        stale = partial
        if self._of_endpoint is not None and self._state is not None:
            # Readers don't tell topics apart, so all topics get their state. The messages of topics
            # that have ended are not kept.
            stale = topics if partial or self._last_ended >= first else []
        answers = [
            (number, topic.name, payload)
            for topic in topics
            if topic not in stale
            for number, payload in topic.sent
            if number >= first
        ]
        for number, name, payload in sorted(answers, key=lambda one: one[0]):
            self._answer(socket, client, name, number, payload)
        if stale:
            self._answer_state(socket, client, stale, first)
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))

    def _answer(
        self, socket: "zmq.Socket[bytes]", client: bytes, name: bytes, number: int, payload: bytes
    ) -> None:
        sequence = number.to_bytes(SEQUENCE_BYTES, "big")
        socket.send_multipart((client, b"", name, sequence, payload))
        self._last_turn_s = time.monotonic()

    # The state

    def _send_state(self, topics: Sequence[_Topic]) -> None:
        """Sends the present state (the cached blocks) to all readers of these topics, without an
        AllBlocksCleared before it."""
        try:
            for topic, events in self._encoded_state(topics):
                for part in _parts(events, len(events)):
                    self._send(topic, self._batch(part), len(part))
                    self._last_turn_s = time.monotonic()
        except Exception:  # As for events.
            log.exception("the state could not be sent")

    def _answer_state(
        self, socket: "zmq.Socket[bytes]", client: bytes, topics: Sequence[_Topic], first: int
    ) -> None:
        """Answers a replay request with a clear and the present state of these topics.

        The messages carry the last numbers that were sent, from `first` on if that gives enough
        numbers. So messages that are sent later have higher numbers.
        """
        state = self._encoded_state(topics)
        clear = [msgspec.Raw(self._encoder.encode(AllBlocksCleared()))]
        if self._of_endpoint is None:
            series = [(topic.last_sent, [(topic, clear + events)]) for topic, events in state]
        else:
            state[0] = (state[0][0], clear + state[0][1])
            series = [(self._last_sent, state)]
        for last, of_topics in series:
            # At least one message per topic, even if there are fewer numbers from `first` on.
            most = max(1, (last - first + 1) // len(of_topics))
            messages = [
                (topic, part) for topic, events in of_topics for part in _parts(events, most)
            ]
            for number, (topic, part) in enumerate(messages, last - len(messages) + 1):
                self._answer(socket, client, topic.name, number, self._batch(part))

    def _batch(self, events: list[msgspec.Raw]) -> bytes:
        return self._encoder.encode([time.time(), events, RANK])

    def _encoded_state(self, topics: Sequence[_Topic]) -> list[tuple[_Topic, list[msgspec.Raw]]]:
        """Returns, for each topic, encoded BlockStored events for all cached blocks. Of a sequence,
        earlier blocks come first."""
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


def _parts(events: list[msgspec.Raw], most: int) -> list[list[msgspec.Raw]]:
    """Splits events into messages of about STATE_BYTES each. If that makes more than `most`
    messages, splits them into `most` larger messages."""
    num_bytes = sum(len(bytes(event)) for event in events)
    count = max(1, min(most, -(-num_bytes // STATE_BYTES)))
    step = max(1, -(-len(events) // count))
    return [events[start : start + step] for start in range(0, len(events), step)]
