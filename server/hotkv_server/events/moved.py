"""Events of blocks that tiers have moved: into host memory, below it, or into a shared tier.

Always true: what was removed before is told of before. An event has one block: its hash, group and
depth are known. Its token ids are not kept, and its link to the block before is a hint
(`cache.table.chains`), which is too little to tell others: the event has neither.
"""

from collections.abc import Callable, Iterator

import numpy as np

from hotkv_proto.blocks import RunContent
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries, Medium
from hotkv_server.events.drive import BlocksStored, EventHub

UNKNOWN = RunContent(np.empty(0, np.int32))


class MovedEvents:
    """See the module. `run_effects`: tells of what was removed."""

    def __init__(self, core: CacheCore, events: EventHub, run_effects: Callable[[], None]) -> None:
        self._core = core
        self._events = events
        self._run_effects = run_effects

    def __repr__(self) -> str:
        return f"MovedEvents({self._events!r})"

    def publish(self, entries: Entries, medium: Medium, tier: str) -> None:
        """As `OnReady`."""
        self._run_effects()
        if not self._events.is_heard:
            return
        index = self._core.space.index
        if medium is Medium.DISK:
            assert self._core.lower is not None, "blocks on a disk without a tier below"
            index = self._core.lower.space.index
        self._events.publish(list(moved_events(index, entries, medium, tier)))


def moved_events(
    index: BlockIndex, entries: Entries, medium: Medium, tier: str
) -> Iterator[BlocksStored]:
    """An event for each of these entries of the index, those before others in a chain first."""
    entries = entries[np.argsort(index.depths(entries), kind="stable")]
    key_spaces, groups, hashes = index.keys(entries)
    rows = zip(key_spaces.tolist(), groups.tolist(), index.depths(entries).tolist(), strict=True)
    for at, (key_space_id, group, depth) in enumerate(rows):
        block = hashes[at : at + 1]
        yield BlocksStored(key_space_id, group, block, None, depth, UNKNOWN, medium, tier)
