"""The whole core against `CacheModel`: what is answered holds, what is pinned stays, what raises
has changed nothing."""

from collections.abc import Callable
from typing import TypeVar

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hotkv.errors import HotKVError, Reason
from hotkv.results import BlockResult
from hotkv.table import SLOT_ALIGN
from hotkv_server.core import reference as core_references
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.slabs import aligned
from hotkv_server.core.transfers import StoreTransfer
from hotkv_server.core.values import CoreConfig, HashList, LoadPositions, Run, SlotRun
from tests.core.cache_model import (
    GARBAGE,
    NUM_HASHES,
    CacheModel,
    Key,
    ModelLease,
    ModelTransfer,
    no_room_left,
    reserve_allowed,
    snapshot,
)
from tests.core.support import (
    evict,
    evict_all,
    expire,
    flush,
    make_key_space,
    make_table,
    taken_over,
    words_of,
)

SLAB = 4 * SLOT_ALIGN
NUM_SLABS = 6
ENGINES = ["e0", "e1", "e2"]
LEASE_IDS = ["a", "b", "c", "d"]
TRANSFER_IDS = ["t", "u", "v"]
MAX_BLOCKS = 40
NUMBERS = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=9)
TTLS = st.sampled_from([0.0, 3.0, 40.0])
T = TypeVar("T")


