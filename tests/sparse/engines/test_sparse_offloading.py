"""The decode loop of vLLM's RFC #37263 with real copies, over an array or a real server's pinned
blocks (`ResidencyPages`)."""

import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError
from hotkv_sparse import SparseConfig
from hotkv_sparse.axes import AxesEstimate
from hotkv_sparse.vllm.cpu.pool import LayerShape
from hotkv_sparse.vllm.offloading import (
    ArrayPages,
    DecodeMetadata,
    HostPages,
    ResidencyPages,
    SparseOffloadingHandler,
    SparseOffloadingManager,
)
from tests.support.waiting import wait_for

T, H, G, D = 16, 2, 2, 32
PAGE = T * H * 2 * D * 4
LAYERS = (2, 3)
CONFIG = SparseConfig(sparse_topk=256, sink_tokens=16, recent_tokens=32, max_correction_blocks=3)


def keys_of(pages: np.ndarray) -> np.ndarray:
    """A page is float32 [T tokens, H KV heads, 2 * D], each key before its value."""
    return np.ascontiguousarray(pages.view(np.float32).reshape(-1, T, H, 2 * D)[..., :D])


def plain_attention(query: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """query: [query heads, head size]; tokens: [n, KV heads, 2 * head size]."""
    scores = np.einsum("hgd,thd->hgt", query.reshape(H, G, D), tokens[..., :D]) / np.sqrt(D)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hgt,thd->hgd", shares / shares.sum(axis=-1, keepdims=True), tokens[..., D:])


class Model:
    """Decodes by the RFC's loop in two layers.

    residency: None: an array.
    """

    def __init__(
        self,
        config: SparseConfig,
        slots: int,
        num_host: int = 200,
        sequences: int = 2,
        residency: ResidencyPages | None = None,
    ) -> None:
        self.config = config
        self.rng = np.random.default_rng(0)
        self.residency = residency
        host = np.zeros((4, num_host, PAGE), np.uint8)
        self.host: HostPages = residency or ArrayPages(host, config.copy_method)
        self.hot = np.zeros((4, slots * sequences, PAGE), np.uint8)
        estimate = AxesEstimate(H, D)
        keys, queries = (self.rng.standard_normal((1024, heads, D)) for heads in (H, H * G))
        estimate.add(keys.astype(np.float32), queries.astype(np.float32))
        calibration = estimate.axes()
        assert calibration is not None
        mu, axes = calibration
        shape = LayerShape(num_host, T, H, D, (config.scorer,), mu, {}, axes)
        self.handler = SparseOffloadingHandler(
            config, dict.fromkeys(LAYERS, shape), slots, self.host, self.hot, keys_of
        )
        self.manager = SparseOffloadingManager(config, num_host, T, self.handler.sketches)
        self.tokens: dict[str, np.ndarray] = {}
        self.table: dict[str, np.ndarray] = {}
        self.jobs = itertools.count()
        self.loaded: list[int] = []

    def hashes(self, name: str, count: int) -> list[bytes]:
        return [f"{name}-{block}".encode().ljust(32) for block in range(count)]

    def prefill(self, name: str, num_blocks: int) -> None:
        tokens = self.rng.standard_normal((4, num_blocks * T, H, 2 * D)).astype(np.float32)
        if self.residency is not None:
            self.residency.open(name, num_blocks + 10)
        table = self.reserve(name, 0, num_blocks)
        pages = tokens.reshape(4, num_blocks, -1).view(np.uint8)
        for layer in LAYERS:
            self.host.store(layer, table, pages[layer], np.arange(num_blocks, dtype=np.int32))
            self.handler.sketches.update(layer, table)
        self.manager.complete_store(table, success=True)
        self.tokens[name], self.table[name] = tokens, table
        self.handler.begin(name)

    def reserve(self, name: str, first: int, count: int) -> np.ndarray:
        """Host blocks for the sequence's blocks from `first` on."""
        hashes = self.hashes(name, first + count)[first:]
        blocks = self.manager.prepare_store(hashes)
        if self.residency is not None:
            self.residency.name(name, first, hashes, blocks)
        return blocks

    def step(self, name: str) -> None:
        seq_len = self.tokens[name].shape[1] + 1
        num_complete = (seq_len - 1) // T
        fresh = self.rng.standard_normal((4, 1, H, 2 * D)).astype(np.float32)
        self.tokens[name] = np.concatenate([self.tokens[name], fresh], axis=1)
        if len(self.table[name]) <= num_complete:
            new = self.reserve(name, num_complete, 1)
            self.table[name] = np.concatenate([self.table[name], new])
        table, stored = self.table[name], np.empty(0, np.int32)
        query = self.rng.standard_normal((H * G, D)).astype(np.float32) * 2
        selected, scores = self.manager.lookup_with_sparse(
            self.hashes(name, num_complete), query, LAYERS[0]
        )
        assert len(selected) == len(scores) and np.isin(selected, table).all()
        load_spec = self.manager.prepare_sparse_load(selected)
        for layer in LAYERS:
            slot = self.handler.extend(name, layer, seq_len)
            page = self.hot[layer, slot].view(np.float32).reshape(T, H, 2 * D)
            page[(seq_len - 1) % T] = fresh[layer, 0]
            metadata, swap_in, swap_out = self.handler.handle_layer(
                DecodeMetadata(name, table, seq_len), layer, query
            )
            job = next(self.jobs)
            self.handler.transfer_async(job, swap_in)
            self.handler.wait({job})
            self.loaded.append(len(swap_in.blocks))
            self.check(name, layer, query, metadata)
            job = next(self.jobs)
            self.handler.transfer_async(job, swap_out)
            self.handler.sketches.update(layer, swap_out.blocks)
            self.handler.wait({job})
            stored = swap_out.blocks
        self.manager.complete_load(load_spec.blocks)
        self.manager.complete_store(stored, success=True)

    def check(self, name: str, layer: int, query: np.ndarray, metadata: DecodeMetadata) -> None:
        """Attended slots hold whole blocks of this sequence, the last one its partial block."""
        pages = (
            self.hot[layer, metadata.block_table]
            .view(np.float32)
            .reshape(-1, H, 2 * D)[: metadata.seq_len]
        )
        tokens = self.tokens[name][layer]
        first = {token.tobytes(): place for place, token in enumerate(tokens[::T])}
        positions = [first[page.tobytes()] for page in pages[::T]]
        assert positions == sorted(positions) and positions[-1] == (len(tokens) - 1) // T
        expected = np.concatenate([tokens[p * T : (p + 1) * T] for p in positions])
        assert np.array_equal(pages, expected)
        if len(positions) == -(-len(tokens) // T):
            assert np.allclose(
                plain_attention(query, pages), plain_attention(query, tokens), atol=1e-5
            )


@pytest.mark.parametrize(
    ("method", "scorer"),
    [("memcpy", "rot2u"), ("batch", "rot2u"), ("kernel", "rot2u"), ("auto", "mix2")],
)
def test_the_loop_of_the_rfc(method: str, scorer: str) -> None:
    model = Model(replace(CONFIG, copy_method=method, scorer=scorer), 32)
    loop(model)
    model.handler.close()


def loop(model: Model) -> None:
    model.prefill("a", 60)
    model.prefill("b", 45)
    for _ in range(50):
        model.step("a")
        model.step("b")
    # The first step loads at most 16, later ones 3.
    assert max(model.loaded[4:]) <= 3
    assert max(model.loaded[:4]) <= 16
    assert sum(model.loaded[4:]) > 100
    # Three blocks are full.
    for name, count in (("a", 63), ("b", 48)):
        table = model.table[name][:count]
        for layer in LAYERS:
            assert np.array_equal(
                model.host.read(layer, table).view(np.float32).ravel(),
                model.tokens[name][layer, : count * T].ravel(),
            )
            assert model.handler.sketches.update(layer, table) == 0
        rows, _ = model.manager.lookup_with_sparse(
            model.hashes(name, count), np.ones((H * G, D), np.float32), 2
        )
        assert len(rows) == 16 and set(rows) <= set(table)


@pytest.fixture
def server() -> Iterator[Server]:
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB") as one,
    ):
        one.wait_ready()
        yield one


@pytest.fixture
def engine(server: Server) -> Iterator[PagedEngine]:
    one = PagedEngine(server.target, layers=len(LAYERS), num_blocks=64, page_bytes=PAGE)
    yield one.connect()
    one.close()


def test_the_loop_of_the_rfc_over_a_residency(engine: PagedEngine) -> None:
    """Old blocks are only in the arena and in hot slots."""
    residency = ResidencyPages(engine.session, engine.kv, LAYERS)
    model = Model(CONFIG, 32, residency=residency)
    loop(model)
    assert not residency._staged and len(residency._offsets) == 63 + 48
    residency.close("a")
    assert len(residency._offsets) == 48
    model.step("b")
    # No longer pinned, so reads fail.
    engine.session.close()
    wait_for(lambda: not residency._arena.holds(residency._opened["b"]))
    with pytest.raises(HotKVError, match="no longer keeps blocks of b"):
        residency.read(LAYERS[0], model.table["b"][:1])
    model.handler.close()


def test_block_the_server_lacks_is_no_host_block(engine: PagedEngine) -> None:
    residency = ResidencyPages(engine.session, engine.kv, LAYERS)
    with pytest.raises(HotKVError, match=r"arena.bytes|share"):
        residency.open("large", 1 << 24)
    residency.open("a", 1)
    pages, blocks = np.ones((2, PAGE), np.uint8), np.arange(2, dtype=np.int32)
    residency.name("a", 0, [b"0" * 32], blocks[:1])
    residency.name("a", 2, [b"1" * 32], blocks[1:])
    residency.store(LAYERS[0], blocks, pages, blocks)
    # The second layer's store fails; the host block is then another's.
    for _ in range(2):
        with pytest.raises(HotKVError):
            residency.store(LAYERS[1], blocks, 2 * pages, blocks)
        residency.name("a", 3, [b"3" * 32], blocks[:1] + 2)
        residency.store(LAYERS[0], blocks[:1] + 2, 3 * pages, blocks[:1])
    for layer, times in zip(LAYERS, (1, 2), strict=True):
        assert np.array_equal(residency.read(layer, blocks[:1]), times * pages[:1])
    # The host block takes another hash, then another sequence.
    residency.name("a", 2, [b"4" * 32], blocks[1:])
    residency.store(LAYERS[1], blocks[1:], pages, blocks[1:])
    residency.close("a")
    residency.open("b", 1)
    residency.name("b", 0, [b"2" * 32], blocks[1:])
    for layer in reversed(LAYERS):
        residency.store(layer, blocks[1:], 2 * pages, blocks[1:])
    assert "1 blocks pinned, 0 staged" in repr(residency)
    assert np.array_equal(residency.read(LAYERS[0], blocks[1:]), 2 * pages[1:])


@pytest.mark.parametrize(("ends", "stays"), ["ab", "ba"])
def test_a_block_of_two_sequences_outlives_either(
    server: Server, engine: PagedEngine, ends: str, stays: str
) -> None:
    residency = ResidencyPages(engine.session, engine.kv, LAYERS)
    pages, blocks = np.ones((1, PAGE), np.uint8), np.zeros(1, np.int32)
    for name in "ab":
        residency.open(name, 1)
        residency.name(name, 0, [b"1" * 32], blocks)
        for layer in LAYERS:
            residency.store(layer, blocks, pages, blocks)
            for read in LAYERS if name == "b" else ():
                assert np.array_equal(residency.read(read, blocks), pages)
    residency.close(ends)
    residency.open("c", 1)
    with AdminClient(server.target) as admin:
        admin.evict(everything=True)
    assert engine.session.extend_residency(stays, 0, 0, [b"1" * 32]).result(20).offsets[0] >= 0
    assert np.array_equal(residency.read(LAYERS[0], blocks), pages)


def test_unanswered_store_never_has_next_pages(server: Server, engine: PagedEngine) -> None:
    residency = ResidencyPages(engine.session, engine.kv, LAYERS)
    pages, blocks = np.ones((1, PAGE), np.uint8), np.zeros(1, np.int32)
    for name in "abc":
        residency.open(name, 1)
    residency.name("a", 0, [b"1" * 32], blocks)
    residency.name("b", 0, [b"2" * 32], blocks + 1)
    residency.store(LAYERS[0], blocks, pages, blocks)
    os.kill(server.pid, signal.SIGSTOP)
    residency._timeout_s = 0.5
    try:
        with pytest.raises(TimeoutError):
            residency.store(LAYERS[1], blocks, pages, blocks)
        residency.close("a")
        residency.store(LAYERS[0], blocks + 1, 2 * pages, blocks)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    wait_for(lambda: not engine.session._life.connection.num_pending)
    found = engine.session.extend_residency("c", 0, 0, [b"1" * 32]).result(20).offsets
    assert found.tolist() == [-1]


def test_blocks_whose_load_failed_are_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(CONFIG, 32)
    model.prefill("a", 60)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model.host, "load", lambda layer, *_: layer == LAYERS[0] or 1 / 0)
        patch.setattr(model, "check", lambda *_: None)
        model.step("a")
    model.handler._states["a", LAYERS[0]].hot.forget(np.arange(60, dtype=np.int32))
    used: list[tuple[str, int, int]] = []

    def told(name: str, call: Any, *args: Any) -> Any:
        used.append((name, len(args[1]), get_ident()))
        return call(*args)

    for name in ("read", "load", "store"):
        monkeypatch.setattr(model.host, name, partial(told, name, getattr(model.host, name)))
    for _ in range(20):
        model.step("a")
    assert len({thread for _, _, thread in used}) == 1
    assert max(count for name, count, _ in used if name == "read") > 1
    model.handler.close()


