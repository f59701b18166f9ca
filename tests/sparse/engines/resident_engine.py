"""The scheduler side of an engine with resident requests. vLLM's block pool, hotkv's block manager
and `ResidentRequests` (`books`) are real.

Block contents are made up: exact ones are equal where prefixes are. Requests hit each other's
blocks on the device as in vLLM. `Workers` know only the steps' messages, and check what has left
the device.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.block_manager import ResidentManager, ResidentSpec
from hotkv_sparse.vllm.device_pool import DevicePool
from hotkv_sparse.vllm.scheduler.calls import ResidencyCalls
from hotkv_sparse.vllm.scheduler.resident_requests import ResidentRequests
from hotkv_sparse.vllm.step import ResidentStep
from hotkv_vllm.link import StreamCount
from hotkv_vllm.scheduler.request import RequestState
from tests.doubles.fake import FakeServer
from tests.doubles.fake_books import FakeResidency
from tests.vllm.parts import TOKENS, Parts, block_hash, request

CHUNK = 2 * TOKENS
LONGEST = 47 * TOKENS
POOL = 60
"""With vLLM's null block."""
STEP_S = 0.1
TIMEOUT_S = 5.0
WELL_S = 2.0
"""No request may fail of a fault this many seconds ago."""
MAX_RUNNING = 4
WINDOW = SlidingWindowSpec(
    block_size=TOKENS,
    num_kv_heads=1,
    head_size=32,
    dtype=torch.float32,
    sliding_window=2 * TOKENS,
)


CONFIG = {
    residency: SparseConfig(
        sparse_topk=192,
        min_context_tokens=5 * TOKENS,
        dense_layers=(),
        sink_tokens=TOKENS,
        recent_tokens=TOKENS,
        residency=residency,
    )
    for residency in ("host", "auto")
}


def spec_of(residency: str) -> ResidentSpec:
    plain = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=CHUNK), max_in_flight_tokens=CHUNK
    )
    return ResidentSpec.of(plain, CONFIG[residency], vllm_config)


class Adapters:
    """`are_known`: requests with an adapter have block hashes."""

    def __init__(self) -> None:
        self.are_known = False

    def keys(self, one: Any) -> list[bytes]:
        if one.lora_request is None:
            return list(one.block_hashes)
        return [b"keyed" + name[:27] for name in one.block_hashes] if self.are_known else []


class Waiting(list[Any]):
    def peek_request(self) -> Any:
        return self[0]


class Store(NamedTuple):
    """incarnation: of the request; recognizes old stores after a preemption, a reopened residency
        or `distrust`.
    first: index of its first block in the request.
    """

    request_id: str
    residency_id: str
    store_id: int
    incarnation: tuple[str, int, int]
    first: int
    names: list[bytes]
    contents: list[bytes]


class Workers:
    """Offsets of each request's blocks in the arena, and its pin."""

    def __init__(self) -> None:
        self.offsets: dict[str, list[int]] = {}
        self.pins: dict[str, Any] = {}

    def end(self, name: str) -> None:
        self.offsets.pop(name, None)
        self.pins.pop(name, None)

    def hear(self, step: ResidentStep, lost: set[str]) -> None:
        """A list begins with block 0 again if the server lost blocks of a request that is whole
        on the device.

        lost: preempted before the next step; their output is dropped.
        """
        for name in step.preempted:
            self.end(name)
        for row in step.rows:
            known = self.offsets.setdefault(row.request_id, [])
            for place in row.kept:
                assert place.first in (0, len(known))
                known[place.first :] = place.offsets.tolist()
            if row.pin is not None:
                self.pins[row.request_id] = row.pin
            if row.num_freed > 0 and row.request_id not in lost:
                assert row.may_outgrow and len(known) >= row.num_freed
                assert row.request_id in self.pins


class Content(NamedTuple):
    data: bytes
    is_exact: bool


