"""Moves blocks between slots and the staging memory, encoded or plain, and says under which keys
the tier below has them.

Always true: slots are touched here and nowhere else, and of the staging memory only the piece's
extent. A row has as much room there as in its slot, so it can be asked for in either form.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hotkv_server.dataplane.plan import Region
from hotkv_server.tiers.compression.codec import Codec
from hotkv_server.tiers.compression.form import VERSION, room_bytes
from hotkv_server.tiers.compression.pieces import Asked, Call, Piece
from hotkv_server.tiers.protocol import MAX_KEY_BYTES, Blocks, Int64s, Read

ENCODED_SUFFIX = b"~%d" % VERSION
"""Of keys of encoded blocks. Another version of the form is another key, and absent here."""
log = logging.getLogger(__name__)

BoolMask = NDArray[np.bool_]


def encoded_key(key: bytes) -> bytes:
    """Where the encoded form of a block is."""
    return key + ENCODED_SUFFIX


class Stager:
    """See the module. Thread-safe for pieces that differ. `forget`: removes keys from the tier
    below; called for those whose bytes are no encoded form."""

    def __init__(
        self,
        arena: Region,
        staging: Region,
        forget: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._slots, self._staged = arena.array(), staging.array()
        self._codec = Codec(self._slots, self._staged)
        self._forget = forget

    def __repr__(self) -> str:
        return f"Stager({self._codec!r})"

    def next_question(self, piece: Piece, place: int) -> Asked | None:
        """Does this tier's part of a piece. Returns what the store is to be asked next."""
        if piece.asked is not None:
            return self._decode(piece.call, piece.asked, self._staged_at(piece, place))
        rows = self._rows_in_arena(piece)
        at = self._staged_at(piece, place)
        is_encoded = self._may_be_encoded(piece.call.blocks, rows)
        if piece.call.is_write:
            is_encoded = self._encode(piece.call.blocks, rows, is_encoded, at)
        return self._question(piece.call, rows, is_encoded, at)

    def _rows_in_arena(self, piece: Piece) -> Int64s:
        """Rows of a piece whose slots lie in the arena; others are FAILED."""
        blocks, rows = piece.call.blocks, np.arange(piece.begin, piece.end)
        slots, sizes = blocks.slots[rows], blocks.num_bytes[rows]
        fits = (slots >= 0) & (slots + sizes <= len(self._slots))
        if not fits.all():
            log.error("%d blocks lie outside the arena", len(rows) - int(fits.sum()))
        fitting: Int64s = rows[fits]
        return fitting

    def _staged_at(self, piece: Piece, place: int) -> Int64s:
        """Where each row of the call would lie in the staging memory; right for those of the
        piece. Each has as much room as in its slot."""
        sizes = piece.call.blocks.num_bytes
        before = np.cumsum(sizes) - sizes
        at: Int64s = place + before - before[piece.begin]
        return at

    def _may_be_encoded(self, blocks: Blocks, rows: Int64s) -> BoolMask:
        sizes = blocks.num_bytes[rows].tolist()
        return np.array(
            [
                room_bytes(size) < size and len(encoded_key(blocks.keys[row])) <= MAX_KEY_BYTES
                for row, size in zip(rows.tolist(), sizes, strict=True)
            ],
            np.bool_,
        )

    def _question(self, call: Call, rows: Int64s, is_encoded: BoolMask, at: Int64s) -> Asked | None:
        """Rows as the store has them. None if there are none."""
        if not len(rows):
            return None
        blocks = call.blocks
        below = Blocks(
            [
                encoded_key(blocks.keys[row]) if encoded else blocks.keys[row]
                for row, encoded in zip(rows.tolist(), is_encoded.tolist(), strict=True)
            ],
            at[rows],
            np.where(is_encoded, _rooms(blocks.num_bytes[rows]), blocks.num_bytes[rows]),
            depths=blocks.depths[rows] if len(blocks.depths) else blocks.depths,
            epochs=blocks.epochs,
        )
        return Asked(rows, is_encoded, below)

    def _encode(self, blocks: Blocks, rows: Int64s, is_encoded: BoolMask, at: Int64s) -> BoolMask:
        """Puts rows into the staging memory. Returns which were encoded; the others are plain."""
        tried = rows[is_encoded]
        sizes = blocks.num_bytes[tried]
        used = self._codec.encode(blocks.slots[tried], sizes, at[tried], _rooms(sizes))
        is_encoded[is_encoded] = used > 0
        for row in rows[~is_encoded].tolist():
            slot, size, place = int(blocks.slots[row]), int(blocks.num_bytes[row]), int(at[row])
            self._staged[place : place + size] = self._slots[slot : slot + size]
        return is_encoded

    def _decode(self, call: Call, asked: Asked, at: Int64s) -> Asked | None:
        """Puts what was found into slots and settles rows. Returns what else the store is to be
        asked for: plain blocks in place of encoded ones that are absent."""
        blocks, codes = call.blocks, asked.codes.copy()
        found = codes == Read.FOUND
        rows = asked.rows[found & asked.is_encoded]
        sizes = blocks.num_bytes[rows]
        is_sound = self._codec.decode(blocks.slots[rows], sizes, at[rows], _rooms(sizes)) > 0
        codes[found & asked.is_encoded] = np.where(is_sound, Read.FOUND, Read.CORRUPT)
        if not is_sound.all():
            self._forget([encoded_key(blocks.keys[row]) for row in rows[~is_sound].tolist()])
        for row in asked.rows[found & ~asked.is_encoded].tolist():
            slot, size, place = int(blocks.slots[row]), int(blocks.num_bytes[row]), int(at[row])
            self._slots[slot : slot + size] = self._staged[place : place + size]
        if (codes == Read.FOUND).any():
            call.found_key = asked.blocks.keys[int(np.argmax(codes == Read.FOUND))]
        is_open = asked.is_encoded & (codes == Read.ABSENT)
        call.codes[asked.rows[~is_open]] = codes[~is_open]
        rows = asked.rows[is_open]
        return self._question(call, rows, np.zeros(len(rows), np.bool_), at)


def _rooms(sizes: Int64s) -> Int64s:
    return np.array([room_bytes(size) for size in sizes.tolist()], np.int64)
