"""Recovery: takes over what an earlier server has left. Key spaces first, then blocks, then a first
comparison of their bytes."""

import logging
import time

import numpy as np

from hotkv_proto import table
from hotkv_proto.errors import HotKVError
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.restore import Restored, restore
from hotkv_server.cache.room.slabs import SlabPool
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.persistence import state_of

log = logging.getLogger(__name__)


def take_over(
    core: CacheCore, memory: NodeMemory, verifier: Verifier, check_s: float | None
) -> None:
    """Fills an empty core with what `memory` found, if anything. Blocks. Raises OSError if the
    files can't be written.

    Compares bytes for `check_s` at most; None: nothing is ever compared, and all blocks count as
    verified.
    """
    core.space.grow(memory.filling.filled_bytes, memory.filling.coming_bytes)
    core.space.index.back(memory.records.num_entries)
    if memory.why_empty:
        log.warning("starting empty reason=%r", memory.why_empty)
    left = memory.leftover
    if left is not None:
        began_s = time.monotonic()
        numbers: dict[int, int] = {}
        for known in left.state.key_spaces:
            try:
                numbers[known.number] = core.catalog.register(
                    known.key_space, known.representations, began_s
                )[0]
            except HotKVError as error:
                log.warning(
                    "key space dropped number=%d model=%r reason=%r",
                    known.number,
                    known.key_space.model,
                    error.message,
                )
        states = left.table.records[:, table.W_GROUP_STATE] >> np.uint32(16)
        num_back = int(np.isin(states, (table.STATE_READY, table.STATE_DETACHED)).sum())
        memory.records.back(num_back)
        core.space.index.back(memory.records.num_entries)
        restored = restore(core, left.table.records, numbers, left.last_used_s, began_s, left.marks)
        _prefault_claimed(core.space.pool, memory)
        is_renumbered = any(old_number != number for old_number, number in numbers.items())
        memory.adopt(state_of(core, memory.slab_bytes), is_renumbered=is_renumbered)
        num_later = 0
        if check_s is not None:
            num_later = verifier.verify_for(check_s)
        else:
            core.space.index.unverified[:] = False
        core.take_effects()
        _log(restored, verifier, num_later, time.monotonic() - began_s)
    else:
        memory.save_state(state_of(core, memory.slab_bytes))


def _prefault_claimed(pool: SlabPool, memory: NodeMemory) -> None:
    """Prefaults slabs beyond the filled part in which blocks came back: stores may use the rest of
    them at once. Raises OSError.

    There are none unless the old server ran with `arena.prefault` off.
    """
    first = memory.filling.filled_bytes // pool.slab_bytes
    slabs = first + np.flatnonzero(pool.slab_owner()[first:] >= 0)
    for run in np.split(slabs, np.flatnonzero(np.diff(slabs) > 1) + 1) if len(slabs) else ():
        memory.filling.bring_in(int(run[0]) * pool.slab_bytes, len(run) * pool.slab_bytes)


def _log(restored: Restored, verifier: Verifier, num_later: int, took_s: float) -> None:
    if restored.lost_readers:
        log.warning("blocks of residencies could not be kept: their engines have been told")
    dropped = (f"{why.replace(' ', '_')}:{count}" for why, count in restored.dropped.items())
    log.info(
        "restored blocks=%d representations=%d verified=%d condemned=%d unverified=%d kept=%d "
        "dropped=%s took_s=%.2f",
        restored.blocks,
        restored.representations,
        verifier.verified_blocks,
        verifier.condemned_blocks,
        num_later,
        restored.kept,
        ",".join(dropped) or "0",
        took_s,
    )
