"""Exceptions in callbacks with sparse decode: nothing outdated is used."""

import inspect
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.step import SparseStep
from hotkv_sparse.vllm.worker.companion import SparseRank
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.metadata import HotKVMetadata
from hotkv_vllm.scheduler.find import hits
from hotkv_vllm.stats import CallbackClock
from hotkv_vllm.worker.side import HotKVWorker
from tests.sparse.engines.sparse_parts import QUERIES
from tests.sparse.engines.sparse_pools import pairs, rows_are_right, sparse_engine, toy
from tests.sparse.engines.sparse_workers import Engine as Layers
from tests.vllm.faults import broken, called_by_callbacks
from tests.vllm.harness import prompt

__all__ = ["toy"]
"""`toy` is a fixture."""

LONG, OTHER = prompt(1, 300), prompt(2, 300)


def traffic(one: Any, server: Any, count: int) -> dict[str, list[int]]:
    """Hits, and blocks reallocated while they are stored. Answers by name."""
    names = {name: f"{name}.{count}" for name in ("a", "b", "c", "c2")}
    server.hold = {"store"}
    one.add(names["a"], LONG, 3)
    one.run(300)
    one.add(names["b"], OTHER, 3)
    one.run(300)
    server.hold = set()
    server.settle()
    for name in ("c", "c2"):
        if not one.scheduler.requests:
            one.scheduler.reset_prefix_cache()
        one.add(names[name], LONG, 3)
        one.run(300)
    return {name: one.outputs[full] for name, full in names.items()}


def of_sparse_decode(one: FunctionType) -> bool:
    return (
        one.__module__.startswith("hotkv_sparse.vllm.")
        or one.__module__.endswith(("sketch_planner", "written_blocks"))
        or one.__name__ in CALLBACKS
    )


CALLBACKS = {
    "handle_preemptions",
    "build_connector_meta",
    "_plan_sparse",
    "_tell_reporter",
    "_begin_sequences",
    "_end_sequences",
    "add_report",
}


@pytest.mark.parametrize(
    "only_once",
    [pytest.param(True, id="once"), pytest.param(False, id="always", marks=pytest.mark.long)],
)
def test_broken_in_each_function_of_sparse_decode(
    engine: Any, server: Any, toy: Any, monkeypatch: pytest.MonkeyPatch, only_once: bool
) -> None:
    monkeypatch.setattr(hits, "MISS_MEMORY_S", 0.0)
    plain = engine(blocks=64)
    expected = traffic(plain, server, 0)
    one, two = (
        sparse_engine(engine, blocks=blocks, extra={"store_timeout_s": 0.01}) for blocks in (16, 64)
    )
    functions = {
        f
        for called in called_by_callbacks(lambda: traffic(one, server, 0) and None).values()
        for f in called
        if of_sparse_decode(f)
    }
    assert {"SparseWorker.begin_step", "SparseWorker.will_write", "RowNames.of_step"} <= {
        f.__qualname__ for f in functions
    }
    rows_are_right(one)
    for count, function in enumerate(sorted(functions, key=lambda f: f.__qualname__), 1):
        server.blocks.clear()
        try:
            with broken(function, only_once=only_once) as fault:
                assert traffic(one, server, count) == expected
            rows_are_right(one)
            assert fault.strikes
            assert traffic(one, server, -count) == expected
            rows_are_right(one)
            pairs(server, one)
            two.drop_local()
            assert two.generate(f"a.{count}", LONG, 3)[0] == expected["a"]
            rows_are_right(two)
            one.drop_local()
        except Exception as error:
            raise AssertionError(
                f"{function.__qualname__} broken: {type(error).__name__}: {error}"
            ) from error


@pytest.mark.parametrize("method", [SparseRank._install, SparseRank.opened])
def test_broken_at_the_start(engine: Any, server: Any, toy: Any, method: Any) -> None:
    expected = engine(blocks=64).generate("plain", LONG, 3)
    server.blocks.clear()
    with broken(inspect.unwrap(method)) as fault:
        one = sparse_engine(engine, blocks=64)
    assert fault.strikes and one.generate("a", LONG, 3) == expected


def connector_over(layers: Layers) -> HotKVConnector:
    """A worker with sparse layers and no server."""
    one = HotKVConnector.__new__(HotKVConnector)
    one.clock = CallbackClock("test")
    one.edge = CallbackEdge(one.clock, lambda _: None)
    worker = one._worker = HotKVWorker.__new__(HotKVWorker)
    worker.rank, worker.loads, worker.stores = Mock(), Mock(), Mock()
    worker.rank.follow.return_value = worker.rank.weights_were_read.return_value = False
    sparse = worker.companion = SparseRank.__new__(SparseRank)
    sparse.edge, sparse.worker, sparse.cuda, sparse.reporter = one.edge, layers.worker, None, None
    return one


@pytest.mark.parametrize("function", ["begin_step", "will_write"])
def test_step_with_unknown_rows_is_dense(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers()
    one = connector_over(layers)
    batch, query = (
        layers.batch("a"),
        np.random.default_rng(0).standard_normal((QUERIES, 64)).astype(np.float32) * 2,
    )
    rows = SparseRows((layers.table("a")[-1],), ("a",))

    def attend() -> Any:
        return layers.worker.attend(layers.layers[0], batch, lambda: batch, lambda _: query)

    one.handle_preemptions(HotKVMetadata(companion=SparseStep(rows)))
    assert attend() is not None
    layers.step("a")
    with broken(getattr(SparseWorker, function), only_once=True):
        one.handle_preemptions(HotKVMetadata(companion=SparseStep(rows)))
    assert attend() is None
    assert not layers.worker._sequences
    assert one.edge.broken == {"handle_preemptions"}
    built = layers.worker.sketches.built(7)
    assert not built.any()
    one.handle_preemptions(HotKVMetadata(companion=SparseStep(rows)))
    batch = layers.batch("a")
    assert attend() is not None
    # Sketches that can't be discarded switch sparse decode off.
    monkeypatch.setattr(layers.worker, "start_over", lambda: 1 / 0)
    with broken(getattr(SparseWorker, function), only_once=True):
        one.handle_preemptions(HotKVMetadata(companion=SparseStep(rows)))
    one.handle_preemptions(HotKVMetadata(companion=SparseStep(rows)))
    assert attend() is None and layers.worker.is_off
    worker = one._worker
    assert worker.stores.take_everything_back.call_count == 2 and not worker.rank.has_attachments


def test_lost_scheduler_makes_worker_discard_all_sketches(
    engine: Any, server: Any, toy: Any
) -> None:
    """Their blocks may have been overwritten."""
    one = sparse_engine(engine)
    one.generate("a", LONG, 4)
    sparse = one.worker._worker.companion.worker
    assert any(sparse.sketches.built(layer.index).any() for layer in sparse.layers.values())
    one.worker.handle_preemptions(HotKVMetadata(lost_track=True))
    assert not any(sparse.sketches.built(layer.index).any() for layer in sparse.layers.values())
