"""The state machine's rules for reservations and stores."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import precondition, rule
from numpy.typing import NDArray

from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import Reason
from hotkv_server.cache.leases.leases import StoreTransfer
from hotkv_server.cache.values import Run, SlotRun
from tests.core.cache_machine import (
    ENGINES,
    LEASE_IDS,
    NUMBERS,
    RESIDENCY_IDS,
    TRANSFER_IDS,
    TTLS,
    CacheWorld,
)
from tests.core.cache_model import (
    GARBAGE,
    Key,
    ModelLease,
    ModelResidency,
    ModelTransfer,
    no_room_left,
    reserve_allowed,
)
from tests.core.support import begin_store, reserve, words_of


class WriteRules(CacheWorld):
    def make_runs(
        self, lists: tuple[list[int], list[int]], depth: int
    ) -> tuple[list[Run], list[tuple[int, list[int]]]]:
        named = [(group, numbers) for group, numbers in enumerate(lists) if numbers]
        return [
            Run(group, words_of(numbers), words_of([99])[0] if depth else None, depth)
            for group, numbers in named
        ], named

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
        room = self.unwritten_room(engine, None)
        reservation = self.call(
            lambda: reserve(self.core, session, lease_id, runs, ttl_s, self.now_s),
            *self.write_refusals(engine, existing, named),
        )
        if reservation:
            results = [result.tolist() for result in reservation.results]
            expires_s = self.now_s + (ttl_s or 10.0)
            ends_s = existing.expires_s if existing else expires_s
            assert reservation.ttl_s == max(0.0, ends_s - self.now_s)
            self.check_reservation(session, lease_id, named, results, expires_s, room)

    def unwritten_room(self, engine: str, residency: ModelResidency | None) -> tuple[int, bool]:
        """(Bytes that a new write lease may reserve, whether they are promised to the
        residency)."""
        config = self.core.config
        capacity = int(2 * config.unwritten_share * config.arena_bytes)
        held = self.unwritten_bytes(engine)
        free = capacity - sum(self.unwritten_bytes(other) for other in ENGINES)
        room = max(0, min(capacity // 64 - held, free), (free - held) // 2)
        asked = residency.asked if residency is not None and residency.is_open else {}
        promised = sum(
            (count - len(residency.rows.get(group, {}))) * self.sizes[group]
            for group, count in asked.items()
            if residency is not None
        ) - self.unwritten_bytes(engine, has_promise=True)
        return max(room, promised), promised > room

    def joined(
        self, data: st.DataObject, lists: tuple[list[int], list[int]], existing: ModelLease | None
    ) -> tuple[list[int], list[int]]:
        """Mostly draws blocks of an existing lease's first call, since the core refuses others."""
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

    def check_reservation(
        self,
        session: int,
        lease_id: str,
        named: list[tuple[int, list[int]]],
        results: list[list[int]],
        expires_s: float,
        room: tuple[int, bool],
    ) -> None:
        """`room`: result of `unwritten_room` before the call."""
        most_bytes, has_promise = room
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
        taken = sum(self.sizes[key[1]] for key in reserved)
        assert taken <= most_bytes, "more is reserved than the owner may have"
        present: set[Key] = set()
        for (group, numbers), got in zip(named, results, strict=True):
            keys = [(ks, group, number) for number in numbers]
            reserve_allowed(self.model, before, lease, keys, got, reserved)
            present |= {
                key for key, result in zip(keys, got, strict=True) if result == BlockResult.PRESENT
            }
            self.count(keys, got, lease)
        assert not present & gone, "evicted what the same call was told is present"
        size = self.sizes[named[-1][0]] if named else 0
        if deciding and BlockResult.NO_SPACE in results[-1] and most_bytes - taken >= size:
            index = self.core.space.index
            untouchable = {int(index.find(*key[:2], words_of([key[2]]))[0]) for key in present}
            no_room_left(self.core.space, size, untouchable)
        if deciding and (reserved or self.num_shards > 1):
            ordered = sorted(reserved)
            self.model.leases[engine, lease_id] = ModelLease(
                True, engine, lease_id, session, ks, expires_s, ordered, named,
                has_promise=has_promise,
            )  # fmt: skip
        for key in reserved:
            self.model.written[key] = 0

    def count(self, keys: list[Key], results: list[int], lease: ModelLease | None) -> None:
        """The second listing of a block is IN_FLIGHT and does not count."""
        counted = self.model.counted
        counted.present_blocks += results.count(BlockResult.PRESENT)
        counted.no_space_blocks += results.count(BlockResult.NO_SPACE) if lease is None else 0
        for key, result in zip(keys, results, strict=True):
            if result == BlockResult.IN_FLIGHT:
                counted.in_flight_blocks += self.model.owner(key) not in (None, lease)

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
        session, engine, _ = self.session(data)
        transfer_id, lease_id = ids
        shard %= self.num_shards
        existing = self.model.leases.get((engine, lease_id))
        if existing and existing.write and existing.keys and data.draw(st.integers(0, 3)):
            # Chosen so that often all shards of a block are stored.
            numbers = [[key[2] for key in existing.keys if key[1] == group] for group in (0, 1)]
            lists = (numbers[0], numbers[1])
        else:
            lists = self.joined(data, lists, existing)
        residency_id = data.draw(st.sampled_from(["", *RESIDENCY_IDS]))
        self.store_begins(session, transfer_id, lease_id, lists, shard, ttl_s, residency_id)

    def store_begins(
        self,
        session: int,
        transfer_id: str,
        lease_id: str,
        lists: tuple[list[int], list[int]],
        shard: int,
        ttl_s: float,
        residency_id: str,
    ) -> bool:
        """False if the core refused the store, as it had to."""
        engine, ks = self.sessions[session]
        existing = self.model.leases.get((engine, lease_id))
        runs, named = self.make_runs(lists, 0)
        room = self.unwritten_room(engine, self.model.residencies.get((engine, residency_id)))
        refusals = (
            *self.write_refusals(engine, existing, named),
            *self.refusal(
                ((session, transfer_id) in self.model.transfers, Reason.DUPLICATE_ID),
                (self.core.draining, Reason.DRAINING),
            ),
        )
        slots = self.call(
            lambda: begin_store(
                self.core,
                session,
                transfer_id,
                lease_id,
                runs,
                shard,
                ttl_s,
                self.now_s,
                residency_id=residency_id,
            ),
            *refusals,
        )
        if slots is None:
            return False
        started = self.core.transfers._transfers[session, transfer_id]
        assert isinstance(started, StoreTransfer)
        results = started.results
        self.check_reservation(
            session,
            lease_id,
            named,
            self.reserve_view(results, slots, named, existing, shard),
            self.now_s + (ttl_s or 10.0),
            room,
        )
        lease = self.model.leases.get((engine, lease_id))
        residency = self.model.residencies.get((engine, residency_id))
        transfer = ModelTransfer(
            lease, shard, [], [result.tolist() for result in results], residency
        )
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
        for (group, numbers), row in zip(named, transfer.results, strict=True):
            for position, number in enumerate(numbers):
                key = (ks, group, number)
                is_there = row[position] == BlockResult.PRESENT and key in self.model.ready
                if residency and is_there:
                    self.model.pin_resident(residency, group, position, key)
        if lease:
            lease.copies += 1
        self.model.transfers[session, transfer_id] = transfer
        self.check_loads()
        return True

    def reserve_view(
        self,
        results: list[NDArray[np.uint8]],
        slots: list[SlotRun],
        named: list[tuple[int, list[int]]],
        lease: ModelLease | None,
        shard: int,
    ) -> list[list[int]]:
        """Converts results of `begin_store` into those of `reserve`. A block that the own lease
        reserved must have been copied, or have a reason why not."""
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
        """Empty if the core must copy the shard."""
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
