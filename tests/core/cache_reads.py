"""The state machine's rules for read leases and loads."""

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import precondition, rule

from hotkv_proto.errors import Reason
from hotkv_server.cache.room.shares import most_pinned
from hotkv_server.cache.values import HashList, LoadPositions
from tests.core.cache_machine import (
    LEASE_IDS,
    NUMBERS,
    TRANSFER_IDS,
    TTLS,
    CacheWorld,
)
from tests.core.cache_model import GARBAGE, ModelLease, ModelTransfer
from tests.core.support import expire, words_of


class ReadRules(CacheWorld):
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
                # Replaces or reorders the lease's blocks, as many as before.
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
            int(self.core.config.unadmitted_share * self.core.config.arena_bytes)
            - self.model.unadmitted_bytes()
        )
        if (resident := self.taken_bytes()) > 0:
            held = self.core.retention_pins.held_bytes + self.model.unadmitted_bytes()
            budget = min(budget, most_pinned(self.core.config.arena_bytes) - resident - held)
        total, counted = 0, self.model.counted
        counted.acquired_blocks += sum(map(sum, masks))
        counted.missed_blocks += sum(len(mask) - sum(mask) for mask in masks)
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

    def check_offsets(
        self,
        session: int,
        lease_id: str,
        asked: list[tuple[int, list[int]]],
        masks: list[list[bool]],
    ) -> None:
        """Only pinned blocks have offsets, and their slots have the right bytes."""
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
        if self.now_s >= self.model.kept_until_s:
            self.model.kept = {}
        self.model.counted.expired_leases += len(late)
        for lease in late:
            self.model.end_lease(lease)

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
        mine = [one for one in self.model.leases.values() if one.engine_id == engine]
        mine = [one for one in mine if not one.write and not one.released]
        is_good = bool(mine) and data.draw(st.integers(0, 3)) > 0
        if is_good:
            lease_id = data.draw(st.sampled_from(sorted(one.lease_id for one in mine)))
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
            if is_good and lease is not None:
                granted_at = {numbers[at]: at for at in np.flatnonzero(lease.granted[run]).tolist()}
                positions = list(granted_at.values())
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
        keys = [key for _, _, key, _ in todo]
        bad |= len(set(keys)) < len(keys)
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
