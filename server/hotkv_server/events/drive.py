"""Makes events for routers and tools, and sends them to all readers. An event reports that blocks
have become ready or were removed, in one medium: host memory, the disk tier, or a store that nodes
share.

Always true:

- a `StoredEvent` is sent after its blocks are ready in the medium, a `RemovedEvent` after its
  blocks can no longer be found there. The events about a block in a medium are sent in the order in
  which the block was stored and removed;
- the blocks of a `StoredEvent` follow each other in a sequence without a gap, and its token ids
  are exactly the tokens of these blocks;
- publishing never waits: a reader that is too slow loses events, and is notified of the loss.
"""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.blocks import BlockResult, RunContent
from hotkv_proto.keys import MAX_GROUPS, KeySpace
from hotkv_proto.table import Words
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import DISK_TIER, BoolMask, Entries, EvictionNotice, Medium, Run
from hotkv_server.node.broadcast import Feeds

NO_CONTENT = RunContent(np.empty(0, np.int32))
STORED = bytes((BlockResult.STORED,))


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event: consecutive blocks of a sequence have become ready in a medium.

    `hashes`: the blocks' hashes, uint32 words [n, 8].
    `parent`: hash of the block before the first block, words [8]. None if the first block begins
        its sequence, or if the parent is not known (possible after a move by a tier).
    `depth`: number of blocks before the first block in the sequence.
    `content`: token ids, adapter and extra keys of the blocks; the token ids are empty if they are
        not known.
    `tier`: name of the tier that has the blocks; empty for host memory.
    """

    key_space_id: int
    group_index: int
    hashes: Words
    parent: Words | None
    depth: int
    content: RunContent
    medium: Medium = Medium.CPU
    tier: str = ""

    @property
    def num_bytes(self) -> int:
        return int(self.hashes.nbytes) + self.content.num_bytes

    def part(self, first: int, end: int) -> "StoredEvent":
        """Returns an event for the blocks `first` to `end` - 1 of this event. Copies the arrays.
        Views would keep the whole arrays in memory as long as the part lives."""
        whole, block_tokens = self.content, len(self.content.token_ids) // len(self.hashes)
        content = RunContent(
            whole.token_ids[first * block_tokens : end * block_tokens].copy(),
            whole.lora_name,
            whole.extra_keys[first:end],
        )
        return StoredEvent(
            self.key_space_id,
            self.group_index,
            self.hashes[first:end].copy(),
            self.hashes[first - 1].copy() if first else self.parent,
            self.depth + first,
            content,
            self.medium,
            self.tier,
        )


@dataclass(frozen=True, slots=True)
class RemovedEvent:
    """An event: blocks were removed from a medium.

    `hashes`: the blocks' hashes, uint32 words [n, 8], in no particular order.
    `tier`: name of the tier that had the blocks; empty for host memory.
    """

    key_space_id: int
    group_index: int
    hashes: Words
    medium: Medium = Medium.CPU
    tier: str = ""

    @property
    def num_bytes(self) -> int:
        return int(self.hashes.nbytes)


@dataclass(frozen=True, slots=True)
class KeySpaceCleared:
    """An event: all blocks of a key space (a model in a configuration) are removed from all
    media (a *clear*).

    `removed`: the blocks in host memory and on the disk that a flush has removed so far, as a
        `RemovedEvent` for each group. Later events name the blocks that the flush removes later.
        The publisher sends `removed` in place of the clear if the ZMQ topic has blocks of other key
        spaces, because a clear would remove those blocks too.
    """

    key_space_id: int
    removed: tuple[RemovedEvent, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(event.num_bytes for event in self.removed)


Event = StoredEvent | RemovedEvent | KeySpaceCleared


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event with its time and its key space (a model in a configuration). The key space is
    included, because the server may forget the key space before a reader reads the event.

    `unix_time_s`: time of the event, in seconds since 1970.
    """

    unix_time_s: float
    event: Event
    key_space: KeySpace

    @property
    def num_bytes(self) -> int:
        return self.event.num_bytes


