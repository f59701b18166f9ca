"""Epochs in a bucket: a number in the object `epochs/1/{fingerprint}`, which a flush raises.

Always true: the epoch of a key space never returns to an earlier value that its raiser knows. The
first write fails if the object exists (If-None-Match), and a raise fails if the object has changed
since it was read (If-Match). So of all writes after the same read, exactly one succeeds. Keys of
blocks contain the epoch: only a node that has not heard of the flush finds blocks of an old epoch.
The order of its requests stops such a node: **the epoch is read after the blocks**.

Proof. The store is strongly consistent: a read that begins after the answer to a write sees that
write. Let a node read blocks, then, when all have come, the epoch, and let it read E, the epoch in
its keys. Epochs do not come back, so a flush that ended E was answered after that read of the epoch
had begun, hence after the blocks had come. If a flush was answered before the read of the blocks
began, the epoch differs and the blocks are refused. Each part of a call reads the epoch; the whole
call is refused if any part saw another epoch.

The proof needs one bucket: a replica in another region may give an old epoch. The first connection
tries whether the store honours both conditions.

An absent epoch equals no epoch: no block passes. An epoch begins at the clock's time, not at 0
(`epoch_numbers`), so a bucket that lost its epoch does not reuse earlier numbers.
"""

import re
from collections.abc import Sequence

from hotkv_server.tiers.protocol import NO_EPOCH, begun, raised
from hotkv_server.tiers.remote.client import LostError, UnusableError
from hotkv_server.tiers.s3.bucket import Bucket, FullError

CHECK = "check"
"""The object that is used to test conditional writes."""
TRIES = 16
_FINGERPRINT = re.compile(r"[0-9A-Za-z_-]{1,64}")


def epoch_path(fingerprint: str) -> str:
    """Returns the path of a key space's epoch. It is outside `blocks/`, so that a lifecycle rule
    can spare it."""
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise LostError("keeps no epoch under such a fingerprint")
    return f"epochs/1/{fingerprint}"


def read_epoch(bucket: Bucket, fingerprint: str, until_s: float) -> int:
    """Returns the epoch; NO_EPOCH if it does not exist. Raises StoreError."""
    return _read(bucket, fingerprint, until_s)[0]


def begin_epoch(bucket: Bucket, fingerprint: str, now_us: int, until_s: float) -> int:
    """Returns the epoch. Begins an epoch if it does not exist; NO_EPOCH if the store has no room
    for it. Raises StoreError.

    `now_us`: microseconds of the wall clock.
    """
    for _ in range(TRIES):
        epoch = read_epoch(bucket, fingerprint, until_s)
        if epoch != NO_EPOCH:
            return epoch
        try:
            if bucket.put(epoch_path(fingerprint), b"%d" % begun(now_us), until_s):
                return begun(now_us)
        except FullError:
            return NO_EPOCH
    raise LostError("changes an epoch again and again")


def begin_epochs(
    bucket: Bucket, fingerprints: Sequence[str], now_us: int, until_s: float
) -> dict[str, int]:
    """Returns the epochs of several key spaces, as `begin_epoch` does. Asks for all at once. Leaves
    out epochs that are no number. Raises StoreError."""
    objects = bucket.objects([epoch_path(name) for name in fingerprints], until_s)
    epochs: dict[str, int] = {}
    for name, found in zip(fingerprints, objects, strict=True):
        try:
            epoch, _ = _parsed(found)
        except LostError:
            continue
        epochs[name] = epoch or begin_epoch(bucket, name, now_us, until_s)
    return epochs


def raise_epoch(bucket: Bucket, fingerprint: str, floor: int, now_us: int, until_s: float) -> int:
    """Ends the epoch, and returns the next epoch, above `floor`. NO_EPOCH if the store has no room
    for it: then blocks don't pass until an epoch begins. Raises StoreError."""
    for _ in range(TRIES):
        epoch, version = _read(bucket, fingerprint, until_s)
        # Without a version the epoch was lost; the next must differ from an epoch that begins now.
        wanted = raised(now_us, epoch, floor) if version else raised(now_us, begun(now_us), floor)
        try:
            if bucket.put(epoch_path(fingerprint), b"%d" % wanted, until_s, version):
                return wanted
        except FullError:
            if not version:
                raise LostError("is full: it has no room for the epoch of a key space") from None
            bucket.delete(epoch_path(fingerprint), until_s)
            return NO_EPOCH
    raise LostError("changes an epoch again and again")


def check_conditions(bucket: Bucket, until_s: float) -> None:
    """Checks that the store honours the two conditions. Raises UnusableError if it does not."""
    bucket.put(CHECK, b"1", until_s)
    found = bucket.get(CHECK, until_s)
    if found is None:
        raise LostError("has lost an object that was just written")
    if bucket.put(CHECK, b"2", until_s):
        raise UnusableError("ignores If-None-Match: without it, a flush can't count on all nodes")
    if bucket.put(CHECK, b"3", until_s, '"0123456789abcdef0123456789abcdef"'):
        raise UnusableError("ignores If-Match: without it, a flush can't count on all nodes")


def _read(bucket: Bucket, fingerprint: str, until_s: float) -> tuple[int, str]:
    return _parsed(bucket.get(epoch_path(fingerprint), until_s))


def _parsed(found: tuple[bytes, str] | None) -> tuple[int, str]:
    """Returns the epoch and the version of an object. Raises LostError."""
    if found is None:
        return NO_EPOCH, ""
    text, version = found
    if not (text.isdigit() and len(text) < 20 and int(text) > 0) or not version:
        raise LostError("has an epoch that is no number: remove the objects below epochs/")
    return int(text), version
