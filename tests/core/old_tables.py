"""An old table with blocks of two groups, and damage to its records."""

import hypothesis.strategies as st
import numpy as np

from hotkv_proto import table
from hotkv_proto.keys import Representation
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig, Run
from tests.core.support import (
    begin_store,
    make_key_space,
    make_table,
    reserve,
    words_of,
)

SLAB, NUM_SLABS, CAPACITY = 4 * SLOT_ALIGN, 12, 40
KEY_SPACE = make_key_space("one", SLOT_ALIGN, 2 * SLOT_ALIGN)
KIND = Representation(0, "rot2u", 7, (SLOT_ALIGN,))
CONFIG = CoreConfig(NUM_SLABS * SLAB, SLAB, CAPACITY, check_stride=64)


def filled() -> CacheCore:
    """Blocks of two groups, some with representations, some being written."""
    core = CacheCore(CONFIG, make_table(CAPACITY), POLICIES["lru"](CAPACITY))
    session = core.open_session("e", "rank", KEY_SPACE, 0.0, (KIND,))
    runs = [
        Run(0, words_of(range(8))),
        Run(1, words_of(range(6))),
        Run(session.representations[0], words_of(range(4))),
    ]
    begin_store(core, session.number, "t", "l", runs, 0, 0.0, 1.0)
    core.end_store(
        session.number,
        "t",
        True,
        1.0,
        [np.arange(len(run.hashes), dtype=np.uint64) for run in runs],
    )
    reserve(core, session.number, "m", [Run(0, words_of([20, 21]))], 0.0, 2.0)
    return core


def empty() -> CacheCore:
    core = CacheCore(CONFIG, make_table(CAPACITY), POLICIES["lru"](CAPACITY))
    core.catalog.register(KEY_SPACE, (KIND,), 0.0)
    return core


def damage(records: Words, data: st.DataObject) -> Words:
    """Changes some words of some records: values that occur elsewhere in the table, or any."""
    for _ in range(data.draw(st.integers(1, 12))):
        row, word = (
            data.draw(st.integers(0, len(records) - 1)),
            data.draw(st.integers(0, table.RECORD_WORDS - 1)),
        )
        other = int(records[data.draw(st.integers(0, len(records) - 1)), word])
        value = data.draw(
            st.one_of(
                st.just(other),
                st.integers(0, 40),
                st.integers(0, 2**32 - 1),
                st.just(other ^ (1 << 16)),
            )
        )
        records[row, word] = value
    return records
