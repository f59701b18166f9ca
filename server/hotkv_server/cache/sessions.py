"""Key spaces and sessions, and the checks that every call of a session passes."""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.keys import MAX_GROUPS, KeySpace, Sketch
from hotkv_server.cache.room.removal import Books
from hotkv_server.cache.room.shares import TenantBook
from hotkv_server.cache.seams import Below
from hotkv_server.cache.values import (
    KEY_SPACE_ROWS,
    MAX_SKETCHES,
    KeySpaceRecord,
    SessionRecord,
)

# The catalog: known key spaces, and the kinds of sketches that sessions declared for them.
#
# Always true: equal fingerprints have one number, which is never reused. Equal kinds in one key
# space have one group index. A block of each registered group fits the arena. A key space with a
# session or a slot is never forgotten.
#
# Each tenant may register only its share (`Catalog.share_out`). To register one more, `surplus`
# chooses one of its key spaces without a session to forget: first one without a block, then the
# one left longest ago.


MAX_SHARDS = 31
MAX_KEY_SPACES = 4096
MAX_KEY_SPACES_OF_TENANT = 256
MAX_WEIGHT_BYTES = 32 << 20
"""Memory that the descriptions of all key spaces may use (`weight_bytes`)."""
FORGET_S = 600.0
"""A key space without a block is forgotten this long after its last session."""
_ENTRY_BYTES = 96
"""Of each string or number in a description, beside its characters; in memory and state file
together."""


def weight_bytes(key_space: KeySpace, kinds: Collection[Sketch] = ()) -> int:
    """Approximate memory that the catalog uses for a key space with these kinds of sketches."""
    names = [name for group in key_space.groups for name in group.layer_names]
    shards = [part.shard_bytes for part in key_space.groups] + [kind.shard_bytes for kind in kinds]
    num_entries = 16 + len(names) + len(key_space.extra) + sum(4 + len(sizes) for sizes in shards)
    return _ENTRY_BYTES * num_entries + 3 * sum(
        len(text) for text in (*names, *key_space.extra, key_space.model)
    )


@dataclass(slots=True)
class _Holding:
    """A tenant's key spaces in the catalog, and the memory of their descriptions."""

    count: int = 0
    weight_bytes: int = 0


