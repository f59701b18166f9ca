"""Makes events and sends them to all readers: routers (through a publisher) and tools (feeds).

Always true:

- a `StoredEvent` is sent after its blocks are ready in the medium, a `RemovedEvent` after they can
  no longer be found there; events of one block in one medium keep their order;
- the blocks of a `StoredEvent` follow each other without a gap, and its token ids are exactly
  theirs;
- publishing never waits: a reader that is too slow loses events and is told so.
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
    """Consecutive blocks of a sequence have become ready in a medium.

    `hashes`: uint32 words [n, 8].
    `parent`: words [8]; None if the first block begins its sequence, or if unknown (after a move).
    `depth`: of the first block.
    `content`: its token ids are empty if unknown.
    `tier`: empty for host memory.
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
        """Event for the blocks `first` to `end` - 1. Copies: views would keep the whole arrays
        alive."""
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
    """Blocks were removed from a medium.

    `hashes`: uint32 words [n, 8], in no order.
    `tier`: empty for host memory.
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
    """All blocks of a key space are removed from all media.

    `removed`: what the flush has removed from host memory and disk so far; later events name the
        rest. Published instead of a clear if the ZMQ topic has other key spaces, whose blocks a
        clear would remove too.
    """

    key_space_id: int
    removed: tuple[RemovedEvent, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(event.num_bytes for event in self.removed)


Event = StoredEvent | RemovedEvent | KeySpaceCleared


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Carries its key space, which the server may forget before a reader reads the event."""

    unix_time_s: float
    event: Event
    key_space: KeySpace

    @property
    def num_bytes(self) -> int:
        return self.event.num_bytes


class EventPublisher(Protocol):
    """Publishes a node's events to routers, under topics. Called on the event loop; only `close`
    blocks. `number` is a key space's number on this node; a *clear* tells readers of a topic to
    drop all of its blocks, of whatever key space."""

    published_events: int
    lost_events: int
    """Dropped because the queue was full."""

    @property
    def queued_bytes(self) -> int: ...

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Called before the key space's first event. Each of `names` gives a topic; if there are
        none, the key space's model name does."""

    def add_name(self, number: int, name: str) -> None:
        """Publishes the key space under one more topic. A new topic begins with a clear and the
        cached blocks, if these are known."""

    def clear(self, number: int) -> None:
        """Queues a clear for each topic of the key space."""

    def sends_clear(self, number: int) -> bool:
        """False if a `KeySpaceCleared` is sent as the removals that it names."""

    def announce(self) -> None:
        """Queues events for all cached blocks."""

    def forget_key_space(self, number: int) -> None:
        """Called after the key space's last event, when it has no blocks; sends nothing. The key
        space may come back under another number."""

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        """Queues events in order, or drops them if the queue is full."""

    def settle(self) -> None:
        """Queues a clear for each topic that lost a removal or a clear. Called regularly."""

    def is_alive(self) -> bool: ...

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the publisher's thread last made progress. `now_s`: time.monotonic."""

    def close(self) -> None:
        """Sends queued events for a limited time, then stops the thread. Blocks."""


class EventHub:
    """Sends events to the feeds and to the publisher, if there is one.

    `of_pool`: nodes that share a store publish its events under one topic. Then only events
        about that store are published; a flush clears the topic, a node's start does not.
    """

    def __init__(self, publisher: EventPublisher | None = None, *, of_pool: bool = False) -> None:
        self.publisher = publisher
        self._of_pool = of_pool
        self.feeds: Feeds[TimedEvent] = Feeds()
        self._key_spaces: dict[int, KeySpace] = {}
        # Key spaces with blocks of a shared store published since their last clear.
        self._in_shared_store: set[int] = set()

    def __repr__(self) -> str:
        return f"EventHub({self.publisher!r}, {self.feeds!r})"

    @property
    def is_heard(self) -> bool:
        """False if events need not be made."""
        return self.publisher is not None or len(self.feeds) > 0

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Also sends a `KeySpaceCleared`: readers may remember blocks of an earlier server."""
        self._key_spaces[number] = key_space
        if self.publisher is not None:
            self.publisher.add_key_space(number, key_space, names)
        self.publish([KeySpaceCleared(number)])

    def add_name(self, number: int, name: str) -> None:
        if self.publisher is not None:
            self.publisher.add_name(number, name)

    def forget_key_space(self, number: int) -> None:
        """Sends no event: the key space has no blocks left. Unknown numbers are ignored."""
        self._in_shared_store.discard(number)
        if self._key_spaces.pop(number, None) is not None and self.publisher is not None:
            self.publisher.forget_key_space(number)

    def timed(self, event: Event) -> TimedEvent | None:
        """None if the server has forgotten the key space."""
        key_space = self._key_spaces.get(event.key_space_id)
        return None if key_space is None else TimedEvent(time.time(), event, key_space)

    def flushed(self, number: int, elsewhere: bool) -> None:
        """Publishes a clear if a flush's removals don't suffice: they name only this node's blocks,
        and nobody knows which blocks a shared store has. So a pool clears, and so does a node that
        has published blocks of a shared store since the last clear.

        `elsewhere`: another node requested the flush and has cleared the pool's topic. This node
            then clears only for what it has published itself, as each clear also drops blocks
            stored since the flush.
        """
        is_of_pool = self._of_pool and not elsewhere
        is_shared = is_of_pool or number in self._in_shared_store
        self._in_shared_store.discard(number)
        if is_shared and self.publisher is not None and number in self._key_spaces:
            self.publisher.clear(number)

    def publish(self, events: Sequence[Event]) -> None:
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
    """(first, end) of each unbroken sequence of True."""
    steps = np.diff(np.concatenate(([0], mask, [0])).astype(np.int8))
    first, end = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def stored_events(
    key_space_id: int,
    runs: Sequence[Run],
    contents: Sequence[RunContent],
    results: Sequence[NDArray[np.uint8]],
) -> list[StoredEvent]:
    """One event for each unbroken sequence of blocks that a store made ready; none for sketches.

    `results`: for each run, its blocks' `BlockResult`, uint8 [n].
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
    """Events for blocks that a tier has moved, by depth. Blocks that were stored together share an
    event; a block with unknown content gets its own.

    `index`, `entries`: the moved blocks; the index is that of host memory or of the disk.
    `medium`, `tier`: where they lie now.
    `find`: `Contents.find`, by key space number. Parents come from it: the index's links are
        only hints.
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
    """A flushed key space's blocks become one `KeySpaceCleared`, behind the other events.

    `notices`, `below`: removed from host memory, from disk.
    `flushed_key_space_id`: 0 if no flush has begun.
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
