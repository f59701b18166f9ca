"""The memory of sketches beside an engine's pages."""

import mmap
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotkv_proto.groups import GroupKind
from hotkv_proto.layout import Layout, MemoryHandle
from hotkv_sparse import SparseConfig, build
from hotkv_sparse.vllm.cpu.pool import LayerShape
from hotkv_sparse.vllm.cpu.shared import HANDLE, shared_pool
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.metadata import HotKVHandshake
from tests.sparse.engines.sparse_pools import (
    BLOCKS,
    FORMATS,
    HEADS,
    SIZE,
    SPARSE,
    TOKENS,
    Toy,
    page_bytes,
    pairs,
    rows_are_right,
    sparse_engine,
    sparse_layer,
    toy,
)
from tests.vllm.harness import prompt
from tests.vllm.specs import full_model, hybrid_model

__all__ = ["toy"]

# ------------------------------------------------------------------------------------ state machine


class PoolMachine(RuleBasedStateMachine):
    """Two groups (layers 1 and 2; layer 5). Stores of a block end before a step writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = np.random.default_rng(0)
        self.pages = {layer: self._keys(BLOCKS) for layer in FORMATS}
        shapes = {
            layer: LayerShape(BLOCKS, TOKENS, HEADS, SIZE, names)
            for layer, names in FORMATS.items()
        }
        layers = [
            sparse_layer(
                f"l{layer}",
                layer,
                0 if layer < 5 else 3,
                shapes[layer],
                lambda b, i=layer: self.pages[i][b],
            )  # type: ignore[misc]
            for layer in FORMATS
        ]
        self.worker = SparseWorker(SparseConfig(dense_layers=(0,)), layers)
        groups = [
            CacheGroup(0, GroupKind.FULL_ATTENTION, TOKENS),
            CacheGroup(3, GroupKind.FULL_ATTENTION, TOKENS),
        ]
        self.pool = shared_pool(self.worker.sketches, layers, groups, 1, None)
        self.layout = Layout(
            0, BLOCKS, (MemoryHandle(HANDLE, self.pool.num_bytes),), self.pool.tensors
        )
        self.server = np.frombuffer(mmap.mmap(self.pool.fd, self.pool.num_bytes), np.uint8)
        self.built = {layer: set[int]() for layer in FORMATS}
        self.stores: list[tuple[int, list[int], list[bytes]]] = []
        self.loading: set[int] = set()
        self.before = 0, {layer: set[int]() for layer in FORMATS}

    def _keys(self, count: int) -> Any:
        return self.dice.standard_normal((count, TOKENS, HEADS, SIZE)).astype(np.float32)

    def _slot(self, kind: int, block: int) -> list[tuple[int, int]]:
        """Engine memory as (offset, length), in the slot's order."""
        (runs,) = self.layout.copy_runs(
            kind, self.pool.kinds[kind], np.array([block]), np.array([0])
        )
        assert np.array_equal(
            runs.slot_offsets, np.concatenate([[0], np.cumsum(runs.num_bytes)[:-1]])
        )
        return list(zip(runs.engine_offsets.tolist(), runs.num_bytes.tolist(), strict=True))

    def _read(self, kind: int, block: int) -> bytes:
        return b"".join(
            self.server[at : at + size].tobytes() for at, size in self._slot(kind, block)
        )

    def _expected(self, kind: int, block: int) -> bytes:
        return b"".join(
            page_bytes(self.pages, layer, block) for layer in ((1, 2) if kind == 0 else (5,))
        )

    def _idle(self, blocks: set[int]) -> list[int]:
        return sorted(blocks - self.loading)

    def _fence(self, blocks: list[int]) -> None:
        """As the scheduler does before a step."""
        for store in [store for store in self.stores if set(store[1]) & set(blocks)]:
            self._end(store)
        self.worker.will_write(np.array(blocks, np.int32))
        for built in self.built.values():
            built -= set(blocks)

    def _end(self, store: tuple[int, list[int], list[bytes]]) -> None:
        kind, blocks, expected = store
        self.stores.remove(store)
        assert [self._read(kind, block) for block in blocks] == expected

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1), max_size=4))
    def write(self, blocks: set[int]) -> None:
        """As prefill, decode or another connector does."""
        chosen = self._idle(blocks)
        self._fence(chosen)
        for layer in FORMATS:
            self.pages[layer][chosen] = self._keys(len(chosen))

    @rule(
        layer=st.sampled_from(sorted(FORMATS)),
        blocks=st.sets(st.integers(0, BLOCKS - 1), max_size=6),
    )
    def attend(self, layer: int, blocks: set[int]) -> None:
        chosen = self._idle(blocks)
        num_built = self.worker.sketches.update(layer, np.array(chosen, np.int32))
        assert num_built == len(set(chosen) - self.built[layer])
        self.built[layer] |= set(chosen)

    @rule(
        kind=st.integers(0, 1), blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1, max_size=6)
    )
    def store(self, kind: int, blocks: set[int]) -> None:
        chosen = self._idle(blocks)
        self.worker.build((0, 3)[kind], np.array(chosen, np.int32))
        for layer in (1, 2) if kind == 0 else (5,):
            self.built[layer] |= set(chosen)
        self.stores.append((kind, chosen, [self._expected(kind, block) for block in chosen]))

    @precondition(lambda self: self.stores)
    @rule(place=st.integers(0, 100))
    def stored(self, place: int) -> None:
        self._end(self.stores[place % len(self.stores)])

    @rule(blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1, max_size=4))
    def load(self, blocks: set[int]) -> None:
        chosen = self._idle(blocks)
        self._fence(chosen)
        self.loading |= set(chosen)

    @precondition(lambda self: self.loading)
    @rule(well=st.booleans(), kind=st.integers(0, 1), alone=st.booleans())
    def loaded(self, well: bool, kind: int, alone: bool) -> None:
        """Without the sketches (`alone`) or after a failure, their memory is random."""
        chosen, self.loading = sorted(self.loading), set()
        for layer in FORMATS:
            self.pages[layer][chosen] = self._keys(len(chosen))
        for block in chosen:
            data = np.frombuffer(self._expected(kind, block), np.uint8)
            if not well or alone:
                data = self.dice.integers(0, 256, len(data) // 2).astype(np.uint8)
            for at, size in self._slot(kind, block):
                part, data = data[:size], data[size:]
                self.server[at : at + len(part)] = part
        if well and not alone:
            self.worker.loaded((0, 3)[kind], np.array(chosen, np.int32))
            for layer in (1, 2) if kind == 0 else (5,):
                self.built[layer] |= set(chosen)

    @invariant()
    def what_is_marked_built_is_what_the_page_gives(self) -> None:
        for layer, names in FORMATS.items():
            marked = np.flatnonzero(self.worker.sketches.built(layer))
            assert set(marked.tolist()) == self.built[layer]
            for name in names:
                rows = self.worker.sketches.sources(layer)[name].pool[marked]
                assert np.array_equal(rows, build(name, self.pages[layer][marked]))

    @invariant()
    def layers_lack_what_is_not_built_and_lose_marks_only_when_told(self) -> None:
        known = self.worker.sketches
        for blocks in (set[int](), {0}, set(range(BLOCKS)), *self.built.values()):
            lacking = {layer for layer, built in self.built.items() if blocks - built}
            assert known.lacking(np.array(sorted(blocks), np.int32)) == lacking
        num_forgets, built_before = self.before
        if known.num_forgets == num_forgets:
            assert all(self.built[layer] >= built for layer, built in built_before.items())
        self.before = known.num_forgets, {layer: set(one) for layer, one in self.built.items()}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# ---------------------------------------------------------------- vLLM's scheduler, server's double


def loaded(one: Any) -> tuple[float, float]:
    """Sketches loaded and built. Counters come with later steps."""
    one.generate("tick", prompt(99, 3))
    one.generate("tock", prompt(99, 3))
    return one.counters.get("sparse_loaded_blocks", 0), one.counters.get("sparse_built_blocks", 0)


@pytest.mark.parametrize("table", [True, False], ids=["table", "rpc"])
def test_they_go_with_blocks_and_come_with_hits(
    engine: Any, server: Any, toy: Toy, table: bool
) -> None:
    server.table = table
    first = sparse_engine(engine)
    answer, _ = first.generate("a", prompt(1, 200), 4)
    assert pairs(server, first) == 6 and loaded(first) == (0, 12)
    second = sparse_engine(engine)
    assert second.generate("b", prompt(1, 200), 4) == (answer, 192)
    assert loaded(second) == (12, 0)
    rows_are_right(second)
    # The server has both, so nothing is stored.
    second.drop_local()
    stored_bytes = second.counters.get("store_bytes", 0)
    second.generate("c", prompt(1, 200), 4)
    assert loaded(second) == (24, 0) and second.counters.get("store_bytes", 0) == stored_bytes


def test_blocks_that_have_none_gain_one(engine: Any, server: Any, toy: Toy) -> None:
    """The blocks are hit in the server, then in its own cache."""
    engine().generate("a", prompt(1, 200), 4)
    one = sparse_engine(engine)
    assert pairs(server, one) == 0
    _, external = one.generate("b", prompt(1, 200), 4)
    assert external == 192 and loaded(one) == (0, 12) and pairs(server, one) == 6
    for key in [key for key in server.blocks if key[1] > 255]:
        del server.blocks[key]
    _, external = one.generate("c", prompt(1, 200), 4)
    assert external == 0 and loaded(one) == (0, 12) and pairs(server, one) == 6
    stored = one.counters.get("stored_blocks", 0)
    assert stored == 0 and one.counters.get("refused_blocks", 0) == 0


def test_another_version_shares_blocks_alone(engine: Any, server: Any, toy: Toy) -> None:
    answer, _ = sparse_engine(engine).generate("a", prompt(1, 200), 4)
    for sparse in (
        SPARSE | {"fusion": {}, "scorer": "quest"},
        SPARSE | {"fusion": {"rot2u": 0.5, "quest": 0.5}},
    ):
        other = sparse_engine(engine, sparse=sparse)
        assert other.generate("b", prompt(1, 200), 4) == (answer, 192)
        assert loaded(other) == (0, 12)
        rows_are_right(other)
    toy.num_layers = 1
    fewer = sparse_engine(engine)
    assert fewer.generate("b", prompt(1, 200), 4) == (answer, 192) and loaded(fewer) == (0, 6)


def test_a_grant_without_sketches_is_a_whole_hit(engine: Any, server: Any, toy: Toy) -> None:
    answer, _ = sparse_engine(engine).generate("a", prompt(1, 200), 4)
    one = sparse_engine(engine)
    for limit, come in ((6, 0), (10, 4)):
        server.grant_limit = limit
        before = one.counters.get("sparse_loaded_blocks", 0)
        assert one.generate(f"b{limit}", prompt(1, 200), 4) == (answer, 192)
        assert loaded(one)[0] - before == 2 * come
        rows_are_right(one)
        one.drop_local()
    assert "short_grants" not in one.counters


def test_ranks_that_disagree_keep_sketches_to_themselves(
    engine: Any, server: Any, toy: Toy
) -> None:
    one = sparse_engine(engine)
    found = one.worker.get_handshake_metadata()
    assert len(found.attachments) == 1
    one.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): found, (0, 1): HotKVHandshake(found.key_space)}
    )
    assert server.sessions[-1].config.sketches == ()


