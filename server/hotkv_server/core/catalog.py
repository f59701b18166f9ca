"""The key spaces that this server knows, and the kinds of representations that sessions have declared for their blocks.

Always true: equal fingerprints have one number, and so have equal kinds of representations in one key space; numbers are never given
away anew. What is registered can be served: a block of each group fits the arena.
"""

from dataclasses import replace

from hotkv.errors import HotKVError, Reason
from hotkv.keys import MAX_GROUPS, KeySpace, Representation
from hotkv_server.core.space import Space
from hotkv_server.core.values import KeySpaceRecord

MAX_SHARDS = 31
MAX_KEY_SPACES = 4096
MAX_REPRESENTATIONS = 256
"""Most kinds of representations of one key space."""


def _invalid(message: str) -> HotKVError:
    return HotKVError(Reason.INVALID_FIELD, message)


class Catalog:
    """Records of key spaces by number, from 1 on."""

    def __init__(self, space: Space) -> None:
        self.records: dict[int, KeySpaceRecord] = {}
        self._space = space
        self._numbers: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"Catalog({len(self.records)} key spaces)"

    @property
    def num_kinds(self) -> int:
        """Kinds of representations, over all key spaces."""
        return sum(len(record.representations) for record in self.records.values())

    def record(self, number: int) -> KeySpaceRecord:
        """The key space with this number. Raises UNKNOWN_KEY_SPACE."""
        record = self.records.get(number)
        if record is None:
            raise HotKVError(Reason.UNKNOWN_KEY_SPACE, f"key_space_id {number} is unknown; known are 1 to {len(self.records)}")
        return record

    def register(self, key_space: KeySpace, kinds: tuple[Representation, ...]) -> tuple[int, tuple[int, ...]]:
        """Number of a key space, and the group index of each kind of representation; they are noted on first sight."""
        number = self._numbers.get(key_space.fingerprint)
        if number is None:
            self._check_key_space(key_space)
        self._check_kinds(key_space, kinds, () if number is None else self.records[number].representations)
        if number is None:
            number = len(self.records) + 1
            self.records[number] = KeySpaceRecord(number, key_space)
            self._numbers[key_space.fingerprint] = number
            self._space.tenants.add_key_space(number, key_space.tenant)
            self._space.index.add_key_space(number, [key_space.group_salt(g) for g in range(len(key_space.groups))])
        return number, tuple(self._group_index(number, kind) for kind in kinds)

    def _group_index(self, number: int, kind: Representation) -> int:
        record = self.records[number]
        if kind in record.representations:
            return MAX_GROUPS + record.representations.index(kind)
        group_index = MAX_GROUPS + len(record.representations)
        self.records[number] = replace(record, representations=(*record.representations, kind))
        self._space.representations.declare(number, group_index, record.key_space.representation_salt(kind))
        return group_index

    def _check_key_space(self, key_space: KeySpace) -> None:
        if len(self.records) >= MAX_KEY_SPACES:
            raise HotKVError(Reason.OVERLOADED, f"key_space: this server already knows {MAX_KEY_SPACES} key spaces")
        if key_space.num_shards > MAX_SHARDS:
            raise _invalid(f"key_space.groups have {key_space.num_shards} shards; at most {MAX_SHARDS} are supported")
        for index, group in enumerate(key_space.groups):
            self._check_fits(f"key_space.groups[{index}]: a block", group.slot_bytes)

    def _check_kinds(self, key_space: KeySpace, kinds: tuple[Representation, ...], known: tuple[Representation, ...]) -> None:
        if len(set(kinds)) != len(kinds):
            raise _invalid("representations lists one twice; give each once")
        if len({*known, *kinds}) > MAX_REPRESENTATIONS:
            raise HotKVError(Reason.OVERLOADED, f"representations: this server already knows {len(known)} kinds of them for the key space")
        for index, kind in enumerate(kinds):
            name = f"representations[{index}]"
            if kind.group_index >= len(key_space.groups):
                raise _invalid(f"{name}.group_index is {kind.group_index}; this key space has {len(key_space.groups)} groups")
            if len(kind.shard_bytes) != key_space.num_shards:
                raise _invalid(f"{name}.shard_byte_counts has {len(kind.shard_bytes)} entries; this key space has {key_space.num_shards}")
            self._check_fits(f"{name}: that of a block", kind.slot_bytes)

    def _check_fits(self, what: str, slot_bytes: int) -> None:
        pool = self._space.pool
        if pool.capacity_slots(slot_bytes) == 0:
            raise _invalid(f"{what} of {slot_bytes} bytes does not fit the arena of {pool.num_slabs * pool.slab_bytes}")
