"""Chooses the sizes of places on the disk.

Always true: a block is encoded (compressed) if and only if its place is smaller than its slot.
Whether its form fits is known only at the write. If few of a group's forms fit, RETRY_BLOCKS are
written plain before encoding is tried again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.values import KeySpaceRecord, aligned

MIN_TRIED = 64
"""Tried blocks before a group's results count."""
MAX_TRIED = 4096
"""At twice this a group's counts are halved: old results weigh less."""
HARDLY = 8
"""A group is no longer encoded if fewer than 1 in 8 tried blocks fit."""
RETRY_BLOCKS = 1 << 15
EncodedBytes = Callable[[int], int]
"""Slot size to an encoded block's place size, a multiple of SLOT_ALIGN. If not smaller, encoding
is useless."""


@dataclass(slots=True)
class _Group:
    """`tried_blocks`: recent blocks that the tier tried to encode.
    `fitted_blocks`: of these, in their place.
    `plain_blocks`: written since encoding was stopped.
    """

    slot_bytes: int
    encoded_bytes: int
    tried_blocks: int = 0
    fitted_blocks: int = 0
    plain_blocks: int = 0

    @property
    def is_encoded(self) -> bool:
        is_judged = self.tried_blocks >= MIN_TRIED
        hardly = is_judged and self.fitted_blocks * HARDLY < self.tried_blocks
        return self.encoded_bytes < self.slot_bytes and not hardly


class PlaceSizes:
    """See the module. `encoded_bytes`: None: blocks are never encoded."""

    def __init__(self, encoded_bytes: EncodedBytes | None = None) -> None:
        self._encoded_bytes = encoded_bytes
        self._groups: dict[tuple[int, int], _Group] = {}

    def __repr__(self) -> str:
        num_encoded = sum(group.is_encoded for group in self._groups.values())
        return f"PlaceSizes({num_encoded} of {len(self._groups)} groups are encoded)"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        for number, spec in enumerate(record.key_space.groups[:MAX_GROUPS]):
            size = aligned(spec.slot_bytes)
            encoded = size if self._encoded_bytes is None else self._encoded_bytes(size)
            self._groups[record.number, number] = _Group(size, encoded)

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        for number in range(len(record.key_space.groups[:MAX_GROUPS])):
            del self._groups[record.number, number]

    def slot_bytes(self, key_space_id: int, group: int) -> int:
        return self._groups[key_space_id, group].slot_bytes

    def place_bytes(self, key_space_id: int, group: int) -> int:
        """Of the group's next blocks."""
        known = self._groups[key_space_id, group]
        return known.encoded_bytes if known.is_encoded else known.slot_bytes

    def tried(self, key_space_id: int, group: int, num_fitted: int, num_blocks: int) -> None:
        known = self._groups[key_space_id, group]
        known.tried_blocks += num_blocks
        known.fitted_blocks += num_fitted
        if known.tried_blocks >= 2 * MAX_TRIED:
            known.tried_blocks //= 2
            known.fitted_blocks //= 2

    def kept_plain(self, key_space_id: int, group: int, num_blocks: int) -> None:
        """Counts blocks written plain because their group is not encoded at present."""
        known = self._groups[key_space_id, group]
        known.plain_blocks += num_blocks
        if known.plain_blocks >= RETRY_BLOCKS:
            known.tried_blocks = known.fitted_blocks = known.plain_blocks = 0
