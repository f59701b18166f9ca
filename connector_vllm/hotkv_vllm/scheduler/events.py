"""Publishes the shared cache's blocks as KV events of this engine, for routers that subscribe to
engines only.

Every READ_S it reads the server's events. vLLM calls `take` once a step and publishes the result
with its own events; an idle engine publishes none.

- A block is stored once per medium (host memory, disk, shared store).
- It is removed when the server removes it, the key space changes, or no server has sent events for
  ABSENCE_PATIENCE_S.
- A shared store evicts without events, so at most MOST_IN_STORE of its blocks stay published; the
  oldest are removed first.
- hotkv never publishes "all blocks cleared": routers would forget the device's blocks too. If vLLM
  does, the shared cache's blocks are published again.

Never waits for the server.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

from hotkv_client.session import Session
from hotkv_client.types import BlocksRemoved, BlocksStored, EventsRead
from hotkv_proto.errors import HotKVError
from hotkv_vllm.compat import events
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.link import logger

ABSENCE_PATIENCE_S = 5.0
"""Longer than a restart of the server, which keeps its blocks."""
READ_S = 0.05
"""A read costs the server more than the events in it, so it waits for several."""
MOST_IN_STORE = 1 << 20
"""Per group; beyond it, REMOVED_AT_ONCE are removed."""
REMOVED_AT_ONCE = 1 << 12

Place = tuple[int, str, str]
"""Group index, medium, name of the tier."""


class SharedEvents:
    """kept: removal events of the last `take` that the caller must not publish: this engine
    still has their blocks in host memory."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._is_kept: Callable[[CacheGroup, bytes], bool] = lambda *_: False
        self._session: Session | None = None
        self._groups: Sequence[CacheGroup] = ()
        self._asked: Future[EventsRead] | None = None
        # Published hashes, oldest first; the dict is an ordered set.
        self._reported: dict[Place, dict[bytes, None]] = {}
        # While the server lists all its blocks: published ones that it has not named. At the end
        # of the list they are published as removed.
        self._unseen: dict[Place, set[bytes]] = {}
        # The next call asks the server to list all its blocks from the beginning.
        self._wants_state = False
        self._next_s = 0.0
        self._absent_since_s: float | None = None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"SharedEvents({sum(map(len, self._reported.values()))} blocks)"

    def device_was_cleared(self) -> None:
        """Publishes the shared cache's blocks again."""
        self._reported.clear()
        self._unseen.clear()
        # The list of all blocks will contain those of a call in progress.
        self._asked, self._wants_state = None, True

    def take(
        self,
        session: Session | None,
        groups: Sequence[CacheGroup],
        now_s: float,
        is_kept: Callable[[CacheGroup, bytes], bool] = lambda *_: False,
    ) -> list[Any]:
        """vLLM's events since the last call.

        session: None while hotkv is off.
        is_kept: whether this engine has the block in host memory.
        """
        taken: list[Any] = []
        self.kept, self._is_kept = [], is_kept
        if session is not self._session:
            taken += self._take_back(self._reported)
            self._session, self._groups, self._asked = session, groups, None
        if session is None:
            return taken
        if not (session.connected and session.has_events):
            # After a reconnect the server lists all its blocks first.
            self._asked = None
            self._absent_since_s = self._absent_since_s or now_s
            if now_s >= self._absent_since_s + ABSENCE_PATIENCE_S:
                taken += self._take_back(self._reported)
            return taken
        self._absent_since_s = None
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            try:
                taken += self._read(asked.result())
            except HotKVError as error:
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("hotkv: events of the shared cache can't be read: %s", error)
                return taken
        if self._asked is None and now_s >= self._next_s:
            self._asked = session.read_events(begins_state=self._wants_state)
            self._next_s = now_s + READ_S
        return taken

    def _read(self, read: EventsRead) -> Iterator[Any]:
        if read.has_more_state:
            self._next_s = 0.0
        if read.begins_state:
            self._wants_state = False
            self._unseen = {place: set(hashes) for place, hashes in self._reported.items()}
        for event in read.events:
            if isinstance(event, BlocksStored):
                yield from self._stored(event)
            elif isinstance(event, BlocksRemoved):
                place = event.group_index, event.medium, event.tier
                yield from self._take_back({place: set(event.hashes)})
            else:
                yield from self._take_back(self._reported)
        if self._unseen and not read.has_more_state:
            unseen, self._unseen = self._unseen, {}
            yield from self._take_back(unseen)

    def _stored(self, event: BlocksStored) -> Iterator[Any]:
        place = event.group_index, event.medium, event.tier
        told = self._reported.setdefault(place, {})
        self._unseen.get(place, set()).difference_update(event.hashes)
        new = [block_hash not in told for block_hash in event.hashes]
        told.update(dict.fromkeys(event.hashes))
        for first, end in _runs(new):
            yield events.stored(self._groups[event.group_index], _part(event, first, end))
        while event.medium == "REMOTE" and len(told) > MOST_IN_STORE:
            yield from self._take_back({place: [*islice(told, REMOVED_AT_ONCE)]})

    def _take_back(self, blocks: Mapping[Place, Iterable[bytes]]) -> Iterator[Any]:
        for place, hashes in list(blocks.items()):
            told = self._reported.get(place, {})
            gone = [block_hash for block_hash in hashes if block_hash in told]
            for block_hash in gone:
                del told[block_hash]
            if not gone:
                continue
            group_index, medium, tier = place
            group = self._groups[group_index]
            kept = {one for one in gone if medium == "CPU" and self._is_kept(group, one)}
            for is_kept in (False, True):
                part = tuple(one for one in gone if (one in kept) == is_kept)
                if part:
                    event = events.removed(group, BlocksRemoved(group_index, part, medium, tier))
                    if is_kept:
                        self.kept.append(event)
                    yield event


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Ranges (first, end) of consecutive True values."""
    edges = [
        at for at, (before, one) in enumerate(pairwise([False, *mask, False])) if one != before
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _part(run: BlocksStored, first: int, end: int) -> BlocksStored:
    if (first, end) == (0, len(run.hashes)):
        return run
    block_tokens = len(run.token_ids) // len(run.hashes)
    return replace(
        run,
        hashes=run.hashes[first:end],
        parent_hash=run.hashes[first - 1] if first else run.parent_hash,
        token_ids=run.token_ids[first * block_tokens : end * block_tokens],
        extra_keys=run.extra_keys[first:end],
    )
