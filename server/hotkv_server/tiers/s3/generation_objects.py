"""Generations in a bucket, in the objects `generations/1/{fingerprint}`. All functions raise
StoreError.

Always true: a raise exceeds all generations that the raising node knows. A first write fails if the
object exists (If-None-Match), a raise if it has changed since the read (If-Match), so of several
nodes one succeeds. A missing object refuses all blocks. A new generation comes from the clock
(`protocol.begun`), so a lost number does not return.

**A read asks for the generation after the blocks.** Proof, for a store where a read sees all writes
answered before it: suppose all blocks of generation E have arrived, and then the generation still
is E. Generations don't return, so a flush that ends E was answered after the blocks had arrived. If
it was answered before the read, the node sees another generation and refuses the blocks. Each part
of a call reads it; if one sees another, the call is refused.

This needs a single bucket: a replica in another region may be old. The first connection tests
the two conditions.
"""

import re
from collections.abc import Sequence

from hotkv_server.tiers.protocol import NO_GENERATION, begun, raised
from hotkv_server.tiers.remote.client import LostError, StoreError, UnusableError
from hotkv_server.tiers.s3.bucket import CHECK, Bucket, DeniedError, FullError

TRIES = 16
"""A try fails if another node changes the generation at the same time."""
_KEY = re.compile(rb"hotkv/1/([0-9A-Za-z_-]{1,64})/generation")


def generation_path(fingerprint: str) -> str:
    """Outside `blocks/`, whose lifecycle rule removes objects."""
    return f"generations/1/{fingerprint}"


def read_generation(bucket: Bucket, fingerprint: str, until_s: float) -> int:
    """NO_GENERATION if there is none."""
    return _read(bucket, fingerprint, until_s)[0]


def begin_generation(bucket: Bucket, fingerprint: str, now_us: int, until_s: float) -> int:
    """The present generation, or a new one; NO_GENERATION if there is no room."""
    for _ in range(TRIES):
        generation = read_generation(bucket, fingerprint, until_s)
        if generation != NO_GENERATION:
            return generation
        try:
            if bucket.put(generation_path(fingerprint), b"%d" % begun(now_us), until_s):
                return begun(now_us)
        except FullError:
            return NO_GENERATION
    raise LostError("changes a generation again and again")


def begin_generations(
    bucket: Bucket, fingerprints: Sequence[str], now_us: int, until_s: float
) -> dict[str, int]:
    """`begin_generation` of several key spaces at once. Omits those whose object is no number,
    or can't be read although others can."""
    objects = bucket.objects([generation_path(name) for name in fingerprints], until_s)
    if any(isinstance(found, LostError) for found in objects):
        bucket.get(CHECK, until_s)
    generations: dict[str, int] = {}
    for name, found in zip(fingerprints, objects, strict=True):
        try:
            generation, _ = _parsed(found)
        except LostError:
            continue
        generations[name] = generation or begin_generation(bucket, name, now_us, until_s)
    return generations


def raise_generation(
    bucket: Bucket, fingerprint: str, floor: int, now_us: int, until_s: float
) -> int:
    """A new generation above the present one and `floor`. Without room, deletes the present one
    and returns NO_GENERATION: blocks are refused until a generation begins."""
    for _ in range(TRIES):
        generation, version = _read(bucket, fingerprint, until_s)
        # Without a version there is no generation, and another node may just begin
        # `begun(now_us)`: exceed that.
        wanted = (
            raised(now_us, generation, floor) if version else raised(now_us, begun(now_us), floor)
        )
        try:
            if bucket.put(generation_path(fingerprint), b"%d" % wanted, until_s, version):
                return wanted
        except FullError:
            if not version:
                raise LostError(
                    "is full: it has no room for the generation of a key space"
                ) from None
            bucket.delete(generation_path(fingerprint), until_s)
            return NO_GENERATION
    raise LostError("changes a generation again and again")


def remove_generations(bucket: Bucket, keys: Sequence[bytes], until_s: float) -> None:
    """Of the keys `hotkv/1/FINGERPRINT/generation`; others are ignored."""
    for match in filter(None, map(_KEY.fullmatch, keys)):
        bucket.delete(generation_path(match[1].decode()), until_s)


def check_conditions(bucket: Bucket, until_s: float) -> None:
    """Raises UnusableError if the store ignores If-None-Match or If-Match."""
    bucket.put(CHECK, b"1", until_s)
    found = bucket.get(CHECK, until_s)
    if found is None:
        raise LostError("has lost an object that was just written")
    if bucket.put(CHECK, b"2", until_s):
        raise UnusableError("ignores If-None-Match: without it, a flush can't count on all nodes")
    if bucket.put(CHECK, b"3", until_s, '"0123456789abcdef0123456789abcdef"'):
        raise UnusableError("ignores If-Match: without it, a flush can't count on all nodes")


def _read(bucket: Bucket, fingerprint: str, until_s: float) -> tuple[int, str]:
    (found,) = bucket.objects([generation_path(fingerprint)], until_s)
    return _parsed(found)


def _parsed(found: tuple[bytes, str] | StoreError | None) -> tuple[int, str]:
    """Generation and version; NO_GENERATION and "" without an object. Raises errors in `found`,
    and LostError for an object that is no number or alone is forbidden."""
    if found is None:
        return NO_GENERATION, ""
    if isinstance(found, DeniedError):
        raise LostError(
            "forbids a generation: allow s3:GetObject on all objects below generations/"
        )
    if isinstance(found, StoreError):
        raise found
    text, version = found
    if not (text.isdigit() and len(text) < 20 and int(text) > 0) or not version:
        raise LostError("has a generation that is no number: remove the objects below generations/")
    return int(text), version
