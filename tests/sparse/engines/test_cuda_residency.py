"""Resident requests on CUDA, with kernels on the CPU under vLLM's real builder and attention
class."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from hotkv_sparse import SparseConfig, build
from hotkv_sparse.cuda.hotsets import SELECTED
from hotkv_sparse.vllm.block_manager import ResidentSpec
from hotkv_sparse.vllm.cuda import backend as cuda_backend
from hotkv_sparse.vllm.cuda import setup as cuda_setup
from hotkv_sparse.vllm.cuda.backend import HotFlashBuilder, HotFlashImpl
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.step import ResidentStep
from hotkv_vllm.compat import Unsupported
from tests.sparse.cuda_support import CpuTensors, needs_compiler
from tests.sparse.engines.cuda_engine import (
    BLOCK_TOKENS,
    NAMES,
    QUERIES,
    SIZE,
    Engine,
    FakeArena,
    Request,
    attention,
)
from tests.vllm.specs import full_spec

pytestmark = [needs_compiler, pytest.mark.long]
CONFIG = SparseConfig(
    sparse_topk=384,
    sink_tokens=32,
    recent_tokens=40,
    min_context_tokens=256,
    dense_layers=(),
    max_correction_blocks=2,
    residency="host",
)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Engine]:
    return partial(Engine, monkeypatch, tmp_path, CONFIG)


def prefilled(engine: Engine, name: str, prompt: int, more: int) -> Request:
    one = engine.add(name, prompt, more)
    prefill(engine, one)
    return one


def prefill(engine: Engine, one: Request) -> None:
    while one.context < one.prompt:
        engine.step({one.name: min(128, one.prompt - one.context)})


def check_sketches(engine: Engine, one: Request) -> None:
    """Rounding allows 2 % of a sketch's bytes."""
    sequence, count = engine.worker.sequences.of(one.name), one.context // BLOCK_TOKENS
    assert sequence is not None
    for number, layer in enumerate(engine.worker.layers.values()):
        found = layer.selector.index.pool.numpy()[sequence.rows[:count]]
        keys = one.kv[number][0, : count * BLOCK_TOKENS].reshape(count, BLOCK_TOKENS, 2, 32)
        expected = build("rot2u", np.ascontiguousarray(keys)).reshape(count, -1)
        differs = (found[:, : expected.shape[1]] != expected).mean(axis=1)
        assert (differs < 0.02).all(), differs


