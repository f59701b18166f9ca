"""A naive model of the cache. It does not predict which blocks the policy evicts, but checks
that each was allowed to go."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from hotkv_proto import table
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.table import RESERVED_FLAG
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.room.policies.shared import Highest
from hotkv_server.cache.room.shares import PinBudget, TenantBook
from hotkv_server.cache.room.slabs import ABSENT, SlabFloors
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Counters, HashList
from hotkv_sparse.server.residency.book.register import ResidentGroup
from tests.core.support import reason_of, residencies, words_of

Key = tuple[int, int, int]
"""Key space, group, and the number from which the block's hash is made."""
GARBAGE: Key = (-1, -1, -1)
NUM_HASHES = 14


@dataclass
class ModelLease:
    """A read lease or a write lease.

    keys: pinned blocks, none after a flush; of a write lease, those reserved and not yet stored.
    asked: (group, block numbers) of the call that opened the lease.
    """

    write: bool
    engine_id: str
    lease_id: str
    session: int
    key_space_id: int
    expires_s: float
    keys: list[Key] = field(default_factory=list)
    asked: list[tuple[int, list[int]]] = field(default_factory=list)
    granted: list[list[bool]] = field(default_factory=list)
    pinned_bytes: int = 0
    admitted: bool = False
    has_promise: bool = False
    shards_seen: int = 0
    copies: int = 0
    released: bool = False


@dataclass
class ModelResidency:
    """`rows` has the key (None after a flush), number of the hash, and slot, by group and
    position."""

    engine_id: str
    session: int
    key_space_id: int
    asked: dict[int, int]
    rows: dict[int, dict[int, tuple[Key | None, int, int]]] = field(default_factory=dict)
    is_open: bool = True


@dataclass
class ModelTransfer:
    """A copy in flight.

    todo: for each block: index of its run, position there, key, offset of the slot.
    residency: pins the blocks once the copy has made them ready.
    """

    lease: ModelLease | None
    shard_index: int
    todo: list[tuple[int, int, Key, int]]
    results: list[list[int]] = field(default_factory=list)
    residency: ModelResidency | None = None