@pytest.mark.parametrize("results", [(False, True), (True, False), (False, False)])
def test_block_of_two_stores_needs_both_failing(
    results: tuple[bool, bool],
) -> None:
    """The second store still writes the host block."""
    model = Model(SparseConfig(sparse_topk=256), 20, num_host=2)
    stores = [model.manager.prepare_store([b"x"]) for _ in results]
    model.manager.complete_store(stores[0], success=results[0])
    other = model.manager.prepare_store([b"y"])
    assert other.tolist() != stores[1].tolist()
    model.manager.complete_store(stores[1], success=results[1])
    found, _ = model.manager.lookup_with_sparse([b"x"], np.ones((H * G, D), np.float32), 2)
    assert found.tolist() == (stores[1].tolist() if any(results) else [])
    if any(results):
        with pytest.raises(HotKVError, match="give it more blocks"):
            model.manager.prepare_store([b"z"])
    else:
        model.manager.prepare_store([b"z"])


def test_refusals_and_failed_stores() -> None:
    model = Model(SparseConfig(sparse_topk=256), 20, num_host=8)
    twice = model.manager.prepare_store([b"x", b"x"])
    assert twice[0] == twice[1]
    model.manager.complete_store(twice, success=False)
    blocks = model.manager.prepare_store(model.hashes("x", 8))
    with pytest.raises(HotKVError, match="give it more blocks"):
        model.manager.prepare_store([b"y"])
    with pytest.raises(HotKVError, match="not ready"):
        model.manager.prepare_sparse_load(blocks[:1])
    model.manager.complete_store(blocks[:3], success=True)
    model.manager.complete_store(blocks, success=False)
    with pytest.raises(HotKVError, match="not reserved"):
        model.manager.complete_store(blocks[3:], success=True)
    assert len(model.manager.prepare_store([b"y"])) == 1
    found, _ = model.manager.lookup_with_sparse(
        model.hashes("x", 8), np.ones((H * G, D), np.float32), 2
    )
    assert found.tolist() == blocks[:3].tolist()
    spec = model.manager.prepare_sparse_load(found)
    model.manager.complete_load(spec.blocks)
    with pytest.raises(HotKVError, match="not pinned"):
        model.manager.complete_load(spec.blocks)
    model.handler.close()


def test_copies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(HotKVError, match="copy_method is 'dma'; use one of memcpy"):
        ArrayPages(np.zeros((1, 4, 8), np.uint8), "dma")
    pages, hot = ArrayPages(np.zeros((1, 4, 8), np.uint8)), np.zeros((5, 8), np.uint8)
    for other in (hot[:, :4], hot.view(np.int8), np.zeros((8, 5), np.uint8).T):
        with pytest.raises(HotKVError, match=r"pass contiguous uint8 \[blocks, 8\]"):
            pages.load(0, np.zeros(1, np.int32), other, np.zeros(1, np.int32))
    four, none = np.array([4], np.int32), np.array([-1], np.int32)
    with pytest.raises(HotKVError, match="blocks must be from 0 to 3"):
        pages.load(0, four, hot, four)
    with pytest.raises(HotKVError, match="blocks must be from 0 to 4"):
        pages.store(0, four - 1, hot, none)