def test_counted_before_start_equals_allocated(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[int] = []
    zeros = CpuTensors.zeros

    def counted(self: CpuTensors, shape: Any, dtype: Any) -> Any:
        made = zeros(self, shape, dtype)
        allocated.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(CpuTensors, "zeros", counted)
    engine = make()
    monkeypatch.setattr(
        type(engine.vllm_config.model_config), "get_num_attention_heads", lambda *_: QUERIES
    )
    found = cuda_setup.totals(CONFIG, 4096, engine.vllm_config, engine.kv_config)
    staging = engine.worker.staging
    assert found.tables + found.sketches == sum(allocated)
    assert found.staging == staging.numel() * staging.element_size()
    assert found.pool == sum(one.numel() * one.element_size() for one in engine.caches.values())


@pytest.mark.parametrize(
    "kind",
    [
        {"is_v2": False},
        {"is_v2": True},
        {"sinks": torch.linspace(-2.0, 3.0, QUERIES)},
        {"is_fp8": True},
    ],
    ids=["v1", "v2", "sinks", "fp8"],
)
def test_contexts_beyond_pool_are_prefilled_exactly(make: Any, kind: dict[str, Any]) -> None:
    engine = make(**kind)
    one, other = prefilled(engine, "a", 600, 80), engine.add("b", 330, 60)
    assert one.freed > 10, "old blocks were given back while the prompt was computed"
    for _ in range(3):
        engine.step({"a": 1})
    engine.step({"a": 1, "b": 100})
    engine.step({"b": 128, "a": 1})
    prefill(engine, other)
    assert other.freed > engine.spec.sink_blocks
    for step in range(10):
        engine.step({"a": 1, "b": 1} if step % 2 else {"b": 1, "a": 1}, padding=2)
        assert not engine.lost
    assert engine.worker.take_counters()["resident_pulled_pages"] > 0
    check_sketches(engine, one)
    check_sketches(engine, other)


def test_a_first_step_fills_the_hot_set(make: Any) -> None:
    engine = make()
    one = prefilled(engine, "a", 640, 64)
    engine.step({"a": 1})
    check_sketches(engine, one)
    budget = 384 // BLOCK_TOKENS
    for layer in range(len(NAMES)):
        assert len(engine.attended["a", layer]) == budget
    before = {key: set(blocks) for key, blocks in engine.attended.items()}
    engine.step({"a": 1})
    for key, blocks in engine.attended.items():
        assert len(set(blocks) - before[key]) <= CONFIG.max_correction_blocks
    hot = next(iter(engine.worker.layers.values())).selector.hot
    assert int(hot.counts[0, SELECTED]) <= budget // 2
    for _ in range(6):
        engine.step({"a": 1})
        assert max(map(len, engine.attended.values())) <= budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def test_whole_budget_equals_dense_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Dense: the same attention over all pages in the order of the context."""
    config = replace(CONFIG, sparse_topk=1024)
    engine, compared, check = Engine(monkeypatch, tmp_path, config, dtype=dtype), [], Engine.check

    def strictly(
        self: Engine, layer: int, row: int, one: Request, count: int, query: Any, output: Any
    ) -> None:
        check(self, layer, row, one, count, query, output)
        context = one.context + count
        blocks = torch.arange(-(-context // BLOCK_TOKENS), dtype=torch.int32)
        pages = torch.stack([self.page(one, layer, block) for block in blocks.tolist()])
        keys, values = pages.transpose(1, 2).chunk(2, dim=3)
        dense = torch.empty_like(output)
        attention(
            q=query,
            k=keys,
            v=values,
            out=dense,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            seqused_k=torch.tensor([context], dtype=torch.int32),
            block_table=blocks[None],
            softmax_scale=SIZE**-0.5,
            causal=True,
            scheduler_metadata=None,
            s_aux=None,
            q_descale=torch.ones(1),
            k_descale=torch.ones(1),
            v_descale=torch.ones(1),
        )
        assert output.equal(dense)
        compared.append(one.name in self.treated and one.freed > 0)

    monkeypatch.setattr(Engine, "check", strictly)
    one = prefilled(engine, "a", 600, 80)
    compared.clear()
    for _ in range(2 * BLOCK_TOKENS):
        engine.step({"a": 1})
    assert one.freed > 10 and compared == [True] * len(NAMES) * 2 * BLOCK_TOKENS


def test_prompt_goes_on_beyond_its_hot_slots(make: Any) -> None:
    """A prompt's step of one token may come from a CUDA graph, so it attends sparsely; the rest
    has more blocks than hot slots."""
    engine = make(is_v2=True, replays_decode=True)
    one = engine.add("a", 1000, 20)
    for count in (128, 128, 1):
        engine.step({"a": count})
    assert engine.treated == {"a"} and engine.spec.hot_blocks < 743 // BLOCK_TOKENS
    prefill(engine, one)
    for _ in range(2):
        engine.step({"a": 1})
        assert engine.treated == {"a"} and not engine.lost


@pytest.mark.parametrize("left", [1, 40])
def test_prefix_hit_is_scored_by_arena_keys(make: Any, left: int) -> None:
    engine = make()
    one = engine.add("a", 512 + left, 40)
    engine.hit(one, 512)
    engine.step({"a": left})
    engine.step({"a": 1})
    check_sketches(engine, one)


@pytest.mark.parametrize(
    ("seed", "replays_decode"), [(10, True), (0, False)], ids=["graphs", "eager"]
)
def test_sparse_rows_are_those_the_scheduler_counts(
    make: Any, seed: int, replays_decode: bool
) -> None:
    """`Engine.step` compares them."""
    dice = random.Random(seed)
    engine = make(is_v2=replays_decode, replays_decode=replays_decode, seed=seed + 1)
    known: dict[str, int] = {}
    seen: set[tuple[bool, bool]] = set()
    moved, away = set[str](), set[str]()
    for number in range(60):
        engine.is_served = number % 12 >= 6
        if len(engine.requests) < 3 and dice.random() < 0.5:
            prompt = dice.choice([1, 257, dice.randrange(2, 600)])
            one = engine.add(f"r{number}", prompt, 40)
            if prompt > 256 and dice.random() < 0.3:
                engine.hit(one, (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        plan: dict[str, int] = {}
        for name, one in engine.requests.items():
            known[name] = max(one.prompt, one.context, known.get(name, 0))
            if one.context and dice.random() < 0.05:
                engine.preempt(name)
            if one.is_whole and one.kept >= 6:
                engine.move(name)
                moved.add(name)
            count = dice.choice([1, 1, 32, dice.randrange(1, 129)])
            plan[name] = min(max(known[name] - one.context, 1), count, 128 - sum(plan.values()))
        plan = {name: count for name, count in plan.items() if count}
        lone = {n: one for n, one in engine.requests.items() if plan.get(n) == 1}
        seen |= {(one.context < one.prompt, engine.is_away(one)) for one in lone.values()}
        if plan:
            engine.step(plan, padding=4 - len(plan) if dice.random() < 0.5 else 0)
        away |= {name for name, one in engine.requests.items() if engine.is_away(one)}
        assert not engine.lost
        for name in [n for n, one in engine.requests.items() if one.context == one.prompt + 40]:
            engine.end(name)
    assert seen >= {(True, True), (False, True)}, "tokens of prompts and answers, blocks away"
    assert moved & away


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_batch_that_nobody_announced_touches_no_state(make: Any, is_captured: bool) -> None:
    """vLLM runs such batches for warm-up and graph capture, with tables of old steps."""
    engine = make()
    one = prefilled(engine, "a", 450, 40)
    engine.step({"a": 1})
    hot = [layer.selector.hot for layer in engine.worker.layers.values()]
    before = [(h.state.clone(), h.used_at.clone(), h.clocks.clone()) for h in hot]
    common = engine.common([(one, 1)], 3)
    capture = engine.builder.build_for_cudagraph_capture
    metadata = capture(common) if is_captured else engine.builder.build(0, common)
    for layer in range(len(NAMES)):
        engine.forward(layer, [(one, 1)], metadata, 3, checks=False)
    for h, old in zip(hot, before, strict=True):
        for now, then in zip((h.state, h.used_at, h.clocks), old, strict=True):
            assert now.equal(then)
    engine.step({"a": 1})
    assert not engine.lost


def test_step_in_the_same_block_names_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are sent to the device once. With runner V2 the batch comes before the message."""
    engine = make(is_v2=True)
    prefilled(engine, "a", 450, 40)
    engine.step({"a": 1})
    write, written = engine.device.write, []

    def noted(target: Any, *more: Any) -> None:
        written.append(target)
        write(target, *more)

    monkeypatch.setattr(engine.device, "write", noted)
    engine.step({"a": 1})
    assert engine.treated == {"a"} and not engine.lost
    names = engine.worker._residents.row_of_block
    assert not any(target is names for target in written)


def lose_the_pin(engine: Engine, _: pytest.MonkeyPatch) -> None:
    engine.arena.is_pinned = False
    engine.step({"b": 1})
    assert not engine.lost, "the step has read nothing in the arena"


def break_a_layer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.worker.layers[NAMES[1]].selector.hot, "grow", lambda *_: 1 / 0)


