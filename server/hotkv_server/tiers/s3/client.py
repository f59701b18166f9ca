"""Does a tier's calls with requests to a bucket. A write's blocks become one or more packs.

Always true, beside `remote.client`: a slot is written only after all bytes have arrived and
matched the seal. Damaged blocks and lost packs leave the index.
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
from hotkv_server.tiers.s3.bounds import S3Bounds
from hotkv_server.tiers.s3.bucket import CHECK, Bucket, DeniedError, FullError, Loop
from hotkv_server.tiers.s3.index import PackIndex, PackRow
from hotkv_server.tiers.s3.lister import Lister
from hotkv_server.tiers.s3.packs import Pack, Space, new_name, packed, space_of
from hotkv_server.tiers.seals import seal

log = logging.getLogger(__name__)


class Shared:
    """What all clients of a tier share. Thread-safe.

    `node`: this server in its packs' names.
    """

    def __init__(self, settings: S3Settings, bounds: S3Bounds) -> None:
        self.settings = settings
        self.bounds = bounds
        self.node = settings.node or secrets.token_hex(8)
        self.loop = Loop()
        self.index = PackIndex(bounds.index_blocks)
        self.lister = Lister(
            self.index,
            self.bucket,
            refresh_s=bounds.refresh_s,
            timeout_s=bounds.timeouts.batch_s,
        )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._bucket: Bucket | None = None
        self._is_checked = False

    def __repr__(self) -> str:
        return f"Shared({self.index!r}, {self.lister!r})"

    def bucket(self) -> Bucket:
        """The common bucket; a new one, with new credentials and certificates, if it
        `is_refused`. Raises UnusableError."""
        with self._lock:
            if self._bucket is None or self._bucket.is_refused:
                self._is_checked = False
                self._bucket = Bucket(self.settings, self.loop, self.bounds.timeouts)
            return self._bucket

    def connect(self, until_s: float) -> "S3Client":
        """Checks that the bucket is usable. Raises StoreError."""
        bucket = self.bucket()
        # A store may list names although it can't read objects.
        bucket.names(CHECK, 1, lambda name: True, until_s - time.monotonic())
        if self._is_checked:
            bucket.get(CHECK, until_s)
        else:
            generation_objects.check_conditions(bucket, until_s)
            self._is_checked = True
        return S3Client(self, bucket)

    def is_alive(self) -> bool:
        """True after `close`."""
        return self.lister.is_alive() and self.loop.is_alive()

    def next_number(self) -> int:
        """Of this node's packs."""
        return next(self._numbers)

    def close(self) -> None:
        """Call it only when no client is in use."""
        self.lister.close()
        self.loop.close()


class S3Client:
    """A `Client` for a bucket; see the module."""

    def __init__(self, shared: Shared, bucket: Bucket) -> None:
        self._shared = shared
        self._bucket = bucket
        self._index = shared.index
        # Infinity during a listing, which may take long, then its end. Requests don't change it:
        # obstore reports no progress.
        self.moved_s = 0.0

    def __repr__(self) -> str:
        return f"S3Client({self._bucket!r})"

    def is_fresh(self) -> bool:
        """False after a refused request. Obstore itself reopens connections."""
        return not self._bucket.is_refused

    def probe(
        self, keys: Sequence[bytes], expected: Generations, codes: Codes, until_s: float
    ) -> Generations:
        """Asks the bucket only for generations, and to list a key space for the first time."""
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
        # After the blocks, to notice a flush meanwhile (`generation_objects`).
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
        """One or more packs per key space. Ignores `depths`."""
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
            # A key that occurs twice is stored once.
            first = first_of.get(key, at)
            if first != at:
                codes[at] = max(Write.PRESENT, codes[first])

    def forget(self, keys: Sequence[bytes], until_s: float) -> None:
        """Removes blocks from this node's index only; the bucket's lifecycle rule removes packs.
        No rule removes generations, so their keys are deleted here."""
        self._index.forget(keys)
        generation_objects.remove_generations(self._bucket, keys, until_s)

    def generations(self, fingerprints: Sequence[str], until_s: float) -> Shown:
        """A bucket does not report restarts."""
        return Shown(
            generation_objects.begin_generations(self._bucket, fingerprints, _now_us(), until_s)
        )

    def raise_generation(
        self, fingerprint: str, floor: int, until_s: float, is_retry: bool = False
    ) -> int:
        raised = generation_objects.raise_generation(
            self._bucket, fingerprint, floor, _now_us(), until_s
        )
        self._forget_others(fingerprint, raised)
        return raised

    def close(self) -> None:
        """Connections end with the last reference to the bucket."""

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
        """Reads blocks into slots and sets their codes in `settled`. Returns the first error;
        blocks of a failed request keep their codes, those of a forbidden pack become FAILED without
        an error.

        `rows_of`: per pack, (index in `keys`, row in the pack).
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
                # Only this pack: the tier must stay up.
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
        """Writes a new pack. False if the store is full. Raises UnusableError if the name
        exists."""
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
        # NO_GENERATION counts as changed even if expected: no block may then be used.
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
