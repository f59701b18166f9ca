"""The base of the state machine that tests `CacheCore`: three engines in two key spaces share a
small arena. Each rule calls the core and changes the naive `CacheModel` alike; the invariant
`settles` compares them. `cache_*` and `test_cache` add rules."""

from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from bench.policies import POLICIES
from hotkv_proto.blocks import BlockResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.readers import no_readers
from hotkv_server.cache.values import CoreConfig, aligned
from tests.core.cache_model import GARBAGE, NUM_HASHES, CacheModel, Key, ModelLease, snapshot
from tests.core.support import RUNS_PER_ARENA, SLAB, AnyRuns, make_key_space, make_table, taken_over

NUM_SLABS = 6
SIZES = [
    (SLOT_ALIGN, 2 * SLOT_ALIGN),
    (SLOT_ALIGN, SLAB + 1),
    (3 * SLOT_ALIGN, SLOT_ALIGN + 7),
    (2 * SLAB, 3 * SLAB),
]
ENGINES = ["e0", "e1", "e2"]
LEASE_IDS = ["a", "b", "c", "d"]
TRANSFER_IDS = ["t", "u", "v"]
RESIDENCY_IDS = ["r", "s"]
MAX_BLOCKS = 40
NUMBERS = st.lists(st.integers(0, NUM_HASHES - 1), min_size=1, max_size=9)
TTLS = st.sampled_from([0.0, 3.0, 40.0])
T = TypeVar("T")


class CacheWorld(AnyRuns):
    @initialize(
        num_shards=st.integers(1, 2),
        sizes=st.sampled_from(SIZES),
        capacity=st.sampled_from([7, 60]),
        share=st.sampled_from([0.25, 1.0]),
        unwritten_share=st.sampled_from([0.1, 0.25, 1.0]),
        policy=st.sampled_from(sorted(POLICIES)),
        runs_per_arena=RUNS_PER_ARENA,
    )
    def start(
        self,
        num_shards: int,
        sizes: tuple[int, int],
        capacity: int,
        share: float,
        unwritten_share: float,
        policy: str,
        runs_per_arena: tuple[int, int],
    ) -> None:
        self.use_runs(runs_per_arena)
        config = CoreConfig(
            NUM_SLABS * SLAB,
            SLAB,
            capacity,
            lease_ttl_s=10.0,
            unadmitted_share=share,
            unwritten_share=unwritten_share,
            max_blocks_per_call=MAX_BLOCKS,
            max_leases=8,
        )
        memory = no_readers(capacity)
        self.words = memory.words
        self.core = CacheCore(config, make_table(capacity), POLICIES[policy](capacity), memory)
        self.readers: dict[tuple[str, str], Any] = {}
        self.all_readers: list[Any] = []
        self.num_stores = 0
        self.left_over = 0, 0
        self.policy = policy
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

    def call(self, function: Callable[[], T], *reasons: Reason) -> T | None:
        """With `reasons`, the core must refuse the call for one of them and change nothing; then
        None."""
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
        """Reasons that hold. Without any, the core must not refuse."""
        return tuple(reason for holds, reason in conditions if holds)

    def session(self, data: st.DataObject) -> tuple[int, str, int]:
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        return number, *self.sessions[number]

    def may_lease(self, engine: str) -> bool:
        """The core has eight leases. An engine may open its first, or another if as many stay
        free as it then has."""
        held = sum(lease.engine_id == engine for lease in self.model.leases.values())
        left = 8 - len(self.model.leases) - 1
        return left >= 0 and (held + 1 <= left or held == 0)

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
        """The server ends a broken stream's transfers as failed first."""
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        for session, transfer_id in [key for key in self.model.transfers if key[0] == number]:
            self.finish(session, transfer_id, succeeded=False)
        self.core.close_session(number, self.now_s)
        self.core.close_session(number, self.now_s)
        if not self.core.draining:
            # The next server keeps their slots for readers.
            self.model.end_residencies(number)
            self.readers = {n: r for n, r in self.readers.items() if r.session != number}
        for lease in [lease for lease in self.model.leases.values() if lease.session == number]:
            self.model.end_lease(lease)
        del self.sessions[number]

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.core.draining = on and not self.core.draining

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
            self.model.counted.loaded_blocks += len(transfer.todo) if succeeded else 0
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
            if expected[run][position] == BlockResult.STORED and transfer.residency:
                self.model.pin_resident(transfer.residency, key[1], position, key)
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
        self.model.counted.stored_blocks += 1
        lease.keys.remove(key)
        del self.model.written[key]
        self.model.ready.add(key)
        return BlockResult.STORED

    def check_loads(self) -> None:
        """Slots of running loads must still hold the right bytes."""
        for transfer in self.model.transfers.values():
            if transfer.shard_index < 0:
                for _, _, key, offset in transfer.todo:
                    for shard in range(self.num_shards):
                        assert self.model.arena[offset, shard] == key, "a slot changed under a load"

    @rule(knows_use=st.booleans())
    def restart(self, knows_use: bool) -> None:
        """`knows_use`: the next server also knows when the blocks were last used."""
        self.core, restored = taken_over(
            self.core, self.policy, self.now_s - 1.0 if knows_use else None, self.now_s
        )
        self.core.space.index.unverified[:] = False
        self.core.grace.until_s = self.now_s + self.core.config.residency_grace_s
        assert restored.blocks == len(self.model.ready) and set(restored.dropped) <= {"unfinished"}
        self.model.restart(self.core, self.now_s)
        self.readers = {}
        self.sessions.clear()
        for engine in ENGINES:
            self.open(engine)

    def unwritten_bytes(self, engine: str, *, has_promise: bool = False) -> int:
        return sum(
            self.sizes[key[1]]
            for lease in self.model.leases.values()
            if lease.write and (lease.engine_id, lease.has_promise) == (engine, has_promise)
            for key in lease.keys
        )

    @invariant()
    def reserves_no_more_than_a_share(self) -> None:
        config = self.core.config
        most_bytes = config.unwritten_share * config.arena_bytes
        used = {engine: self.unwritten_bytes(engine) for engine in ENGINES}
        # A smaller arena takes nothing away, but allows no more.
        most, together = (
            max(bound, left)
            for bound, left in zip((most_bytes, 2 * most_bytes), self.left_over, strict=True)
        )
        assert max(used.values()) <= most and sum(used.values()) <= together
        self.left_over = max(used.values()), sum(used.values())
        assert self.core.leases.unwritten.total == sum(used.values())

    @invariant()
    def settles(self) -> None:
        assert not self.model.take_notices(), "a call evicted something it has no business to evict"
        self.model.settle()
        self.check_loads()