def leave_out(fault: int) -> Callable[[Engine, pytest.MonkeyPatch], None]:
    """0: a new block without a slot; 1: a block without an address in the arena."""

    def report(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        find_lost, work = engine.worker.find_lost, engine.worker._work

        def counted() -> None:
            counts = np.zeros(3, np.int32)
            counts[fault] = 1
            work.device.write(work.faults, (0,), counts)
            find_lost()

        patch.setattr(engine.worker, "find_lost", counted)

    return report


@pytest.mark.parametrize(
    ("lose", "num_faults"),
    [
        pytest.param(lose_the_pin, 0, id="pin"),
        pytest.param(break_a_layer, 1, id="layer"),
        pytest.param(leave_out(0), 0, id="slot"),
        pytest.param(leave_out(1), 0, id="address"),
    ],
)
def test_request_with_unreadable_bytes_is_lost(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Engine, pytest.MonkeyPatch], None],
    num_faults: int,
) -> None:
    """The second request is whole on the device.

    num_faults: exceptions of layers.
    """
    engine = make()
    one = prefilled(engine, "a", 450, 40)
    prefilled(engine, "b", 64, 20)
    lose(engine, monkeypatch)
    engine.step({"a": 1, "b": 1}, checks=False)
    assert engine.lost == {one.table[0]}
    assert engine.worker.take_counters().get("sparse_faults", 0) == num_faults