def test_memory_that_cannot_be_shared_stays_private(
    engine: Any, server: Any, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("told to fail")

    monkeypatch.setattr("hotkv_sparse.vllm.cpu.pool.os.memfd_create", refuse)
    one = sparse_engine(engine)
    answer, _ = one.generate("a", prompt(1, 200), 4)
    assert one.worker._worker.rank.session.config.sketches == () and len(server.blocks) == 6
    one.drop_local()
    assert one.generate("b", prompt(1, 200), 4) == (answer, 192)


@pytest.mark.long
@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_random_requests_and_faults(
    engine: Any, server: Any, toy: Toy, pipelined: bool, model: Any
) -> None:
    dice = random.Random(0)
    extra = {"lookup_timeout_s": 0.002, "reset_timeout_s": 0.002}
    one = sparse_engine(
        engine, model, pipelined=pipelined, blocks=40, max_tokens_per_step=128, extra=extra
    )
    live: list[str] = []
    most_pairs = 0
    for turn in range(120):
        roll = dice.random()
        if roll < 0.35 and len(live) < 6:
            live.append(f"r{turn}")
            one.add(live[-1], prompt(dice.randrange(3), dice.randrange(20, 400)), 40)
        elif roll < 0.39 and live:
            one.abort(live.pop(dice.randrange(len(live))))
        elif roll < 0.5:
            server.hold = set(
                dice.sample(["store", "load", "acquire", "lookup"], dice.choice([0, 0, 1, 2]))
            )
        elif roll < 0.65:
            server.settle(dice.choice(["", "store", "load", "acquire"]))
        elif roll < 0.68:
            server.fail_loads, server.fail_stores = dice.random() < 0.3, dice.random() < 0.2
        elif roll < 0.72:
            server.grant_limit = dice.choice([1, 3, 1 << 30, 1 << 30])
        elif roll < 0.85 and server.blocks:
            for key in dice.sample(list(server.blocks), min(len(server.blocks), 8)):
                for number in [
                    n for _, n, h in server.blocks if h == key[2] and (key[1] < 256 or n == key[1])
                ]:
                    server.blocks.pop((key[0], number, key[2]), None)
        elif roll < 0.93:
            # Later requests hit hotkv.
            server.hold.clear()
            server.settle()
            server.fail_loads = server.fail_stores = False
            one.drop_local()
        for _ in range(dice.randrange(4)):
            one.step()
            rows_are_right(one)
        live = [name for name in live if name not in one.finished]
        most_pairs = max(most_pairs, pairs(server, one))
    server.hold.clear()
    server.settle()
    server.fail_loads = server.fail_stores = False
    server.grant_limit = 1 << 30
    one.drop_local()
    one.generate("last", prompt(9, 200))
    one.drop_local()
    one.generate("very last", prompt(9, 200))
    rows_are_right(one)
    loaded(one)
    planner = one.connector._scheduler.cache.planner
    assert len(planner.in_flight) == 0
    assert not planner.in_flight.reading
    assert planner.in_flight.num_bytes == 0
    assert not server.leases and "callback_errors" not in one.counters
    assert most_pairs > 0
    assert one.counters["sparse_loaded_blocks"] > 0
    assert one.counters["sparse_built_blocks"] > 0
