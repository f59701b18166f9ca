"""A new server over what an old one left: its key spaces, then its blocks, then a look at their bytes."""

import logging
import time

import numpy as np

from hotkv.errors import HotKVError
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.restore import Restored, restore
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.memory.state import KnownKeySpace, ServerState
from hotkv_server.runtime.verify import Verifier

log = logging.getLogger(__name__)


def take_over(core: CacheCore, memory: NodeMemory, verifier: Verifier, check_s: float | None) -> None:
    """Fills an empty core with what `memory` found, if anything. Raises OSError where the files can't be written.

    Compares bytes for `check_s` at most; None: nothing is ever compared, and so everything is trusted.
    """
    if memory.why_empty:
        log.warning("starting empty reason=%r", memory.why_empty)
    left = memory.leftover
    if left is not None:
        began_s = time.monotonic()
        numbers: dict[int, int] = {}
        for known in left.state.key_spaces:
            try:
                numbers[known.number] = core.catalog.register(known.key_space, known.representations)[0]
            except HotKVError as error:
                log.warning("key space dropped number=%d model=%s reason=%r", known.number, known.key_space.model, error.message)
        restored = restore(core, left.table.records, numbers, left.last_used_s, began_s)
        memory.save_state(state_of(core, memory.slab_bytes))
        memory.adopt()
        num_later = 0
        if check_s is not None:
            num_later = verifier.verify_for(check_s)
        else:
            core.space.index.unverified[:] = False
        core.take_effects()
        _log(restored, verifier, num_later, time.monotonic() - began_s)
    else:
        memory.save_state(state_of(core, memory.slab_bytes))


def _log(restored: Restored, verifier: Verifier, num_later: int, took_s: float) -> None:
    log.info(
        "restored blocks=%d representations=%d verified=%d condemned=%d unverified=%d dropped=%s took_s=%.2f",
        restored.blocks, restored.representations, verifier.verified_blocks, verifier.condemned_blocks, num_later,
        ",".join(f"{reason.replace(' ', '_')}:{count}" for reason, count in restored.dropped.items()) or "0", took_s,
    )  # fmt: skip


def state_of(core: CacheCore, slab_bytes: int) -> ServerState:
    """What must outlive the server for its blocks to be understood."""
    known = (KnownKeySpace(number, record.key_space, record.representations) for number, record in sorted(core.key_spaces.items()))
    return ServerState(slab_bytes, tuple(known))


def last_used(core: CacheCore) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When each entry was last used, by entry number; nan for those that are not ready blocks. Linear in capacity."""
    index = core.space.index
    entries = index.ready_blocks()
    used_s = np.full(len(index.states()), np.nan)
    used_s[entries] = core.space.policy.last_used_s(entries)
    return used_s
