"""Chooses the sizes of the places that blocks get on the disk: as large as the block's slot in host
memory, or smaller, so that the tier stores the block encoded (compressed).

Always true: the disk tier encodes a block if and only if its place is smaller than its slot (place
in the arena).

Whether the encoded form of a block fits its place is known only when the tier writes the block. If
few blocks of a KV cache group have an encoded form that fits, the group's next blocks get places as
large as their slots. After RETRY_BLOCKS such blocks, encoding of the group is tried again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.values import KeySpaceRecord

MIN_TRIED = 64
"""Number of blocks of a group that the tier must have tried to encode before their results can stop
the encoding of the group (HARDLY)."""
MAX_TRIED = 4096
"""When the tier has tried to encode twice this number of a group's blocks, the group's counts are
halved, so that old results weigh less."""
HARDLY = 8
"""The blocks of a KV cache group are no longer encoded (compressed) if fewer than 1 in 8 of the
blocks that the tier tried to encode had an encoded form that fitted its place."""
RETRY_BLOCKS = 1 << 15
"""If a group is no longer encoded, encoding is tried again after this number of the group's blocks
was written without encoding."""
EncodedBytes = Callable[[int], int]
"""Returns the size of the place for an encoded block, given the size of the block's slot. The
result is a multiple of SLOT_ALIGN. If the place would not be smaller than the slot, encoding is
useless."""


@dataclass(slots=True)
class _Group:
    """A KV cache group of a key space (a model in a configuration), with counts of its blocks.

    `slot_bytes`: size of the group's slots in host memory.
    `encoded_bytes`: size of the place for an encoded block.
    `tried_blocks`: recent blocks that the tier tried to encode.
    `fitted_blocks`: how many of the tried blocks had an encoded form that fitted its place.
    `plain_blocks`: blocks written without encoding since encoding of the group was stopped.
    """

    slot_bytes: int
    encoded_bytes: int
    tried_blocks: int = 0
    fitted_blocks: int = 0
    plain_blocks: int = 0

    @property
    def is_encoded(self) -> bool:
        """True if the disk tier is to encode (compress) the group's next blocks."""
        is_judged = self.tried_blocks >= MIN_TRIED
        hardly = is_judged and self.fitted_blocks * HARDLY < self.tried_blocks
        return self.encoded_bytes < self.slot_bytes and not hardly


class PlaceSizes:
    """Chooses the sizes of the places that blocks get on the disk; see the module. In its methods,
    `group` is the number of a KV cache group of the key space `key_space_id`.

    `encoded_bytes`: returns the size of the place for an encoded (compressed) block, given the size
        of its slot; None if blocks are never encoded.
    """

    def __init__(self, encoded_bytes: EncodedBytes | None = None) -> None:
        self._encoded_bytes = encoded_bytes
        self._groups: dict[tuple[int, int], _Group] = {}

    def __repr__(self) -> str:
        num_encoded = sum(group.is_encoded for group in self._groups.values())
        return f"PlaceSizes({num_encoded} of {len(self._groups)} groups are encoded)"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Registers the KV cache groups of a key space (a model in a configuration), so that sizes
        for their blocks on the disk can be chosen."""
        for number, spec in enumerate(record.key_space.groups[:MAX_GROUPS]):
            size = aligned(spec.slot_bytes)
            encoded = size if self._encoded_bytes is None else self._encoded_bytes(size)
            self._groups[record.number, number] = _Group(size, encoded)

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets the groups of a key space (a model in a configuration)."""
        for number in range(len(record.key_space.groups[:MAX_GROUPS])):
            del self._groups[record.number, number]

    def slot_bytes(self, key_space_id: int, group: int) -> int:
        """Returns the size of the group's slots in host memory."""
        return self._groups[key_space_id, group].slot_bytes

    def place_bytes(self, key_space_id: int, group: int) -> int:
        """Returns the size of the places (ranges of the disk's file) that the group's next blocks
        get on the disk."""
        known = self._groups[key_space_id, group]
        return known.encoded_bytes if known.is_encoded else known.slot_bytes

    def tried(self, key_space_id: int, group: int, num_fitted: int, num_blocks: int) -> None:
        """Counts `num_blocks` blocks of a group that the tier tried to encode. `num_fitted`: how
        many of these blocks had an encoded form that fitted its place (range of the disk's file).
        """
        known = self._groups[key_space_id, group]
        known.tried_blocks += num_blocks
        known.fitted_blocks += num_fitted
        if known.tried_blocks >= 2 * MAX_TRIED:
            known.tried_blocks //= 2
            known.fitted_blocks //= 2

    def kept_plain(self, key_space_id: int, group: int, num_blocks: int) -> None:
        """Counts blocks that were written without encoding, because their group is not encoded at
        present. After RETRY_BLOCKS such blocks, the group is encoded again."""
        known = self._groups[key_space_id, group]
        known.plain_blocks += num_blocks
        if known.plain_blocks >= RETRY_BLOCKS:
            known.tried_blocks = known.fitted_blocks = known.plain_blocks = 0
