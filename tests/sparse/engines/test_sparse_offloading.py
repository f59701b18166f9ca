"""The decode loop of vLLM's RFC #37263, word for word, with vLLM's attention kernel: over an array
in this process that stands for the arena (`FakeServer`), and over a real server.

The oracle is numpy's attention over exactly the blocks that the loop attends to, and dense
attention if the budget covers the context.
"""

import inspect
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    ReqContext,
    make_offload_key,
)

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.types import Role, SessionConfig
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import SparseConfig
from hotkv_sparse.config import COPY_METHODS
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.key_pages import KeyFormat, KeyPages, key_packing
from hotkv_sparse.vllm.cpu.pool import LayerShape
from hotkv_sparse.vllm.cpu.swap import OptimizedSwapHandler, SwapOut
from hotkv_sparse.vllm.host_blocks import HostBlocks
from hotkv_sparse.vllm.offloading import (
    DecodeMetadata,
    HostLoadStoreSpec,
    SparseOffloadingHandler,
    SparseOffloadingManager,
)
from tests.doubles.fake import FakeServer
from tests.support.waiting import wait_for

T, H, G, D, LAYERS = 32, 2, 2, 32, (0, 1, 2)
PAGE = T * H * 2 * D * 4
SCALE = D**-0.5
NUM_DEVICE = 96
CONFIG = SparseConfig(
    sparse_topk=256, sink_tokens=32, recent_tokens=64, dense_layers=(), min_context_tokens=64,
    max_correction_blocks=2,
)  # fmt: skip


