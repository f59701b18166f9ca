"""Key spaces and sessions (connections of clients, each for one key space), and the checks that
every call of a session passes.

Sessions may declare kinds of sketches for the blocks of their key space (a model in a
configuration). A sketch is a compact summary of a block's attention keys, for sparse
attention.
"""

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

# The catalog: the key spaces (each is a model in a configuration) that this server knows, and the
# kinds of sketches (compact forms of blocks' keys) that sessions have declared.
#
# Always true: key spaces with equal fingerprints have the same number. Equal kinds of
# sketches in one key space have the same group index. A number is never reused. Every
# registered key space can be served: a block of each group fits the arena. The catalog never
# forgets a key space that has a session or a slot.
#
# Each tenant may register only its share of key spaces (`Catalog.share_out`). To register one more,
# another key space of the tenant must be forgotten first. `Catalog.surplus` chooses this key space
# among those without a session. It prefers a key space without a block, and then the key space
# whose last session ended longest ago.


MAX_SHARDS = 31
MAX_KEY_SPACES = 4096
MAX_KEY_SPACES_OF_TENANT = 256
MAX_WEIGHT_BYTES = 32 << 20
"""Most memory, in bytes, that the descriptions of all tenants' key spaces together may use
(`weight_bytes`), not their blocks."""
FORGET_S = 600.0
"""A key space without a block is forgotten this many seconds after its last session (connection of
an engine) has ended."""
_ENTRY_BYTES = 96
"""Bytes that each string or number in the description of a key space uses in addition to its
characters, in memory and in the server's state file together."""


def weight_bytes(key_space: KeySpace, kinds: Collection[Sketch] = ()) -> int:
    """Returns the approximate bytes of memory that the catalog uses for a key space (a model in
    a configuration) with these kinds of sketches (compact summaries of blocks' attention
    keys, for sparse attention)."""
    names = [name for group in key_space.groups for name in group.layer_names]
    shards = [part.shard_bytes for part in key_space.groups] + [kind.shard_bytes for kind in kinds]
    num_entries = 16 + len(names) + len(key_space.extra) + sum(4 + len(sizes) for sizes in shards)
    return _ENTRY_BYTES * num_entries + 3 * sum(
        len(text) for text in (*names, *key_space.extra, key_space.model)
    )


@dataclass(slots=True)
class _Holding:
    """The number of a tenant's key spaces (each is a model in a configuration) in the catalog,
    and the bytes of memory that the catalog uses for them."""

    count: int = 0
    weight_bytes: int = 0


