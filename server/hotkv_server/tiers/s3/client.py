"""Translates a tier's calls into requests to a bucket. The blocks of a write are stored as one or
more objects, the packs (`s3.packs`).

Always true, in addition to the rules of `remote.client`: a slot (place in the arena) is written
only after all bytes of the block have arrived and matched the seal (checksum). Damaged blocks,
and packs that no longer exist, are removed from the index (`s3.index`).
"""

import itertools
import logging
import math
import secrets
import threading
import time
from collections.abc import Sequence

from hotkv_server.settings.tiers import S3Settings
from hotkv_server.tiers.protocol import (
    NO_GENERATION,
    NO_GENERATIONS,
    Codes,
    Generations,
    Read,
    Shown,
    Write,
)
from hotkv_server.tiers.remote.client import StoreError, UnusableError
from hotkv_server.tiers.s3 import generation_objects
from hotkv_server.tiers.s3.bucket import CHECK, Bucket, DeniedError, FullError, Loop
from hotkv_server.tiers.s3.index import PackIndex, PackRow
from hotkv_server.tiers.s3.lister import Lister
from hotkv_server.tiers.s3.packs import Pack, Space, new_name, packed, space_of
from hotkv_server.tiers.seals import seal

log = logging.getLogger(__name__)


class Shared:
    """The state that all clients of a tier share: the bucket, the index of blocks, and the threads
    that list packs (objects with blocks) and send requests. Thread-safe.

    `node`: name of this server in the names of its packs.
    """

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.node = settings.node or secrets.token_hex(8)
        self.loop = Loop()
        self.index = PackIndex(settings.index_blocks)
        self.lister = Lister(
            self.index,
            self.bucket,
            refresh_s=settings.refresh_s,
            timeout_s=settings.timeout_s,
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._bucket: Bucket | None = None
        self._is_checked = False

    def __repr__(self) -> str:
        return f"Shared({self.index!r}, {self.lister!r})"

    def bucket(self) -> Bucket:
        """Returns the `Bucket` that all clients share. If the store has refused requests of this
        `Bucket` (`Bucket.is_refused`), first replaces it by a new `Bucket`, which reads the
        credentials and certificates again. Raises UnusableError."""
        with self._lock:
            if self._bucket is None or self._bucket.is_refused:
                self._is_checked = False
                self._bucket = Bucket(self.settings, self.loop)
            return self._bucket

    def connect(self, until_s: float) -> "S3Client":
        """Checks that the bucket answers and is usable, then returns a new client. Raises
        StoreError."""
        bucket = self.bucket()
        # List one name and read an object: a store may list names although it can't read objects.
        bucket.names(CHECK, 1, lambda name: True, until_s - time.monotonic())
        if self._is_checked:
            bucket.get(CHECK, until_s)
        else:
            generation_objects.check_conditions(bucket, until_s)
            self._is_checked = True
        return S3Client(self, bucket)

    def is_alive(self) -> bool:
        """Returns False if a thread that clients share has died. True once `close` was called."""
        return self.lister.is_alive() and self.loop.is_alive()

    def next_number(self) -> int:
        """Returns the number for the next pack (object with blocks) that this node writes. Each
        call returns another number."""
        return next(self._numbers)

    def close(self) -> None:
        """Ends the threads that all clients share. Call this only when no client is in use."""
        self.lister.close()
        self.loop.close()


class S3Client:
    """A `Client` (connection of a tier to its store) for an S3 bucket; see the module."""

    def __init__(self, shared: Shared, bucket: Bucket) -> None:
        self._shared = shared
        self._bucket = bucket
        self._index = shared.index
        # Shows that a call is still alive (`Client.moved_s`). Infinity while the client waits for a
        # listing, which may take long; afterwards the end of this wait. Requests don't change it,
        # because obstore does not report their progress.
        self.moved_s = 0.0

    def __repr__(self) -> str:
        return f"S3Client({self._bucket!r})"

    def is_fresh(self) -> bool:
        """Returns False if the store has refused a request of this `Bucket` (`Bucket.is_refused`);
        see `Client.is_fresh`. Obstore itself reopens a connection that has ended."""
        return not self._bucket.is_refused

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Finds out which keys exist, from the index in memory; see `Client.probe`. Asks the bucket
        only for the generations (numbers that each flush raises), and for the packs (objects with
        blocks) of a key space whose packs were never listed."""
        places = self._places(keys, until_s)
        changed = self._changed(expected, until_s)
        if not changed:
            codes[:] = [Read.ABSENT if place is None else Read.FOUND for place in places]
        return changed

    def read(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        expected: Generations,
        codes: Codes,
        until_s: float,
    ) -> Generations:
        """Reads blocks into their slots; see `Client.read`."""
        places = self._places(keys, until_s)
        settled = codes.copy()
        rows_of: dict[Pack, list[tuple[int, int]]] = {}
        for at, place in enumerate(places):
            if place is None:
                settled[at] = Read.ABSENT
            elif place.pack.num_bytes[place.row] != len(slots[at]):
                settled[at] = Read.CORRUPT
            else:
                rows_of.setdefault(place.pack, []).append((at, place.row))
        first_error = self._fill(rows_of, keys, slots, settled, until_s)
        # Read the generations after the blocks, so that a flush during the reads is noticed (module
        # `generations`).
        changed = self._changed(expected, until_s)
        if changed:
            return changed
        codes[:] = settled
        self._index.forget(keys[at] for at in (settled == Read.CORRUPT).nonzero()[0].tolist())
        if first_error is not None:
            raise first_error
        return NO_GENERATIONS

    def write(
        self,
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        depths: Sequence[int],
        codes: Codes,
        until_s: float,
    ) -> None:
        """Writes the blocks of each key space (a model in a configuration) as one object, a
        pack; see `Client.write`. Ignores `depths`."""
        rows_of: dict[Space, list[int]] = {}
        first_of: dict[bytes, int] = {}
        for at, (key, place) in enumerate(zip(keys, self._places(keys, until_s), strict=True)):
            space = space_of(key)
            if place is not None:
                codes[at] = Write.PRESENT
            elif space is not None and first_of.setdefault(key, at) == at:
                rows_of.setdefault(space, []).append(at)
        for space, rows in rows_of.items():
            asked = [keys[at] for at in rows], [slots[at] for at in rows], until_s
            codes[rows] = Write.STORED if self._put(space, *asked) else Write.FULL
        for at, key in enumerate(keys):
            # If a key occurs twice in the call, it is stored once.
            first = first_of.get(key, at)
            if first != at:
                codes[at] = max(Write.PRESENT, codes[first])

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Removes the blocks from the index of this node; see `Client.forget`. The packs (objects
        with blocks) stay in the bucket until the bucket's lifecycle rule removes them. No such rule
        removes generations (numbers that each flush raises). So if `keys` has the key of a
        generation, this method removes the generation from the bucket."""
        self._index.forget(keys)
        generation_objects.remove_generations(self._bucket, keys, until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """Returns the key spaces' generations (numbers that each flush raises); see
        `Client.generations`. `restored_below` is 0, because a bucket does not report restarts."""
        return Shown(
            generation_objects.begin_generations(self._bucket, fingerprints, _now_us(), until_s)
        )

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        """Raises the generation (number that each flush raises) of a key space (a model in a
        configuration), which flushes its blocks in the store; see `Client.raise_generation`."""
        raised = generation_objects.raise_generation(
            self._bucket, fingerprint, floor, _now_us(), until_s
        )
        self._forget_others(fingerprint, raised)
        return raised

    def close(self) -> None:
        """Does nothing, because connections end with the last reference to the bucket; see
        `Client.close`."""

    def _places(self, keys: Sequence[bytes], until_s: float) -> list[PackRow | None]:
        self.moved_s = math.inf
        try:
            for space in dict.fromkeys(map(space_of, keys)):
                if space is not None:
                    self._shared.lister.ask(space, until_s)
        finally:
            self.moved_s = time.monotonic()
        return self._index.find(keys)

    def _fill(
        self,
        rows_of: dict[Pack, list[tuple[int, int]]],
        keys: Sequence[bytes],
        slots: Sequence[memoryview],
        settled: Codes,
        until_s: float,
    ) -> StoreError | None:
        """Reads blocks from packs (objects with blocks) into their slots (places in the arena), and
        sets their codes in `settled`. If requests fail, their blocks keep their codes. Returns the
        first error of a request; None if all succeed. If the store forbids a pack, the pack's
        blocks become FAILED, the pack stays in the index, and the error is not returned.

        `rows_of`: for each pack, the blocks to read, as pairs: index of the block in `keys`, and
            row of the block in the pack's list.
        `keys`, `slots`: the keys of all blocks of the call, and the memory of their slots.
        `settled`: gets the result of each block, a value of `Read`, uint8 [number of keys].
        """
        wanted = []
        for pack, rows in rows_of.items():
            in_pack = [row for _, row in rows]
            wanted.append(
                (pack.path, pack.begins[in_pack].tolist(), pack.num_bytes[in_pack].tolist())
            )
        first_error: StoreError | None = None
        found = self._bucket.ranges(wanted, until_s) if wanted else []
        for (pack, rows), pieces in zip(rows_of.items(), found, strict=True):
            if pieces is None:
                self._index.drop(pack.path)
                settled[[at for at, _ in rows]] = Read.ABSENT
            elif isinstance(pieces, DeniedError):
                # The store forbids only this pack. So don't raise the error: the tier must stay up.
                log.info("s3 %s: %s", pieces, pack.path)
                settled[[at for at, _ in rows]] = Read.FAILED
            elif isinstance(pieces, StoreError):
                first_error = first_error or pieces
            else:
                for (at, row), piece in zip(rows, pieces, strict=True):
                    is_sound = len(piece) == len(slots[at]) and (
                        seal(keys[at], piece) == pack.seals[row]
                    )
                    settled[at] = Read.FOUND if is_sound else Read.CORRUPT
                    if is_sound:
                        slots[at][:] = piece
        return first_error

    def _put(
        self, space: Space, keys: list[bytes], slots: list[memoryview], until_s: float
    ) -> bool:
        """Writes blocks of a key space (a model in a configuration) as a new pack (one object
        with these blocks), and adds the pack to the index. Returns False if the store is full.
        Raises UnusableError if an object with the pack's name already exists."""
        number = self._shared.next_number()
        name = new_name(_now_us(), self._shared.node, number, len(keys))
        pack, body = packed(space, name, keys, slots)
        try:
            is_new = self._bucket.put(pack.path, body, until_s)
        except FullError:
            return False
        if not is_new:
            raise UnusableError(f"has a pack {name} already: give each server another node")
        self._index.add(pack)
        return True

    def _changed(self, expected: Generations, until_s: float) -> Generations:
        now = {
            name: generation_objects.read_generation(self._bucket, name, until_s)
            for name in expected
        }
        # NO_GENERATION (the store has no generation, the number that each flush raises) counts as
        # changed even if it was expected: without a generation no block may be used.
        changed = {
            name: at for name, at in now.items() if at != expected[name] or at == NO_GENERATION
        }
        for name, at in changed.items():
            self._forget_others(name, at)
        return changed

    def _forget_others(self, fingerprint: str, generation: int) -> None:
        space = Space(f"{fingerprint}/{generation}") if generation != NO_GENERATION else None
        self._index.drop_others(fingerprint, space)
        self._shared.lister.forget_others(fingerprint, space)


def _now_us() -> int:
    return time.time_ns() // 1000
