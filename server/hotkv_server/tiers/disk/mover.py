"""Copies the blocks of a piece between slots and places in the slab file. A place smaller than its
slot holds the encoded form (`tiers.compression.form`).

Always true: a FOUND block's bytes are those that were written. Its seal covers the whole place,
also the form's unused bytes, and is compared before decoding. For encoded blocks the key, the
seal's seed, has a suffix.
"""

import errno
import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.form import encoded_key
from hotkv_server.tiers.compression.staged import Staged, packed
from hotkv_server.tiers.disk.calls import DiskCall, DiskPiece
from hotkv_server.tiers.disk.slab_file import BlockIO, SlabFile
from hotkv_server.tiers.protocol import Int64s, Read, Seals, Write
from hotkv_server.tiers.seals import secrets

FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
log = logging.getLogger(__name__)

BoolMask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of n blocks of a call, int64 [n], offsets and sizes in bytes.

    `numbers`: in the call.
    `sizes`: of the slots.
    `stored`: sizes of the places.
    """

    numbers: Int64s
    slots: Int64s
    sizes: Int64s
    places: Int64s
    stored: Int64s

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def is_encoded(self) -> bool:
        """Only if all are encoded or all plain."""
        return bool((self.stored != self.sizes).any())

    def only(self, mask: BoolMask | slice) -> "Rows":
        return Rows(
            self.numbers[mask],
            self.slots[mask],
            self.sizes[mask],
            self.places[mask],
            self.stored[mask],
        )


class BlockMover:
    """See the module. Thread-safe for different pieces."""

    def __init__(self, arena: Region, file: SlabFile, io: BlockIO, staged: Staged) -> None:
        self._arena = arena
        self._file = file
        self._io = io
        self._staged = staged
        self._kernels = native.require("hotkv_server.tiers.disk.disk_kernels")

    def __repr__(self) -> str:
        return f"BlockMover({self._file!r}, {self._staged!r})"

    def move(self, piece: DiskPiece) -> None:
        """Copies a piece and sets codes and seals. A block outside the arena or file, or without
        staging memory in time, stays FAILED."""
        call, rows = piece.call, self._rows(piece)
        is_plain = rows.stored == rows.sizes
        plain, encoded = rows.only(is_plain), rows.only(~is_plain)
        addresses = self._arena.address + plain.slots
        if call.is_write and len(plain):
            self._put(call, plain, addresses)
        elif len(plain):
            is_same = self._fetch(call, plain, addresses)
            call.codes[plain.numbers[is_same]] = Read.FOUND
        move = self._encode if call.is_write else self._decode
        for part in self._staged.parts(encoded.stored, is_write=call.is_write):
            move(call, encoded.only(part))

    def _rows(self, piece: DiskPiece) -> Rows:
        """The blocks inside the arena and, for a write, inside the file."""
        blocks = piece.call.blocks
        rows = Rows(
            np.arange(piece.begin, piece.end),
            *(
                np.asarray(column[piece.begin : piece.end], np.int64)
                for column in (blocks.slots, blocks.num_bytes, blocks.places, blocks.stored_bytes)
            ),
        )
        fits = (rows.slots >= 0) & (rows.sizes > 0) & (rows.stored > 0)
        fits &= rows.slots + rows.sizes <= self._arena.num_bytes
        if piece.call.is_write:
            fits &= (rows.places >= 0) & (rows.places + rows.stored <= self._file.num_bytes)
        if not fits.all():
            log.error("%s: %d blocks lie outside", self._file.path, int((~fits).sum()))
        return rows.only(fits)

    def _decode(self, call: DiskCall, rows: Rows) -> None:
        num_bytes = int(rows.stored.sum())
        place = self._staged.take(num_bytes, call.deadline_s, is_write=False)
        if place is None:
            return
        try:
            at = packed(rows.stored, place)
            is_same = self._fetch(call, rows, self._staged.memory.address + at)
            good = rows.only(is_same)
            decoded = self._staged.decode(good.slots, good.sizes, at[is_same], good.stored)
            call.codes[good.numbers] = np.where(decoded > 0, Read.FOUND, Read.CORRUPT)
        finally:
            self._staged.give(place, num_bytes, is_write=False)

    def _fetch(self, call: DiskCall, rows: Rows, addresses: Int64s) -> BoolMask:
        """Reads blocks to `addresses`. Mask of those that match their seals.

        The others are CORRUPT. If the disk can't read a block, nor another part of the file, it
        stays FAILED.
        """
        results = self._io.read_many(addresses, rows.places, rows.stored)
        whole = results == rows.stored
        found = self._sealed(call, rows.only(whole), addresses[whole])
        is_same: BoolMask = whole.copy()
        is_same[whole] = found == np.asarray(call.blocks.seals, np.uint64)[rows.numbers[whole]]
        call.codes[rows.numbers[whole & ~is_same]] = Read.CORRUPT
        is_short = ~whole & (results >= 0)
        call.codes[rows.numbers[is_short]] = Read.CORRUPT
        failed = np.flatnonzero(results < 0)
        if len(failed):
            call.code = -int(results[failed[-1]])
            works = self._file.is_direct and whole.any()
            if works or self._reads_elsewhere(rows.places, int(addresses[failed[0]])):
                # After FAILED the server would offer a lost block for ever.
                call.codes[rows.numbers[failed]] = Read.CORRUPT
        if is_short.any():
            self._file.mend()
        return is_same

    def _reads_elsewhere(self, places: Int64s, address: int) -> bool:
        """After a failed read of `places`: the disk can read the file's first page (or last, if
        a place is at the beginning), so the blocks are lost. Bypasses the page cache, which
        outlives a failed disk."""
        if not self._file.is_direct:
            self._io.drop_cached()
        offset = 0 if places.min() > 0 else self._file.num_bytes - SLOT_ALIGN
        page = np.array([SLOT_ALIGN])
        results = self._io.read_many(np.array([address]), np.array([offset]), page)
        return bool(results[0] == SLOT_ALIGN)

    def _encode(self, call: DiskCall, rows: Rows) -> None:
        """A block is UNFIT if its form exceeds its place, or its place the staging memory for
        writes."""
        num_bytes = int(rows.stored.sum())
        if not self._staged.fits(num_bytes, is_write=True):
            call.codes[rows.numbers] = Write.UNFIT
            return
        place = self._staged.take(num_bytes, call.deadline_s, is_write=True)
        if place is None:
            return
        try:
            at = packed(rows.stored, place)
            fits = self._staged.encode(rows.slots, rows.sizes, at, rows.stored) > 0
            call.codes[rows.numbers[~fits]] = Write.UNFIT
            if fits.any():
                self._put(call, rows.only(fits), self._staged.memory.address + at[fits])
        finally:
            self._staged.give(place, num_bytes, is_write=True)

    def _put(self, call: DiskCall, rows: Rows, addresses: Int64s) -> None:
        """Writes the bytes at `addresses`, and sets codes and seals."""
        seals = self._sealed(call, rows, addresses)
        results = self._io.write_many(addresses, rows.places, rows.stored)
        whole, is_full = results == rows.stored, np.isin(-results, FULL_CODES)
        call.codes[rows.numbers[whole]] = Write.STORED
        call.seals[rows.numbers[whole]] = seals[whole]
        call.codes[rows.numbers[is_full]] = Write.FULL
        failed = results[(results < 0) & ~is_full]
        if len(failed):
            call.code = -int(failed[-1])

    def _sealed(self, call: DiskCall, rows: Rows, addresses: Int64s) -> Seals:
        seals = np.empty(len(rows), np.uint64)
        if len(rows):
            keys = [call.blocks.keys[row] for row in rows.numbers.tolist()]
            if rows.is_encoded:
                keys = [encoded_key(key) for key in keys]
            self._kernels.seal_many(addresses, rows.stored, secrets(keys), seals)
        return seals