class CacheModel:
    def __init__(self, core: CacheCore, slot_bytes: dict[Key, int]) -> None:
        self.core = core
        self.slot_bytes = slot_bytes
        self.ready: set[Key] = set()
        self.written: dict[Key, int] = {}
        self.aborted: set[Key] = set()
        self.leases: dict[tuple[str, str], ModelLease] = {}
        self.transfers: dict[tuple[int, str], ModelTransfer] = {}
        self.residencies: dict[tuple[str, str], ModelResidency] = {}
        # Slots that clients of an earlier server's residencies may read: offset to key; None
        # after a flush.
        self.kept: dict[int, Key | None] = {}
        self.kept_until_s = 0.0
        self.arena: dict[tuple[int, int], Key] = {}
        self.counted = Counters()
        self.key_of = {
            (ks, group, words_of([n])[0].tobytes()): (ks, group, n) for ks, group, n in slot_bytes
        }

    def restart(self, core: CacheCore, now_s: float) -> None:
        """Ready blocks stay; so do slots of residencies, for the grace time."""
        self.core = core
        self.kept = {
            **self.kept,
            **{offset: key for key, offset in self.resident()},
        }
        self.kept_until_s = now_s + core.config.residency_grace_s
        self.counted = Counters(restored_blocks=len(self.ready))
        for residency in self.residencies.values():
            residency.is_open = False
        self.residencies = {}
        self.leases, self.transfers, self.written, self.aborted = {}, {}, {}, set()

    # Questions to the model

    def pins(self) -> dict[Key, int]:
        pins: dict[Key, int] = {}
        for lease in self.leases.values():
            for key in [] if lease.write else lease.keys:
                pins[key] = pins.get(key, 0) + 1
        for key, _ in [*self.resident(), *((key, 0) for key in self.kept.values())]:
            if key is not None:
                pins[key] = pins.get(key, 0) + 1
        return pins

    def resident(self) -> list[tuple[Key | None, int]]:
        return [
            (key, offset)
            for residency in self.residencies.values()
            for rows in residency.rows.values()
            for key, _, offset in rows.values()
        ]

    def pin_resident(self, residency: ModelResidency, group: int, position: int, key: Key) -> None:
        rows = residency.rows.get(group, {})
        if residency.is_open and position not in rows and len(rows) < residency.asked.get(group, 0):
            residency.rows.setdefault(group, rows)[position] = (key, key[2], self.slot(key))

    def end_residencies(self, session: int) -> None:
        for name, residency in list(self.residencies.items()):
            if residency.session == session:
                residency.is_open = False
                del self.residencies[name]

    def owner(self, key: Key) -> ModelLease | None:
        return next(
            (lease for lease in self.leases.values() if lease.write and key in lease.keys), None
        )

    def evictable(self) -> set[Key]:
        return self.ready - set(self.pins())

    def unadmitted_bytes(self) -> int:
        return sum(
            lease.pinned_bytes
            for lease in self.leases.values()
            if not lease.write and not lease.admitted
        )

    def slot(self, key: Key) -> int:
        index = self.core.space.index
        word = index.find(key[0], key[1], words_of([key[2]]))
        return int(index.offsets(word & ~RESERVED_FLAG)[0])

    # Ends of leases

    def end_lease(self, lease: ModelLease) -> None:
        lease.released = True
        if not lease.copies:
            for key in lease.keys if lease.write else []:
                self.drop_reserved(key)
            del self.leases[lease.engine_id, lease.lease_id]

    def drop_reserved(self, key: Key) -> None:
        self.written.pop(key)
        self.aborted.discard(key)
        self.counted.aborted_blocks += 1

    def settle_write(self, lease: ModelLease, whole: int) -> None:
        """To be called after a copy. `whole`: mask of all shards."""
        if lease.copies:
            return
        for key in [key for key in lease.keys if key in self.aborted]:
            lease.keys.remove(key)
            self.drop_reserved(key)
        if lease.released or (lease.shards_seen == whole and not lease.keys):
            self.end_lease(lease)

    def flush(self, key_space_id: int, whole: int) -> int:
        """Number of blocks that were ready. Read leases keep their slots pinned. `whole`: mask
        of all shards."""
        for lease in [
            lease for lease in self.leases.values() if lease.key_space_id == key_space_id
        ]:
            if lease.write:
                self.aborted |= set(lease.keys)
                self.settle_write(lease, whole)
            else:
                lease.keys = []
        for residency in self.residencies.values():
            if residency.key_space_id == key_space_id:
                residency.rows = {
                    group: {at: (None, number, slot) for at, (_, number, slot) in rows.items()}
                    for group, rows in residency.rows.items()
                }
        self.kept = {
            slot: None if key and key[0] == key_space_id else key for slot, key in self.kept.items()
        }
        gone = {key for key in self.ready if key[0] == key_space_id}
        assert self.take_notices() == gone
        self.counted.evicted_blocks -= len(gone)
        self.counted.flushed_blocks += len(gone)
        return len(gone)

    # Comparing

    def take_notices(self) -> set[Key]:
        """Removes what the last call evicted, by the core's notices."""
        named = [
            self.key_of[effect.key_space_id, effect.group_index, row.tobytes()]
            for effect in self.core.take_effects()
            for row in effect.hashes
        ]
        assert len(set(named)) == len(named), "a block was evicted twice in one call"
        assert set(named) <= self.ready, "a notice names a block that was not stored"
        assert not set(named) & set(self.pins()), "a pinned block was evicted"
        self.ready -= set(named)
        self.counted.evicted_blocks += len(named)
        return set(named)

    def settle(self) -> None:
        core, index = self.core, self.core.space.index
        core.check_invariants()
        assert not core.space.removal.effects, "a call left effects that nobody took"
        pins = self.pins()
        for ks, group in {key[:2] for key in self.slot_bytes}:
            words = index.find(ks, group, words_of(range(NUM_HASHES)))
            masks = core.lookup(ks, [HashList(group, words_of(range(NUM_HASHES)))])[0]
            self.counted.lookup_blocks += NUM_HASHES
            self.counted.lookup_hit_blocks += int(masks.sum())
            for number, (word, found) in enumerate(
                zip(words.tolist(), masks.tolist(), strict=True)
            ):
                key = (ks, group, number)
                assert found == (key in self.ready), f"{key}: found={found}"
                assert (
                    (word >= int(RESERVED_FLAG))
                    == (self.owner(key) is not None)
                    == (key in self.written)
                ), key
                if found:
                    assert index.pins[word] == pins.get(key, 0)
                    for shard in range(core.key_space(ks).num_shards):
                        assert self.arena[self.slot(key), shard] == key, (
                            "the slot of a ready block holds other bytes"
                        )
        assert sorted(
            (lease.engine_id, lease.lease_id, lease.num_copies, lease.released)
            for lease in core.leases.all()
        ) == sorted(
            (lease.engine_id, lease.lease_id, lease.copies, lease.released)
            for lease in self.leases.values()
        )
        assert len(core.transfers) == len(self.transfers)
        assert core.counters == self.counted
        assert sum(core._read_leases._unadmitted.values()) == self.unadmitted_bytes()


