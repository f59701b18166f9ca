"""Flush of a key space: no earlier block is found again, blocks under leases stay as they are, and
all memory comes back.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.blocks import BlockResult, Retention
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.room.policies.protocol import Keys
from hotkv_server.cache.values import CoreConfig, Entries, HashList, LoadPositions, Run
from tests.core.support import (
    begin_store,
    evict,
    flush,
    make_key_space,
    make_table,
    reserve,
    words_of,
)

NUM_SLOTS = 24
NUMBERS = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=8, unique=True)
NO_RETENTION = Retention()
KEPT = Retention(pin=True, ttl_s=50.0)


def filled(count: int, num_shards: int = 1) -> tuple[CacheCore, int]:
    """Returns a core of 24 slots with blocks 0 to `count`, stored by a session whose number is
    returned."""
    config = CoreConfig(
        NUM_SLOTS * SLOT_ALIGN, 4 * SLOT_ALIGN, 100, unadmitted_share=1.0, held_share=1.0
    )
    core = CacheCore(config, make_table(100), LRU(100))
    session = core.open_session(
        "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN, num_shards), 0.0
    ).number
    if count:
        store(core, session, list(range(count)))
    return core, session


def store(
    core: CacheCore, session: int, numbers: list[int], retention: Retention = NO_RETENTION
) -> list[int]:
    name = f"store {numbers[0]}"
    begin_store(core, session, name, name, [Run(0, words_of(numbers))], 0, 0.0, 1.0, retention)
    results: list[int] = core.end_store(session, name, True, 1.0)[0].tolist()
    return results


def found(core: CacheCore, numbers: list[int], key_space_id: int = 1) -> list[int]:
    mask = core.lookup(key_space_id, [HashList(0, words_of(numbers))])[0]
    return [number for number, ready in zip(numbers, mask.tolist(), strict=True) if ready]


@given(
    count=st.integers(1, NUM_SLOTS),
    leases=st.lists(NUMBERS, max_size=4),
    held=NUMBERS | st.just([]),
    writing=st.booleans(),
    data=st.data(),
)
def test_what_is_pinned_stays_as_it_is_until_its_last_lease_ends(
    count: int, leases: list[list[int]], held: list[int], writing: bool, data: st.DataObject
) -> None:
    core, session = filled(count)
    everything = list(range(count))
    core.touch(session, [HashList(0, words_of(held))], 1.0, KEPT)
    slots: dict[str, set[int]] = {}
    for name, numbers in enumerate(leases):
        grant = core.acquire(session, f"lease {name}", [HashList(0, words_of(numbers))], 0.0, 1.0)
        positions = np.flatnonzero(grant.pinned[0])
        offsets = core.begin_load(
            session, f"load {name}", f"lease {name}", [LoadPositions(0, positions)]
        )[0].offsets
        slots[f"lease {name}"] = set(offsets.tolist())
        core.end_load(session, f"load {name}", True)
    if writing:
        begin_store(
            core, session, "writing", "writing", [Run(0, words_of([50, 51, 52]))], 0, 0.0, 1.0
        )
    # Making room for what is being written may have evicted some.
    gone = {row.tobytes() for notice in core.take_effects() for row in notice.hashes}
    left = [number for number in everything if words_of([number])[0].tobytes() not in gone]

    assert flush(core, 1) == len(left)
    core.check_invariants()
    assert not found(core, everything)
    noticed = {row.tobytes() for notice in core.take_effects() for row in notice.hashes}
    assert noticed == {words_of([number])[0].tobytes() for number in left}
    assert core.retention_pins.held_bytes == 0

    fresh = 100
    for name in data.draw(st.permutations(sorted(slots))):
        # Blocks of before may be stored anew, beside their old slots.
        numbers = [*everything[:2], *range(fresh, fresh + NUM_SLOTS)]
        fresh += NUM_SLOTS
        run = begin_store(
            core, session, "s", f"w {fresh}", [Run(0, words_of(numbers))], 0, 0.0, 2.0
        )[0]
        assert not set(run.offsets.tolist()) & set().union(*slots.values()), (
            "a slot under a lease was given away"
        )
        core.end_store(session, "s", True, 2.0)
        core.check_invariants()
        again = core.begin_load(session, "l", name, [LoadPositions(0, np.arange(0))])
        assert len(again[0].offsets) == 0
        core.end_load(session, "l", True)
        core.release(session, name)
        del slots[name]
        core.check_invariants()
    if writing:
        results = core.end_store(session, "writing", True, 3.0)[0]
        assert set(results.tolist()) <= {BlockResult.ABORTED, BlockResult.NO_SPACE}
        assert not found(core, [50, 51, 52])
    core.check_invariants()
    results = store(core, session, list(range(1000, 1000 + NUM_SLOTS)))
    assert results == [BlockResult.STORED] * NUM_SLOTS, "memory did not come back"


def test_what_is_reserved_never_becomes_ready() -> None:
    core, session = filled(2)
    reserve(core, session, "later", [Run(0, words_of([5, 6]))], 0.0, 1.0)
    assert flush(core, 1) == 2
    # Nobody writes them, so others may store them at once.
    assert store(core, session, [5]) == [BlockResult.STORED]
    begin_store(core, session, "t", "later", [Run(0, words_of([5, 6]))], 0, 0.0, 2.0)
    assert core.end_store(session, "t", True, 2.0)[0].tolist() == [
        BlockResult.PRESENT,
        BlockResult.NO_SPACE,
    ]
    core.check_invariants()


def test_a_block_that_half_the_ranks_have_written_never_becomes_ready() -> None:
    core, session = filled(0, num_shards=2)
    run = Run(0, words_of([1]))
    begin_store(core, session, "rank 0", "lease", [run], 0, 0.0, 1.0)
    assert core.end_store(session, "rank 0", True, 1.0)[0].tolist() == [BlockResult.WRITTEN]
    begin_store(core, session, "rank 1", "lease", [run], 1, 0.0, 1.0)
    assert flush(core, 1) == 0
    assert core.end_store(session, "rank 1", True, 1.0)[0].tolist() == [BlockResult.ABORTED]
    assert not found(core, [1])
    assert len(core.leases) == 0
    core.check_invariants()


def test_other_key_spaces_keep_theirs() -> None:
    core, session = filled(3)
    other = core.open_session(
        "other", "rank", make_key_space("two", SLOT_ALIGN, SLOT_ALIGN), 0.0
    ).number
    store(core, other, [0, 1], KEPT)
    begin_store(core, other, "t", "t", [Run(0, words_of([7]))], 0, 0.0, 1.0)
    assert flush(core, 1) == 3
    assert core.end_store(other, "t", True, 1.0)[0].tolist() == [BlockResult.STORED]
    assert found(core, [0, 1, 7], 2) == [0, 1, 7]
    assert core.retention_pins.held_bytes == 2 * SLOT_ALIGN
    with pytest.raises(HotKVError) as caught:
        flush(core, 3)
    assert caught.value.reason is Reason.UNKNOWN_KEY_SPACE
    assert store(core, session, [0]) == [BlockResult.STORED]


def test_only_blocks_that_made_room_count_as_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy remembers what it should not have evicted; a flush tells nothing about that."""
    core, session = filled(8)
    told: list[tuple[int, bool]] = []
    forget = core.space.policy.forget

    def note(entries: Entries, keys: Keys, *, evicted: bool) -> None:
        told.append((len(entries), evicted))
        forget(entries, keys, evicted=evicted)

    monkeypatch.setattr(core.space.policy, "forget", note)
    assert evict(core, 1, 0, words_of([0, 1, 2])) == (3, 0)
    assert told == [(3, True)]
    told.clear()
    assert flush(core, 1) == 5
    assert told == [(5, False)]
    told.clear()
    reserve(core, session, "a", [Run(0, words_of([9]))], 10.0, 1.0)
    core.release(session, "a")
    assert told == [(1, False)]
