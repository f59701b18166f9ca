"""Events for routers and tools: blocks that became ready, and blocks that were removed, each in a
medium.

Always true:

- `BlocksStored` comes after the block is ready, `BlocksRemoved` after it can no longer be found in
  that medium. Events of the same block and medium come in the order of stores and removals;
- the blocks of a `BlocksStored` are an unbroken run of a chain, so its token ids belong exactly to
  them;
- publishing never waits: a reader that is too slow loses events and is notified.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
class BlocksStored:
    """An unbroken run of blocks became ready.

    `parent`: hash words [8]; None at the root, and after a move between tiers if it is not known.
    `depth`: of the first block.
    `tier`: its name; empty for host memory.
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

    def part(self, first: int, end: int) -> "BlocksStored":
        """Returns the blocks from `first` to `end` of this run, as copies: a view would keep all of
        the run's arrays in memory."""
        whole, block_tokens = self.content, len(self.content.token_ids) // len(self.hashes)
        content = RunContent(
            whole.token_ids[first * block_tokens : end * block_tokens].copy(),
            whole.lora_name,
            whole.extra_keys[first:end],
        )
        return BlocksStored(
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
class BlocksRemoved:
    """Blocks were removed.

    `hashes`: words [n, 8], in no order.
    `tier`: as in `BlocksStored`.
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
    """All blocks of the key space were removed, in every medium. `removed`: the blocks that were in
    host memory or below it."""

    key_space_id: int
    removed: tuple[BlocksRemoved, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(event.num_bytes for event in self.removed)


Event = BlocksStored | BlocksRemoved | KeySpaceCleared


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event with its time, seconds since 1970, and its key space. The server may have forgotten
    the key space when the event is read."""

    unix_time_s: float
    event: Event
    key_space: KeySpace

    @property
    def num_bytes(self) -> int:
        return self.event.num_bytes


class EventPublisher(Protocol):
    """Publishes the events of a node. Called on the event loop; its methods, except `close`, don't
    block."""

    published_events: int
    """Events sent since the start."""
    lost_events: int
    """Events dropped since the start, because the queue was full."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of events that wait to be sent."""

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Declares a key space, before its first event. `names`: of its model; without any, the key
        space has its name."""

    def add_name(self, number: int, name: str) -> None:
        """Publishes the events of a key space under another name of its model, too."""

    def announce(self) -> None:
        """Sends the present state, after all events that are queued."""

    def forget_key_space(self, number: int) -> None:
        """Ends a key space, after its last event. It may be declared again under another number."""

    def publish(self, unix_time_s: float, events: Sequence[Event]) -> None:
        """Queues events, in order. Drops them if the queue is full."""

    def settle(self) -> None:
        """Notifies readers of losses that they don't know of yet. Called from time to time."""

    def is_alive(self) -> bool:
        """Returns whether its thread lives."""

    def stalled_s(self, now_s: float) -> float:
        """Returns how long its thread has been stuck; 0 if it works."""

    def close(self) -> None:
        """Sends queued events for a short time and ends. Blocks."""


class EventHub:
    """Sends events to feeds, and to the publisher if the server has a publisher.

    of_pool: the publisher tells only of stores that nodes share, in the name of all of these nodes.
        A node that starts then clears nothing.
    """

    def __init__(self, publisher: EventPublisher | None = None, *, of_pool: bool = False) -> None:
        self.publisher = publisher
        self._of_pool = of_pool
        self.feeds: Feeds[TimedEvent] = Feeds()
        self._key_spaces: dict[int, KeySpace] = {}

    def __repr__(self) -> str:
        return f"EventHub({self.publisher!r}, {self.feeds!r})"

    @property
    def is_heard(self) -> bool:
        """Whether anybody would receive an event."""
        return self.publisher is not None or len(self.feeds) > 0

    def add_key_space(self, number: int, key_space: KeySpace, names: Sequence[str] = ()) -> None:
        """Registers a key space the first time it is seen, and tells subscribers to drop blocks
        that they remember from an earlier server."""
        self._key_spaces[number] = key_space
        if self.publisher is not None:
            self.publisher.add_key_space(number, key_space, names)
        self.publish([KeySpaceCleared(number)], is_first=True)

    def add_name(self, number: int, name: str) -> None:
        """Adds a name under which requests know the model of a key space."""
        if self.publisher is not None:
            self.publisher.add_name(number, name)

    def forget_key_space(self, number: int) -> None:
        """Ends a key space that the server has forgotten; it has no blocks. Does nothing if the key
        space was never announced."""
        if self._key_spaces.pop(number, None) is not None and self.publisher is not None:
            self.publisher.forget_key_space(number)

    def timed(self, event: Event) -> TimedEvent | None:
        """Returns an event as of now; None if its key space has been forgotten."""
        key_space = self._key_spaces.get(event.key_space_id)
        return None if key_space is None else TimedEvent(time.time(), event, key_space)

    def publish(self, events: Sequence[Event], *, is_first: bool = False) -> None:
        """Sends events out, in order. `is_first`: of a key space that was not known."""
        if not (events and self.is_heard):
            return
        now_s = time.time()
        if self.publisher is not None:
            published = events
            if self._of_pool:
                published = [] if is_first else [one for one in events if _is_of_pool(one)]
            if published:
                self.publisher.publish(now_s, published)
        if len(self.feeds):
            self.feeds.put(
                TimedEvent(now_s, event, self._key_spaces[event.key_space_id]) for event in events
            )


def _is_of_pool(event: Event) -> bool:
    return isinstance(event, KeySpaceCleared) or event.medium is Medium.REMOTE


def edges(mask: BoolMask) -> list[tuple[int, int]]:
    """Returns the unbroken runs of True: pairs of the first position and the position behind."""
    steps = np.diff(np.concatenate(([0], mask, [0])).astype(np.int8))
    first, end = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    return list(zip(first.tolist(), end.tolist(), strict=True))


def stored_events(
    key_space_id: int,
    runs: Sequence[Run],
    contents: Sequence[RunContent],
    results: Sequence[NDArray[np.uint8]],
) -> list[BlocksStored]:
    """Returns an event for each unbroken run of blocks that a store has made ready, except
    representations."""
    events: list[BlocksStored] = []
    for run, content, values in zip(runs, contents, results, strict=True):
        num_stored = values.tobytes().count(STORED)
        if run.group_index < MAX_GROUPS and num_stored:
            whole = BlocksStored(
                key_space_id, run.group_index, run.hashes, run.parent, run.depth, content
            )
            if num_stored == len(values):
                events.append(whole)
            else:
                parts = edges(values == BlockResult.STORED)
                events += [whole.part(first, end) for first, end in parts]
    return events


@dataclass(frozen=True, slots=True)
class Content:
    """The parent and the content of a block, as its store named them.

    parent: hash words [8]; None at the root.
    """

    parent: Words | None
    content: RunContent


UNKNOWN = Content(None, NO_CONTENT)


def moved_events(
    index: BlockIndex,
    entries: Entries,
    medium: Medium,
    tier: str,
    content_of: Callable[[int, int, bytes], Content],
) -> Iterator[BlocksStored]:
    """Yields an event for each of these entries, which a tier has moved. Of a chain, earlier blocks
    come first. An event has a single block.

    content_of: returns what is known of a block by key space, group and hash (32 bytes). The link
        to the block before is only a hint (`cache.table.index`), so it names no parent.
    """
    entries = entries[np.argsort(index.depths(entries), kind="stable")]
    key_spaces, groups, hashes = index.keys(entries)
    rows = zip(key_spaces.tolist(), groups.tolist(), index.depths(entries).tolist(), strict=True)
    for at, (key_space_id, group, depth) in enumerate(rows):
        block = hashes[at : at + 1]
        known = content_of(key_space_id, group, block.tobytes())
        yield BlocksStored(
            key_space_id, group, block, known.parent, depth, known.content, medium, tier
        )


def removed_events(
    notices: Sequence[EvictionNotice],
    flushed_key_space_id: int,
    below: Sequence[EvictionNotice] = (),
) -> list[Event]:
    """Returns the events of evictions from host memory and from the disk tier; a single event for a
    flushed key space."""
    removed = [BlocksRemoved(one.key_space_id, one.group_index, one.hashes) for one in notices]
    removed += [
        BlocksRemoved(one.key_space_id, one.group_index, one.hashes, Medium.DISK, DISK_TIER)
        for one in below
    ]
    if not flushed_key_space_id:
        return list(removed)
    cleared = KeySpaceCleared(
        flushed_key_space_id,
        tuple(event for event in removed if event.key_space_id == flushed_key_space_id),
    )
    return [*(event for event in removed if event.key_space_id != flushed_key_space_id), cleared]