class Catalog:
    """The known key spaces. A key space is a model in a configuration; its `KeySpaceRecord` has
    a number from 1 on.

    records: the known key spaces by number.
    revision: number that rises when a key space or a kind of sketch (compact summary of a
        block's attention keys) is added or forgotten.

    Arguments of the constructor: `books` is the state of the arena, `num_tenants` the number of
    configured tenants (0: no tenants), `below` the tiers below host memory.
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
        # For each key space without a session: when its last session ended. The oldest comes first.
        self._left_s: dict[int, float] = {}
        self._holdings: dict[str, _Holding] = {}
        self.share_out(num_tenants)

    def __repr__(self) -> str:
        return f"Catalog({len(self.records)} key spaces)"

    def share_out(self, num_tenants: int) -> None:
        """Limits each of `num_tenants` tenants to an equal share of the catalog. If no tenants are
        configured (0), all key spaces (each is a model in a configuration) use one share. A
        tenant above its share keeps its key spaces, but can't register more until enough of its key
        spaces are forgotten."""
        self.max_of_tenant = MAX_KEY_SPACES
        if num_tenants:
            self.max_of_tenant = min(MAX_KEY_SPACES_OF_TENANT, MAX_KEY_SPACES // num_tenants)
        self.max_weight_bytes = MAX_WEIGHT_BYTES // max(1, num_tenants)

    def record(self, number: int) -> KeySpaceRecord:
        """Returns the key space (a model in a configuration) with this number. Raises
        UNKNOWN_KEY_SPACE."""
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
        """Registers a key space (a model in a configuration) and kinds of sketches
        (compact summaries of attention keys) the first time they are seen. Returns the number of
        the key space and the group index of each kind. Raises OVERLOADED if the tenant's share of
        the catalog is used up (`share_out`).

        earlier_number: the key space's number in the earlier server, which it gets again; 0 for a
            new number.
        """
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
        """Returns the number of the key space (a model in a configuration) with this fingerprint
        (the hash of its fields); 0 if it is not registered."""
        return self._numbers.get(fingerprint, 0)

    def enter(self, number: int) -> None:
        """Counts one more open session (an engine's connection) of the key space of this number."""
        self._sessions[number] = self._sessions.get(number, 0) + 1
        self._left_s.pop(number, None)

    def leave(self, number: int, now_s: float) -> None:
        """Subtracts one from the number of open sessions (connections of engines) of the key space
        with this number. If that was the last session, records `now_s` as the time when it ended.
        """
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
        """Chooses a key space (a model in a configuration) to forget, so that there is room to
        register `key_space`. Returns the number of the chosen key space, never a number in `tried`.
        Returns 0 if the tenant's share of the catalog has room already, or if no other key space of
        the tenant may be forgotten. `kinds`: the kinds of sketches (compact summaries of
        blocks' attention keys) of `key_space`.

        Raises HotKVError if forgetting key spaces can't help, for example because a block of
        `key_space` does not fit the arena.
        """
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
        """Yields the numbers of key spaces (each is a model in a configuration) that have no
        block and have had no session for FORGET_S. The catalog must not change during the
        iteration."""
        for number, left_s in self._left_s.items():
            if left_s > now_s - FORGET_S:
                return
            if not self.has_blocks(number):
                yield number

    def has_blocks(self, number: int) -> bool:
        """Returns True if the key space (a model in a configuration) has a slot in host memory
        or a block on the disk, or if one of its blocks is being moved between tiers. Does not ask
        shared tiers."""
        return bool(self._books.tenants.bytes_of(number)) or (
            any(one.has_blocks(number) for one in self._below)
        )

    def forget(self, number: int) -> bool:
        """Removes a key space (a model in a configuration). Returns False, with nothing changed, if
        the key space has a session (connection of an engine) or a block, or is unknown."""
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
        arena_bytes = self._books.pool.num_slabs * self._books.pool.slab_bytes
        if slot_bytes > arena_bytes:
            raise invalid(f"{what} of {slot_bytes} bytes does not fit the arena of {arena_bytes}")

    def check_invariants(self, in_sessions: list[int]) -> None:
        """Raises AssertionError if the catalog's counts of sessions, numbers of key spaces (each is
        a model in a configuration) and rows in arrays disagree. `in_sessions`: the number of the
        key space of each live session."""
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
    """Raises AssertionError if two key spaces (each is a model in a configuration) have the
    same row (number modulo KEY_SPACE_ROWS) in arrays, or if the catalog has miscounted a tenant's
    key spaces or their memory."""
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


# Sessions (connections of clients), and the checks that every call of a session passes.
#
# Always true: a number names a single session and is never reused. The catalog knows the key space
# of every session. While the server drains (before it stops), nothing new begins, and running work
# can end.


def check_named(
    record: KeySpaceRecord,
    groups: Iterable[int],
    num_blocks: int,
    most_blocks: int,
    *,
    only_blocks: bool = False,
) -> None:
    """Raises HotKVError unless the key space (a model in a configuration) has all these groups
    and a call may name `num_blocks` blocks.

    groups: indices of the groups that the call names.
    most_blocks: the most blocks that a call may name.
    only_blocks: if True, refuses indices of sketches (compact summaries of blocks' attention
        keys) too.
    """
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
    """Live sessions (connections of clients), by number. `draining`: True while the server refuses
    new sessions, leases and transfers, because it is about to stop."""

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
        """Opens a session (connection of a client). Registers its key space (a model in a
        configuration) and its kinds of sketches if they are not registered yet.

        engine_id: id that all sessions of one engine share.
        role: `scheduler`, `worker` or `tool`; only shown to operators.
        sketches: kinds of sketches (compact summaries of blocks' attention keys, for
            sparse attention) that the session will store or load.

        Raises INVALID_FIELD if `engine_id` is empty, DRAINING while the server drains (refuses new
        work), and the errors of `Catalog.register`.
        """
        if not engine_id:
            raise invalid("engine_id is empty; give one id to all sessions of an engine")
        self.check_takes_new("takes no new sessions")
        key_space_id, groups = self._catalog.register(key_space, sketches, now_s)
        self._catalog.enter(key_space_id)
        record = SessionRecord(self._next_number, engine_id, role, key_space_id, now_s, groups)
        self._next_number += 1
        self.records[record.number] = record
        return record

    def close(self, number: int, now_s: float) -> None:
        """Removes a session whose leases and transfers have ended."""
        self._catalog.leave(self.records.pop(number).key_space_id, now_s)

    def record(self, number: int) -> SessionRecord:
        """Returns the session with this number. Raises UNKNOWN_SESSION."""
        if number not in self.records:
            raise HotKVError(
                Reason.UNKNOWN_SESSION, "session_id is unknown or closed; open a new session"
            )
        return self.records[number]

    def owner(self, session: SessionRecord) -> str:
        """Returns the owner of a session (a client's connection): its tenant, or its engine if no
        tenants are configured. `FairBound` limits the leases and transfers of each owner."""
        return (
            self._catalog.record(session.key_space_id).key_space.tenant
            if self._tenants.is_used
            else session.engine_id
        )

    def check_takes_new(self, refusal: str) -> None:
        """Raises DRAINING while the server drains (refuses new work). `refusal`: ends the error's
        message, for example "takes no new sessions"."""
        if self.draining:
            raise HotKVError(Reason.DRAINING, f"the server is draining and {refusal}")
