"""Publishes events over ZMQ, in messages with vLLM's frames (topic, sequence number, payload).
Replays messages that a reader has missed. A *clear* is vLLM's event AllBlocksCleared.

Always true:

- the first sequence number is the time of the publisher's start, in microseconds since 1970, so
  numbers also grow over restarts. This is needed because a router drops messages whose numbers go
  back;
- the numbers of each topic form a sequence without gaps, as if an engine published the topic. With
  `per_endpoint`, the numbers of all topics together form one such sequence;
- the event loop only queues events; a thread translates, encodes and sends them;
- the queue and the messages kept for replay are bounded in bytes;
- if the queue is full, new events are lost. If a removal or a clear was lost, the next message of
  the topic begins with a clear, so that readers don't count on removed blocks. The present state
  (the cached blocks) follows, because the clear also makes readers drop blocks that are cached;
- readers of a topic don't distinguish its key spaces. So if a block of a key space is removed, but
  another key space of the topic has a block with the same hash, no removal is sent;
- if a reader asks for a replay of messages, and some of them are no longer kept, the reader gets
  the present state instead: a clear and then the cached blocks, in messages with the last numbers
  that were sent.
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
"""Most items that the publisher's thread takes from its queue before it checks whether a reader
asks for a replay."""
STOP_TIMEOUT_S = 2.0
"""Longest time that `close` waits for the thread."""
LINGER_MS = 200
"""Longest time, in milliseconds, for which a closed socket still sends its queued messages."""
HIGH_WATER_MESSAGES = 10_000
"""Most messages that ZMQ queues for a slow reader. If this queue is full, ZMQ drops new messages
for the reader, as in vLLM's publisher."""
REPLAY_MESSAGES = 64
"""Most messages of an answer to a request for replay that ZMQ queues for a reader. The publisher
keeps the further messages until the reader has taken some."""
REQUEST_BYTES = 128 << 10
"""Longest frame, in bytes, that a reader may send in a request for replay. ZMQ ends the connection
of a reader that sends more."""
MOST_ANSWERS = 4
"""Most requests for replay that are answered at a time; further requests wait."""
ANSWER_S = 60.0
"""An answer to a request for replay is dropped if its reader has not received all of its messages
after this time."""
STALLED_S = 2.0
"""An answer to a request for replay may be dropped earlier, in favor of a waiting request, if its
reader has taken no message for this time."""
STATE_BYTES = 1 << 20
"""Approximate bytes of events in each message with the present state (events for the cached
blocks)."""
MESSAGE_BYTES = 1 << 20
"""Most bytes of separately queued events that are merged into one message."""
EVENT_BYTES = 64
"""Estimated memory of an event, without its arrays."""


HasBlocks = Callable[[int, RemovedEvent], BoolMask]
"""Takes the number of a key space, and a removal of n blocks of another key space. Returns a mask
[n] of the hashes for which the key space has a ready block in the same medium and group."""


def binds(endpoint: str) -> bool:
    """Returns True if the publisher must bind the endpoint, False if it must connect to it. Like
    vLLM's publisher, it binds endpoints that have a wildcard address or begin with `ipc://` or
    `inproc://`. It also binds 0.0.0.0 (all interfaces), because a connection to this address would
    reach no reader."""
    wildcards = ("*", "::", "//0.0.0.0:")
    return any(one in endpoint for one in wildcards) or endpoint.startswith(("ipc://", "inproc://"))