class Impl:
    """`self.impl` of the RFC's loop: writes the step's tokens, and attends with vLLM's kernels."""

    def __init__(self, kv: np.ndarray) -> None:
        self.isa = _get_attn_isa(torch.float32, T, D)
        self.pages = torch.from_numpy(kv.view(np.float32).reshape(-1, H, T, 2 * D))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.pages.view(len(self.pages), H, 2 * T, D).chunk(2, dim=2)
        return keys, values

    def write(self, tokens: np.ndarray, blocks: np.ndarray, first: int) -> None:
        """tokens: [n, H, 2 * D], from place `first` of the first block on."""
        at = first + np.arange(len(tokens))
        slots = np.asarray(blocks, np.int64)[at // T] * T + at % T
        key, value = (
            torch.from_numpy(np.ascontiguousarray(part)) for part in np.split(tokens, 2, axis=-1)
        )
        ops.cpu_attn_reshape_and_cache(key, value, *self.parts(), torch.from_numpy(slots), self.isa)

    def forward(
        self, query: np.ndarray, tokens: np.ndarray, metadata: DecodeMetadata
    ) -> np.ndarray:
        """tokens: the step's."""
        last = (metadata.seq_len - 1) % T
        self.write(tokens, metadata.block_table[-1:], last + 1 - len(tokens))
        lengths, starts = (
            torch.tensor([metadata.seq_len], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
        )
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=H * G, num_kv_heads=H, head_dim=D, seq_lens=lengths,
            dtype=torch.float32, query_start_loc=starts, causal=True, sliding_window_size=-1,
            isa=self.isa, enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip
        output = torch.empty(1, H * G, D)
        keys, values = self.parts()
        ops.cpu_attention_with_kv_cache(
            query=torch.from_numpy(query)[None], key_cache=keys, value_cache=values, output=output,
            query_start_loc=starts, seq_lens=lengths, scale=SCALE, causal=True, alibi_slopes=None,
            sliding_window=-1, block_table=torch.from_numpy(metadata.block_table)[None], softcap=0,
            scheduler_metadata=schedule, s_aux=None, dynamic_causal=None,
        )  # fmt: skip
        return output[0].numpy()


def naive_attention(query: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """query: [query heads, D]; tokens: [n, H, 2 * D]."""
    scores = np.einsum("hgd,thd->hgt", query.reshape(H, G, D), tokens[..., :D]) * SCALE
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("hgt,thd->hgd", shares, tokens[..., D:]).reshape(H * G, D)


numbers = itertools.count()


class Loop:
    """An engine of three layers over the RFC's classes, and the naive model: all tokens."""

    def __init__(
        self,
        engine: PagedEngine,
        config: SparseConfig = CONFIG,
        num_host: int = 120,
        num_device: int = NUM_DEVICE,
    ) -> None:
        self.kv, self.session, self.config = engine.kv, engine.session, config
        self.impls = [Impl(engine.kv[layer]) for layer in LAYERS]
        packing = key_packing(T, D, torch.float32, self.impls[0].isa)
        shape = LayerShape(NUM_DEVICE, T, H, D, tuple(config.fusion or [config.scorer]))
        layers = [
            SparseLayer(
                f"layer{index}",
                index,
                0,
                shape,
                SCALE,
                KeyPages(impl.pages, KeyFormat(packing, torch.float32)),
            )
            for index, impl in zip(LAYERS, self.impls, strict=True)
        ]
        self.host = HostBlocks(self.session, num_host, timeout_s=10.0)
        # The last four are the prefill's.
        self.handler = SparseOffloadingHandler(config, layers, self.host, range(num_device - 4))
        self.manager = SparseOffloadingManager(config, self.host, self.handler.sketches)
        # In hashes: runs share a server.
        self.number = next(numbers)
        self.rng = np.random.default_rng(0)
        self.tokens: dict[str, np.ndarray] = {}
        self.table: dict[str, np.ndarray] = {}
        self.attended: list[int] = []
        self.swapped: list[int] = []
        self.completes_in_loop = self.waits_for_out = False
        self.job_ids = itertools.repeat(7)

    def hashes(self, name: str, count: int) -> list[bytes]:
        return [f"{self.number}-{name}-{block}".encode().ljust(32) for block in range(count)]

    def keys(self, name: str, first: int, last: int) -> list[Any]:
        return [make_offload_key(one, 0) for one in self.hashes(name, last)[first:]]

    def random(self, count: int) -> np.ndarray:
        return self.rng.standard_normal((len(LAYERS), count, H, 2 * D)).astype(np.float32)

    def prefill(self, name: str, num_tokens: int) -> None:
        """By vLLM's own calls: four blocks at a time leave for host memory."""
        self.tokens[name] = self.random(num_tokens)
        count, self.table[name] = num_tokens // T, np.empty(0, np.int32)
        for first in range(0, count, 4):
            keys = self.keys(name, first, min(first + 4, count))
            blocks = np.arange(NUM_DEVICE - 4, NUM_DEVICE - 4 + len(keys), dtype=np.int32)
            for layer, impl in zip(LAYERS, self.impls, strict=True):
                impl.write(self.tokens[name][layer, first * T : (first + len(keys)) * T], blocks, 0)
            output = self.manager.prepare_store(keys)
            assert output is not None
            store = self.manager.host_blocks(keys)
            if output.keys_to_store:
                assert output.store_spec.block_ids.tolist() == store.tolist()
                spec = GPULoadStoreSpec(blocks.tolist(), [len(keys)], [first])
                assert self.handler.submit_store(first, spec, output.store_spec)
                self.handler.wait({first})
                (ended,) = self.handler.get_finished()
                assert (ended.job_id, ended.success) == (first, True)
            self.manager.complete_store(keys)
            self.table[name] = np.concatenate([self.table[name], store])

    def step(self, name: str) -> None:
        """One token: the text of the RFC, between the marks."""
        is_first = name not in self.handler._sequences
        context = self.tokens[name].shape[1] + 1
        self.tokens[name] = np.concatenate([self.tokens[name], self.random(1)], axis=1)
        count = -(-context // T)
        if len(self.table[name]) < count:
            keys = self.keys(name, count - 1, count)
            assert self.manager.prepare_store(keys) is not None
            self.table[name] = np.concatenate([self.table[name], self.manager.host_blocks(keys)])
        tokens = self.tokens[name][:, (count - 1) * T if is_first else context - 1 :]
        query = self.rng.standard_normal((H * G, D)).astype(np.float32) * 2
        block_hashes = self.hashes(name, count)
        attn_metadata = DecodeMetadata(name, self.table[name], context)
        sparse_manager, sparse_worker, optimized_handler = self.manager, self.handler, self.handler
        block_repr_manager = self.handler.sketches
        job_id, all_new = next(self.job_ids), np.empty(0, np.int32)
        # ---------------------------------------------------------------- scheduler
        selected_blocks, scores = sparse_manager.lookup_with_sparse(block_hashes, query, 0)
        load_spec = sparse_manager.prepare_sparse_load(selected_blocks)
        assert len(scores) == len(selected_blocks) == len(load_spec.block_ids)
        # ------------------------------------------------------------------- worker
        for layer_idx in LAYERS:
            new_attn_metadata, swap_in_spec, swap_out_spec = sparse_worker.handle_layer(
                attn_metadata, layer_idx, query
            )
            optimized_handler.transfer_async(job_id, swap_in_spec)
            optimized_handler.wait({job_id})
            output = self.impls[layer_idx].forward(query, tokens[layer_idx], new_attn_metadata)
            optimized_handler.transfer_async(job_id, swap_out_spec)
            new_blocks = swap_out_spec.blocks
            block_repr_manager.update(layer_idx, new_blocks)
            if self.completes_in_loop:
                sparse_manager.complete_load(selected_blocks)
                sparse_manager.complete_store(new_blocks, success=True)
            # ------------------------------------------------------------------ end
            if self.waits_for_out:
                optimized_handler.wait({job_id})
            self.check(name, layer_idx, query, new_attn_metadata, output)
            all_new = new_blocks
            self.swapped.append(len(swap_in_spec.blocks))
        if not self.completes_in_loop:
            sparse_manager.complete_load(selected_blocks)
            sparse_manager.complete_store(all_new, success=True)

    def check(
        self, name: str, layer: int, query: np.ndarray, metadata: DecodeMetadata, output: np.ndarray
    ) -> None:
        tokens, context = self.tokens[name][layer], self.tokens[name].shape[1]
        found = self.handler._layer_of[layer].keys_of(metadata.block_table)
        found = found.reshape(-1, H, D)[: metadata.seq_len]
        place = {token.tobytes(): at for at, token in enumerate(tokens[::T, :, :D])}
        positions = [place[np.ascontiguousarray(page).tobytes()] for page in found[::T]]
        assert positions == sorted(positions) and positions[-1] == (context - 1) // T
        attended = np.concatenate([tokens[at * T : (at + 1) * T] for at in positions])
        assert np.array_equal(found, attended[..., :D])
        assert np.allclose(output, naive_attention(query, attended), atol=2e-5)
        self.attended.append(len(positions))
        if self.config.covers(context, T) or context < self.config.min_context_tokens:
            assert np.allclose(output, naive_attention(query, tokens), atol=2e-5)
        else:
            most = max(self.config.budget_blocks(context, T), 1 + 1 + 64 // T + 1)
            assert len(positions) <= most
        self.books_balance()

    def books_balance(self) -> None:
        """Every device block is free, or has one use."""
        used = list(self.handler._free)
        for one in self.handler._sequences.values():
            used += one.record.hot_blocks.tolist() + one.device_C[one.device_C >= 0].tolist()
        assert sorted(used) == list(range(len(used)))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(256 << 20) as folder, Server(folder, "128MiB") as one:
        one.wait_ready()
        yield one


class ArrayEngine(PagedEngine):
    """Its server is an array in this process."""

    def __init__(self, double: FakeServer) -> None:
        super().__init__(
            "unix:/nowhere",
            layers=len(LAYERS),
            num_blocks=NUM_DEVICE,
            page_bytes=PAGE,
            block_tokens=T,
        )
        self.double = double
        config = SessionConfig("unix:/nowhere", "engine", Role.WORKER, self.key_space)
        self.session = double.open(config, self.layout, {"kv": self.fd})  # type: ignore[assignment]


def array_engine() -> ArrayEngine:
    return ArrayEngine(FakeServer())


def real_engine(server: Server) -> PagedEngine:
    return PagedEngine(
        server.target, layers=len(LAYERS), num_blocks=NUM_DEVICE, page_bytes=PAGE, block_tokens=T
    ).connect()


@pytest.fixture(params=["array", "server"])
def engine(request: pytest.FixtureRequest) -> Iterator[PagedEngine]:
    one = (
        array_engine()
        if request.param == "array"
        else real_engine(request.getfixturevalue("server"))
    )
    yield one
    one.close()


class OneAtATime(Iterator[int]):
    """A new job id for each transfer of the loop is not the RFC's, but allowed."""

    def __init__(self) -> None:
        self.last = 0

    def __next__(self) -> int:
        self.last += 1
        return self.last


@pytest.mark.parametrize("in_loop", [True, False], ids=["complete in the loop", "after it"])
def test_the_loop_of_the_rfc_runs(engine: PagedEngine, in_loop: bool) -> None:
    loop = Loop(engine)
    loop.completes_in_loop = in_loop
    loop.prefill("a", 20 * T)
    loop.prefill("b", 15 * T + 9)
    for _ in range(T + 5):
        loop.step("a")
        loop.step("b")
    assert 0 < max(loop.swapped[6:]) <= 2
    held = loop.manager.host_blocks(loop.keys("a", 0, 21))
    assert loop.host.is_ready(held).all() and loop.handler.sketches.update(0, held) == 0
    loop.handler.end("a")
    loop.step("b")
    loop.handler.end("b")
    assert len(loop.handler._free) == NUM_DEVICE - 4
    loop.manager.shutdown()
    assert not loop.host.request_ids and len(loop.host._free) == loop.host.num_blocks


@pytest.mark.parametrize("topk", [1, 31, 97, 320, 1024, 5000, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["lru", "none"])
def test_any_budget_runs_and_whole_ones_are_dense(topk: float, policy: str) -> None:
    loop = Loop(array_engine(), replace(CONFIG, sparse_topk=topk, cache_policy=policy))
    loop.prefill("a", 18 * T + 30)
    for _ in range(T + 3):
        loop.step("a")
    whole = loop.config.covers(18 * T + 30, T)
    assert (min(loop.attended) >= 19) == whole
    if type(topk) is int and topk < 97:
        assert set(loop.attended) <= {3, 4}, "those always kept"


@pytest.mark.parametrize("method", COPY_METHODS)
def test_each_copy_method_and_numpy_decode_run(method: str) -> None:
    fusion = {"rot2u": 0.7, "mean": 0.3} if method == "batch" else {}
    loop = Loop(array_engine(), replace(CONFIG, copy_method=method, fusion=fusion))
    loop.prefill("a", 20 * T)
    for _ in range(8):
        loop.step("a")


def test_short_contexts_are_dense_until_they_are_long() -> None:
    loop = Loop(array_engine(), replace(CONFIG, min_context_tokens=12 * T + 4))
    loop.prefill("a", 12 * T)
    for _ in range(12):
        loop.step("a")
    assert set(loop.attended[:9]) == {13} and max(loop.attended[9:]) <= 8


def test_jobs_may_have_own_ids_and_waits() -> None:
    loop = Loop(array_engine())
    loop.job_ids, loop.waits_for_out = OneAtATime(), True
    loop.prefill("a", 20 * T)
    for _ in range(T + 2):
        loop.step("a")
    assert not loop.handler._stores
    assert "sequences 1, free device blocks" in repr(loop.handler)
    assert repr(OptimizedSwapHandler(loop.handler.copier)).endswith("threads), jobs 0)")


@pytest.mark.parametrize("ends", ["a", "b"])
def test_two_sequences_of_one_text_share_host_blocks(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    engine = array_engine()
    loop = Loop(engine)
    hashes = loop.hashes
    monkeypatch.setattr(loop, "hashes", lambda name, count: hashes("text", count))
    loop.prefill("a", 12 * T)
    loop.tokens["b"], loop.table["b"] = loop.tokens["a"], loop.table["a"]
    engine.double.fail_stores = True
    for step in range(T + 4):
        for name in "ab":
            loop.rng = np.random.default_rng(1000 + step)
            loop.step(name)
    loop.handler.end(ends)
    engine.double.fail_stores = False
    stays = "b" if ends == "a" else "a"
    for _ in range(4):
        loop.step(stays)
    assert loop.host.is_ready(loop.table[stays][:13]).all()
    loop.handler.sketches.forget_all()
    loop.step(stays)


operation = st.one_of(
    st.tuples(st.just("begin"), st.integers(4 * T, 11 * T), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(1, 40), st.integers(0, 3)),
    st.tuples(st.just("end"), st.just(0), st.integers(0, 3)),
    st.tuples(st.just("fail"), st.booleans(), st.just(0)),
)


@given(
    operations=st.lists(operation, max_size=14),
    topk=st.sampled_from([64, 200, 0.5]),
    in_loop=st.booleans(),
)
def test_sequences_come_and_go_while_stores_fail(
    operations: list[Any], topk: float, in_loop: bool
) -> None:
    """`Loop.check` compares every layer with the naive model."""
    engine = array_engine()
    loop = Loop(engine, replace(CONFIG, sparse_topk=topk))
    loop.completes_in_loop = in_loop
    number = itertools.count()
    names: dict[int, str] = {}
    for what, value, which in operations:
        if what == "begin" and which not in names and len(names) < 2:
            engine.double.fail_stores = False
            names[which] = f"s{next(number)}"
            loop.prefill(names[which], value)
        elif what == "step" and which in names:
            for _ in range(value):
                loop.step(names[which])
        elif what == "end" and which in names:
            if names[which] in loop.handler._sequences:
                loop.handler.end(names[which])
            del names[which]
        elif what == "fail":
            engine.double.fail_stores = value
        loop.books_balance()
    assert set(loop.handler._sequences) <= set(names.values())


# ------------------------------------------------------------------------------- vLLM's interfaces


def test_the_classes_are_vllms_and_answer_its_calls() -> None:
    for own, base in (
        (SparseOffloadingManager, OffloadingManager),
        (SparseOffloadingHandler, OffloadingWorker),
        (OptimizedSwapHandler, OffloadingWorker),
    ):
        assert issubclass(own, base) and not own.__abstractmethods__
        for name, method in inspect.getmembers(base, inspect.isfunction):
            if name.startswith("_"):
                continue
            asked = inspect.signature(method).parameters
            offered = list(inspect.signature(getattr(own, name)).parameters.values())
            assert [one.name for one in offered][: len(asked)] == list(asked)
            assert all(one.default is not one.empty for one in offered[len(asked) :])


key_numbers = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
call = st.one_of(
    st.tuples(st.just("store"), key_numbers, st.sampled_from("ab")),
    st.tuples(st.just("done"), key_numbers, st.sampled_from("ab")),
    st.tuples(st.just("fail"), key_numbers, st.sampled_from("ab")),
    st.tuples(st.just("load"), key_numbers, st.sampled_from("ab")),
    st.tuples(st.just("loaded"), key_numbers, st.sampled_from("ab")),
    st.tuples(st.just("finish"), st.just([]), st.sampled_from("ab")),
    st.tuples(st.just("reset"), st.just([]), st.just("a")),
)


@given(calls=st.lists(call, max_size=25))
def test_the_manager_agrees_with_a_model_of_sets(calls: list[Any]) -> None:
    """stored: in the server. prepared, loading: of each request, which ends once both are empty."""
    engine = array_engine()
    loop = Loop(engine, num_host=12)
    manager, handler = loop.manager, loop.handler
    stored = set[int]()
    prepared, loading, held = ({"a": set[int](), "b": set[int]()} for _ in range(3))
    finished = set[str]()
    for what, numbers, name in calls:
        context = ReqContext(name)
        keys = [loop.keys("k", one, one + 1)[0] for one in numbers]
        if what == "store":
            output = manager.prepare_store(keys, context)
            if output is None:
                assert len(set(numbers) - held[name]) > 12 - sum(map(len, held.values()))
                continue
            new = [one for one in numbers if one not in stored | prepared[name]]
            assert output.keys_to_store == [keys[numbers.index(one)] for one in new]
            assert output.evicted_keys == []
            prepared[name].update(new)
            held[name].update(numbers)
            if len(new) % 2:
                device = GPULoadStoreSpec(list(range(90, 90 + len(new))), [len(new)], [0])
                assert handler.submit_store(1, device, output.store_spec)
                assert [one.success for one in handler.get_finished()] == [True]
                stored.update(new)
        elif what in ("done", "fail"):
            manager.complete_store(keys, context, success=what == "done")
            ended = set(numbers) if what == "fail" else set(numbers) & stored & held[name]
            prepared[name] -= ended
        elif what == "load":
            if set(numbers) <= stored:
                try:
                    spec = manager.prepare_load(keys, context)
                except HotKVError as error:
                    assert error.reason is Reason.OVERLOADED
                    continue
                assert handler._host.is_ready(spec.block_ids).all()
                loading[name].update(numbers)
                held[name].update(numbers)
            elif set(numbers) <= held[name]:
                with pytest.raises(HotKVError, match="are not stored"):
                    manager.prepare_load(keys, context)
        elif what == "loaded":
            manager.complete_load(keys, context)
            loading[name] -= set(numbers)
        elif what == "finish":
            manager.on_request_finished(context)
            finished.add(name)
        else:
            manager.reset_cache()
            for books in (prepared, loading, held):
                books.update(a=set(), b=set())
            finished.clear()
        for one in list(finished):
            if not prepared[one] and not loading[one]:
                finished.discard(one)
                held[one].clear()
        for number in range(8):
            key = loop.keys("k", number, number + 1)[0]
            for other in "ab":
                expected = (
                    LookupResult.HIT
                    if number in stored
                    else (
                        LookupResult.HIT_PENDING if number in prepared[other] else LookupResult.MISS
                    )
                )
                assert manager.lookup(key, ReqContext(other)) is expected
        assert len(loop.host._names) == sum(map(len, held.values()))
        assert set(engine.double.residencies.open) == {
            ("engine", f"offloading:{one}") for one in held if held[one]
        }


def test_whole_blocks_come_back_as_they_left(engine: PagedEngine) -> None:
    loop = Loop(engine)
    loop.prefill("a", 6 * T)
    before = loop.kv.copy()
    context = ReqContext("another")
    spec = loop.manager.prepare_load(loop.keys("a", 0, 6), context)
    assert loop.handler.submit_load(3, spec, GPULoadStoreSpec(list(range(40, 46)), [6], [0]))
    (ended,) = loop.handler.get_finished()
    assert (ended.job_id, ended.success, ended.transfer_size) == (3, True, 18 * PAGE)
    # The prefill wrote the last two blocks here.
    assert np.array_equal(loop.kv[:, 44:46], before[:, NUM_DEVICE - 4 : NUM_DEVICE - 2])
    loop.host.check()
    nothing = HostLoadStoreSpec([loop.host.num_blocks - 1])
    assert not loop.handler.submit_load(4, nothing, GPULoadStoreSpec([0], [1], [0]))


def test_a_block_outlives_either_of_its_requests(server: Server) -> None:
    for ends, stays in ("ab", "ba"):
        engine = real_engine(server)
        loop = Loop(engine)
        loop.prefill("x", 4 * T)
        loop.manager.prepare_store(loop.keys("x", 0, 4))
        contexts = {name: ReqContext(name) for name in "ab"}
        keys = loop.keys("x", 0, 4)
        for context in contexts.values():
            loop.manager.prepare_load(keys, context)
            loop.manager.complete_load(keys, context)
        loop.manager.on_request_finished(ReqContext(""))
        loop.manager.on_request_finished(contexts[ends])
        with AdminClient(server.target) as admin:
            admin.evict(everything=True)
        spec = loop.manager.prepare_load(keys, contexts[stays])
        assert loop.handler.submit_load(1, spec, GPULoadStoreSpec([0, 1, 2, 3], [4], [0]))
        loop.handler.wait({1})
        found = loop.handler._layer_of[1].keys_of(np.arange(4, dtype=np.int32))
        assert np.array_equal(found.reshape(-1, H, D), loop.tokens["x"][1, :, :, :D])
        engine.close()


# --------------------------------------------------------------------------------- what goes wrong


def test_a_store_that_fails_is_made_again() -> None:
    engine = array_engine()
    loop = Loop(engine)
    loop.prefill("a", 10 * T)
    engine.double.fail_stores = True
    for _ in range(3 * T + 2):
        loop.step("a")
    on_device = int((loop.handler._sequences["a"].device_C >= 0).sum())
    assert on_device > 1 + 3, "blocks that host memory lacks stay on the device"
    engine.double.fail_stores = False
    for _ in range(2):
        loop.step("a")
    assert loop.host.is_ready(loop.table["a"][:13]).all()
    engine.double.fail_stores = True
    keys = loop.keys("z", 0, 1)
    output = loop.manager.prepare_store(keys)
    assert output is not None
    assert loop.handler.submit_store(9, GPULoadStoreSpec([90], [1], [0]), output.store_spec)
    loop.handler.wait({9})
    assert [one.success for one in loop.handler.get_finished()] == [False]
    loop.manager.complete_store(keys, success=False)
    assert loop.manager.lookup(keys[0], ReqContext("")) is LookupResult.MISS
    again = loop.manager.prepare_store(keys)
    assert again is not None and again.keys_to_store == keys


def test_an_unanswered_store_never_has_next_pages() -> None:
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB") as server:
        server.wait_ready()
        engine = real_engine(server)
        loop = Loop(engine)
        loop.host._timeout_s = 0.5
        loop.prefill("a", 4 * T)
        keys = loop.keys("z", 0, 1)
        output = loop.manager.prepare_store(keys)
        assert output is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            loop.handler.submit_store(9, GPULoadStoreSpec([90], [1], [0]), output.store_spec)
            loop.host.finish(output.store_spec.block_ids)
            # Revoked: the pages may change.
        finally:
            os.kill(server.pid, signal.SIGCONT)
        wait_for(lambda: not engine.session._life.connection.num_pending)
        assert not loop.host.is_in_server(loop.hashes("z", 1)).any()
        engine.close()


def test_lost_pins_are_found_after_a_load(engine: PagedEngine) -> None:
    loop = Loop(engine)
    loop.prefill("a", 16 * T)
    loop.step("a")
    if isinstance(engine, ArrayEngine):
        engine.double.residencies.revoke("engine")
    else:
        engine.session.close()
        wait_for(lambda: not loop.host._arena.holds(loop.host._requests[""].opened))
    with pytest.raises(HotKVError) as caught:
        for _ in range(4):
            metadata = DecodeMetadata("a", loop.table["a"], 16 * T + 1)
            query = loop.rng.standard_normal((H * G, D)).astype(np.float32) * 4
            _, swap_in, _ = loop.handler.handle_layer(metadata, 0, query)
            loop.handler.transfer_async(1, swap_in)
            loop.handler.wait({1})
    assert caught.value.reason is Reason.UNKNOWN_RESIDENCY
    spec = HostLoadStoreSpec(loop.table["a"][:1].tolist())
    assert not loop.handler.submit_load(2, spec, GPULoadStoreSpec([90], [1], [0]))


def test_what_does_not_fit_is_refused_in_words() -> None:
    engine = array_engine()
    with pytest.raises(HotKVError, match=r"dense_layers names layers \[1\].* use \(\)"):
        Loop(engine, replace(CONFIG, dense_layers=(1,)))
    loop = Loop(engine, num_host=12, num_device=24)
    query = np.ones((H * G, D), np.float32)
    loop.prefill("a", 8 * T)
    loop.step("a")
    for seq_len, blocks, words in (
        (8 * T + 3, 9, r"seq_len is 259 after 257; .* Call end\('a'\) first"),
        (8 * T + 2, 8, "block_table has 8 blocks; 258 tokens need 9"),
    ):
        with pytest.raises(HotKVError, match=words):
            loop.handler.handle_layer(
                DecodeMetadata("a", loop.table["a"][:blocks], seq_len), 0, query
            )
    free = len(loop.handler._free)
    for name, words in (("b", "are not stored; prepare_store"), ("c", "device blocks needed")):
        table = loop.table["a"] if name == "c" else np.arange(3, 12, dtype=np.int32)
        with pytest.raises(HotKVError, match=words):
            loop.handler.handle_layer(DecodeMetadata(name, table, 8 * T + 1), 0, query)
        assert name == "c" or len(loop.handler._free) == free
    assert loop.manager.prepare_store(loop.keys("b", 0, 4)) is None, "12 host blocks"
    engine.double.residencies.most_blocks = 10
    assert loop.manager.prepare_store(loop.keys("b", 0, 2)) is None, "no room in the server"
    with pytest.raises(HotKVError, match="one KV cache group"):
        loop.manager.lookup(make_offload_key(b"0" * 32, 1), ReqContext("a"))
    with pytest.raises(HotKVError, match="an engine's connector stores"):
        OptimizedSwapHandler(loop.handler.copier, loop.handler._layers).transfer_async(
            0, SwapOut(0, np.zeros(1, np.int32), np.zeros(1, np.int32))
        )
    loop.session.close()
    with pytest.raises(HotKVError, match="has no arena"):
        HostBlocks(loop.session, 4)