def reserve_allowed(
    model: CacheModel,
    before: set[Key],
    lease: ModelLease | None,
    keys: list[Key],
    results: list[int],
    fresh: set[Key],
) -> None:
    """lease: extended by the call; None if it made one.
    before: blocks that were ready.
    fresh: blocks that it reserved.
    """
    seen: set[Key] = set()
    for key, result in zip(keys, results, strict=True):
        if result == BlockResult.PRESENT:
            assert key in before, "present, but was not there"
        elif result == BlockResult.IN_FLIGHT:
            assert key in seen or (
                model.owner(key) is not None and model.owner(key) is not lease
            ), "in flight with nobody"
        elif result == BlockResult.RESERVED:
            assert key in fresh or (lease is not None and key in lease.keys), (
                "reserved by somebody else"
            )
        else:
            assert (
                result == BlockResult.NO_SPACE
                and key not in fresh
                and model.owner(key) is None
                and key not in model.ready
            )
        seen.add(key)


def values(thing: object) -> object:
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if isinstance(thing, dict):
        return {key: values(value) for key, value in thing.items()}
    if isinstance(thing, Highest):
        return thing.number
    policies = ("hotkv_server.cache.room.policies", "bench.policies")
    if isinstance(thing, RetentionPins | PinBudget | SlabFloors) or type(
        thing
    ).__module__.startswith(policies):
        return {name: values(value) for name, value in vars(thing).items()}
    return (
        None
        if callable(thing) or isinstance(thing, BlockIndex | TenantBook | ModuleType)
        else copy.deepcopy(thing)
    )


def vars_of(group: ResidentGroup) -> dict[str, object]:
    return {name: getattr(group, name) for name in ("positions", "entries", "linked")}


def snapshot(core: CacheCore) -> object:
    """All state of the core that a call may change."""
    space, index, pool = core.space, core.space.index, core.space.pool
    classes = {
        size: (c.num_slabs, c.free.all().tolist())
        for size, c in pool._classes.items()
        if c.num_slabs or c.free.num
    }  # leaves out slot sizes that have no slab and no free slot
    leases = [copy.deepcopy(lease) for lease in core.leases.all()]
    return (
        index.table.buckets.tobytes(),
        index.table.records.tobytes(),
        index.pins.tobytes(),
        (index._free_head, index._next_unused, index.num_entries),
        classes,
        pool._owner.tobytes(),
        pool._used.tobytes(),
        values(space.policy),
        values(core.retention_pins),
        repr(leases),
        repr(core.transfers._transfers),
        repr(sorted(core.sessions.records.items())),
        repr(core.key_spaces),
        repr(core.counters),
        [
            (repr(r), {g: values(vars_of(m)) for g, m in r.groups.items()})
            for r in residencies(core).book.all()
        ],
        repr(residencies(core).bound),
        residencies(core).resident.counts.tobytes(),
        repr(space.removal.effects),
        (
            space.removal.evicted_blocks,
            {t: n for t, n in core._read_leases._unadmitted.items() if n},
            space.tenants.used.tolist(),
            core.draining,
            core.sessions._next_number,
            core.leases._next_number,
        ),
    )


def refused(core: CacheCore, call: Callable[[], object], reason: Reason) -> None:
    """The refusal must change nothing."""
    before = snapshot(core)
    assert reason_of(call) is reason
    assert snapshot(core) == before


def no_room_left(space: Space, slot_bytes: int, untouchable: set[int]) -> None:
    """No block of this size could be evicted, and no slab was free or could be emptied.
    `untouchable`: entries that the core had to keep during the call.
    """
    if space.policy.figures().get("hold_s"):
        # This policy may refuse to evict recently used blocks.
        return
    index, pool = space.index, space.pool
    live = np.flatnonzero(index.states()).astype(np.uint32)
    may_go = (
        (index.states()[live] == table.STATE_READY)
        & (index.pins[live] == 0)
        & ~np.isin(live, list(untouchable))
    )
    sizes = index.slot_bytes(live)
    assert not np.any(may_go & (sizes == slot_bytes)), (
        "refused, though a block of the same slot size could have been evicted"
    )
    if len(live) == index.capacity or pool.floors.sizes():
        # Slabs may be kept free for slot sizes that residencies have reserved.
        return
    assert pool.available_slots(slot_bytes) == 0, "refused, though there are free slots"
    # Slabs that are free now, or would be if every evictable block were evicted.
    heads = pool.slab_head()
    stays = heads[index.offsets(live[~may_go]) // pool.slab_bytes]
    free = (pool.slab_owner() != ABSENT) & ~np.isin(heads, stays)
    span = -(-slot_bytes // pool.slab_bytes)
    gaps = "".join("." if slab else "x" for slab in free).split("x")
    assert all(len(gap) < span for gap in gaps), (
        "refused, though slabs lent to another size could have been taken"
    )
