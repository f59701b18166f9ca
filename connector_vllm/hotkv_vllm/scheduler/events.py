"""Publishes the shared cache's blocks as KV events of this engine, for routers that know only
engines.

The session reads from the server which blocks of its key space are stored (`Session.read_events`).
vLLM publishes the events that `take` returns together with the engine's own events, at the engine's
endpoint and with its sequence numbers. vLLM asks once a step, so an idle engine publishes no
events. The server is asked every READ_S.

Always true: a block is published as stored once for each medium. It is published as removed when
the server removes it, when the key space changes, or when there is no server for some seconds. No
event clears the engine's own blocks. Scheduler thread only; never waits for the server.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from hotkv_client.types import BlocksRemoved, BlocksStored, EventsRead
from hotkv_proto.errors import HotKVError
from hotkv_vllm.compat import events
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.link import CacheSession, logger

ABSENCE_PATIENCE_S = 5.0
"""How long blocks stay published without a server. A restart of the server is shorter, and keeps
its blocks."""
READ_S = 0.05
"""Seconds between two reads of the server's events. A read costs the server more than an event."""

Place = tuple[int, str, str]
"""Where a block is published to be: the index of its group, the medium, the name of the tier."""


class SharedEvents:
    """Tracks which blocks of the shared cache this engine has published."""

    def __init__(self) -> None:
        self._session: CacheSession | None = None
        self._groups: Sequence[CacheGroup] = ()
        self._asked: Future[EventsRead] | None = None
        self._told: dict[Place, set[bytes]] = {}
        # Blocks that were told before the state which is being read, and are not in it so far.
        self._unseen: dict[Place, set[bytes]] = {}
        self._next_s = 0.0
        self._absent_since_s: float | None = None
        self._has_warned = False

    def __repr__(self) -> str:
        return f"SharedEvents({sum(map(len, self._told.values()))} blocks)"

    def take(
        self, session: CacheSession | None, groups: Sequence[CacheGroup], now_s: float
    ) -> list[Any]:
        """Returns vLLM's events since the last call.

        session: the session of the present key space; None while hotkv is off.
        groups: the groups of that key space.
        """
        taken: list[Any] = []
        if session is not self._session:
            taken += self._take_back(self._told)
            self._session, self._groups, self._asked = session, groups, None
        if session is None:
            return taken
        if not session.connected:
            # The server's next session begins with the present state.
            self._asked = None
            self._absent_since_s = self._absent_since_s or now_s
            if now_s >= self._absent_since_s + ABSENCE_PATIENCE_S:
                taken += self._take_back(self._told)
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
        if self._asked is None and session.has_events and now_s >= self._next_s:
            self._asked, self._next_s = session.read_events(), now_s + READ_S
        return taken

    def _read(self, read: EventsRead) -> Iterator[Any]:
        if read.has_more_state:
            self._next_s = 0.0
        if read.begins_state:
            self._unseen = {place: set(hashes) for place, hashes in self._told.items()}
        for event in read.events:
            if isinstance(event, BlocksStored):
                yield from self._stored(event)
            elif isinstance(event, BlocksRemoved):
                place = event.group_index, event.medium, event.tier
                yield from self._take_back({place: set(event.hashes)})
            else:
                yield from self._take_back(self._told)
        if self._unseen and not read.has_more_state:
            unseen, self._unseen = self._unseen, {}
            yield from self._take_back(unseen)

    def _stored(self, event: BlocksStored) -> Iterator[Any]:
        place = event.group_index, event.medium, event.tier
        told = self._told.setdefault(place, set())
        self._unseen.get(place, set()).difference_update(event.hashes)
        new = [block_hash not in told for block_hash in event.hashes]
        told.update(event.hashes)
        for first, end in _runs(new):
            yield events.stored(self._groups[event.group_index], _part(event, first, end))

    def _take_back(self, blocks: dict[Place, set[bytes]]) -> Iterator[Any]:
        """Yields removal events for the blocks that were published as stored, and forgets them."""
        for place, hashes in list(blocks.items()):
            told = self._told.get(place, set())
            gone = [block_hash for block_hash in hashes if block_hash in told]
            told.difference_update(gone)
            if gone:
                group_index, medium, tier = place
                yield events.removed(
                    self._groups[group_index], BlocksRemoved(group_index, tuple(gone), medium, tier)
                )


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Returns the unbroken sequences of True: for each, its first position and the position behind
    its last."""
    edges = [
        at
        for at, (one, before) in enumerate(zip([*mask, False], [False, *mask], strict=True))
        if one != before
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