class ResidentEngine:
    """on_device: by device block, as last computed.
    most_blocks: that the server has room for; None: no limit.
    well_since_s: the server has had no fault since.
    excused: requests that may fail anyway.
    contents: stored bytes by block hash.
    """

    def __init__(
        self,
        residency: str = "auto",
        most_blocks: int | None = None,
        pool: int = POOL,
        *,
        has_windows: bool = False,
    ) -> None:
        self.adapters = Adapters()
        self.parts = Parts(adapters=self.adapters)
        self.server: FakeServer = self.parts.server
        self.server.residencies.most_blocks = most_blocks
        self._slots: dict[bytes, int] = {}
        self._new_slot = self.server.residencies._slot
        self.server.residencies._slot = self._slot  # type: ignore[method-assign]
        self._extend = self.server.residencies.extend
        self.server.residencies.extend = self._pin  # type: ignore[method-assign]
        self._close = self.parts.session.close_residency
        self.parts.session.close_residency = self._close_residency  # type: ignore[method-assign]
        self._open = self.parts.session.open_residency
        self.parts.session.open_residency = self._open_residency  # type: ignore[method-assign]
        self.pool = BlockPool(pool, True, TOKENS)
        self.on_device: dict[int, Content] = {}
        self.spec = spec_of(residency)
        self.manager = ResidentManager(
            self.spec,
            block_pool=self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            scheduler_block_size=TOKENS,
        )
        specs: list[Any] = [self.spec, WINDOW] if has_windows else [self.spec]
        self.device = DevicePool(
            SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=LONGEST),
                parallel_config=SimpleNamespace(decode_context_parallel_size=1),
                max_in_flight_tokens=CHUNK,
            ),
            SimpleNamespace(
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
                num_blocks=pool,
            ),
        )
        self.windows = [
            SlidingWindowManager(
                spec,
                block_pool=self.pool,
                enable_caching=True,
                kv_cache_group_id=1,
                scheduler_block_size=TOKENS,
                max_admission_blocks_per_request=spec.max_admission_blocks_per_request(
                    max_in_flight_tokens=CHUNK, max_model_len=LONGEST
                ),
            )
            for spec in specs[1:]
        ]
        for one in self.windows:
            one.cache_hit_alignment_tokens = TOKENS
        self.manager.accompany(list(zip(self.device._beside, self.windows, strict=True)))
        self.manager.find_hit = self._found
        self.managers: list[Any] = [self.manager, *self.windows]
        self.running: list[Any] = []
        self.waiting = Waiting()
        self.requests: dict[str, Any] = {}
        self.failed: set[str] = set()
        self.scheduler = SimpleNamespace(
            running=self.running,
            waiting=self.waiting,
            kv_holding_waiting=Waiting(),
            requests=self.requests,
            max_num_active_reqs=MAX_RUNNING,
            max_num_scheduled_tokens=CHUNK,
            current_step=0,
            encoder_cache_mismatch_reqs=self.failed,
            reset_preempted_req_ids=set(),
            _preempt_request=self._preempt_request,
        )
        self.device._manager, self.device._scheduler = self.manager, self.scheduler
        streams = StreamCount(lambda state, why: None)
        object.__setattr__(self.parts.session.config, "on_state", streams)
        self.books = ResidentRequests(
            ResidencyCalls(self.parts.session, streams, self.parts.stats),
            self.parts.groups,
            self.parts.exactness,
            self.device,
            self.parts.stats,
            TIMEOUT_S,
        )
        self.parts.exactness.exact_tokens = (  # type: ignore[method-assign]
            lambda name: (
                min(self.requests[name].exact_blocks, self.requests[name].distrusted_from) * TOKENS
            )
        )
        self.manager.stored_tokens = self.books.kept_tokens
        self.manager.exact_tokens = self._exact_tokens
        self.manager.has_room = self.books.has_room
        self.manager.step_starts = self._step_starts
        self.workers = Workers()
        self.states: dict[str, RequestState] = {}
        self.stores: list[Store] = []
        self.contents: dict[bytes, bytes] = {}
        self.numbers = itertools.count()
        self.now_s = self.well_since_s = 100.0
        self.excused: set[str] = set()
        self.asks_too_much = False
        self.num_distrusts = 0
        self.preempted: list[str] = []

    def _exact_tokens(self, one: Any) -> int:
        if not one.num_computed_tokens:
            return max(one.num_hit, one.computes_exact) * TOKENS
        return min(one.exact_blocks, one.distrusted_from) * TOKENS

    def _slot(self, shards: Any) -> int:
        """The slot is the same while the server has the bytes."""
        return self._slots.setdefault(shards[0], self._new_slot(shards))

    def _pin(self, name: Any, group: int, first: int, hashes: Any, blocks: Any) -> Any:
        """`asks_too_much`: more blocks than the residency has room for."""
        residency = self.server.residencies.open.get(name)
        self.asks_too_much |= residency is not None and first + len(hashes) > residency.asked[group]
        return self._extend(name, group, first, hashes, blocks)

    def _open_residency(self, residency_id: str, num_blocks: Any) -> Any:
        """An open residency must ask for more room than before."""
        residents = self.books._residents.values()
        one = next(one for one in residents if one.residency_id == residency_id)
        assert not self.books._reservations.is_open(one) or num_blocks[0] > one.room
        return self._open(residency_id, num_blocks)

    def _close_residency(self, residency_id: str) -> None:
        """A real connection keeps the order of calls."""
        self.server.settle("open_residency")
        self._close(residency_id)

    def count(self, name: str) -> float:
        return self.parts.count(name)

    # ------------------------------------------------------------------------------------- requests

    def arrive(
        self,
        prompt: int,
        answer: int,
        family: str = "a",
        exact_blocks: int = LONGEST,
        is_announced: bool = True,
        has_adapter: bool = False,
    ) -> str:
        """family: requests of one share a prefix.
        exact_blocks: later ones are inexact.
        is_announced: to `ResidentRequests`.
        """
        name = f"r{next(self.numbers)}"
        one = request(name, min(prompt, LONGEST - 1))
        one.goal = min(LONGEST, prompt + answer)
        one.max_tokens = answer
        one.lora_request = "an adapter" if has_adapter else None
        one.family = f"{family} adapted " if has_adapter else family
        one.computes_exact = one.exact_blocks = exact_blocks
        one.begun, one.distrusted_from, one.hit, one.num_hit = 0, LONGEST, [], 0
        one.num_output_placeholders = one.num_in_flight_tokens = 0
        one.num_tokens_with_spec = one.num_tokens
        one.next_decode_eligible_step = 0
        self._hash(one)
        self.requests[name] = one
        self.waiting.append(one)
        self.states[name] = self.parts.state(one)
        if is_announced:
            self.books.arrived(self.states[name], self.now_s)
        return name

    def _hash(self, one: Any) -> None:
        count = one.num_tokens // TOKENS
        one.block_hashes = [block_hash(one.family, number) for number in range(count)]

    def content(self, one: Any, block: int) -> bytes:
        """Inexact blocks change with each preemption."""
        if block < len(one.hit):
            return one.hit[block].data
        if block < min(one.exact_blocks, one.distrusted_from):
            of_base = block_hash(one.family, block)
            return of_base if one.lora_request is None else b"keyed" + of_base[:27]
        return f"{one.request_id}/{one.begun}/{block}".encode().ljust(32)

    def end(self, name: str) -> None:
        one = self.requests.pop(name)
        if one in self.running:
            self.running.remove(one)
            self._free(name)
        else:
            self.waiting.remove(one)
        self.books.ended(name)
        self.workers.end(name)
        del self.states[name]

    def _free(self, name: str) -> None:
        for manager in self.managers:
            manager.free(name)

    # ---------------------------------------------------------------------------------------- steps

    def _step_starts(self) -> None:
        held = self.books.held(self.now_s)
        is_well = self.now_s - self.well_since_s > WELL_S
        if is_well and self.server.residencies.most_blocks is None:
            assert self.excused.issuperset(held), "it asks for room ahead"
        self.device.leave_out(held)
        # Else vLLM would preempt others, of the lowest priority.
        assert self.manager.lost.isdisjoint(one.request_id for one in self.running)
        demand = self.device.demand(self.books.has_room)
        before = set(self.manager.moved)
        self.books.make_room()
        if self.manager.moved - before:
            assert demand is not None and demand.is_short

    def step(self) -> None:
        self.now_s += STEP_S
        self.scheduler.current_step += 1
        for manager in self.managers:
            manager.new_step_starts()
        planned = self._plan()
        preempted, self.scheduler.reset_preempted_req_ids = (
            self.scheduler.reset_preempted_req_ids,
            set(),
        )
        for one, new in planned.values():
            if not self.device.holds_whole(one) and not self.device.stays_whole(one):
                room = self.pinned(one)
                assert room is None or room.asked[0] * TOKENS >= one.num_computed_tokens + new
        tables: dict[str, Any] = {
            name: ([block.block_id for block in self.manager.req_to_blocks[name]],)
            for name in planned
        }
        output = SimpleNamespace(
            preempted_req_ids=preempted,
            num_scheduled_tokens={name: new for name, (_, new) in planned.items()},
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
        )
        rows: Any = SimpleNamespace(request=self.requests.get)
        step = self.books.step(output, rows, self.now_s)
        assert not self.asks_too_much
        self.workers.hear(step, self.manager.lost)
        self._read(step)
        for name in step.lost:
            assert self.device.has_blocks(name), "no worker reads for a request that waits"
            assert not self.device.stays_whole(self.requests[name]), "the device has it all"
        for one, new in planned.values():
            self._compute(one, new)
            one.num_computed_tokens += new
            if one.num_computed_tokens == one.num_tokens:
                one.num_tokens += 1
                one.num_tokens_with_spec = one.num_tokens
                self._hash(one)
            if one.num_tokens > one.goal:
                self.end(one.request_id)
        self.lose([name for name in step.lost if name in self.requests])
        for name in self.failed & self.requests.keys():
            is_well = self.now_s - self.well_since_s > WELL_S
            assert name in self.excused or not is_well, f"{name} fails, and the server is well"
            fits = self.device.could_be_whole(self.requests[name])
            assert name in self.excused or not fits, f"{name} fails, and fits on the device"
            self.end(name)
        self.failed.clear()

    def _compute(self, one: Any, new: int) -> None:
        """Before the tokens count. Of a new request also its blocks hit or loaded."""
        blocks, done = self.manager.req_to_blocks[one.request_id], one.num_computed_tokens
        if one.num_hit:
            one.hit = [self.on_device[block.block_id] for block in blocks[: one.num_hit]]
            assert all(content.is_exact for content in one.hit), "a hit of inexact KV"
            for manager in self.windows:
                for block in manager.req_to_blocks[one.request_id][: one.num_hit]:
                    assert block.is_null or self.on_device[block.block_id].is_exact
            one.exact_blocks = max(one.computes_exact, one.num_hit)
            one.num_hit = 0
        first = len(one.hit) if one.is_new else done // TOKENS
        for place in range(first, (done + new) // TOKENS):
            is_exact = place < min(one.exact_blocks, one.distrusted_from)
            content = Content(self.content(one, place), is_exact)
            for manager in self.managers:
                block = manager.req_to_blocks[one.request_id][place]
                if not block.is_null:
                    self.on_device[block.block_id] = content
        one.is_new = False

    def _residency(self, one: Any) -> str:
        return self.books.kept_as(one.request_id)

    def _read(self, step: ResidentStep) -> None:
        """Each block that is only in the arena must be right and pinned."""
        memory = self.server.residencies.arena.memory
        for row in step.rows:
            if row.request_id in self.manager.lost:
                continue
            one, known = self.requests[row.request_id], self.workers.offsets[row.request_id]
            pin, pinned = self.workers.pins.get(row.request_id), self.pinned(one)
            for block in range(self.spec.sink_blocks, row.num_freed):
                found = memory[known[block] : known[block] + 32].tobytes()
                assert found == self.content(one, block), (one.request_id, block)
                if pinned is not None and pinned.opened == pin:
                    assert pinned.offsets.get((0, block)) == known[block], "the pin lacks it"

    def pinned(self, one: Any) -> FakeResidency | None:
        return self.server.residencies.open.get(("engine", self._residency(one)))

    def _plan(self) -> dict[str, tuple[Any, int]]:
        """As vLLM plans: requests and their new tokens."""
        budget, planned, has_preempted = CHUNK, dict[str, tuple[Any, int]](), False
        for one in list(self.running):
            if one.next_decode_eligible_step > self.scheduler.current_step:
                continue
            new = min(one.num_tokens - one.num_computed_tokens, budget)
            while new and one in self.running:
                if self._allocate(one, new):
                    planned[one.request_id] = one, new
                    budget -= new
                    break
                if self.books.is_freeing(self.now_s):
                    return planned
                last = self.running[-1]
                planned.pop(last.request_id, None)
                self._preempt(last, is_first=not has_preempted)
                has_preempted = True
        if not has_preempted:
            self._admit(budget, planned)
        return planned

    def reset_running(self) -> None:
        while self.running:
            self._preempt_request(self.running.pop(), 0.0, drop_stale_output=True)

    def _preempt(self, last: Any, *, is_first: bool) -> None:
        """is_first: of the step; blocks that only another shared then could not be known."""
        for one in self.running if is_first else ():
            resident = self.books._residents.get(one.request_id)
            if resident is not None and self.books._may_move(resident):
                kept = self.books.kept_tokens(one.request_id)
                relief = self.device.relief(one.request_id, kept)
                is_lost = bool(self.manager.lost)
                assert is_lost or relief is None or relief.freed <= 0, "it could have been moved"
        self.running.remove(last)
        self._preempt_request(last, 0.0, drop_stale_output=True)

    def _preempt_request(self, last: Any, _: float, *, drop_stale_output: bool) -> None:
        """The caller has removed it from `running`."""
        assert drop_stale_output
        self.preempted.append(last.request_id)
        self.scheduler.reset_preempted_req_ids.add(last.request_id)
        self._free(last.request_id)
        last.num_computed_tokens = 0
        last.begun += 1
        last.exact_blocks, last.hit, last.distrusted_from = last.computes_exact, [], LONGEST
        self.waiting.insert(0, last)

    def _admit(self, budget: int, planned: dict[str, tuple[Any, int]]) -> None:
        for one in list(self.waiting):
            if not budget or len(self.running) == self.scheduler.max_num_active_reqs:
                return
            if self.device.was_preempted(one.request_id):
                continue
            if not self.books.is_admitted(self.states[one.request_id], self.now_s):
                continue
            found, one.num_hit = self._found(one.block_hashes, one.num_tokens - 1)
            one.num_hit //= TOKENS
            hit = self._hit(one, one.num_hit * TOKENS)
            if hit is None:
                continue
            new = min(one.num_tokens - hit, budget)
            if not self._allocate(one, new, hit, found, is_first=True):
                return
            one.is_new = True
            self.waiting.remove(one)
            self.running.append(one)
            one.num_computed_tokens = hit
            planned[one.request_id] = one, new
            budget -= new

    def _found(self, hashes: Any, most_tokens: int) -> tuple[list[list[Any]], int]:
        """Blocks of the hit on the device by manager, and its tokens."""
        blocks: list[list[Any]] = []
        for manager in self.managers:
            (found,), most_tokens = manager.find_longest_cache_hit(
                block_hashes=hashes,
                max_length=most_tokens,
                kv_cache_group_ids=[manager.kv_cache_group_id],
                block_pool=self.pool,
                kv_cache_spec=manager.kv_cache_spec,
                drop_eagle_block=False,
                alignment_tokens=TOKENS,
            )
            blocks.append(found)
        return [found[: most_tokens // TOKENS] for found in blocks], most_tokens

    def _hit(self, one: Any, device_tokens: int) -> int | None:
        """Hit tokens; None if the request has to wait."""
        names = self.parts.groups.hashes(one, 0)
        most = min((one.num_tokens - 1) // TOKENS, one.exact_blocks, len(names))
        count = 0
        while count < most and self.has(bytes(names[count])):
            count += 1
        if count * TOKENS <= device_tokens or not self.server.up:
            return device_tokens
        usable = self.books.usable_tokens(one, device_tokens, count * TOKENS)
        return None if usable is None else max(usable, device_tokens)

    def has(self, name: bytes) -> bool:
        return (self.parts.space, 0, name) in self.server.blocks

    def _allocate(
        self,
        one: Any,
        new: int,
        hit: int = 0,
        found: Sequence[Sequence[Any]] = ((), ()),
        is_first: bool = False,
    ) -> bool:
        """As `KVCacheManager.allocate_slots`. False if too few blocks are free.

        hit: tokens, also of `found`; others are loaded.
        found: by manager.
        """
        name, free = one.request_id, self.pool.get_num_free_blocks
        local = one.num_computed_tokens + len(found[0]) * TOKENS
        total = max(local, hit)

        def needed(num_tokens: int, *, is_admission: bool) -> int:
            return sum(
                manager.get_num_blocks_to_allocate(
                    name, num_tokens, blocks, total, local, num_tokens, is_admission
                )
                for manager, blocks in zip(self.managers, found, strict=False)
            )

        if is_first and needed(one.num_tokens, is_admission=True) > free():
            return False
        for manager in self.managers:
            manager.remove_skipped_blocks(name, total, one.num_tokens)
        count = needed(total + new, is_admission=False)
        if count > free():
            return False
        before = free()
        if hit:
            for manager, blocks in zip(self.managers, found, strict=False):
                manager.add_local_computed_blocks(name, blocks, local, total - local)
            for manager in self.managers if total > local else ():
                manager.allocate_external_computed_blocks(name, local, total - local)
        for manager in self.managers:
            manager.allocate_new_blocks(name, total + new, total + new)
            manager.num_cached_block.setdefault(name, 0)
        assert before - free() <= count
        for manager in self.managers:
            manager.cache_blocks(one, min(total + new, one.num_tokens), replay_boundaries=())
        return True

    # ------------------------------------------------------------------------------- host memory

    def begin_store(self, name: str) -> None:
        """Skips blocks that an earlier call stores."""
        state, one = self.states[name], self.requests[name]
        first, until = state.store.stored_blocks[0], one.num_computed_tokens // TOKENS
        if not self.books.keeps(name) or first >= until or name in self.manager.lost:
            return
        names = [bytes(block) for block in self.books.names(state, until)[first:until]]
        contents = [self.content(one, block) for block in range(first, until)]
        shared = [bytes(block) for block in self.parts.groups.hashes(one, 0)]
        for block, stored in zip(range(first, until), names, strict=True):
            is_exact = block < min(one.exact_blocks, one.distrusted_from)
            assert is_exact or stored not in shared, "others would find what is not exact"
        resident = self.books._residents[name]
        incarnation = resident.residency_id, one.begun, self.num_distrusts
        for other in self.stores:
            if other.incarnation == incarnation and other.store_id in resident.storing:
                assert not set(other.names) & set(names), "stored twice at a time"
        number = next(self.numbers)
        job: Any = SimpleNamespace(
            store_id=number, runs=(SimpleNamespace(depth=first),), attached=()
        )
        state.store.stored_blocks[0] = until
        self.books.storing(name, job)
        residency_id = self.books.kept_as(name)
        self.stores.append(Store(name, residency_id, number, incarnation, first, names, contents))

    def end_stores(self, are_taken: bool = True, are_reported: bool = True) -> None:
        """are_taken: the server keeps the blocks.
        are_reported: to the scheduler side.
        """
        stores, self.stores = self.stores, []
        for store in stores:
            for block, content in zip(store.names, store.contents, strict=True):
                assert self.contents.setdefault(block, content) == content, "a name of two contents"
                if are_taken and self.server.up:
                    self.server.blocks[self.parts.space, 0, block] = {0: content}
            if are_taken and self.server.up:
                self._pin_stored(store)
            ended: Any = SimpleNamespace(request_id=store.request_id, store_id=store.store_id)
            if are_reported:
                self.books.stored(ended)

    def _pin_stored(self, store: Store) -> None:
        residency = self.server.residencies.open.get(("engine", store.residency_id))
        if residency is None:
            return
        for place, block in enumerate(store.names, store.first):
            if (0, place) not in residency.names and len(residency.names) < residency.asked[0]:
                residency.names[0, place] = block
                shards = self.server.blocks[self.parts.space, 0, block]
                residency.offsets[0, place] = self._slot(shards)

    def run(self, steps: int, *, stores: bool = True) -> None:
        """stores: each step's blocks are stored at once."""
        for _ in range(steps):
            self.step()
            if stores:
                for one in self.running:
                    self.begin_store(one.request_id)
                self.end_stores()
            if not stores or not self.server.up or self.server.hold:
                self.well_since_s = self.now_s

    def distrust(self) -> None:
        """Blocks on the device become inexact, unless the server has them."""
        for name in self.requests:
            if self.books.keeps(name) and self.device.has_blocks(name):
                kept = self.books.kept_tokens(name) // TOKENS
                self.requests[name].distrusted_from = min(self.requests[name].distrusted_from, kept)
        self.num_distrusts += 1
        self.device.distrust()
        self.books.distrust()

    def lose(self, names: list[str]) -> None:
        """As workers that can't read these requests' bytes."""
        for name in names:
            self.device.lose(name)
        self.books.lost(names)

    def die(self, *, empty: bool) -> None:
        self.server.die(empty=empty)
        if empty:
            self._slots.clear()
            self.contents.clear()

    def refuse(self, name: str) -> None:
        self.excused.add(name)
        plain = self.server.residencies.add

        def add(residency: tuple[str, str], asked: dict[int, int]) -> Any:
            if residency[1].endswith(f"-{name}"):
                raise HotKVError(Reason.RESIDENCY_TOO_LARGE, "told to refuse")
            return plain(residency, asked)

        self.server.residencies.add = add  # type: ignore[method-assign]