class CacheMachine(RuleBasedStateMachine):
    """Three engines on two key spaces share one small arena. Rules call the core and change the
    model; `settles` compares."""

    @initialize(
        num_shards=st.integers(1, 2),
        sizes=st.sampled_from(
            [
                (SLOT_ALIGN, 2 * SLOT_ALIGN),
                (SLOT_ALIGN, SLAB + 1),
                (3 * SLOT_ALIGN, SLOT_ALIGN + 7),
                (2 * SLAB, 3 * SLAB),
            ]
        ),
        capacity=st.sampled_from([7, 60]),
        share=st.sampled_from([0.25, 1.0]),
        reference=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(
        self,
        num_shards: int,
        sizes: tuple[int, int],
        capacity: int,
        share: float,
        reference: bool,
        policy: str,
    ) -> None:
        config = CoreConfig(
            NUM_SLABS * SLAB,
            SLAB,
            capacity,
            lease_ttl_s=10.0,
            unadmitted_share=share,
            max_blocks_per_call=MAX_BLOCKS,
            max_leases=8,
        )
        self.core = CacheCore(config, make_table(capacity), POLICIES[policy](capacity))
        self.policy, self.reference = policy, reference
        if reference:
            self.use_references()
        self.now_s = 100.0
        self.whole = (1 << num_shards) - 1
        self.num_shards = num_shards
        self.key_spaces = [make_key_space(name, *sizes, num_shards) for name in ("one", "two")]
        self.sizes = [aligned(size) for size in sizes]
        self.sessions: dict[int, tuple[str, int]] = {}
        self.engine_key_space = dict(zip(ENGINES, (1, 1, 2), strict=True))
        for engine in ENGINES:
            self.open(engine)
        keys = [
            (ks, group, number) for ks in (1, 2) for group in (0, 1) for number in range(NUM_HASHES)
        ]
        self.model = CacheModel(self.core, {key: self.sizes[key[1]] for key in keys})

    def use_references(self) -> None:
        self.core.space.index._kernels = self.core.space.pool._kernels = core_references
        self.core.space.index.table._kernels = None

    def call(self, function: Callable[[], T], *reasons: Reason) -> T | None:
        """Calls the core. With `reasons` it must refuse for one of them; in either case, what
        raises has changed nothing."""
        before = snapshot(self.core)
        try:
            result = function()
        except HotKVError as error:
            assert snapshot(self.core) == before, "a call that raised has changed something"
            assert error.reason in reasons, error
            return None
        assert not reasons, f"expected {reasons}"
        return result

    def refusal(self, *conditions: tuple[bool, Reason]) -> tuple[Reason, ...]:
        """Reasons for which a call must be refused; which of several comes first is not ours to
        say."""
        return tuple(reason for holds, reason in conditions if holds)

    # Sessions

    @rule(engine=st.sampled_from(ENGINES))
    def open(self, engine: str) -> None:
        key_space = self.key_spaces[self.engine_key_space[engine] - 1]
        reasons = self.refusal((self.core.draining, Reason.DRAINING))
        record = self.call(
            lambda: self.core.open_session(engine, "rank", key_space, self.now_s), *reasons
        )
        if record:
            assert (
                record.number not in self.sessions
                and record.key_space_id == self.engine_key_space[engine]
            )
            self.sessions[record.number] = (engine, self.engine_key_space[engine])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """The session's transfers are settled first, as failed ones, as the runtime does when a
        stream breaks."""
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        for session, transfer_id in [key for key in self.model.transfers if key[0] == number]:
            self.finish(session, transfer_id, succeeded=False)
        self.core.close_session(number, self.now_s)
        self.core.close_session(number, self.now_s)
        for lease in [lease for lease in self.model.leases.values() if lease.session == number]:
            self.model.end_lease(lease)
        del self.sessions[number]

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.core.draining = on and not self.core.draining

    # Read leases

    def check_offsets(
        self,
        session: int,
        lease_id: str,
        asked: list[tuple[int, list[int]]],
        masks: list[list[bool]],
    ) -> None:
        """A lease says where its pinned blocks lie, and only theirs: there are the right bytes of
        every shard."""
        ks = self.sessions[session][1]
        for (group, numbers), mask, found in zip(
            asked, masks, self.core.slot_offsets(session, lease_id), strict=True
        ):
            for number, is_pinned, offset in zip(numbers, mask, found.tolist(), strict=True):
                assert (offset != -1) == is_pinned
                for shard in range(self.num_shards) if is_pinned else ():
                    assert self.model.arena[offset, shard] == (ks, group, number), (
                        "a leased block is not where the lease says"
                    )

    def may_lease(self, engine: str) -> bool:
        """One more lease: of eight an engine has no more than are left then, or one."""
        held = sum(lease.engine_id == engine for lease in self.model.leases.values())
        left = 8 - len(self.model.leases) - 1
        return left >= 0 and (held + 1 <= left or held == 0)

    def session(self, data: st.DataObject) -> tuple[int, str, int]:
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        return number, *self.sessions[number]

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        lease_id=st.sampled_from(LEASE_IDS),
        lists=st.tuples(NUMBERS, NUMBERS | st.just([])),
        ttl_s=TTLS,
    )
    def acquire(
        self, data: st.DataObject, lease_id: str, lists: tuple[list[int], list[int]], ttl_s: float
    ) -> None:
        session, engine, ks = self.session(data)
        existing = self.model.leases.get((engine, lease_id))
        asked = [(group, numbers) for group, numbers in enumerate(lists) if numbers]
        if existing and data.draw(st.booleans()):
            asked = existing.asked
            if data.draw(st.integers(0, 3)) == 0:
                # As many other hashes, or the same in another order.
                asked = [
                    (group, data.draw(st.permutations(numbers) | st.just([n ^ 1 for n in numbers])))
                    for group, numbers in asked
                ]
        differs = existing and existing.asked != asked
        reasons = self.refusal(
            (existing is None and self.core.draining, Reason.DRAINING),
            (existing is None and not self.may_lease(engine), Reason.OVERLOADED),
            (
                existing is not None and (existing.write or existing.released or bool(differs)),
                Reason.DUPLICATE_ID,
            ),
        )
        groups = [HashList(group, words_of(numbers)) for group, numbers in asked]
        grant = self.call(
            lambda: self.core.acquire(session, lease_id, groups, ttl_s, self.now_s), *reasons
        )
        if grant is None:
            return
        masks = [mask.tolist() for mask in grant.pinned]
        self.check_offsets(session, lease_id, existing.asked if existing else asked, masks)
        if existing:
            assert masks == existing.granted and grant.ttl_s == max(
                0.0, existing.expires_s - self.now_s
            )
            return
        lease = ModelLease(
            False,
            engine,
            lease_id,
            session,
            ks,
            self.now_s + (ttl_s or 10.0),
            asked=asked,
            granted=masks,
        )
        budget = (
            int(self.core.config.unadmitted_share * NUM_SLABS * SLAB)
            - self.model.unadmitted_bytes()
        )
        total = 0
        for (group, numbers), mask in zip(asked, masks, strict=True):
            over = False
            for number, pinned in zip(numbers, mask, strict=True):
                key = (ks, group, number)
                over |= key in self.model.ready and total + self.sizes[group] > budget
                assert pinned == (key in self.model.ready and not over), (
                    "pinned exactly what is ready, up to the budget"
                )
                if pinned:
                    total += self.sizes[group]
                    lease.keys.append(key)
        lease.pinned_bytes = total
        self.model.leases[engine, lease_id] = lease

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), lease_id=st.sampled_from(LEASE_IDS))
    def release(self, data: st.DataObject, lease_id: str) -> None:
        session, engine, _ = self.session(data)
        lease = self.model.leases.get((engine, lease_id))
        elsewhere = any(key[1] == lease_id for key in self.model.leases)
        reasons = self.refusal((lease is None and elsewhere, Reason.FOREIGN_LEASE))
        released = self.call(lambda: self.core.release(session, lease_id), *reasons)
        assert reasons or released == (lease is not None)
        if lease:
            self.model.end_lease(lease)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 30.0]))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        late = [
            lease
            for lease in self.model.leases.values()
            if lease.expires_s <= self.now_s and not lease.released
        ]
        assert expire(self.core, self.now_s) == len(late)
        for lease in late:
            self.model.end_lease(lease)

    # Loads

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        transfer_id=st.sampled_from(TRANSFER_IDS),
        lease_id=st.sampled_from(LEASE_IDS),
        picks=st.lists(st.integers(0, 8), max_size=6),
    )
    def begin_load(
        self, data: st.DataObject, transfer_id: str, lease_id: str, picks: list[int]
    ) -> None:
        session, engine, ks = self.session(data)
        lease = self.model.leases.get((engine, lease_id))
        foreign = any(key[1] == lease_id and key[0] != engine for key in self.model.leases)
        usable = lease is not None and not lease.released
        runs, todo, bad = [], [], False
        for run, (group, numbers) in enumerate(
            lease.asked if lease and not lease.write else [(0, [0])]
        ):
            positions = [
                pick for pick in picks if pick < len(numbers) or data.draw(st.integers(0, 9)) == 0
            ]
            runs.append(LoadPositions(group, np.array(positions, np.int64)))
            for at, position in enumerate(positions):
                granted = (
                    lease is not None
                    and not lease.write
                    and position < len(numbers)
                    and lease.granted[run][position]
                )
                bad |= not granted
                todo.append((run, at, (ks, group, numbers[position]) if granted else GARBAGE, 0))
        reasons = self.refusal(
            ((session, transfer_id) in self.model.transfers, Reason.DUPLICATE_ID),
            (not usable and foreign, Reason.FOREIGN_LEASE),
            (not usable and not foreign, Reason.UNKNOWN_LEASE),
            (usable and lease is not None and lease.write, Reason.INVALID_FIELD),
            (usable and bad, Reason.INVALID_FIELD),
            (self.core.draining, Reason.DRAINING),
        )
        slots = self.call(
            lambda: self.core.begin_load(session, transfer_id, lease_id, runs), *reasons
        )
        if slots is None or lease is None:
            return
        for slot_run, load_run in zip(slots, runs, strict=True):
            assert slot_run.group_index == load_run.group_index
            assert slot_run.positions.tolist() == list(range(len(load_run.positions)))
        offsets = [offset for slot_run in slots for offset in slot_run.offsets.tolist()]
        lease.admitted = True
        lease.copies += 1
        placed = [
            (run, at, key, offset) for (run, at, key, _), offset in zip(todo, offsets, strict=True)
        ]
        self.model.transfers[session, transfer_id] = ModelTransfer(lease, -1, placed)
        self.check_loads()

    def check_loads(self) -> None:
        """While a load runs, every slot it reads holds the right bytes of every shard."""
        for transfer in self.model.transfers.values():
            if transfer.shard_index < 0:
                for _, _, key, offset in transfer.todo:
                    for shard in range(self.num_shards):
                        assert self.model.arena[offset, shard] == key, "a slot changed under a load"

    # Stores

    def make_runs(
        self, lists: tuple[list[int], list[int]], depth: int
    ) -> tuple[list[Run], list[tuple[int, list[int]]]]:
        named = [(group, numbers) for group, numbers in enumerate(lists) if numbers]
        return [
            Run(group, words_of(numbers), words_of([99])[0] if depth else None, depth)
            for group, numbers in named
        ], named

    def check_reservation(
        self,
        session: int,
        lease_id: str,
        named: list[tuple[int, list[int]]],
        results: list[list[int]],
        expires_s: float,
    ) -> None:
        """Takes over a fresh reservation into the model, having checked it."""
        engine, ks = self.sessions[session]
        lease = self.model.leases.get((engine, lease_id))
        deciding = lease is None
        before = set(self.model.ready)
        gone = self.model.take_notices()
        assert deciding or not gone, "joining a lease evicted something"
        fresh = [
            [(ks, g, n) for n, r in zip(numbers, got, strict=True) if r == BlockResult.RESERVED]
            for (g, numbers), got in zip(named, results, strict=True)
        ]
        reserved = {key for keys in fresh for key in keys} - set(lease.keys if lease else [])
        assert deciding or not reserved, "a lease grew after its first call"
        assert (
            not {key for key in reserved if self.model.owner(key)}
            and not reserved & self.model.ready
        )
        for run, ((group, numbers), got) in enumerate(zip(named, results, strict=True)):
            keys = [(ks, group, number) for number in numbers]
            reserve_allowed(self.model, before, lease, keys, got, reserved)
            present = {
                key for key, result in zip(keys, got, strict=True) if result == BlockResult.PRESENT
            }
            assert run < len(named) - 1 or not present & gone, (
                "evicted what the same run was told is present"
            )
            if BlockResult.NO_SPACE in got and deciding and run == len(named) - 1:
                index = self.core.space.index
                untouchable = {int(index.find(*key[:2], words_of([key[2]]))[0]) for key in present}
                no_room_left(self.core.space, self.sizes[group], untouchable)
        if deciding and (reserved or self.num_shards > 1):
            ordered = sorted(reserved)
            self.model.leases[engine, lease_id] = ModelLease(
                True, engine, lease_id, session, ks, expires_s, ordered, named
            )
        for key in reserved:
            self.model.written[key] = 0

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        lease_id=st.sampled_from(LEASE_IDS),
        lists=st.tuples(NUMBERS, NUMBERS | st.just([])),
        depth=st.integers(0, 2),
        ttl_s=TTLS,
    )
    def reserve(
        self,
        data: st.DataObject,
        lease_id: str,
        lists: tuple[list[int], list[int]],
        depth: int,
        ttl_s: float,
    ) -> None:
        session, engine, _ = self.session(data)
        existing = self.model.leases.get((engine, lease_id))
        runs, named = self.make_runs(self.joined(data, lists, existing), depth)
        reservation = self.call(
            lambda: self.core.reserve(session, lease_id, runs, ttl_s, self.now_s),
            *self.write_refusals(engine, existing, named),
        )
        if reservation:
            results = [result.tolist() for result in reservation.results]
            self.check_reservation(session, lease_id, named, results, self.now_s + (ttl_s or 10.0))

    def joined(
        self, data: st.DataObject, lists: tuple[list[int], list[int]], existing: ModelLease | None
    ) -> tuple[list[int], list[int]]:
        """Mostly some of what the lease's first call named, where there is one: others are
        refused."""
        if not existing or not existing.write or not data.draw(st.integers(0, 3)):
            return lists
        asked = dict(existing.asked)
        full, window = (
            [n for n in asked.get(group, []) if data.draw(st.integers(0, 3))] for group in (0, 1)
        )
        return full, window

    def write_refusals(
        self, engine: str, existing: ModelLease | None, named: list[tuple[int, list[int]]]
    ) -> tuple[Reason, ...]:
        listed = {
            (group, n)
            for group, numbers in (existing.asked if existing else named)
            for n in numbers
        }
        others = {(group, n) for group, numbers in named for n in numbers} - listed
        return self.refusal(
            (existing is not None and (not existing.write or bool(others)), Reason.DUPLICATE_ID),
            (existing is None and self.core.draining, Reason.DRAINING),
            (existing is None and not self.may_lease(engine), Reason.OVERLOADED),
        )

    @precondition(lambda self: self.sessions)
    @rule(
        data=st.data(),
        ids=st.tuples(st.sampled_from(TRANSFER_IDS), st.sampled_from(LEASE_IDS)),
        lists=st.tuples(NUMBERS, NUMBERS | st.just([])),
        shard=st.integers(0, 1),
        ttl_s=TTLS,
    )
    def begin_store(
        self,
        data: st.DataObject,
        ids: tuple[str, str],
        lists: tuple[list[int], list[int]],
        shard: int,
        ttl_s: float,
    ) -> None:
        session, engine, ks = self.session(data)
        transfer_id, lease_id = ids
        shard %= self.num_shards
        existing = self.model.leases.get((engine, lease_id))
        if existing and existing.write and existing.keys and data.draw(st.integers(0, 3)):
            # Mostly what the lease reserved, so that shards and blocks come together.
            numbers = [[key[2] for key in existing.keys if key[1] == group] for group in (0, 1)]
            lists = (numbers[0], numbers[1])
        else:
            lists = self.joined(data, lists, existing)
        runs, named = self.make_runs(lists, 0)
        refusals = (
            *self.write_refusals(engine, existing, named),
            *self.refusal(
                ((session, transfer_id) in self.model.transfers, Reason.DUPLICATE_ID),
                (self.core.draining, Reason.DRAINING),
            ),
        )
        slots = self.call(
            lambda: self.core.begin_store(
                session, transfer_id, lease_id, runs, shard, ttl_s, self.now_s
            ),
            *refusals,
        )
        if slots is None:
            return
        started = self.core.transfers._transfers[session, transfer_id]
        assert isinstance(started, StoreTransfer)
        results = started.results
        self.check_reservation(
            session,
            lease_id,
            named,
            self.reserve_view(results, slots, named, existing, shard),
            self.now_s + (ttl_s or 10.0),
        )
        lease = self.model.leases.get((engine, lease_id))
        transfer = ModelTransfer(lease, shard, [], [result.tolist() for result in results])
        busy = {
            (offset, t.shard_index)
            for t in self.model.transfers.values()
            if t.shard_index >= 0
            for _, _, _, offset in t.todo
        }
        for run, ((group, numbers), slot_run) in enumerate(zip(named, slots, strict=True)):
            for position, offset in zip(
                slot_run.positions.tolist(), slot_run.offsets.tolist(), strict=True
            ):
                key = (ks, group, numbers[position])
                assert lease is not None and key in lease.keys and offset == self.model.slot(key)
                assert (offset, shard) not in busy, "two copies write the same bytes"
                busy.add((offset, shard))
                assert not self.model.written[key] >> shard & 1 and key not in self.model.aborted, (
                    "a shard is written twice"
                )
                transfer.todo.append((run, position, key, offset))
                self.model.arena[offset, shard] = GARBAGE
        if lease:
            lease.copies += 1
        self.model.transfers[session, transfer_id] = transfer
        self.check_loads()

    def reserve_view(
        self,
        results: list[NDArray[np.uint8]],
        slots: list[SlotRun],
        named: list[tuple[int, list[int]]],
        lease: ModelLease | None,
        shard: int,
    ) -> list[list[int]]:
        """Results of a store's start as `reserve` would have answered: what its own lease holds is
        reserved, whatever became of it."""
        view = [result.tolist() for result in results]
        listed: set[Key] = set()
        for row, slot_run, (group, numbers) in zip(view, slots, named, strict=True):
            for position, number in enumerate(numbers):
                key = (lease.key_space_id if lease else 0, group, number)
                if lease is None or not lease.write or key not in lease.keys:
                    continue
                reasons = self.reasons_not_to_copy(key, lease, shard) | (
                    {BlockResult.IN_FLIGHT} if key in listed else set()
                )
                copied = position in slot_run.positions
                assert row[position] in ({BlockResult.RESERVED} if copied else reasons), (
                    "a wrong reason not to copy"
                )
                assert not (copied and reasons), "copied though there was a reason not to"
                row[position] = int(BlockResult.RESERVED)
                listed.add(key)
        return view

    def reasons_not_to_copy(self, key: Key, lease: ModelLease, shard: int) -> set[BlockResult]:
        """Why a block of a lease need not be copied for this shard: aborted, written, being
        written."""
        busy = any(
            t.lease is lease and t.shard_index == shard and any(k == key for _, _, k, _ in t.todo)
            for t in self.model.transfers.values()
        )
        reasons = {
            BlockResult.ABORTED: key in self.model.aborted,
            BlockResult.WRITTEN: bool(self.model.written[key] >> shard & 1),
            BlockResult.IN_FLIGHT: busy,
        }
        return {reason for reason, holds in reasons.items() if holds}

    # Ends of copies

    @precondition(lambda self: self.model.transfers)
    @rule(data=st.data(), succeeded=st.integers(0, 3))
    def end(self, data: st.DataObject, succeeded: int) -> None:
        session, transfer_id = data.draw(st.sampled_from(sorted(self.model.transfers)))
        self.finish(session, transfer_id, succeeded=succeeded > 0)

    def finish(self, session: int, transfer_id: str, *, succeeded: bool) -> None:
        self.check_loads()
        transfer = self.model.transfers.pop((session, transfer_id))
        lease = transfer.lease
        if transfer.shard_index < 0:
            self.core.end_load(session, transfer_id, succeeded)
            assert lease is not None
            lease.copies -= 1
            if lease.released:
                self.model.end_lease(lease)
            return
        for _, _, key, offset in transfer.todo:
            self.model.arena[offset, transfer.shard_index] = key if succeeded else GARBAGE
        results = self.core.end_store(session, transfer_id, succeeded, self.now_s)
        expected = transfer.results
        for run, position, key, _ in transfer.todo:
            expected[run][position] = self.end_block(
                key, lease, 1 << transfer.shard_index, succeeded=succeeded
            )
        assert [result.tolist() for result in results] == expected
        if lease:
            lease.copies -= 1
            lease.shards_seen |= 1 << transfer.shard_index
            self.model.settle_write(lease, self.whole)

    def end_block(
        self, key: Key, lease: ModelLease | None, bit: int, *, succeeded: bool
    ) -> BlockResult:
        assert lease is not None
        if not succeeded:
            self.model.aborted.add(key)
        if key in self.model.aborted:
            return BlockResult.ABORTED
        self.model.written[key] |= bit
        if self.model.written[key] != self.whole:
            return BlockResult.WRITTEN
        lease.keys.remove(key)
        del self.model.written[key]
        self.model.ready.add(key)
        return BlockResult.STORED

    # Operators, hints, nonsense

    @rule(ks=st.integers(0, 2), group=st.integers(0, 1), numbers=NUMBERS | st.none())
    def evict(self, ks: int, group: int, numbers: list[int] | None) -> None:
        hashes = None if numbers is None else words_of(numbers)
        reasons = self.refusal(
            (
                ks > len(self.core.key_spaces) or (ks == 0 and numbers is not None),
                Reason.UNKNOWN_KEY_SPACE,
            )
        )
        answer = self.call(
            lambda: (
                evict_all(self.core, ks) if hashes is None else evict(self.core, ks, group, hashes)
            ),
            *reasons,
        )
        if answer is None:
            return
        if numbers is None:
            named = {key for key in self.model.ready if ks in (0, key[0])}
        else:
            named = {
                key
                for key in self.model.ready | set(self.model.written)
                if key[:2] == (ks, group) and key[2] in numbers
            }
        going = named & self.model.evictable()
        assert answer == (len(going), len(named - going))
        assert self.model.take_notices() == going

    @rule(ks=st.integers(0, 3))
    def flush(self, ks: int) -> None:
        reasons = self.refusal((ks not in self.core.key_spaces, Reason.UNKNOWN_KEY_SPACE))
        count = self.call(lambda: flush(self.core, ks), *reasons)
        if count is not None:
            assert count == self.model.flush(ks, self.whole)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), numbers=NUMBERS, group=st.integers(0, 1))
    def touch(self, data: st.DataObject, numbers: list[int], group: int) -> None:
        session, _, _ = self.session(data)
        self.core.touch(session, [HashList(group, words_of(numbers))], self.now_s)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def nonsense(self, data: st.DataObject) -> None:
        session, engine, ks = self.session(data)
        core, now_s, one = self.core, self.now_s, words_of([1])
        many = words_of([1] * (MAX_BLOCKS + 1))
        no_group, too_many = Run(2, one), Run(0, many)
        calls: list[tuple[Callable[[], object], Reason]] = [
            (lambda: core.lookup(0, []), Reason.UNKNOWN_KEY_SPACE),
            (lambda: core.lookup(ks, [HashList(-1, one)]), Reason.INVALID_FIELD),
            (lambda: core.lookup(ks, [HashList(0, many)]), Reason.TOO_LARGE),
            (lambda: core.acquire(999, "z", [], 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.acquire(session, "", [], 0.0, now_s), Reason.INVALID_FIELD),
            (
                lambda: core.acquire(
                    session, "z", [HashList(0, one), HashList(0, one)], 0.0, now_s
                ),
                Reason.INVALID_FIELD,
            ),
            (
                lambda: core.acquire(session, "z", [HashList(7, one)], 0.0, now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: core.touch(999, [], now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.touch(session, [HashList(2, one)], now_s), Reason.INVALID_FIELD),
            (lambda: core.release(999, "a"), Reason.UNKNOWN_SESSION),
            (lambda: core.reserve(999, "z", [], 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.reserve(session, "z", [no_group], 0.0, now_s), Reason.INVALID_FIELD),
            (lambda: core.reserve(session, "z", [too_many], 0.0, now_s), Reason.TOO_LARGE),
            (
                lambda: core.reserve(session, "z", [Run(0, one, depth=-1)], 0.0, now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: core.reserve(session, "", [Run(0, one)], 0.0, now_s), Reason.INVALID_FIELD),
            (lambda: core.begin_load(999, "z", "a", []), Reason.UNKNOWN_SESSION),
            (lambda: core.begin_load(session, "", "a", []), Reason.INVALID_FIELD),
            (lambda: core.begin_load(session, "z", "never", []), Reason.UNKNOWN_LEASE),
            (lambda: core.begin_store(999, "z", "a", [], 0, 0.0, now_s), Reason.UNKNOWN_SESSION),
            (lambda: core.begin_store(session, "", "a", [], 0, 0.0, now_s), Reason.INVALID_FIELD),
            (
                lambda: core.open_session("", "rank", self.key_spaces[0], now_s),
                Reason.INVALID_FIELD,
            ),
            (lambda: evict_all(core, 9), Reason.UNKNOWN_KEY_SPACE),
            (lambda: evict(core, ks, 2, one), Reason.INVALID_FIELD),
            (lambda: evict(core, ks, 0, many), Reason.TOO_LARGE),
        ]
        if not core.draining and self.may_lease(engine):
            calls += [
                (lambda: core.acquire(session, "z", [], -1.0, now_s), Reason.INVALID_FIELD),
                (
                    lambda: core.reserve(session, "z", [Run(0, one)], -1.0, now_s),
                    Reason.INVALID_FIELD,
                ),
                (
                    lambda: core.begin_store(session, "z", "z", [no_group], 0, 0.0, now_s),
                    Reason.INVALID_FIELD,
                ),
                (
                    lambda: core.begin_store(
                        session, "z", "z", [Run(0, one)], self.num_shards, 0.0, now_s
                    ),
                    Reason.INVALID_FIELD,
                ),
                (
                    lambda: core.begin_store(session, "z", "z", [Run(0, one)], -1, 0.0, now_s),
                    Reason.INVALID_FIELD,
                ),
            ]
        function, reason = data.draw(st.sampled_from(calls))
        self.call(function, reason)

    @rule(knows_use=st.booleans())
    def restart(self, knows_use: bool) -> None:
        """The server is killed, whatever it was doing, and another one takes over its table."""
        self.core, restored = taken_over(
            self.core, self.policy, self.now_s - 1.0 if knows_use else None, self.now_s
        )
        if self.reference:
            self.use_references()
        assert restored.blocks == len(self.model.ready) and set(restored.dropped) <= {"unfinished"}
        self.model.restart(self.core)
        self.sessions.clear()
        for engine in ENGINES:
            self.open(engine)

    @invariant()
    def settles(self) -> None:
        if hasattr(self, "model"):
            assert not self.model.take_notices(), (
                "a call evicted something it has no business to evict"
            )
            self.model.settle()
            self.check_loads()


TestCacheMachine = CacheMachine.TestCase
