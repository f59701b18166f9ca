"""Numpy references of `hotkv_server.cache.table.kernels`: same arguments, same results."""

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import (
    ENTRIES,
    MAX_PROBE_BUCKETS,
    OVERFLOW,
    RESERVED_FLAG,
    SEQ,
    SLOT_ALIGN,
    STATE_READY,
    STATE_RESERVED,
    TAGS,
    W_CHECK,
    W_DEPTH,
    W_GENERATION,
    W_GROUP_STATE,
    W_KEY_SPACE,
    W_OFFSET,
    W_PARENT,
    W_REPRESENTATION,
    W_SIZE,
    WAYS,
    Words,
    home_buckets,
    mix,
    mix_prefixes,
)
from hotkv_server.cache.values import KEY_SPACE_ROWS

Mixed = NDArray[np.uint64]


def _write(buckets: Words, bucket: int, column: int, value: int) -> None:
    """Makes one locked change of one bucket word."""
    buckets[bucket, SEQ] += 1
    buckets[bucket, column] = value
    buckets[bucket, SEQ] += 1


def mixed_keys(records: Words, salts: Mixed, entries: Words, out: Mixed) -> None:
    """Computes what `kernels.mixed_keys` does, the plain way."""
    rows = records[entries]
    prefixes = rows[:, 0].astype(np.uint64) | (rows[:, 1].astype(np.uint64) << np.uint64(32))
    out[:] = mix_prefixes(
        prefixes ^ salts[rows[:, W_GROUP_STATE] & 0xFFFF, rows[:, W_KEY_SPACE] % KEY_SPACE_ROWS], 0
    )


def evictable(
    records: Words, pins: Words, entries: Words, size: int, out: NDArray[np.bool_]
) -> None:
    """Computes what `kernels.evictable` does, the plain way."""
    out[:] = (records[entries, W_GROUP_STATE] >> 16 == STATE_READY) & (pins[entries] == 0)
    if size:
        out &= records[entries, W_SIZE] == size


def add_pins(pins: Words, entries: Words, change: int) -> bool:
    """Computes what `kernels.add_pins` does, the plain way."""
    good = change > 0 or bool(np.all(pins[entries] > 0))
    if change > 0:
        np.add.at(pins, entries, np.uint32(change))
    else:
        np.subtract.at(pins, entries, np.uint32(-change))
    return good


def count_slots(
    used: NDArray[np.int64],
    owner: NDArray[np.int64],
    offsets: NDArray[np.int64],
    slab_bytes: int,
    slot_bytes: int,
    change: int,
    emptied: NDArray[np.int64],
) -> int:
    """Computes what `kernels.count_slots` does, the plain way."""
    slabs = offsets // slab_bytes
    if np.any(owner[slabs] != slot_bytes):
        return -1
    np.add.at(used, slabs, change)
    # Slabs in the order in which their counts came to 0: that of their last slot.
    last = len(slabs) - 1 - np.unique(slabs[::-1], return_index=True)[1]
    empty = slabs[np.sort(last)]
    empty = empty[used[empty] == 0]
    emptied[: len(empty)] = empty
    return -2 if np.any(used[slabs] < 0) else len(empty)


