# mypy: disable-error-code="untyped-decorator"
"""Numba kernels that write the block table, and those of `BlockIndex` and `SlabPool`. Import them
through `hotkv_proto.native.require`. `tests/core/test_index.py` compares them with a model.

Always true: the server is the table's only writer. The layout is that of `hotkv_proto.table`. A
free entry's record has the next free number in place of the slot's offset. `mixed` are keys from
`BlockIndex.mixed`. Runs of slabs are as in `cache.room.slabs`.
"""

from typing import Any

import numba
import numpy as np
from numba.types import UniTuple, int64, uint32, uint64

from hotkv_proto.table_reading import (
    ENTRIES,
    MAX_PROBE_BUCKETS,
    OVERFLOW,
    READ_WORDS,
    RESERVED_FLAG,
    SEQ,
    TAGS,
    WAYS,
    home_bucket,
    mix,
    prefetch,
    row_prefix,
    store32,
)
from hotkv_server.cache.values import KEY_SPACE_ROWS

CHECK, KEY_SPACE, GROUP_STATE, OFFSET, SIZE, REUSES, PARENT, DEPTH, SKETCH = (
    8,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    17,
)
SLOT_ALIGN = 4096
RESERVED, READY = 1, 2
LOW_HALF = np.uint64(0xFFFF_FFFF)
KEY_SPACE_MASK = np.uint32(KEY_SPACE_ROWS - 1)
AHEAD = 8


@numba.njit(
    "void(uint32[:, ::1], uint64[:, ::1], uint32[::1], uint64[::1])", nogil=True, cache=True
)
def mixed_keys(records: Any, salts: Any, entries: Any, out: Any) -> None:
    for i in range(entries.shape[0]):
        if i + AHEAD < entries.shape[0]:
            prefetch(records, np.int64(entries[i + AHEAD]))
        entry = entries[i]
        out[i] = mix(
            row_prefix(records, entry),
            salts[
                records[entry, GROUP_STATE] & np.uint32(0xFFFF),
                records[entry, KEY_SPACE] & KEY_SPACE_MASK,
            ],
        )


@numba.njit(
    "void(uint32[:, ::1], uint32[::1], uint32[::1], uint32, boolean[::1])", nogil=True, cache=True
)
def evictable(records: Any, pins: Any, entries: Any, size: Any, out: Any) -> None:
    """Ready, unpinned, and of this slot size in units of SLOT_ALIGN; 0 for any."""
    for i in range(entries.shape[0]):
        entry = entries[i]
        is_ready = records[entry, GROUP_STATE] >> np.uint32(16) == READY
        out[i] = is_ready and pins[entry] == 0 and (size == 0 or records[entry, SIZE] == size)


@numba.njit("boolean(uint32[::1], uint32[::1], int64)", nogil=True, cache=True)
def add_pins(pins: Any, entries: Any, change: Any) -> bool:
    """False if a number would fall below 0."""
    good = True
    for i in range(entries.shape[0]):
        good &= change > 0 or pins[entries[i]] > 0
        pins[entries[i]] += np.uint32(change)
    return good


NOT_LISTED, NOT_PINNED, REPEATED = 1, 2, 3
MARK = np.uint32(1 << 31)
"""Of pins, while a load's entries are collected."""


@numba.njit(
    "int64(uint32[:, ::1], uint32[::1], uint32[::1], int64[::1], uint32[::1], int64[::1])",
    nogil=True,
    cache=True,
)
def choose(records: Any, pins: Any, listed: Any, positions: Any, entries: Any, offsets: Any) -> int:
    """Writes the entries at `positions` of `listed`, and the offsets of their slots in bytes, and
    marks them in `pins` until `unmark`. Returns 0, or why it stopped: NOT_LISTED, NOT_PINNED (entry
    0) or REPEATED (marked before)."""
    for i in range(positions.shape[0]):
        if positions[i] < 0 or positions[i] >= listed.shape[0]:
            return NOT_LISTED
        entry = listed[positions[i]]
        if entry == 0:
            return NOT_PINNED
        if pins[entry] & MARK:
            return REPEATED
        pins[entry] |= MARK
        entries[i], offsets[i] = entry, np.int64(records[entry, OFFSET]) * SLOT_ALIGN
    return 0


@numba.njit("void(uint32[::1], uint32[::1])", nogil=True, cache=True)
def unmark(pins: Any, entries: Any) -> None:
    for i in range(entries.shape[0]):
        pins[entries[i]] &= ~MARK