@dataclass(slots=True, eq=False)
class _Topic:
    """The state of a ZMQ topic. Only the event loop changes the first five fields, only the thread
    changes the other fields.

    `key_spaces`: numbers of the key spaces (each is a model in a configuration) whose events
        are sent under the topic.
    `must_clear`: True if a removal was lost because the queue was full, so that the topic's next
        message must begin with a clear (vLLM's event AllBlocksCleared).
    `must_announce`: True if the present state must be sent after the topic's first clear.
    `announcement`: the last queued announcement of the topic; None before the first.
    `sequence`: counter of the topic's sequence numbers; None before its first message.
    `last_sent`: number of the topic's newest message; -1 before its first message.
    `last_forgotten`: number of the newest message that is no longer kept for replay; -1 if all
        messages are kept.
    `sent`: number and payload of each message that is kept for replay; the oldest comes first.
    `sent_bytes`: bytes of these payloads.
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
    """An answer to a request for replay.

    `messages`: the messages that its reader has not taken yet.
    `until_s`: when the answer is dropped.
    `moved_s`: when the reader last took a message.
    """

    messages: deque[tuple[bytes, ...]]
    until_s: float
    moved_s: float


@dataclass(frozen=True, slots=True)
class _Item:
    """An item of the queue: events of one key space (a model in a configuration), to be sent
    under a topic.

    `clears_first`: True if a clear (vLLM's event AllBlocksCleared) must be sent before the events.
    `is_alone`: True if the removal of all blocks of the key space may be sent as a clear (see
        `_is_alone`).
    `num_bytes`: estimated memory of the events.
    """

    topic: _Topic
    unix_time_s: float
    events: tuple[Event, ...]
    clears_first: bool
    is_alone: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """An item of the queue: the server has forgotten a key space (a model in a configuration),
    so the thread must also remove the key space from its tables.

    `number`: number of the key space.
    `topics`: the topics that had only this key space. Their messages are no longer kept for replay.
    """

    number: int
    topics: tuple[_Topic, ...]


@dataclass(frozen=True, slots=True)
class _Announcement:
    """An item of the queue: an order to send the readers of some topics the present state (all
    cached blocks). The publisher skips a topic that has a later announcement in the queue. So if
    many lost removals cause many clears (events that all blocks were removed), the state is sent
    only after the last clear."""

    topics: tuple[_Topic, ...]


class ZmqPublisher:
    """Publishes events over ZMQ; see the module. The constructor raises zmq.ZMQError if an endpoint
    can't be bound or connected to. The publisher must be closed.

    `endpoint`: ZMQ address for events.
    `replay_endpoint`: ZMQ address for requests for replay; empty: no replay.
    `topic_of`: returns the topic of a key space. Its three arguments: the key space's number, the
        key space, and a name of the model.
    `buffer_steps`: most messages of a topic to keep for replay.
    `buffer_bytes`: most bytes of the queue, and most bytes of all messages kept for replay.
    `int_hashes`: True sends the last 8 bytes of each hash as a number, False sends all bytes.
    `per_endpoint`: True numbers the messages of all topics in one sequence. False numbers the
        messages of each topic in a separate sequence.
    `state`: yields the present state: events for the cached blocks of all key spaces. Yields None
        after a part of its work that found no event. The publisher's thread calls it. Events that
        are queued during the call are sent after the state. `state` None: the present state is not
        known, so a replay has only the messages that are kept.
    `has_blocks`: looks up the blocks of a removal in another key space (`HasBlocks`). The
        publisher's thread calls it. None: removals are sent whatever other key spaces have.
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
        self._translator = Translator(self._key_spaces, as_ints=int_hashes)
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.SimpleQueue[_Item | _Ended | _Announcement | None] = queue.SimpleQueue()
        # Counters of bytes of queued, taken and kept events. Each counter is written by one thread
        # only, so no lock is needed.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._sent_bytes = 0
        # The unfinished answers to requests for replay. The key is ZMQ's identity of the reader.
        self._answers: dict[bytes, _Answer] = {}
        # The topics of which messages are kept for replay.
        self._kept: dict[_Topic, None] = {}
        # First sequence number of a new topic. It grows, because the numbers of a topic that ends
        # and is made again must not go back.
        self._first_number = time.time_ns() // 1000
        self._of_endpoint = itertools.count(self._first_number) if per_endpoint else None
        # The highest sequence number of a message of any topic; and of any topic that has ended.
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
        # Enable IPv6 only for an IPv6 address. Otherwise the wildcard `*` would listen on IPv6 too.
        made.ipv6 = "[" in endpoint
        if kind == zmq.ROUTER:
            # Raise ZMQError instead of dropping a message for a slow reader.
            made.router_mandatory = True
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
        """Registers a key space (a model in a configuration), before its first event.

        `number`: the number of the key space on this node.
        `names`: names by which requests address the model of the key space. Each name gives a
            topic. If empty, the model name in the key space is used.
        """
        self._key_spaces[number] = key_space
        self._by_key_space[number] = []
        for name in names or (key_space.model,):
            self._add_topic(number, name)

    def add_name(self, number: int, name: str) -> None:
        """Adds a name of a key space's model: the key space's events are also published under the
        topic for this name. If the topic is new for the key space (a model in a configuration),
        also queues two things for this topic: a clear (vLLM's event AllBlocksCleared), because
        readers may remember blocks from an earlier server; and then the present state (events for
        all cached blocks)."""
        topic = self._add_topic(number, name)
        if topic is not None and self._state is not None:
            topic.must_announce = True
            self._put(topic, time.time(), (KeySpaceCleared(number),))

    def _add_topic(self, number: int, model: str) -> _Topic | None:
        """Adds a key space (a model in a configuration) to those whose events are sent under the
        ZMQ topic for a name of its model. Returns the topic; None if it had the key space already.
        `model`: the name of the model."""
        name = self._topic_of(number, self._key_spaces[number], model)
        topic = self._topics.setdefault(name, _Topic(name.encode()))
        if number in topic.key_spaces:
            return None
        topic.key_spaces.add(number)
        self._by_key_space[number].append(topic)
        log.info("events of key space %d have topic %s", number, name)
        return topic

    def forget_key_space(self, number: int) -> None:
        """Removes a key space (a model in a configuration) from the publisher's tables, after
        its last event. Also removes the topics that have no other key space; their messages are no
        longer kept for replay. Sends no message."""
        ended = []
        for topic in self._by_key_space.pop(number):
            topic.key_spaces.remove(number)
            if not topic.key_spaces:
                del self._topics[topic.name.decode()]
                ended.append(topic)
        for topic in ended:
            if topic.must_clear and self._of_endpoint is None:
                # Send the clear (event that all blocks were removed) even if the queue is full,
                # because no other event follows under this topic.
                self._queue.put(_Item(topic, time.time(), (), True, True, 0))
        if self._of_endpoint is not None and any(topic.must_clear for topic in ended):
            # With `per_endpoint`, readers apply a clear (event that all blocks were removed) of any
            # topic to the whole endpoint. So let any other topic send the clear that the ended
            # topic still had to send. If there is no other topic, the next topic begins with a
            # clear (see `_is_alone`).
            for topic in itertools.islice(self._topics.values(), 1):
                topic.must_clear = True
        self._queue.put(_Ended(number, tuple(ended)))

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        """Queues events, in order. Drops the events if the queue is full. `unix_time_s`: the time
        of the events, in seconds since 1970."""
        for number, part in itertools.groupby(events, _key_space_id):
            of_key_space = tuple(part)
            for topic in self._by_key_space[number]:
                self._put(topic, unix_time_s, of_key_space)

    def clear(self, number: int) -> None:
        """Queues a clear (vLLM's event AllBlocksCleared) for each topic of a key space (a model
        in a configuration). The clear also clears blocks of other key spaces in these topics. If
        the queue is full, `settle` queues the clear later."""
        for topic in self._by_key_space[number]:
            topic.must_clear = True
            self._put(topic, time.time(), ())

    def sends_clear(self, number: int) -> bool:
        """Returns True if a `KeySpaceCleared` of a key space is sent as a clear (vLLM's event
        AllBlocksCleared) under each of its topics (see `_is_alone`)."""
        return all(map(self._is_alone, self._by_key_space[number]))

    def announce(self) -> None:
        """Queues the present state (events for all cached blocks) for all topics, to be sent after
        the events that are queued already."""
        self._announce(self._topics.values())

    def _announce(self, topics: Iterable[_Topic]) -> None:
        announcement = _Announcement(tuple(topics))
        for topic in announcement.topics:
            topic.announcement = announcement
        self._queue.put(announcement)

    def settle(self) -> None:
        """Queues a clear (vLLM's event AllBlocksCleared) for each topic of which a removal was lost
        because the queue was full. Does so only once the queue has room again."""
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
            topic.must_clear |= any(not isinstance(event, StoredEvent) for event in events)
            return
        self._put_bytes += num_bytes
        self._queue.put(
            _Item(topic, unix_time_s, events, topic.must_clear, self._is_alone(topic), num_bytes)
        )
        if topic.must_announce or (topic.must_clear and self._state is not None):
            # With `per_endpoint`, readers apply a clear (event that all blocks were removed) to all
            # topics of the endpoint (see `_is_alone`), so announce the blocks of all topics.
            self._announce([topic] if self._of_endpoint is None else self._topics.values())
        topic.must_clear = topic.must_announce = False

    def _is_alone(self, topic: _Topic) -> bool:
        """Returns True if `topic` has only one key space, so that the removal of all of its blocks
        may be sent as a clear (vLLM's event AllBlocksCleared). With `per_endpoint`, returns True
        only if the publisher has only one key space, because readers then apply a clear to the
        topics of the whole endpoint."""
        others = self._by_key_space if self._of_endpoint is not None else ()
        return len(topic.key_spaces) == 1 and len(others) <= 1

    def is_alive(self) -> bool:
        """Returns False if the publisher's thread has died."""
        return self._thread.is_alive()

    def stalled_s(self, now_s: float) -> float:
        """Returns the seconds since the publisher's thread last made progress. A thread that has no
        work makes progress in each turn of its loop. `now_s`: a time of time.monotonic."""
        return now_s - self._last_turn_s

    def close(self) -> None:
        """Makes the thread send the queued events and close the sockets. Waits for the thread's
        end, at most STOP_TIMEOUT_S."""
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
                # Answer only one request before the next events are sent: an answer can be long.
                if self._replay is not None:
                    self._serve_replays(self._replay)
            except Exception:  # An error must not end the thread.
                log.exception("a replay could not be sent")
        self._pub.close()
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _next(self) -> "Iterator[_Item | _Ended | _Announcement | None]":
        """Yields the queued items, at most about MOST_AT_ONCE. Waits for the first item, at most
        POLL_S. Then waits GATHER_S more, so that further items are queued. Without this pause each
        store would wake this thread, which competes with the event loop for the GIL."""
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
        """Sends the gathered events of each topic, and empties `gathered`. Merges the events of a
        topic into few messages: while this thread makes a message, it holds the GIL, for which the
        event loop must wait."""
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
        """Yields the events of an item of the queue. If another key space of the topic has a block
        with the same hash as a removed block, leaves that block out of the removal: readers can't
        tell the two blocks apart, and one of them is still cached."""
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
        """Yields the removal of the blocks in `event`, except blocks with the same hash as a block
        of a key space in `others`. Yields nothing if no blocks are left."""
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
        """Sends a message with the next sequence number of the topic, and keeps it for replay.
        `num_events`: number of events in the payload."""
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
        """Keeps a message for replay, and drops old messages that exceed the limits.

        If the messages of all topics together exceed the limit in bytes, the oldest messages of
        `topic` are dropped if it has more than an equal share of the bytes. Otherwise, the oldest
        messages of the topic with the most bytes are dropped. There may be any number of topics,
        because clients choose the names of models.
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

    def _serve_replays(self, socket: "zmq.Socket[bytes]") -> None:
        """Receives a request for replay if there is one. Does not receive it while MOST_ANSWERS
        answers are unfinished, unless one of them has stalled. Then sends messages of all answers,
        as many as the readers accept now. If a reader sends a new request, the rest of the answer
        to its last request is dropped."""
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
                # The error EAGAIN means that the reader accepts no message now; any other error
                # means that it has disconnected.
                if error.errno == zmq.EAGAIN and time.monotonic() < one.until_s:
                    continue
            del self._answers[client]

    def _replayed(self, frames: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Returns the answer to a request for replay: the last three frames of each message. The
        request's frames are an empty frame, the first sequence number to send, and optionally the
        name of a topic; without a name, the messages of all topics are sent."""
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
            # With `per_endpoint`, readers don't distinguish topics. So if a message of any topic is
            # missing, the state of all topics must be sent. Messages of ended topics are missing
            # too: they are not kept.
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
        """Sends the present state (events for the cached blocks) to all readers of these topics,
        without a clear (vLLM's event AllBlocksCleared) before it."""
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
        """Yields messages with a clear (vLLM's event AllBlocksCleared) and the present state (the
        cached blocks) of these topics. Each message is a sequence number, a topic and a payload.

        The messages reuse the last sequence numbers that were sent, so all later messages have
        greater numbers.

        `first`: the first sequence number that the reader wants. The messages use the numbers from
            `first` to the last number that was sent. If these numbers are too few for all topics,
            the messages also use lower numbers.
        """
        state = self._encoded_state(topics)
        clear = [msgspec.Raw(self._encoder.encode(AllBlocksCleared()))]
        if self._of_endpoint is None:
            series = [(topic.last_sent, [(topic, clear + events)]) for topic, events in state]
        else:
            state[0] = (state[0][0], clear + state[0][1])
            series = [(self._last_sent, state)]
        for last, of_topics in series:
            # Send at least one message per topic, even if there are fewer sequence numbers from
            # `first` on.
            most = max(1, (last - first + 1) // len(of_topics))
            messages = [
                (topic, part) for topic, events in of_topics for part in _parts(events, most)
            ]
            for number, (topic, part) in enumerate(messages, last - len(messages) + 1):
                yield number, topic.name, self._batch(part)

    def _batch(self, events: list[msgspec.Raw]) -> bytes:
        return self._encoder.encode([time.time(), events, RANK])

    def _encoded_state(self, topics: Sequence[_Topic]) -> list[tuple[_Topic, list[msgspec.Raw]]]:
        """Returns, for each topic, its present state: an encoded BlockStored event for each run
        (consecutive blocks of a group) of cached blocks. In a sequence of blocks, earlier blocks
        come first."""
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
    """Splits encoded events into parts of about STATE_BYTES, one for each message. If that gives
    more than `most` parts, returns at most `most` larger parts."""
    num_bytes = sum(len(bytes(event)) for event in events)
    count = max(1, min(most, -(-num_bytes // STATE_BYTES)))
    step = max(1, -(-len(events) // count))
    return [events[start : start + step] for start in range(0, len(events), step)]
