"""Numpy twins of the writing kernels of `hotkv.kernels`: same arguments, same results, one entry at a time."""

import numpy as np
from numpy.typing import NDArray

from hotkv.table import (
    ENTRIES,
    MAX_PROBE_BUCKETS,
    OVERFLOW,
    RESERVED_FLAG,
    SEQ,
    STATE_READY,
    TAGS,
    W_CHECK,
    W_GROUP_STATE,
    WAYS,
    Words,
    home_buckets,
)

Mixed = NDArray[np.uint64]


def _write(buckets: Words, bucket: int, column: int, value: int) -> None:
    """One locked change of one bucket word."""
    buckets[bucket, SEQ] += 1
    buckets[bucket, column] = value
    buckets[bucket, SEQ] += 1


def insert(buckets: Words, records: Words, mixed: Mixed, entries: Words, new_records: Words) -> int:
    """Twin of `kernels.insert`."""
    homes = home_buckets(mixed, len(buckets))
    for i, entry in enumerate(entries):
        path = (homes[i] + np.arange(min(MAX_PROBE_BUCKETS, len(buckets)))) % len(buckets)
        open_ways = np.argwhere(buckets[path, ENTRIES : ENTRIES + WAYS] == 0)
        if not len(open_ways):
            return i
        distance, way = open_ways[0]
        for passed in path[:distance]:
            _write(buckets, passed, OVERFLOW, buckets[passed, OVERFLOW] + 1)
        bucket = path[distance]
        buckets[bucket, SEQ] += 1
        records[entry] = new_records[i]
        buckets[bucket, TAGS + way] = mixed[i] & np.uint64(0xFFFF_FFFF)
        buckets[bucket, ENTRIES + way] = entry | RESERVED_FLAG
        buckets[bucket, SEQ] += 1
    return len(entries)


def _locate(buckets: Words, home: int, entry: int) -> tuple[int, int, NDArray[np.int64]]:
    """Bucket and way of a linked entry, and the buckets passed on the way; bucket -1 where it is not linked."""
    path = (home + np.arange(min(MAX_PROBE_BUCKETS, len(buckets)))) % len(buckets)
    hits = np.argwhere((buckets[path, ENTRIES : ENTRIES + WAYS] & ~RESERVED_FLAG) == entry)
    if not len(hits):
        return -1, -1, path[:0]
    distance, way = hits[0]
    return int(path[distance]), int(way), path[:distance]


def publish(buckets: Words, records: Words, mixed: Mixed, entries: Words, checks: Mixed) -> int:
    """Twin of `kernels.publish`."""
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


def remove(buckets: Words, records: Words, mixed: Mixed, entries: Words) -> int:
    """Twin of `kernels.remove`."""
    homes = home_buckets(mixed, len(buckets))
    done = 0
    for i, entry in enumerate(entries):
        bucket, way, passed_buckets = _locate(buckets, int(homes[i]), int(entry))
        if bucket < 0:
            continue
        buckets[bucket, SEQ] += 1
        buckets[bucket, ENTRIES + way] = 0
        buckets[bucket, TAGS + way] = 0
        records[entry, W_GROUP_STATE] = 0
        buckets[bucket, SEQ] += 1
        for passed in passed_buckets:
            _write(buckets, passed, OVERFLOW, buckets[passed, OVERFLOW] - 1)
        done += 1
    return done
