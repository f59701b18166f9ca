"""Chooses the sizes of blocks' places on the disk: as large as the slot in host memory, or smaller
for blocks that are stored encoded (compressed).

The disk tier encodes a block if its place is smaller than its slot. Whether the encoded form fits
the place is only known when the block is written. Always true: a block is encoded exactly if its
place is smaller than its slot. If few blocks of a KV cache group fit, the group's next blocks get
places as large as their slots; encoding is tried again later.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.values import KeySpaceRecord

MIN_TRIED = 64
"""Number of blocks of a group that are tried before the group can count as not fitting."""
MAX_TRIED = 4096
"""At twice this number of tried blocks the counts are halved, so that old tries weigh less."""
HARDLY = 8
"""A group's blocks are no longer encoded if fewer than 1 in 8 of the tried blocks fit."""
RETRY_BLOCKS = 1 << 15
"""Encoding such a group is tried again after this number of its blocks was written plain."""
EncodedBytes = Callable[[int], int]
"""Maps the size of a slot to the size of the place for its encoded block, a multiple of SLOT_ALIGN.
Encoding is useless if that is not smaller than the slot."""


@dataclass(slots=True)
class _Group:
    """A KV cache group of a key space.

    `slot_bytes`: size of the group's slots in host memory.
    `encoded_bytes`: size of the place for an encoded block.
    `tried_blocks`, `fitted_blocks`: recent blocks whose encoding was tried, and that fitted.
    `plain_blocks`: blocks that were written plain since the group is no longer encoded.
    """

    slot_bytes: int
    encoded_bytes: int
    tried_blocks: int = 0
    fitted_blocks: int = 0
    plain_blocks: int = 0

    @property
    def is_encoded(self) -> bool:
        """True if the group's next blocks are to be encoded."""
        is_judged = self.tried_blocks >= MIN_TRIED
        hardly = is_judged and self.fitted_blocks * HARDLY < self.tried_blocks
        return self.encoded_bytes < self.slot_bytes and not hardly


class PlaceSizes:
    """Chooses sizes of places; see the module. `encoded_bytes`: None if blocks are never
    encoded."""

    def __init__(self, encoded_bytes: EncodedBytes | None = None) -> None:
        self._encoded_bytes = encoded_bytes
        self._groups: dict[tuple[int, int], _Group] = {}

    def __repr__(self) -> str:
        num_encoded = sum(group.is_encoded for group in self._groups.values())
        return f"PlaceSizes({num_encoded} of {len(self._groups)} groups are encoded)"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Registers the groups of a key space."""
        for number, spec in enumerate(record.key_space.groups[:MAX_GROUPS]):
            size = aligned(spec.slot_bytes)
            encoded = size if self._encoded_bytes is None else self._encoded_bytes(size)
            self._groups[record.number, number] = _Group(size, encoded)

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets the groups of a key space."""
        for number in range(len(record.key_space.groups[:MAX_GROUPS])):
            del self._groups[record.number, number]

    def slot_bytes(self, key_space_id: int, group: int) -> int:
        """Returns the size of the group's slots in host memory."""
        return self._groups[key_space_id, group].slot_bytes

    def place_bytes(self, key_space_id: int, group: int) -> int:
        """Returns the size of the places for the group's next blocks."""
        known = self._groups[key_space_id, group]
        return known.encoded_bytes if known.is_encoded else known.slot_bytes

    def tried(self, key_space_id: int, group: int, num_fitted: int, num_blocks: int) -> None:
        """Counts `num_blocks` of a group that the tier tried to encode, of which `num_fitted`
        fitted their places."""
        known = self._groups[key_space_id, group]
        known.tried_blocks += num_blocks
        known.fitted_blocks += num_fitted
        if known.tried_blocks >= 2 * MAX_TRIED:
            known.tried_blocks //= 2
            known.fitted_blocks //= 2

    def kept_plain(self, key_space_id: int, group: int, num_blocks: int) -> None:
        """Counts blocks of a group that were written plain because the group is not encoded at
        present."""
        known = self._groups[key_space_id, group]
        known.plain_blocks += num_blocks
        if known.plain_blocks >= RETRY_BLOCKS:
            known.tried_blocks = known.fitted_blocks = known.plain_blocks = 0