class Catalog:
    """records: by number, from 1 on.
    revision: rises when a key space or a kind of sketch is added or forgotten.

    `num_tenants`: configured tenants; 0 without tenants.
    """

    def __init__(self, books: Books, num_tenants: int = 0, below: Sequence[Below] = ()) -> None:
        self.records: dict[int, KeySpaceRecord] = {}
        self.revision = 0
        self._books = books
        self._below = below
        self._numbers: dict[bytes, int] = {}
        self._last = 0
        self._rows = {0}
        self._sessions: dict[int, int] = {}
        # When the last session of each key space without one ended; oldest first.
        self._left_s: dict[int, float] = {}
        self._holdings: dict[str, _Holding] = {}
        self.share_out(num_tenants)

    def __repr__(self) -> str:
        return f"Catalog({len(self.records)} key spaces)"

    def share_out(self, num_tenants: int) -> None:
        """Gives each tenant an equal share; without tenants, all key spaces use one. A tenant
        above its share keeps its key spaces, but can't register more."""
        self.max_of_tenant = MAX_KEY_SPACES
        if num_tenants:
            self.max_of_tenant = min(MAX_KEY_SPACES_OF_TENANT, MAX_KEY_SPACES // num_tenants)
        self.max_weight_bytes = MAX_WEIGHT_BYTES // max(1, num_tenants)

    def record(self, number: int) -> KeySpaceRecord:
        """Raises UNKNOWN_KEY_SPACE."""
        record = self.records.get(number)
        if record is None:
            raise HotKVError(
                Reason.UNKNOWN_KEY_SPACE,
                f"key_space_id {number} is unknown; `hotkv status` lists those that are known",
            )
        return record

    def register(
        self,
        key_space: KeySpace,
        kinds: tuple[Sketch, ...],
        now_s: float,
        earlier_number: int = 0,
    ) -> tuple[int, tuple[int, ...]]:
        """Registers what is new. Returns the key space's number and the group index of each
        kind. Raises OVERLOADED if the tenant's share is used up. `earlier_number`: number in the
        earlier server, given again; 0 for a new one."""
        self._check(key_space, kinds)
        if not self._has_room(key_space, kinds):
            count = self._holding(key_space).count
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"key_space: of {len(self.records)} that this server knows {count} are this "
                    "tenant's, all in sessions: close some"
                ),
            )
        number = self._numbers.get(key_space.fingerprint)
        if number is None:
            number = self._next_number(earlier_number)
            self.records[number] = KeySpaceRecord(number, key_space)
            self.revision += 1
            self._numbers[key_space.fingerprint] = number
            self._left_s[number] = now_s
            self._count(key_space, 1, weight_bytes(key_space))
            self._books.tenants.add_key_space(number, key_space.tenant)
            self._books.index.add_key_space(
                number, [key_space.group_salt(g) for g in range(len(key_space.groups))]
            )
            for one in self._below:
                one.add_key_space(self.records[number])
        return number, tuple(self._group_index(number, kind) for kind in kinds)

    def number(self, fingerprint: bytes) -> int:
        """0 if not registered."""
        return self._numbers.get(fingerprint, 0)

    def enter(self, number: int) -> None:
        """Counts one more open session."""
        self._sessions[number] = self._sessions.get(number, 0) + 1
        self._left_s.pop(number, None)

    def leave(self, number: int, now_s: float) -> None:
        """Counts one session less."""
        self._sessions[number] -= 1
        if not self._sessions[number]:
            del self._sessions[number]
            self._left_s[number] = now_s

    def surplus(
        self,
        key_space: KeySpace,
        kinds: tuple[Sketch, ...],
        tried: Container[int] = (),
    ) -> int:
        """Number of a key space to forget, not in `tried`, so that `key_space` can be
        registered. 0 if there is room, or if none of the tenant's may be forgotten. Raises
        HotKVError if forgetting can't help, for example because a block does not fit the arena."""
        self._check(key_space, kinds)
        if self._has_room(key_space, kinds):
            return 0
        known = self._numbers.get(key_space.fingerprint)
        owner = self._owner(key_space)
        mine = [
            number
            for number in self._left_s
            if number != known
            and number not in tried
            and self._owner(self.records[number].key_space) == owner
        ]
        return next(
            (number for number in mine if not self.has_blocks(number)),
            mine[0] if mine else 0,
        )

    def outlived(self, now_s: float) -> Iterator[int]:
        """Key spaces without a block and, for FORGET_S, without a session. The catalog must not
        change during the iteration."""
        for number, left_s in self._left_s.items():
            if left_s > now_s - FORGET_S:
                return
            if not self.has_blocks(number):
                yield number

    def has_blocks(self, number: int) -> bool:
        """True for a slot in host memory, a block on the disk, or a move. Shared stores are not
        asked."""
        return bool(self._books.tenants.bytes_of(number)) or (
            any(one.has_blocks(number) for one in self._below)
        )

    def forget(self, number: int) -> bool:
        """False, with nothing changed, if the key space has a session or a block, or is unknown."""
        if number not in self._left_s or self.has_blocks(number):
            return False
        record = self.records.pop(number)
        self.revision += 1
        del self._left_s[number], self._numbers[record.key_space.fingerprint]
        self._rows.remove(number % KEY_SPACE_ROWS)
        for one in self._below:
            one.forget_key_space(record)
        self._count(record.key_space, -1, -weight_bytes(record.key_space, record.sketches))
        return True

    def _owner(self, key_space: KeySpace) -> str:
        return key_space.tenant if self._books.tenants.is_used else ""

    def _holding(self, key_space: KeySpace) -> _Holding:
        return self._holdings.get(self._owner(key_space), _Holding())

    def _count(self, key_space: KeySpace, count: int, num_bytes: int) -> None:
        holding = self._holdings.setdefault(self._owner(key_space), _Holding())
        holding.count, holding.weight_bytes = (
            holding.count + count,
            holding.weight_bytes + num_bytes,
        )
        if not holding.count:
            del self._holdings[self._owner(key_space)]

    def _next_number(self, earlier_number: int) -> int:
        self._last = earlier_number or self._last + 1
        while self._last % KEY_SPACE_ROWS in self._rows:
            self._last += 1
        self._rows.add(self._last % KEY_SPACE_ROWS)
        return self._last

    def _has_room(self, key_space: KeySpace, kinds: tuple[Sketch, ...]) -> bool:
        number, holding = self._numbers.get(key_space.fingerprint), self._holding(key_space)
        if number is None:
            more_bytes = weight_bytes(key_space, kinds)
            return (
                len(self.records) < MAX_KEY_SPACES
                and holding.count < self.max_of_tenant
                and holding.weight_bytes + more_bytes <= self.max_weight_bytes
            )
        known = self.records[number].sketches
        more_bytes = weight_bytes(key_space, {*known, *kinds}) - weight_bytes(key_space, known)
        return not more_bytes or holding.weight_bytes + more_bytes <= self.max_weight_bytes

    def _group_index(self, number: int, kind: Sketch) -> int:
        record = self.records[number]
        if kind in record.sketches:
            return MAX_GROUPS + record.sketches.index(kind)
        group_index = MAX_GROUPS + len(record.sketches)
        self.records[number] = replace(record, sketches=(*record.sketches, kind))
        self.revision += 1
        self._count(
            record.key_space,
            0,
            weight_bytes(record.key_space, (kind,)) - weight_bytes(record.key_space),
        )
        self._books.sketches.declare(number, group_index, record.key_space.sketch_salt(kind))
        return group_index

    def _check(self, key_space: KeySpace, kinds: tuple[Sketch, ...]) -> None:
        if key_space.num_shards > MAX_SHARDS:
            raise invalid(
                f"key_space.groups have {key_space.num_shards} shards; at most {MAX_SHARDS} "
                "are supported"
            )
        for index, group in enumerate(key_space.groups):
            self._check_fits(f"key_space.groups[{index}]: a block", group.slot_bytes)

        number = self._numbers.get(key_space.fingerprint)
        known = () if number is None else self.records[number].sketches
        if len(set(kinds)) != len(kinds):
            raise invalid("sketches lists one twice; give each once")
        if len({*known, *kinds}) > MAX_SKETCHES:
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"sketches: this server already knows {len(known)} kinds of them for "
                    "the key space"
                ),
            )
        for index, kind in enumerate(kinds):
            name = f"sketches[{index}]"
            if kind.group_index >= len(key_space.groups):
                raise invalid(
                    f"{name}.group_index is {kind.group_index}; this key space has "
                    f"{len(key_space.groups)} groups"
                )
            if len(kind.shard_bytes) != key_space.num_shards:
                raise invalid(
                    f"{name}.shard_byte_counts has {len(kind.shard_bytes)} entries; this key "
                    f"space has {key_space.num_shards}"
                )
            self._check_fits(f"{name}: that of a block", kind.slot_bytes)

    def _check_fits(self, what: str, slot_bytes: int) -> None:
        arena_bytes = self._books.pool.bar_start * self._books.pool.slab_bytes
        if slot_bytes > arena_bytes:
            raise invalid(f"{what} of {slot_bytes} bytes does not fit the arena of {arena_bytes}")

    def check_invariants(self, in_sessions: list[int]) -> None:
        """`in_sessions`: key space number of each live session."""
        assert self._sessions == {
            number: in_sessions.count(number) for number in set(in_sessions)
        }, "sessions of key spaces miscounted"
        assert set(self.records) == set(self._sessions) | set(self._left_s), (
            "a key space is neither in use nor left"
        )
        assert not set(self._sessions) & set(self._left_s), "a key space is in use and left"
        assert self._numbers == {
            record.key_space.fingerprint: number for number, record in self.records.items()
        }, "fingerprints disagree"
        _check_holdings(self)