def lie_in(
    offsets: NDArray[np.int64], slab_bytes: int, slabs: NDArray[np.bool_], out: NDArray[np.bool_]
) -> None:
    """Computes what `kernels.lie_in` does, the plain way."""
    out[:] = slabs[offsets // slab_bytes]


def insert(
    buckets: Words,
    records: Words,
    hashes: Words,
    offsets: NDArray[np.int64],
    depths: NDArray[np.int64],
    salt: int,
    lease: int,
    key_space: int,
    group: int,
    size: int,
    free_head: int,
    next_unused: int,
    entries: Words,
) -> tuple[int, int, int]:
    """Computes what `kernels.insert` does, the plain way."""
    mixed = mix(hashes, int(salt))
    homes = home_buckets(mixed, len(buckets))
    for i in range(len(entries)):
        path = (homes[i] + np.arange(min(MAX_PROBE_BUCKETS, len(buckets)))) % len(buckets)
        open_ways = np.argwhere(buckets[path, ENTRIES : ENTRIES + WAYS] == 0)
        if not len(open_ways):
            return i, free_head, next_unused
        distance, way = open_ways[0]
        entry = free_head or next_unused
        if free_head:
            free_head = int(records[entry, W_OFFSET])
        else:
            next_unused += 1
        for passed in path[:distance]:
            _write(buckets, passed, OVERFLOW, buckets[passed, OVERFLOW] + 1)
        bucket = path[distance]
        buckets[bucket, SEQ] += 1
        record = records[entry]
        record[:8] = hashes[i]
        record[W_CHECK : W_CHECK + 2] = lease, 0
        record[W_KEY_SPACE], record[W_GROUP_STATE] = key_space, group | STATE_RESERVED << 16
        record[W_OFFSET], record[W_SIZE] = offsets[i] // SLOT_ALIGN, size
        record[W_GENERATION] += 1
        record[W_PARENT], record[W_DEPTH], record[W_REPRESENTATION] = 0, depths[i], 0
        buckets[bucket, TAGS + way] = mixed[i] & np.uint64(0xFFFF_FFFF)
        buckets[bucket, ENTRIES + way] = entry | RESERVED_FLAG
        buckets[bucket, SEQ] += 1
        entries[i] = entry
    return len(entries), free_head, next_unused


def _locate(buckets: Words, home: int, entry: int) -> tuple[int, int, NDArray[np.int64]]:
    """Returns bucket and way of a linked entry, and the buckets passed on the way; bucket -1 if it
    is not linked."""
    path = (home + np.arange(min(MAX_PROBE_BUCKETS, len(buckets)))) % len(buckets)
    hits = np.argwhere((buckets[path, ENTRIES : ENTRIES + WAYS] & ~RESERVED_FLAG) == entry)
    if not len(hits):
        return -1, -1, path[:0]
    distance, way = hits[0]
    return int(path[distance]), int(way), path[:distance]


def link(records: Words, entries: Words, first: int) -> None:
    """Computes what `kernels.link` does, the plain way."""
    before = np.concatenate((np.array([first], np.uint32), entries[:-1]))
    records[entries[entries != 0], W_PARENT] = before[: len(entries)][entries != 0]


def mark_written(records: Words, entries: Words, mark: int, masks: Words) -> None:
    """Computes what `kernels.mark_written` does, the plain way."""
    records[entries, W_CHECK + 1] |= np.uint32(mark)
    masks[:] = records[entries, W_CHECK + 1]


def publish(buckets: Words, records: Words, mixed: Mixed, entries: Words, checks: Mixed) -> int:
    """Computes what `kernels.publish` does, the plain way."""
    homes = home_buckets(mixed, len(buckets))
    done = 0
    for i, entry in enumerate(entries):
        bucket, way, _ = _locate(buckets, int(homes[i]), int(entry))
        if bucket < 0:
            continue
        buckets[bucket, SEQ] += 1
        records[entry, W_CHECK] = checks[i] & np.uint64(0xFFFF_FFFF)
        records[entry, W_CHECK + 1] = checks[i] >> np.uint64(32)
        records[entry, W_GROUP_STATE] = (records[entry, W_GROUP_STATE] & 0xFFFF) | STATE_READY << 16
        buckets[bucket, ENTRIES + way] = entry
        buckets[bucket, SEQ] += 1
        done += 1
    return done


def unlink(
    buckets: Words, records: Words, mixed: Mixed, entries: Words, rows: Words, state: int
) -> int:
    """Computes what `kernels.unlink` does, the plain way."""
    homes = home_buckets(mixed, len(buckets))
    done = 0
    for i, entry in enumerate(entries):
        rows[i] = records[entry]
        bucket, way, passed_buckets = _locate(buckets, int(homes[i]), int(entry))
        if bucket < 0:
            continue
        buckets[bucket, SEQ] += 1
        buckets[bucket, ENTRIES + way] = 0
        buckets[bucket, TAGS + way] = 0
        group = records[entry, W_GROUP_STATE] & 0xFFFF
        records[entry, W_GROUP_STATE] = group | state << 16 if state else 0
        buckets[bucket, SEQ] += 1
        for passed in passed_buckets:
            _write(buckets, passed, OVERFLOW, buckets[passed, OVERFLOW] - 1)
        done += 1
    return done


def is_uniform(rows: Words) -> bool:
    """Computes what `kernels.is_uniform` does, the plain way."""
    owners = rows[:, [W_KEY_SPACE, W_GROUP_STATE, W_SIZE]] & np.array(
        [0xFFFF_FFFF, 0xFFFF, 0xFFFF_FFFF], np.uint32
    )
    return bool(np.all(owners == owners[:1]))


def release(records: Words, entries: Words, free_head: int) -> int:
    """Computes what `kernels.release` does, the plain way."""
    if not len(entries):
        return free_head
    records[entries, W_OFFSET] = np.concatenate(([free_head], entries[:-1]))
    return int(entries[-1])
