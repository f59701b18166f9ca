"""A resident CUDA engine's steps on the CPU. vLLM's metadata builder and attention class and
hotkv's code in them are real; `tests.device.cuda_on_cpu` runs the kernels.

Keys, values and queries are random and known, freed pages NaN.
"""

import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    create_kv_cache_views,
)

from hotkv_client.types import ResidencyOpened
from hotkv_sparse import SparseConfig
from hotkv_sparse.cuda.hotsets import ATTENDED
from hotkv_sparse.cuda.mapped_arena import PAGEABLE_ACCESS
from hotkv_sparse.cuda.selector import Queries
from hotkv_sparse.selection import exact_log_mass
from hotkv_sparse.vllm.block_manager import ResidentSpec
from hotkv_sparse.vllm.cuda import setup as cuda_setup
from hotkv_sparse.vllm.cuda.backend import HotFlashBuilder, HotFlashImpl
from hotkv_sparse.vllm.device_pool import DevicePool
from hotkv_sparse.vllm.scheduler.rows import ResidentOnly, RowNames, SparseRows
from hotkv_sparse.vllm.step import KeptBlocks, ResidentRow, ResidentStep
from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from tests.sparse.cuda_support import CpuTensors, Cuda
from tests.vllm.tiny import BLOCK_TOKENS, engine_args, transfer_config, write_model

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

HEADS, QUERIES, SIZE = 2, 6, 32
NAMES = ("model.layers.0.attn", "model.layers.1.attn")
FILE = (1, 2)
PIN = ResidencyOpened("r", 0, 0, 0)
CHUNK = 128
ATTEND = "flash_attn_varlen_func"
FP8 = torch.float8_e4m3fn
FP8_NAN = 0x7F
KEY_SCALES, VALUE_SCALES, QUERY_SCALE = (0.5, 0.75), (0.25, 1.5), 0.125
"""Of an engine with fp8, by KV head; of queries one for all."""


class FakeArena:
    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.file_id, self.is_writable, self.is_pinned = FILE, False, True

    def holds(self, pin: ResidencyOpened) -> bool:
        return self.is_pinned

    def memory_end(self, start: int) -> int:
        return int(self.memory.size)


def attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    scheduler_metadata: Any,
    s_aux: torch.Tensor | None,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    **_: Any,
) -> None:
    """In place of FlashAttention. k, v: [pages, tokens, KV heads, head size]."""
    assert causal and scheduler_metadata is None
    if k.dtype == FP8:
        # All rows have the same scales.
        q = q.float() * q_descale[0].repeat_interleave(q.shape[1] // k.shape[2])[:, None]
        k, v = k.float() * k_descale[0, :, None], v.float() * v_descale[0, :, None]
    for row, (begin, end) in enumerate(
        zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)
    ):
        if end == begin:
            continue
        length = int(seqused_k[row])
        pages = block_table[row, : -(-length // k.shape[1])].long()
        if k.dtype == torch.bfloat16:
            given = k[pages], v[pages]
            out[begin:end] = by_pages(q[begin:end], *given, softmax_scale, length - (end - begin))
            continue
        keys, values = (part[pages].flatten(0, 1)[:length].numpy() for part in (k, v))
        out[begin:end] = torch.from_numpy(
            exact(q[begin:end].numpy(), keys, values, softmax_scale, length - (end - begin), s_aux)
        )


def by_pages(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, before: int
) -> torch.Tensor:
    """Rounds as FlashAttention does: by page, with shares in bf16 relative to the largest score so
    far.

    keys, values: [pages, tokens, KV heads, head size].
    before: context tokens before the first query.
    """
    group = query.shape[1] // keys.shape[2]
    peak = torch.full(query.shape[:2], -torch.inf)
    total, found = torch.zeros(query.shape[:2]), torch.zeros(query.shape)
    for number, (page, of_values) in enumerate(zip(keys, values, strict=True)):
        scores = torch.einsum(
            "nqd,tqd->nqt", query.float(), page.float().repeat_interleave(group, dim=1)
        )
        at = number * len(page) + torch.arange(len(page))
        is_later = at > before + torch.arange(len(query))[:, None]
        scores = (scores * scale).masked_fill(is_later[:, None], -torch.inf)
        higher = torch.maximum(peak, scores.amax(dim=-1))
        shares = torch.exp(scores - higher[..., None]).to(query.dtype).float()
        shrinks = torch.exp(peak - higher)
        total, peak = total * shrinks + shares.sum(dim=-1), higher
        # Tokens behind the context may be NaN.
        valid = of_values.float().nan_to_num().repeat_interleave(group, dim=1)
        found = found * shrinks[..., None] + torch.einsum("nqt,tqd->nqd", shares, valid)
    return (found / total[..., None]).to(query.dtype)


def exact(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scale: float,
    before: int,
    sinks: torch.Tensor | None,
) -> np.ndarray:
    """Causal attention of `queries` [n, query heads, head size].

    keys, values: [tokens, KV heads, head size].
    before: context tokens before the first query.
    sinks: learned logits [query heads].
    """
    group = queries.shape[1] // keys.shape[1]
    scores = np.einsum("nqd,tqd->nqt", queries, np.repeat(keys, group, axis=1)) * scale
    at = before + np.arange(len(queries))
    scores[np.broadcast_to(np.arange(len(keys)) > at[:, None, None], scores.shape)] = -np.inf
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = shares.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.numpy()[:, None] - scores.max(axis=-1, keepdims=True))
    shares /= total
    return np.einsum("nqt,tqd->nqd", shares, np.repeat(values, group, axis=1)).astype(np.float32)


def caches(vllm_config: VllmConfig, spec: KVCacheSpec, num_pages: int) -> dict[str, torch.Tensor]:
    """Pages are laid out as the connector asks on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current_platform, "is_cuda", lambda: True)
        wanted = HotKVConnector.get_required_kvcache_layout(vllm_config)
    vllm_config.cache_config.kv_cache_layout = wanted
    group = KVCacheGroupSpec(list(NAMES), spec)
    num_bytes = num_pages * len(NAMES) * spec.page_size_bytes
    made = get_kv_cache_config_from_groups(vllm_config, [group], num_bytes)
    assert made.num_blocks == num_pages
    found: dict[str, torch.Tensor] = {}
    for place in made.kv_cache_tensors:
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        raw = torch.empty(place.size, dtype=torch.int8)
        views = create_kv_cache_views(raw, spec, num_pages, layout, place)
        found |= {
            name: view.fill_(_nothing(view)) for name, view in zip(place.layers, views, strict=True)
        }
    return found


def _nothing(cache: torch.Tensor) -> float:
    return FP8_NAN if cache.dtype == torch.uint8 else torch.nan


def _bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(eq=False)
class Request:
    """kv: [layers, 2 (keys, values), tokens, KV heads, head size].
    slots: in the arena.
    table: device pages; 0 if only in the arena.
    hot: device pages for blocks of the arena; `sent_hot` is what the worker knows.
    is_whole: all blocks are on the device, and `hot` is empty, until `Engine.move`.
    context: tokens computed.
    told: blocks whose place the worker knows.
    freed: blocks from the sinks up to this index have left the device.
    approximate: first token whose attention left out a block.
    """

    name: str
    kv: np.ndarray
    slots: np.ndarray
    table: list[int] = field(default_factory=list)
    hot: tuple[int, ...] = ()
    sent_hot: tuple[int, ...] = ()
    is_whole: bool = False
    context: int = 0
    prompt: int = 0
    kept: int = 0
    told: int = 0
    freed: int = 0
    is_new: bool = True
    is_admitted: bool = False
    approximate: int = EVERYTHING

    @property
    def request_id(self) -> str:
        return self.name

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt

    @property
    def num_tokens(self) -> int:
        return max(self.prompt, self.context + 1)

    @property
    def num_computed_tokens(self) -> int:
        return self.context


class Engine:
    """is_v2: metadata comes before the connector's message.
    replays_decode: steps of one token per row may come from CUDA graphs, and must not stage blocks.
    sketch_tokens: tokens that sketches have memory for.
    is_served: False: nothing is stored, and requests that may begin wholly on the device do so.
    is_mapped: False: the worker maps no arena yet.
    sinks: learned logits of all layers.
    is_fp8: queries too, as vLLM passes them.
    dtype: of the model.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        folder: Path,
        config: SparseConfig,
        *,
        is_v2: bool = False,
        replays_decode: bool = True,
        pages: int = 160,
        max_model_len: int = 1024,
        sketch_tokens: int = 4096,
        is_served: bool = True,
        sinks: torch.Tensor | None = None,
        is_fp8: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
    ) -> None:
        patch.setitem(sys.modules, "cupy", Cuda(PAGEABLE_ACCESS).module)
        patch.setattr(flash_attn, ATTEND, attention, raising=False)
        self.rng, self.config = np.random.default_rng(seed), config
        extra = {"sparse": {"residency": "host"}, "allow_sparse_cuda": True}
        vllm_config = EngineArgs(
            **engine_args(
                write_model(folder),
                max_num_batched_tokens=CHUNK,
                max_model_len=max_model_len,
                max_num_seqs=4,
            ),
            kv_transfer_config=transfer_config(**extra),
        ).create_engine_config()
        patch.setattr(type(vllm_config), "use_v2_model_runner", property(lambda _: is_v2))
        self.is_v2, self.is_served, self.is_mapped = is_v2, is_served, is_served
        plain = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=HEADS,
            head_size=SIZE,
            dtype=torch.uint8 if is_fp8 else dtype,
        )
        self.is_fp8, self.dtype, self.sinks = is_fp8, dtype, sinks
        # Of queries, which the references take as float32, and of outputs.
        self.noise = {"rtol": 2e-4, "atol": 2e-5}
        if dtype != torch.float32:
            self.noise = {"rtol": 2e-2, "atol": 2e-2}
        self.unit = torch.ones((HEADS, 1, 2 * SIZE))
        scale = torch.ones(1)
        scales = {"_q_scale": scale, "_k_scale": scale, "_v_scale": scale}
        if is_fp8:
            self.unit[:, 0, :SIZE] = torch.tensor(KEY_SCALES)[:, None]
            self.unit[:, 0, SIZE:] = torch.tensor(VALUE_SCALES)[:, None]
            scales["_k_scale"], scales["_v_scale"] = (
                torch.tensor(one) for one in (KEY_SCALES, VALUE_SCALES)
            )
            scales["_q_scale"] = torch.tensor([QUERY_SCALE])
        self.spec = ResidentSpec.of(plain, config, vllm_config)
        with set_current_vllm_config(vllm_config):
            impls = {
                name: HotFlashImpl(QUERIES, SIZE, SIZE**-0.5, HEADS, None, None, "auto")
                for name in NAMES
            }
        self.impls = impls
        for impl in impls.values():
            impl.vllm_flash_attn_version, impl.sinks = 2, sinks
            impl.kv_cache_dtype = "fp8_e4m3" if is_fp8 else "auto"
        vllm_config.compilation_config.static_forward_context = {
            name: SimpleNamespace(impl=impl, **scales) for name, impl in impls.items()
        }
        self.modules = vllm_config.compilation_config.static_forward_context
        group = SimpleNamespace(layer_names=list(NAMES), kv_cache_spec=self.spec)
        self.vllm_config = vllm_config
        kv_config = self.kv_config = SimpleNamespace(
            kv_cache_groups=[group], num_blocks=pages, kv_tp_replicas=1
        )
        self.caches = caches(vllm_config, self.spec, pages)
        self.page_bytes = self.caches[NAMES[0]][0].nbytes
        self.arena = FakeArena(256 * 2 * self.page_bytes)
        self.device = CpuTensors(seed)
        self.worker = cuda_setup.install(
            config, sketch_tokens, vllm_config, kv_config, self.caches, None, self.device
        )
        self.worker.arena_of = lambda: self.arena if self.is_mapped else None
        assert self.worker.map_arena() == is_served
        patch.setattr(vllm_config.device_config, "device_type", "cuda")
        self.pool = DevicePool(vllm_config, kv_config)
        self.builder = HotFlashBuilder(self.spec, list(NAMES), vllm_config, torch.device("cpu"))
        self.free = list(range(pages - 1, 0, -1))
        self.free_slots = list(self.rng.permutation(256))
        self.preempted: list[str] = []
        self.requests: dict[str, Request] = {}
        self.attended: dict[tuple[str, int], list[int]] = {}
        self.lost: set[int] = set()
        self.replays_decode = replays_decode
        self.names = RowNames(
            config,
            [(0, BLOCK_TOKENS)],
            lambda name: self.is_away(self.requests[name]),
            ResidentOnly(lambda name: not self.requests[name].is_whole, replays_decode),
        )
        self.exactness = Exactness((BLOCK_TOKENS,), pages)
        self.exactness.is_watching = True
        self.taken: list[int] = []
        self.counted: set[str] = set()
        self.treated: set[str] = set()

    # ------------------------------------------------------------------------------------- requests

    def add(self, name: str, prompt: int, more: int) -> Request:
        tokens = prompt + more
        count = -(-tokens // BLOCK_TOKENS)
        kv = self.rng.standard_normal((len(NAMES), 2, count * BLOCK_TOKENS, HEADS, SIZE))
        slots = np.array([self.free_slots.pop() for _ in range(count)], np.int64)
        if self.is_fp8:
            units = np.array([KEY_SCALES, VALUE_SCALES])[None, :, None, :, None]
            kv = torch.from_numpy(kv / units).to(FP8).double().numpy() * units
        kv = torch.from_numpy(kv).to(self.dtype).double().numpy()
        one = self.requests[name] = Request(name, kv.astype(np.float32), slots, prompt=prompt)
        self.begin(one)
        self.names.arrived(one)
        return one

    def begin(self, one: Request) -> None:
        """Gives a request its hot slots, unless it begins wholly on the device."""
        one.is_whole = not self.is_served and self.pool.could_be_whole(one)
        one.hot = () if one.is_whole else self.hot_slots()

    def hot_slots(self) -> tuple[int, ...]:
        return tuple(self.take() for _ in range(self.spec.hot_blocks))

    def move(self, name: str) -> None:
        """Moves a request off the device, as the scheduler does before a step."""
        one = self.requests[name]
        one.is_whole = False
        self.free_old(one, one.kept)
        one.hot = self.hot_slots()

    def take(self) -> int:
        self.taken.append(self.free.pop())
        return self.taken[-1]

    def hit(self, one: Request, tokens: int) -> None:
        """The hit lies in the arena, sinks and recent blocks also on the device."""
        count = tokens // BLOCK_TOKENS
        for block in range(count):
            self.store(one, block)
        one.context, one.kept = tokens, count
        one.freed = max(count - 2, self.spec.sink_blocks)
        for block in range(count):
            is_here = block < self.spec.sink_blocks or block >= one.freed
            one.table.append(self.take() if is_here else 0)
            if is_here:
                for layer, name in enumerate(NAMES):
                    self.caches[name][one.table[block]] = self.page(one, layer, block)

    def end(self, name: str) -> None:
        one = self.requests.pop(name)
        self.names.ended(name)
        self.exactness.ended(name)
        self.give_back(self.pages_of(one))

    def pages_of(self, one: Request) -> list[int]:
        here = [page for block, page in enumerate(one.table) if self.is_here(one)(block)]
        return [page for page in (*here, *one.hot) if page]

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            for cache in self.caches.values():
                cache[page] = _nothing(cache)
        self.free = pages + self.free

    def page(self, one: Request, layer: int, block: int) -> torch.Tensor:
        tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        return self._encoded(
            torch.from_numpy(one.kv[layer][:, tokens]).permute(2, 1, 0, 3).flatten(2)
        )

    def _encoded(self, kv: torch.Tensor) -> torch.Tensor:
        """As a page has it. `kv`: [KV heads, tokens, 2 * head size]."""
        return (kv / self.unit).to(FP8).view(torch.uint8) if self.is_fp8 else kv.to(self.dtype)

    def store(self, one: Request, block: int) -> None:
        memory = self.arena.memory
        at = int(one.slots[block]) * 2 * self.page_bytes
        for layer in range(len(NAMES)):
            page = self.page(one, layer, block).contiguous().view(torch.uint8).numpy().reshape(-1)
            memory[at : at + len(page)] = page
            at += len(page)

    # ---------------------------------------------------------------------------------------- steps

    def step(self, plan: dict[str, int], *, padding: int = 0, checks: bool = True) -> None:
        """plan: new tokens by request, in the order of rows.
        padding: empty rows at the end.
        """
        rows = [(self.requests[name], count) for name, count in plan.items()]
        told = [self.tell(one, count) for one, count in rows]
        step = ResidentStep(tuple(told), tuple(self.preempted))
        self.preempted = []
        sparse = self.decide(rows)
        common = self.common(rows, padding)
        if self.is_v2:
            metadata = self.builder.build(0, common)
            self.worker.begin_resident(step, sparse)
        else:
            self.worker.begin_resident(step, sparse)
            metadata = self.builder.build(0, common)
        states = self.worker._work.state_of[: len(rows)].tolist()
        self.treated = {
            one.name for (one, _), state in zip(rows, states, strict=True) if state >= 0
        }
        if self.replays_decode and set(plan.values()) == {1}:
            assert not any(run.staged_blocks for run in self.worker.runs)
        for layer in range(len(NAMES)):
            self.forward(layer, rows, metadata, padding, checks)
        self.lost = self.worker.take_lost()
        assert self.treated == self.counted
        for one, count in rows:
            assert self.exactness.exact_tokens(one.name) <= one.approximate
            one.context += count
            self.after(one)

    def decide(self, rows: list[tuple[Request, int]]) -> SparseRows:
        is_here = {one.name: self.is_here(one) for one, _ in rows}
        tables = {
            one.name: ([p if is_here[one.name](i) else 0 for i, p in enumerate(one.table)],)
            for one, _ in rows
        }
        new = [one for one, _ in rows if not one.is_admitted]
        cached = [one for one, _ in rows if one.is_admitted]
        for one in new:
            one.is_admitted = True
        scheduled = SimpleNamespace(
            num_scheduled_tokens={one.name: count for one, count in rows},
            kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
            kv_cache_block_copies=(),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.name, num_computed_tokens=one.context, block_ids=tables[one.name]
                )
                for one in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.name for one in cached],
                resumed_req_ids=set(),
                num_computed_tokens=[one.context for one in cached],
            ),
        )
        sparse = self.names.of_step(scheduled)
        taken, self.taken = self.taken, []
        self.exactness.step(scheduled, taken, sparse.request_ids)
        self.counted = set(sparse.request_ids)
        return sparse

    def preempt(self, name: str) -> None:
        one = self.requests[name]
        self.give_back(self.pages_of(one))
        self.preempted.append(name)
        one.table, one.context, one.kept, one.told, one.freed = [], 0, 0, 0, 0
        self.begin(one)
        one.sent_hot = ()
        one.is_new, one.is_admitted, one.approximate = True, False, EVERYTHING

    def is_away(self, one: Request) -> bool:
        return one.freed > self.spec.sink_blocks

    def is_here(self, one: Request) -> Callable[[int], bool]:
        return lambda block: block < self.spec.sink_blocks or block >= one.freed

    def tell(self, one: Request, count: int) -> ResidentRow:
        context = one.context + count
        while len(one.table) * BLOCK_TOKENS < context:
            one.table.append(self.take())
        if one.is_whole:
            last = one.table[(context - 1) // BLOCK_TOKENS]
            return ResidentRow(one.name, last, one.table[0], False, 0)
        kept: tuple[KeptBlocks, ...] = ()
        if one.kept > one.told:
            offsets = one.slots[one.told : one.kept] * 2 * self.page_bytes
            kept = (KeptBlocks(one.told, offsets, np.full_like(offsets, -1), FILE),)
            one.told = one.kept
        is_new, one.is_new = one.is_new, False
        hot = one.hot if one.hot != one.sent_hot else ()
        one.sent_hot = one.hot
        return ResidentRow(
            one.name,
            one.table[(context - 1) // BLOCK_TOKENS],
            one.table[0],
            True,
            one.freed,
            hot,
            kept,
            PIN if is_new else None,
            context,
            count,
        )

    def common(self, rows: list[tuple[Request, int]], padding: int) -> CommonAttentionMetadata:
        counts = [count for _, count in rows] + [0] * padding
        starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32)
        width = 1024 // BLOCK_TOKENS
        table = torch.zeros((len(counts), width + 3), dtype=torch.int32)
        for row, (one, _) in enumerate(rows):
            table[row, : len(one.table)] = torch.tensor(one.table)
        seq_lens = [one.context + count for one, count in rows] + [0] * padding
        num_tokens = int(starts[-1]) + padding
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=num_tokens,
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        )

    def forward(
        self,
        layer: int,
        rows: list[tuple[Request, int]],
        metadata: Any,
        padding: int,
        checks: bool,
    ) -> None:
        name = NAMES[layer]
        cache, impl = self.caches[name], self.impls[name]
        for one, count in rows:
            for token in range(one.context, one.context + count):
                page, place = one.table[token // BLOCK_TOKENS], token % BLOCK_TOKENS
                if place == 0:
                    cache[page] = _nothing(cache)
                written = np.concatenate(
                    [one.kv[layer][0, token], one.kv[layer][1, token]], axis=-1
                )
                cache[page, :, place] = self._encoded(torch.from_numpy(written)[:, None])[:, 0]
        total = sum(count for _, count in rows) + padding
        query = torch.from_numpy(
            self.rng.standard_normal((total, QUERIES, SIZE)).astype(np.float32) * 2
        )
        query = query.to(self.dtype)
        output, given = torch.full_like(query, torch.nan), query
        if self.is_fp8:
            given = (query / QUERY_SCALE).to(FP8)
            query = given.float() * QUERY_SCALE
        impl.forward(self.modules[name], given, given, given, cache, metadata, output)
        begin = 0
        for row, (one, count) in enumerate(rows):
            end = begin + count
            if checks:
                self.check(layer, row, one, count, query[begin:end], output[begin:end])
            begin = end

    def check(
        self, layer: int, row: int, one: Request, count: int, query: Any, output: Any
    ) -> None:
        """A sparse row attends to a selection with sinks and recent window, others to
        everything."""
        context = one.context + count
        keys, values = one.kv[layer]
        tokens = np.arange(context)
        if one.name in self.treated:
            blocks = self.blocks_of(layer, row, one)
            if len(blocks) * BLOCK_TOKENS < context:
                one.approximate = min(one.approximate, one.context)
            self.check_scores(layer, row, one, query.float().numpy()[0])
            self.attended[one.name, layer] = blocks
            assert len(set(blocks)) == len(blocks) <= self.spec.hot_blocks or not one.freed
            last = (context - 1) // BLOCK_TOKENS
            assert blocks[-1] == last and set(range(self.spec.sink_blocks)) <= set(blocks)
            recent = max(context - self.config.recent_tokens, 0) // BLOCK_TOKENS
            assert set(range(recent, last + 1)) <= set(blocks)
            tokens = tokens[np.isin(tokens // BLOCK_TOKENS, blocks)]
            assert len(tokens) <= self.config.sparse_topk
            self.check_own_attention(layer, row, query[0], keys[tokens])
        expected = exact(
            query.float().numpy(),
            keys[tokens],
            values[tokens],
            SIZE**-0.5,
            len(tokens) - count,
            self.sinks,
        )
        np.testing.assert_allclose(output.float().numpy(), expected, **self.noise)

    def check_scores(self, layer: int, row: int, one: Request, query: np.ndarray) -> None:
        """The log mass is sum of exp(q · k); that of sinks and recent window is exact."""
        work = self.worker._work
        first, last, *_, context = work.plan[row, :6].tolist()
        if last - first < 8:
            return
        at = np.arange(context) // BLOCK_TOKENS
        always = one.kv[layer][0, :context][(at < first) | (at >= last)]
        log_mass = exact_log_mass(query, always, SIZE**-0.5)
        if self.sinks is not None:
            log_mass = np.logaddexp(log_mass, self.sinks.numpy())
        np.testing.assert_allclose(
            work.always_log_mass[row].numpy(), log_mass, rtol=1e-4, atol=1e-3
        )
        tokens = slice(first * BLOCK_TOKENS, last * BLOCK_TOKENS)
        keys = np.repeat(one.kv[layer][0, tokens], QUERIES // HEADS, axis=1)
        exact_scores = np.einsum("qd,tqd->qt", query, keys) * SIZE**-0.5
        by_block = exact_scores.reshape(QUERIES, last - first, BLOCK_TOKENS)
        expected = np.log(np.exp(by_block).sum(axis=-1))
        found = work.scores[row, :, first:last].numpy()
        assert np.corrcoef(found.reshape(-1), expected.reshape(-1))[0, 1] > 0.7

    def check_own_attention(self, layer: int, row: int, query: Any, keys: np.ndarray) -> None:
        """Checks hotkv's own kernel over the hot set; keys serve as values."""
        selector = self.worker.layers[NAMES[layer]].selector
        asked = torch.zeros((self.worker._work.num_rows, QUERIES, SIZE))
        asked[row] = query
        found = torch.zeros_like(asked)
        selector.attend(Queries(asked, "float32", QUERIES * SIZE, SIZE), found)
        expected = exact(
            asked[row : row + 1].numpy(), keys, keys, SIZE**-0.5, len(keys) - 1, self.sinks
        )
        np.testing.assert_allclose(found[row].numpy(), expected[0], rtol=2e-4, atol=2e-5)

    def blocks_of(self, layer: int, row: int, one: Request) -> list[int]:
        """Blocks are recognized by their bytes."""
        length, table = int(self.worker.lengths[row]), self.worker.table[row]
        pages = table[: -(-length // BLOCK_TOKENS)].tolist()
        cache, found = self.caches[NAMES[layer]], []
        truth = {_bytes(self.page(one, layer, b)[0, 0]): b for b in range(len(one.table))}
        for page in pages:
            found.append(truth[_bytes(cache[page, 0, 0])])
        hot = self.worker.layers[NAMES[layer]].selector.hot
        attended = int(hot.counts[row, ATTENDED])
        if attended:
            state = self.worker.sequences.of(one.name).state
            assert hot.block_of[state, hot.slots[row, :attended].long()].tolist() == found
        return found

    def after(self, one: Request) -> None:
        complete = one.context // BLOCK_TOKENS if self.is_served else 0
        for block in range(one.kept, complete):
            self.store(one, block)
        one.kept = max(one.kept, complete)
        longest = max(one.context, one.prompt)
        if longest >= self.config.min_context_tokens and not one.is_whole:
            self.free_old(one, one.told)

    def free_old(self, one: Request, kept: int) -> None:
        """Frees device blocks that are older than the recent window, of the first `kept`."""
        last = min((one.context - self.config.recent_tokens) // BLOCK_TOKENS, kept)
        first = max(one.freed, self.spec.sink_blocks)
        if last > first:
            self.give_back(one.table[first:last])
            one.freed = last