def _check_holdings(catalog: Catalog) -> None:
    assert catalog._rows == {0, *(number % KEY_SPACE_ROWS for number in catalog.records)}, (
        "rows disagree"
    )
    assert len(catalog._rows) == len(catalog.records) + 1 <= MAX_KEY_SPACES + 1, (
        "two key spaces share a row"
    )
    counted: dict[str, _Holding] = {}
    for record in catalog.records.values():
        holding = counted.setdefault(catalog._owner(record.key_space), _Holding())
        holding.count += 1
        holding.weight_bytes += weight_bytes(record.key_space, record.sketches)
    assert catalog._holdings == counted, "what tenants have of the catalog is miscounted"


# Sessions. While the server drains, nothing new begins, and running work can end.


def check_named(
    record: KeySpaceRecord,
    groups: Iterable[int],
    num_blocks: int,
    most_blocks: int,
    *,
    only_blocks: bool = False,
) -> None:
    """Raises HotKVError for an unknown group or more than `most_blocks` blocks. `only_blocks`:
    sketches are refused too."""
    for group_index in groups:
        if not record.has(group_index):
            raise invalid(
                f"groups.group_index is {group_index}; this key space has "
                f"{len(record.key_space.groups)} groups"
            )
        if only_blocks and group_index >= MAX_GROUPS:
            raise invalid(
                "groups.group_index names a sketch; those go with their blocks, so name these"
            )
    check_most(most_blocks, num_blocks, "the call names {} blocks")