@numba.njit(
    "int64(int64[::1], int64[::1], int64[::1], int64[:], int64, int64, int64, int64[::1])",
    nogil=True,
    cache=True,
)
def count_slots(
    used: Any, owner: Any, head: Any, offsets: Any, slab_bytes: Any, slot_bytes: Any, change: Any,
    emptied: Any,
) -> int:  # fmt: skip
    """Adds `change` to the used slots of each slot's run. Returns the number of runs that reached
    0, and writes their first slabs into `emptied`. -1, with nothing changed, if a slab has slots of
    another size; -2 if a count fell below 0.

    used: of each run, by its first slab.
    owner: slot size of each slab.
    head: first slab of each slab's run.
    """
    for i in range(offsets.shape[0]):
        if owner[offsets[i] // slab_bytes] != slot_bytes:
            return -1
    num_emptied, below = 0, False
    for i in range(offsets.shape[0]):
        slab = head[offsets[i] // slab_bytes]
        used[slab] += change
        if used[slab] == 0:
            emptied[num_emptied] = slab
            num_emptied += 1
        below |= used[slab] < 0
    return -2 if below else num_emptied


@numba.njit(
    "UniTuple(int64, 2)(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64,"
    " int64, int64[:, ::1])",
    nogil=True,
    cache=True,
)
def plan_runs(
    owner: Any, head: Any, length: Any, run_slabs: Any, longest: Any, slot_bytes: Any,
    slab_bytes: Any, usable: Any, want: Any, plan: Any,
) -> Any:  # fmt: skip
    """Chooses at most `usable` free slabs for `want` slots: whole runs from the start of each gap,
    then what is left at its end. That lengthens the run before it, if it has the same slot size,
    stays within `longest`, and gains as many slots as a new run; else it is a new run.

    Returns the numbers of pieces and of their slots. `plan`, unless empty, gets a row for each
    piece: first slab of its run, first slab of the piece, number of slabs.

    owner: slot size of each slab; -1 if free.
    head: first slab of each slab's run.
    length: slabs of each run, by its first slab.
    """
    num_pieces, num_slots, num_slabs = 0, 0, owner.shape[0]
    # First whole runs, then the rest. `reached`: no slab from here on was taken by the first
    # pass.
    reached = 0
    for is_rest in range(2):
        at = 0
        while at < num_slabs and usable > 0 and num_slots < want:
            if owner[at] != -1:
                at += 1
                continue
            end = at
            while end < num_slabs and owner[end] == -1:
                end += 1
            first, slabs, slots, before, old = (
                at,
                run_slabs,
                run_slabs * slab_bytes // slot_bytes,
                0,
                0,
            )
            if is_rest:
                first = at + (min(end, max(at, reached)) - at) // run_slabs * run_slabs
                slabs = min(end - first, usable)
                slots = slabs * slab_bytes // slot_bytes
                if first > at:
                    before = run_slabs
                elif at > 0 and owner[at - 1] == slot_bytes:
                    before = length[head[at - 1]]
                longer = min(slabs, longest - before)
                old = before * slab_bytes // slot_bytes
                gain = (before + longer) * slab_bytes // slot_bytes - old
                if before > 0 and longer > 0 and gain >= slots:
                    slots = gain
                else:
                    before = old = 0
                # Without unused slabs at the end.
                slabs = (slots + old) * slot_bytes
                slabs = (slabs + slab_bytes - 1) // slab_bytes - before
            while slots > 0 and slabs <= min(end - first, usable) and num_slots < want:
                if plan.shape[0]:
                    plan[num_pieces, 0] = first - before
                    plan[num_pieces, 1] = first
                    plan[num_pieces, 2] = slabs
                num_pieces += 1
                num_slots += slots
                usable -= slabs
                first += slabs
                if is_rest:
                    break
                reached = first
            at = end
    return num_pieces, num_slots


@numba.njit("void(int64[:], int64, boolean[::1], boolean[::1])", nogil=True, cache=True)
def lie_in(offsets: Any, slab_bytes: Any, slabs: Any, out: Any) -> None:
    """Mask of the offsets that lie in chosen slabs."""
    shift = 0
    while slab_bytes >> shift > 1:
        shift += 1
    is_power = slab_bytes == 1 << shift
    for i in range(offsets.shape[0]):
        # A shift is ten times faster than a division.
        out[i] = slabs[offsets[i] >> shift if is_power else offsets[i] // slab_bytes]


@numba.njit(nogil=True, cache=True)
def _open_way(buckets: Any, home: Any) -> Any:
    """First free way from bucket `home` on: bucket, way, distance in buckets. Way -1 if none of
    MAX_PROBE_BUCKETS has one."""
    num_buckets = buckets.shape[0]
    bucket = home
    for distance in range(MAX_PROBE_BUCKETS):
        for way in range(WAYS):
            if buckets[bucket, ENTRIES + way] == 0:
                return bucket, way, distance
        bucket = bucket + 1 if bucket + 1 < num_buckets else 0
    return bucket, -1, MAX_PROBE_BUCKETS


@numba.njit(nogil=True, cache=True)
def _count_overflow(buckets: Any, home: Any, distance: Any, change: Any) -> None:
    for d in range(distance):
        passed = (home + d) % buckets.shape[0]
        seq = buckets[passed, SEQ]
        store32(buckets, passed, SEQ, seq + np.uint32(1))
        buckets[passed, OVERFLOW] += np.uint32(change)
        store32(buckets, passed, SEQ, seq + np.uint32(2))


@numba.njit(
    UniTuple(int64, 3)(
        uint32[:, ::1],
        uint32[:, ::1],
        READ_WORDS,
        int64[:],
        int64[:],
        uint64,
        uint32,
        uint32,
        uint32,
        uint32,
        int64,
        int64,
        uint32[::1],
    ),
    nogil=True,
    cache=True,
)
def insert(
    buckets: Any,
    records: Any,
    hashes: Any,
    offsets: Any,
    depths: Any,
    salt: Any,
    lease: Any,
    key_space: Any,
    group: Any,
    size: Any,
    free_head: Any,
    next_unused: Any,
    entries: Any,
) -> Any:
    """Adds reserved entries for keys that are not in the table; stops at the first without a place.
    Returns how many, the new `free_head` and the new `next_unused`.

    salt: mixed into the hashes to make keys.
    lease: owner of the entries.
    size: in units of SLOT_ALIGN.
    free_head: of the list of free numbers; 0 if empty.
    next_unused: first number that was never used.
    """
    for i in range(entries.shape[0]):
        if i + AHEAD < entries.shape[0]:
            prefetch(
                buckets, home_bucket(mix(row_prefix(hashes, i + AHEAD), salt), buckets.shape[0])
            )
        mixed = mix(row_prefix(hashes, i), salt)
        home = home_bucket(mixed, buckets.shape[0])
        bucket, way, distance = _open_way(buckets, home)
        if way < 0:
            return i, free_head, next_unused
        if free_head != 0:
            entry = free_head
            free_head = np.int64(records[entry, OFFSET])
        else:
            entry = next_unused
            next_unused += 1
        _count_overflow(buckets, home, distance, 1)
        seq = buckets[bucket, SEQ]
        store32(buckets, bucket, SEQ, seq + np.uint32(1))
        for word in range(8):
            records[entry, word] = hashes[i, word]
        records[entry, CHECK] = lease
        records[entry, CHECK + 1] = np.uint32(0)
        records[entry, KEY_SPACE] = key_space
        records[entry, GROUP_STATE] = group | np.uint32(RESERVED << 16)
        records[entry, OFFSET] = np.uint32(offsets[i] // SLOT_ALIGN)
        records[entry, SIZE] = size
        records[entry, REUSES] += np.uint32(1)
        records[entry, PARENT] = np.uint32(0)
        records[entry, DEPTH] = np.uint32(depths[i])
        records[entry, SKETCH] = np.uint32(0)
        buckets[bucket, TAGS + way] = np.uint32(mixed & LOW_HALF)
        buckets[bucket, ENTRIES + way] = np.uint32(entry) | RESERVED_FLAG
        store32(buckets, bucket, SEQ, seq + np.uint32(2))
        entries[i] = np.uint32(entry)
    return entries.shape[0], free_head, next_unused


@numba.njit(nogil=True, cache=True, inline="always")
def _locate(buckets: Any, mixed: Any, entry: Any) -> Any:
    num_buckets = buckets.shape[0]
    bucket = home_bucket(mixed, num_buckets)
    for distance in range(MAX_PROBE_BUCKETS):
        for way in range(WAYS):
            if (buckets[bucket, ENTRIES + way] & ~RESERVED_FLAG) == entry:
                return bucket, way, distance
        bucket = bucket + 1 if bucket + 1 < num_buckets else 0
    return -1, -1, -1


@numba.njit("void(uint32[:, ::1], uint32[::1], uint32)", nogil=True, cache=True)
def link(records: Any, entries: Any, first: Any) -> None:
    """Writes each block's parent; 0 if that has no entry. `first`: the entry before the first."""
    before = first
    for i in range(entries.shape[0]):
        if entries[i] != 0:
            records[entries[i], PARENT] = before
        before = entries[i]


@numba.njit("void(uint32[:, ::1], uint32[::1], uint32, uint32[::1])", nogil=True, cache=True)
def mark_written(records: Any, entries: Any, mark: Any, masks: Any) -> None:
    """Adds `mark` to each entry's mask of written shards and returns the masks. A reserved entry
    has it in the upper half of its checksum."""
    for i in range(entries.shape[0]):
        records[entries[i], CHECK + 1] |= mark
        masks[i] = records[entries[i], CHECK + 1]


@numba.njit(
    "int64(uint32[:, ::1], uint32[:, ::1], uint64[::1], uint32[::1], uint64[::1])",
    nogil=True,
    cache=True,
)
def publish(buckets: Any, records: Any, mixed: Any, entries: Any, checks: Any) -> int:
    """Makes reserved entries ready. Skips entries that are not in the table; returns how many
    are ready."""
    done = 0
    for i in range(mixed.shape[0]):
        if i + AHEAD < mixed.shape[0]:
            prefetch(buckets, home_bucket(mixed[i + AHEAD], buckets.shape[0]))
        bucket, way, _ = _locate(buckets, mixed[i], entries[i])
        if bucket < 0:
            continue
        seq = buckets[bucket, SEQ]
        store32(buckets, bucket, SEQ, seq + np.uint32(1))
        records[entries[i], CHECK] = np.uint32(checks[i] & LOW_HALF)
        records[entries[i], CHECK + 1] = np.uint32(checks[i] >> np.uint64(32))
        # The state last: after a kill, the record of a ready entry is complete.
        store32(
            records,
            entries[i],
            GROUP_STATE,
            (records[entries[i], GROUP_STATE] & np.uint32(0xFFFF)) | np.uint32(READY << 16),
        )
        buckets[bucket, ENTRIES + way] = entries[i]
        store32(buckets, bucket, SEQ, seq + np.uint32(2))
        done += 1
    return done


@numba.njit(
    "int64(uint32[:, ::1], uint32[:, ::1], uint64[::1], uint32[::1], uint32[:, ::1], uint32)",
    nogil=True,
    cache=True,
)
def unlink(buckets: Any, records: Any, mixed: Any, entries: Any, rows: Any, state: Any) -> int:
    """Removes entries from the buckets, sets their state (0: free), and writes their former
    records into `rows`. Returns how many were found. The state is one write: a kill must not
    leave free what should be detached."""
    done = 0
    for i in range(mixed.shape[0]):
        if i + AHEAD < mixed.shape[0]:
            prefetch(buckets, home_bucket(mixed[i + AHEAD], buckets.shape[0]))
        entry = entries[i]
        for word in range(records.shape[1]):
            rows[i, word] = records[entry, word]
        bucket, way, distance = _locate(buckets, mixed[i], entry)
        if bucket < 0:
            continue
        seq = buckets[bucket, SEQ]
        store32(buckets, bucket, SEQ, seq + np.uint32(1))
        buckets[bucket, ENTRIES + way] = np.uint32(0)
        buckets[bucket, TAGS + way] = np.uint32(0)
        group = records[entry, GROUP_STATE] & np.uint32(0xFFFF)
        records[entry, GROUP_STATE] = group | state << np.uint32(16) if state else np.uint32(0)
        store32(buckets, bucket, SEQ, seq + np.uint32(2))
        _count_overflow(buckets, home_bucket(mixed[i], buckets.shape[0]), distance, -1)
        done += 1
    return done


@numba.njit("boolean(uint32[:, ::1])", nogil=True, cache=True)
def is_uniform(rows: Any) -> bool:
    """True if key space, group and slot size are the same in all records."""
    for i in range(1, rows.shape[0]):
        different = (rows[i, KEY_SPACE] ^ rows[0, KEY_SPACE]) | (rows[i, SIZE] ^ rows[0, SIZE])
        if different | ((rows[i, GROUP_STATE] ^ rows[0, GROUP_STATE]) & np.uint32(0xFFFF)):
            return False
    return True


@numba.njit("int64(uint32[:, ::1], uint32[::1], int64)", nogil=True, cache=True)
def release(records: Any, entries: Any, free_head: Any) -> int:
    """Puts entry numbers in front of the list of free numbers; returns its new head."""
    for i in range(entries.shape[0]):
        records[entries[i], OFFSET] = np.uint32(free_head)
        free_head = np.int64(entries[i])
    return free_head


@numba.njit("int64(uint32[:, ::1], uint32, uint32[::1])", nogil=True, cache=True)
def ancestors(records: Any, entry: Any, out: Any) -> int:
    """Writes the ready entries before a block, nearest first, until `out` is full or a link is
    not valid (`Chains`). Returns how many."""
    count = 0
    while count < out.shape[0]:
        parent = records[entry, PARENT]
        # The number may have been reused for another block.
        if (
            parent == 0
            or records[parent, GROUP_STATE] >> np.uint32(16) != READY
            or records[parent, KEY_SPACE] != records[entry, KEY_SPACE]
        ):
            break
        if records[parent, GROUP_STATE] & np.uint32(0xFFFF) != records[
            entry, GROUP_STATE
        ] & np.uint32(0xFFFF):
            break
        if records[parent, DEPTH] + np.uint32(1) != records[entry, DEPTH]:
            break
        out[count] = parent
        count += 1
        entry = parent
    return count