class EventPublisher(Protocol):
    """Publishes the events of a node to routers, under topics; `ZmqPublisher` implements it. Its
    methods are called on the event loop, and do not block, except `close`: a thread of the
    publisher sends the queued events. In its methods, `number` is the number of a key space (a
    model in a configuration) on this node."""

    published_events: int
    """Number of events sent since the start."""
    lost_events: int
    """Number of events dropped since the start, because the queue was full."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of events that wait to be sent."""

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Registers a key space (a model in a configuration), before its first event.

        `number`: the number of the key space on this node.
        `names`: names by which requests address the model of the key space; its events are
            published under a topic for each name. If empty, the model name in the key space is
            used.
        """

    def add_name(self, number: int, name: str) -> None:
        """Adds a name of a key space's model: the key space's events are also published under the
        ZMQ topic for this name. Under a new topic, first sends an event that all blocks were
        removed (a clear), and then events for the cached blocks, if these are known."""

    def clear(self, number: int) -> None:
        """Queues an event that all blocks were removed (a clear) for each ZMQ topic under which
        events of this key space (a model in a configuration) are published. Readers then also drop
        the blocks of other key spaces that are published under these topics."""

    def sends_clear(self, number: int) -> bool:
        """Returns True if a `KeySpaceCleared` of a key space is sent as a clear (an event that all
        blocks were removed) under each of its topics, False if it is sent as the removal of the
        blocks that it names."""

    def announce(self) -> None:
        """Queues the present state (events for all cached blocks), to be sent after the events that
        are queued already."""

    def forget_key_space(self, number: int) -> None:
        """Removes a key space (a model in a configuration) from the publisher's tables, after
        its last event. Called when the server has forgotten the key space, because the key space
        has no blocks. Readers are not notified, because earlier events have reported the removal of
        its blocks. The same key space may be registered again later, with another number."""

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        """Queues events, in order. Drops the events if the queue is full. `unix_time_s`: the time
        of the events, in seconds since 1970."""

    def settle(self) -> None:
        """Queues an event that all blocks were removed (a clear) for each ZMQ topic of which a
        removal or a clear was lost, because the queue was full. Skips topics for which a clear was
        queued since the loss. The node calls this method regularly."""

    def is_alive(self) -> bool:
        """Returns False if the publisher's thread has died."""

    def stalled_s(self, now_s: float) -> float:
        """Returns the seconds since the publisher's thread last made progress. `now_s`: a time of
        time.monotonic."""

    def close(self) -> None:
        """Sends queued events for a limited time, then stops the thread. Blocks the calling
        thread."""