def test_batch_that_cannot_be_planned_loses_requests(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed graph would use an earlier batch's plan."""
    engine = make()
    long, short = prefilled(engine, "a", 450, 40), prefilled(engine, "b", 64, 20)
    with monkeypatch.context() as broken:
        broken.setattr(engine.worker._work, "begin_batch", lambda *_: 1 / 0)
        engine.worker.begin_resident(ResidentStep((engine.tell(long, 1),)), SparseRows())
        metadata = engine.builder.build(0, engine.common([(long, 1), (short, 1)], 1))
    assert metadata.worker is None, "vLLM's own attention serves the batch"
    assert engine.worker.take_lost() == {long.table[0], short.table[0]}
    assert engine.worker.sequences.is_lost("a")


def test_arenas_of_servers_that_are_gone_are_unregistered(make: Any) -> None:
    engine = make()
    prefilled(engine, "a", 450, 40)
    old = engine.arena
    engine.arena = FakeArena(old.memory.size)
    engine.arena.file_id = (1, 3)
    assert engine.worker.map_arena()
    mapped = engine.worker._arenas[old.file_id].mapped
    prefilled(engine, "b", 64, 20)
    engine.end("b")
    engine.step({"a": 1})
    assert mapped.readable_bytes and not engine.lost, "a request still reads it"
    engine.end("a")
    prefilled(engine, "c", 64, 20)
    assert list(engine.worker._arenas) == [(1, 3)]
    assert not mapped.readable_bytes


@pytest.mark.parametrize(("is_v2", "before"), [(False, 472), (True, 256)], ids=["answer", "prompt"])
def test_device_request_moves_once_the_server_is_there(make: Any, is_v2: bool, before: int) -> None:
    """An earlier request leaves its hot slots and rows of sketches in the state that the request
    gets. The worker maps the arena two steps after the scheduler has said what is in it.

    before: tokens that are computed before the server is there; the prompt has 470.
    """
    engine = make(is_v2=is_v2)
    prefilled(engine, "old", 300, 8)
    engine.step({"old": 1})
    engine.end("old")
    engine.is_served = engine.is_mapped = False
    engine.worker._arenas.clear()
    one, other = engine.add("a", 470, 80), engine.add("b", 330, 80)
    assert one.is_whole and other.is_whole
    engine.worker.take_counters()

    def step() -> None:
        engine.step({r.name: max(1, min(64, r.prompt - r.context)) for r in (one, other)})
        assert not engine.lost

    while one.context < before:
        step()
    copies = {"resident_pulled_pages", "resident_staged_pages"}
    assert not copies & engine.worker.take_counters().keys()
    engine.is_served = True
    step()
    step()
    engine.is_mapped = True
    step()
    engine.move("a")
    assert engine.is_away(one) and not engine.is_away(other)
    while one.context < one.prompt + 10:
        step()
    assert engine.treated == {"a"} and other.is_whole
    assert engine.worker.take_counters()["resident_pulled_pages"] > 0
    check_sketches(engine, one)
    assert engine.worker.sequences.of("b") is None


def test_too_few_rows_for_sketches_lose_the_request(make: Any) -> None:
    engine = make(sketch_tokens=320)
    one = engine.add("a", 450, 40)
    for _ in range(2):
        engine.step({"a": 128})
        assert not engine.lost
    engine.step({"a": 128}, checks=False)
    assert engine.lost == {one.table[0]}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("logits_soft_cap", 30.0, "caps its logits"),
        ("fa4_hd256", True, "heads of 256"),
        ("pages", lambda one: one.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1), "smaller"),
        ("pages", lambda one: one[:, :, :, ::2], "side by side"),
        ("groups", 2, "not all layers are of plain full attention"),
    ],
)
def test_layers_unfit_for_kernels_are_refused(
    make: Any, field: str, value: Any, words: str
) -> None:
    engine = make()
    if field == "pages":
        engine.caches[NAMES[1]] = value(engine.caches[NAMES[1]])
    elif field == "groups":
        engine.kv_config.kv_cache_groups *= value
    else:
        setattr(engine.impls[NAMES[1]], field, value)
    with pytest.raises(Unsupported, match=words):
        cuda_setup.install(
            CONFIG, 4096, engine.vllm_config, engine.kv_config, engine.caches, None, engine.device
        )


def test_engines_without_residency_get_vllms_classes(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, backend = full_spec(), cuda_backend.HotFlashBackend
    asked = CONFIG, make().vllm_config
    monkeypatch.setattr(backend, "_resident", None)
    monkeypatch.setattr(cuda_backend, "_wanted", lambda: asked)
    assert (backend.get_impl_cls(), backend.get_builder_cls()) == (HotFlashImpl, HotFlashBuilder)
    assert backend.customize_spec(spec) == ResidentSpec.of(spec, *asked)
    monkeypatch.setattr(cuda_backend, "_wanted", lambda: None)
    assert backend.get_impl_cls() is FlashAttentionImpl
    assert backend.get_builder_cls() is FlashAttentionMetadataBuilder
    assert backend.get_name() == "FLASH_ATTN" and backend.customize_spec(spec) is spec


def test_graphs_hold_decode_only() -> None:
    support = HotFlashBuilder.get_cudagraph_support(None, None)  # type: ignore[arg-type]
    assert support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
