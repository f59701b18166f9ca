"""How large the places of blocks in a tier below are: as their slots, or less for encoded ones.

The tier encodes a block that gets a place smaller than its slot. Whether its bytes fit, nobody
knows before they are written. Always true: the size of a place says how its block lies there.
Groups of which hardly a block fits get places as large as their slots, and are tried again later.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.room.slabs import aligned
from hotkv_server.cache.values import KeySpaceRecord

MIN_TRIED = 64
"""Blocks of a group that are tried before it is judged."""
MAX_TRIED = 4096
"""Twice as many count half: what was tried long ago is forgotten."""
HARDLY = 8
"""A group of which fewer than one block in so many fits is not tried any more."""
RETRY_BLOCKS = 1 << 15
"""After so many blocks of a group were written as they are, it is tried anew."""
EncodedBytes = Callable[[int], int]
"""Bytes of the place of an encoded block, by those of its slot: a multiple of SLOT_ALIGN. As many
or more: nothing is won."""


@dataclass(slots=True)
class _Group:
    """A group of a key space. `plain_blocks`: written as they are since it was judged."""

    slot_bytes: int
    encoded_bytes: int
    tried_blocks: int = 0
    fitted_blocks: int = 0
    plain_blocks: int = 0

    @property
    def is_encoded(self) -> bool:
        """Whether its next blocks are to be tried."""
        is_judged = self.tried_blocks >= MIN_TRIED
        hardly = is_judged and self.fitted_blocks * HARDLY < self.tried_blocks
        return self.encoded_bytes < self.slot_bytes and not hardly


class PlaceSizes:
    """See the module. `encoded_bytes`: None if no block is to be encoded."""

    def __init__(self, encoded_bytes: EncodedBytes | None = None) -> None:
        self._encoded_bytes = encoded_bytes
        self._groups: dict[tuple[int, int], _Group] = {}

    def __repr__(self) -> str:
        num_encoded = sum(group.is_encoded for group in self._groups.values())
        return f"PlaceSizes({num_encoded} of {len(self._groups)} groups are encoded)"

    def add_key_space(self, record: KeySpaceRecord) -> None:
        """Declares the groups of a key space."""
        for number, spec in enumerate(record.key_space.groups[:MAX_GROUPS]):
            size = aligned(spec.slot_bytes)
            encoded = size if self._encoded_bytes is None else self._encoded_bytes(size)
            self._groups[record.number, number] = _Group(size, encoded)

    def forget_key_space(self, record: KeySpaceRecord) -> None:
        """Forgets the groups of a key space."""
        for number in range(len(record.key_space.groups[:MAX_GROUPS])):
            del self._groups[record.number, number]

    def slot_bytes(self, key_space_id: int, group: int) -> int:
        """Size of the group's slots in host memory."""
        return self._groups[key_space_id, group].slot_bytes

    def place_bytes(self, key_space_id: int, group: int) -> int:
        """Size of the places that the group's next blocks get."""
        known = self._groups[key_space_id, group]
        return known.encoded_bytes if known.is_encoded else known.slot_bytes

    def tried(self, key_space_id: int, group: int, num_fitted: int, num_blocks: int) -> None:
        """The tier has tried to encode so many blocks of a group, of which so many fitted."""
        known = self._groups[key_space_id, group]
        known.tried_blocks += num_blocks
        known.fitted_blocks += num_fitted
        if known.tried_blocks >= 2 * MAX_TRIED:
            known.tried_blocks //= 2
            known.fitted_blocks //= 2

    def kept_plain(self, key_space_id: int, group: int, num_blocks: int) -> None:
        """So many blocks of a group that is not tried any more are written as they are."""
        known = self._groups[key_space_id, group]
        known.plain_blocks += num_blocks
        if known.plain_blocks >= RETRY_BLOCKS:
            known.tried_blocks = known.fitted_blocks = known.plain_blocks = 0