class SessionBook:
    """Live sessions, by number."""

    def __init__(self, catalog: Catalog, tenants: TenantBook) -> None:
        self.records: dict[int, SessionRecord] = {}
        self.draining = False
        self._catalog = catalog
        self._tenants = tenants
        self._next_number = 1

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, number: int) -> bool:
        return number in self.records

    def __repr__(self) -> str:
        return f"SessionBook({len(self)} sessions{', draining' if self.draining else ''})"

    def open(
        self,
        engine_id: str,
        role: str,
        key_space: KeySpace,
        now_s: float,
        sketches: tuple[Sketch, ...],
    ) -> SessionRecord:
        """As `CacheCore.open_session`. Raises INVALID_FIELD if `engine_id` is empty, DRAINING,
        and the errors of `Catalog.register`."""
        if not engine_id:
            raise invalid("engine_id is empty; give one id to all sessions of an engine")
        self.check_takes_new("takes no new sessions")
        key_space_id, groups = self._catalog.register(key_space, sketches, now_s)
        self._catalog.enter(key_space_id)
        owner = key_space.tenant if self._tenants.is_used else engine_id
        record = SessionRecord(
            self._next_number, engine_id, owner, role, key_space_id, now_s, groups
        )
        self._next_number += 1
        self.records[record.number] = record
        return record

    def close(self, number: int, now_s: float) -> None:
        """Its leases and transfers must have ended."""
        self._catalog.leave(self.records.pop(number).key_space_id, now_s)

    def record(self, number: int) -> SessionRecord:
        """Raises UNKNOWN_SESSION."""
        record = self.records.get(number)
        if record is None:
            raise HotKVError(
                Reason.UNKNOWN_SESSION, "session_id is unknown or closed; open a new session"
            )
        return record

    def check_takes_new(self, refusal: str) -> None:
        """Raises DRAINING while the server drains. `refusal` ends the message: "takes no new
        sessions"."""
        if self.draining:
            raise HotKVError(Reason.DRAINING, f"the server is draining and {refusal}")
