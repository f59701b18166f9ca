"""Generations in a bucket. The generation of a key space (a model in a configuration) is a number
in the object `generations/1/{fingerprint}`. Each flush, which deletes all blocks of the key space,
raises it.

Always true: a raise gives a greater generation than all generations that the raising node knows.
The request that first writes the object fails if the object exists (If-None-Match). A raise fails
if the object has changed since this node read it (If-Match). So if several nodes read the same
generation and then write, only one of them succeeds.

The keys of blocks contain the generation. So only a node that does not know of a flush yet asks for
blocks of an old generation. The order of this node's requests prevents it from using these blocks:
**it reads the generation after the blocks**.

Proof. The store is strongly consistent: a read that begins after the answer to a write sees that
write. Suppose a node reads blocks whose keys contain the generation E. When all blocks have
arrived, it reads the generation, and this is still E. A generation that has ended does not return.
So a flush that ends E was answered after the read of the generation began, hence after the blocks
had arrived. Conversely, if a flush was answered before the read of the blocks began, the node sees
another generation than E, and refuses the blocks. Each part of a call reads the generation; if any
part sees another generation, the whole call is refused.

The proof assumes a single bucket: a replica in another region may show an old generation. The first
connection tests that the store honours If-None-Match and If-Match (`check_conditions`).

If the generation's object is absent, every block is refused. A new generation is computed from the
clock of the node (`protocol.begun`), and not counted from 0. So if a bucket has lost a generation,
no later generation has the number of the lost generation.
"""

import re
from collections.abc import Sequence

from hotkv_server.tiers.protocol import NO_GENERATION, begun, raised
from hotkv_server.tiers.remote.client import LostError, StoreError, UnusableError
from hotkv_server.tiers.s3.bucket import CHECK, Bucket, DeniedError, FullError

TRIES = 16
"""Most tries to begin or raise a generation (a number that each flush raises). A try fails if
another node changes the generation at the same time."""
_KEY = re.compile(rb"hotkv/1/([0-9A-Za-z_-]{1,64})/generation")


def generation_path(fingerprint: str) -> str:
    """Returns the path of the object with a key space's generation (a number that each flush
    raises). The path is outside `blocks/`, so that the lifecycle rule for blocks does not remove
    generations."""
    return f"generations/1/{fingerprint}"


def read_generation(bucket: Bucket, fingerprint: str, until_s: float) -> int:
    """Returns a key space's generation (a number that each flush raises); NO_GENERATION if the
    bucket has no generation for it. Raises StoreError."""
    return _read(bucket, fingerprint, until_s)[0]


def begin_generation(bucket: Bucket, fingerprint: str, now_us: int, until_s: float) -> int:
    """Returns a key space's generation (a number that each flush raises). If the bucket has no
    generation for it, first begins a generation. Returns NO_GENERATION if the store has no room for
    the generation. Raises StoreError.

    `now_us`: the time of the wall clock in microseconds.
    """
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
    """Returns several key spaces' generations (numbers that each flush raises), by fingerprint.
    First begins a generation for each key space (a model in a configuration) that has no
    generation, as `begin_generation` does. Reads all generations at the same time. Omits a key
    space whose generation is not a number, or can't be read although the store can read other
    objects. Raises StoreError.

    `now_us`: the time of the wall clock in microseconds.
    """
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
    """Flushes a key space (a model in a configuration) in the store, which deletes all its
    blocks there. For this, raises the key space's generation (a number that each flush raises):
    ends the old generation, and begins and returns a new one, which is greater than the old
    generation and `floor`. If the store has no room for the new generation, deletes the old
    generation and returns NO_GENERATION; blocks are then refused until a generation begins. Raises
    StoreError.

    `floor`: the highest generation of the key space that the caller knows.
    `now_us`: the time of the wall clock in microseconds.
    """
    for _ in range(TRIES):
        generation, version = _read(bucket, fingerprint, until_s)
        # An empty version means that the bucket has no generation (number that each flush raises).
        # Another node may begin a generation at this moment, with the number `begun(now_us)`. So
        # the new generation must be greater than this number, to differ from that node's
        # generation.
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
    """Removes the generations (numbers that each flush raises) whose keys
    (`hotkv/1/FINGERPRINT/generation`) are in `keys`. Ignores other keys."""
    for match in filter(None, map(_KEY.fullmatch, keys)):
        bucket.delete(generation_path(match[1].decode()), until_s)


def check_conditions(bucket: Bucket, until_s: float) -> None:
    """Checks that the store honours If-None-Match and If-Match. Raises UnusableError if the store
    ignores one of these conditions."""
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
    """Returns the generation (a number that each flush raises) in an object, and the object's
    version; NO_GENERATION and "" if there is no object. Raises LostError if the object does not
    contain a generation, or if the store forbids only this object. `found`: a result of
    `Bucket.objects`; if it is another error, raises it."""
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
