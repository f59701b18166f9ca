"""Moves the blocks of a piece (part of a read or write call) between the arena and the slab file,
and sets the result of each block.

A slot is the part of the arena that a block occupies; a place is its part of the file. If the place
of a block is smaller than its slot, the block is stored encoded, that is compressed
(`tiers.compression.form`).

Always true: a block is FOUND only if the file has returned the written bytes unchanged. The block's
seal (checksum) covers all bytes of its place, and is compared before the bytes are decoded. (A
seal over decoded bytes would not cover the unused bytes of the encoded form.) The seed of the seal
is computed from the block's key. For an encoded block the key has a suffix, so plain and encoded
bytes of a block have different seals.
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
    """The data of n blocks of a call, as columns, int64 [n] each.

    `numbers`: index of each block in the call.
    `slots`: offset of each block's slot in the arena, in bytes.
    `sizes`: size of each block's slot, in bytes.
    `places`: offset of each block's place in the file, in bytes.
    `stored`: size of each block's place, in bytes.
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
        """True if these blocks are stored encoded. Valid only if all of them are stored encoded or
        all of them plain."""
        return bool((self.stored != self.sizes).any())

    def only(self, mask: BoolMask | slice) -> "Rows":
        """Returns the data of the blocks that `mask` selects."""
        return Rows(
            self.numbers[mask],
            self.slots[mask],
            self.sizes[mask],
            self.places[mask],
            self.stored[mask],
        )


class BlockMover:
    """Moves the blocks of pieces (parts of a read or write call) between the arena and the slab
    file; see the module. Several threads may use it at the same time, for different pieces.

    `io`: reads and writes `file`.
    `staged`: encodes and decodes blocks.
    """

    def __init__(self, arena: Region, file: SlabFile, io: BlockIO, staged: Staged) -> None:
        """Loads compiled functions (numba), which takes seconds the first time."""
        self._arena = arena
        self._file = file
        self._io = io
        self._staged = staged
        self._kernels = native.require("hotkv_server.tiers.disk.disk_kernels")

    def __repr__(self) -> str:
        return f"BlockMover({self._file!r}, {self._staged!r})"

    def move(self, piece: DiskPiece) -> None:
        """Copies the blocks of a piece (part of a read or write call). Sets their codes (results)
        and, for a write, their seals (checksums).

        A block is not copied, and stays FAILED, in three cases: its slot is outside the arena; it
        would be written outside the file; or it gets no staging memory in time.
        """
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
        """Returns the blocks of a piece (some blocks of a call) that may be copied: their slots
        must be inside the arena and, for a write, their places (byte ranges) inside the file. Logs
        the number of blocks that may not be copied."""
        blocks = piece.call.blocks
        rows = Rows(
            np.arange(piece.begin, piece.end),
            *(
                np.asarray(column[piece.begin : piece.end], np.int64)
                for column in (blocks.slots, blocks.num_bytes, blocks.places, blocks.place_bytes)
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
        """Reads the encoded blocks of `rows` (some blocks of `call`) from the file to staging
        memory, decodes them to their slots (places in the arena), and sets their codes (results).
        """
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
        """Reads the blocks of `rows` (some blocks of `call`) from the file to memory at
        `addresses`. Returns a mask of the blocks whose bytes match their seals (checksums).

        Sets a block's result to CORRUPT in three cases: the block's bytes don't match its seal; the
        file ends before these bytes; or the disk can't read this block but can read another part of
        the file. If the disk can't read another part either, the result stays FAILED.
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
                # The block is lost. The result CORRUPT makes the server forget it; after FAILED,
                # the server would offer it as a hit for ever.
                call.codes[rows.numbers[failed]] = Read.CORRUPT
        if is_short.any():
            self._file.mend()
        return is_same

    def _reads_elsewhere(self, places: Int64s, address: int) -> bool:
        """Called if the disk could not read the blocks at `places`. Returns True if the disk can
        read another part of the file: then the disk works, and these blocks are lost. Tries to read
        the first SLOT_ALIGN bytes of the file, or the last if one of the `places` is at the file's
        beginning, to memory at `address`. Bypasses the page cache, because it still has pages of
        the file after the disk has failed."""
        if not self._file.is_direct:
            self._io.drop_cached()
        offset = 0 if places.min() > 0 else self._file.num_bytes - SLOT_ALIGN
        page = np.array([SLOT_ALIGN])
        results = self._io.read_many(np.array([address]), np.array([offset]), page)
        return bool(results[0] == SLOT_ALIGN)

    def _encode(self, call: DiskCall, rows: Rows) -> None:
        """Encodes the blocks of `rows` (some blocks of `call`) to staging memory, and writes the
        encoded forms to the file. Sets a block to UNFIT in two cases: its encoded form is larger
        than its place in the file; or the place is larger than the part of the staging memory that
        writes may use."""
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
        """Writes the stored bytes of the blocks of `rows` (some blocks of `call`), which are in
        memory at `addresses`, to the blocks' places in the file. Sets the blocks' codes (results),
        and the seals (checksums) of STORED blocks."""
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
        """Returns the seals (checksums) of the blocks of `rows` (some blocks of `call`), whose
        stored bytes are in memory at `addresses`."""
        seals = np.empty(len(rows), np.uint64)
        if len(rows):
            keys = [call.blocks.keys[row] for row in rows.numbers.tolist()]
            if rows.is_encoded:
                keys = [encoded_key(key) for key in keys]
            self._kernels.seal_many(addresses, rows.stored, secrets(keys), seals)
        return seals