class EventHub:
    """Sends events to all readers: to the feeds (readers over gRPC), and to the publisher if there
    is one. In its methods, `number` is the number of a key space (a model in a configuration)
    on this node.

    `publisher`: publishes the events to routers; None: events are sent to feeds only.
    `of_pool`: True if several nodes (a *pool*) share a store, and all of them publish the store's
        events under one topic. The publisher then sends only events about that store. It sends a
        clear (an event that all blocks were removed) if a key space is flushed, but no clear if a
        node starts.
    """

    def __init__(self, publisher: EventPublisher | None = None, *, of_pool: bool = False) -> None:
        self.publisher = publisher
        self._of_pool = of_pool
        self.feeds: Feeds[TimedEvent] = Feeds()
        self._key_spaces: dict[int, KeySpace] = {}
        # The key spaces of which blocks in a shared store were published since their last clear
        # (event that all blocks were removed).
        self._in_shared_store: set[int] = set()

    def __repr__(self) -> str:
        return f"EventHub({self.publisher!r}, {self.feeds!r})"

    @property
    def is_heard(self) -> bool:
        """True if events must be made, because there is a publisher, or a reader over gRPC."""
        return self.publisher is not None or len(self.feeds) > 0

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Registers a key space (a model in a configuration) that is new to this server. Sends
        a `KeySpaceCleared`, so that readers drop blocks of the key space that they remember from an
        earlier server. For the arguments see `EventPublisher.add_key_space`."""
        self._key_spaces[number] = key_space
        if self.publisher is not None:
            self.publisher.add_key_space(number, key_space, names)
        self.publish([KeySpaceCleared(number)])

    def add_name(self, number: int, name: str) -> None:
        """Adds a name by which requests address the model of a key space (a model in a
        configuration). The publisher then also publishes the key space's events under the topic for
        this name."""
        if self.publisher is not None:
            self.publisher.add_name(number, name)

    def forget_key_space(self, number: int) -> None:
        """Removes a key space (a model in a configuration) from the tables of the hub and the
        publisher. Called when the server has forgotten the key space, because the key space has no
        blocks. Sends no event, because the removal of its blocks was reported before. Does nothing
        if the key space was never registered."""
        self._in_shared_store.discard(number)
        if self._key_spaces.pop(number, None) is not None and self.publisher is not None:
            self.publisher.forget_key_space(number)

    def timed(self, event: Event) -> TimedEvent | None:
        """Returns the event with the present time and its key space; None if the server has
        forgotten the key space."""
        key_space = self._key_spaces.get(event.key_space_id)
        return None if key_space is None else TimedEvent(time.time(), event, key_space)

    def flushed(self, number: int, *, elsewhere: bool = False) -> None:
        """Makes the publisher send an event that all blocks were removed (a clear), if the removal
        events of a flush are not enough. They name only blocks of this node, and the server does
        not know which blocks a shared store has. So the clear is sent if the publisher has
        published blocks in a shared store since the last clear, or if the nodes publish as a pool
        (`of_pool`).

        `number`: the key space (a model in a configuration) that was flushed.
        `elsewhere`: True if another node has requested the flush. It has sent a clear of the
            pool's topic, so this node sends a clear only for blocks that it has published itself.
            After each clear, readers also forget the blocks that other nodes have copied to the
            store since the flush.
        """
        is_of_pool = self._of_pool and not elsewhere
        is_shared = is_of_pool or number in self._in_shared_store
        self._in_shared_store.discard(number)
        if is_shared and self.publisher is not None and number in self._key_spaces:
            self.publisher.clear(number)

    def publish(self, events: Sequence[Event]) -> None:
        """Sends events to the publisher and to all readers over gRPC, in order."""
        if not (events and self.is_heard):
            return
        now_s = time.time()
        if self.publisher is not None:
            published = [one for one in events if not self._of_pool or _is_of_pool(one)]
            for one in published:
                number = one.key_space_id
                if _is_of_pool(one):
                    self._in_shared_store.add(number)
                elif isinstance(one, KeySpaceCleared) and self.publisher.sends_clear(number):
                    self._in_shared_store.discard(number)
            if published:
                self.publisher.publish(now_s, published)
        if len(self.feeds):
            self.feeds.put(
                TimedEvent(now_s, event, self._key_spaces[event.key_space_id]) for event in events
            )


def _is_of_pool(event: Event) -> bool:
    return not isinstance(event, KeySpaceCleared) and event.medium is Medium.REMOTE


def edges(mask: BoolMask) -> list[tuple[int, int]]:
    """Returns, for each unbroken sequence of True values in a mask, the position of its first value
    and the position after its last value."""
    steps = np.diff(np.concatenate(([0], mask, [0])).astype(np.int8))
    first, end = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def stored_events(
    key_space_id: int,
    runs: Sequence[Run],
    contents: Sequence[RunContent],
    results: Sequence[NDArray[np.uint8]],
) -> list[StoredEvent]:
    """Returns the events of a store: an event for each unbroken sequence of blocks that the store
    has made ready. Sketches (compact forms of keys, for sparse attention) have no events.

    `runs`: the runs of the store (consecutive blocks of a group).
    `contents`: for each run, its token ids, adapter and extra keys.
    `results`: for each run, the `BlockResult` of each of its blocks, uint8 [n].
    """
    events: list[StoredEvent] = []
    for run, content, values in zip(runs, contents, results, strict=True):
        num_stored = values.tobytes().count(STORED)
        if run.group_index < MAX_GROUPS and num_stored:
            whole = StoredEvent(
                key_space_id, run.group_index, run.hashes, run.parent, run.depth, content
            )
            if num_stored == len(values):
                events.append(whole)
            else:
                parts = edges(values == BlockResult.STORED)
                events += [whole.part(first, end) for first, end in parts]
    return events


def moved_events(
    index: BlockIndex,
    entries: Entries,
    medium: Medium,
    tier: str,
    find: Callable[[int, int, list[bytes]], tuple[list[StoredEvent], list[int]]],
) -> list[StoredEvent]:
    """Returns the events for blocks that a tier has moved. Blocks that were stored together and
    follow each other share an event. A block whose content (token ids) is not known gets its own
    event. Events of earlier blocks in a sequence come first.

    `index`: the index that has the moved blocks: of host memory, or of the disk.
    `entries`: entry numbers of the moved blocks in `index`.
    `medium`: the medium to which the blocks were moved.
    `tier`: name of the tier that now has the blocks; empty for host memory.
    `find`: looks up the contents of blocks (`Contents.find`). Its arguments are the number of the
        key space, the group and the block hashes. It returns the runs (consecutive blocks) with
        known contents, and the positions of the other blocks. The parent of a block comes from its
        content, not from the index, whose links between blocks are only hints
        (`cache.table.index`).
    """
    events: list[StoredEvent] = []
    key_spaces, groups, hashes = index.keys(entries)
    depths = index.depths(entries)
    for key_space_id, group in set(zip(key_spaces.tolist(), groups.tolist(), strict=True)):
        at = np.flatnonzero((key_spaces == key_space_id) & (groups == group))
        known, others = find(key_space_id, group, hashes[at].view("V32").ravel().tolist())
        events += [
            replace(one, key_space_id=key_space_id, medium=medium, tier=tier) for one in known
        ]
        events += [
            StoredEvent(
                key_space_id, group, hashes[one : one + 1], None, depth, NO_CONTENT, medium, tier
            )
            for one, depth in zip(at[others], depths[at[others]].tolist(), strict=True)
        ]
    return sorted(events, key=operator.attrgetter("depth"))


def removed_events(
    notices: Sequence[EvictionNotice],
    flushed_key_space_id: int,
    below: Sequence[EvictionNotice] = (),
) -> list[Event]:
    """Returns the events of removed blocks. If a key space (a model in a configuration) was
    flushed, its blocks become one `KeySpaceCleared`, which follows the other events.

    `notices`: blocks that were removed from host memory.
    `flushed_key_space_id`: the key space whose flush has begun; 0 if no flush has begun.
    `below`: blocks that were removed from the disk tier.
    """
    removed = [RemovedEvent(one.key_space_id, one.group_index, one.hashes) for one in notices]
    removed += [
        RemovedEvent(one.key_space_id, one.group_index, one.hashes, Medium.DISK, DISK_TIER)
        for one in below
    ]
    if not flushed_key_space_id:
        return list(removed)
    cleared = KeySpaceCleared(
        flushed_key_space_id,
        tuple(event for event in removed if event.key_space_id == flushed_key_space_id),
    )
    return [*(event for event in removed if event.key_space_id != flushed_key_space_id), cleared]
