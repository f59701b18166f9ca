"""Block tables as a killed server leaves them, with damaged records."""

import hypothesis.strategies as st
import numpy as np

from bench.policies import POLICIES
from hotkv_proto import table
from hotkv_proto.keys import Sketch
from hotkv_proto.table import SLOT_ALIGN, Words
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import CoreConfig, Run
from tests.core.support import SLAB, begin_store, make_key_space, make_table, reserve, words_of

NUM_SLABS, CAPACITY = 12, 40
KEY_SPACE = make_key_space("one", SLOT_ALIGN, 2 * SLOT_ALIGN)
KIND = Sketch(0, "rot2u", 7, (SLOT_ALIGN,))
CONFIG = CoreConfig(NUM_SLABS * SLAB, SLAB, CAPACITY, check_stride=64)


def empty(config: CoreConfig = CONFIG) -> CacheCore:
    core = CacheCore(config, make_table(CAPACITY), POLICIES["lru"](CAPACITY))
    core.catalog.register(KEY_SPACE, (KIND,), 0.0)
    return core


def filled() -> CacheCore:
    """Blocks of two groups, some with sketches, some still being written."""
    core = empty()
    session = core.open_session("e", "rank", KEY_SPACE, 0.0, (KIND,))
    groups = ((0, 8), (1, 6), (session.sketches[0], 4))
    runs = [Run(group, words_of(range(count))) for group, count in groups]
    sums = [np.arange(count, dtype=np.uint64) for _, count in groups]
    begin_store(core, session.number, "t", "l", runs, 0, 0.0, 1.0)
    core.end_store(session.number, "t", True, 1.0, sums)
    reserve(core, session.number, "m", [Run(0, words_of([20, 21]))], 0.0, 2.0)
    return core


def damage(records: Words, data: st.DataObject) -> Words:
    """Overwrites words of records with values from elsewhere in the table, or any."""
    rows, words = st.integers(0, len(records) - 1), st.integers(0, table.RECORD_WORDS - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        word = data.draw(words)
        other = int(records[data.draw(rows), word])
        values = st.sampled_from([other, other ^ (1 << 16)])
        values |= st.integers(0, 40) | st.integers(0, 2**32 - 1)
        records[data.draw(rows), word] = data.draw(values)
    return records
