"""Compares sketches with their pages; and a model with sparse layers for the harness."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotkv_proto.groups import GroupKind
from hotkv_sparse import SparseConfig, build
from hotkv_sparse.centre import Centres
from hotkv_sparse.vllm import attention_layers
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.pool import BlockReprManager, LayerShape
from hotkv_sparse.vllm.cpu.shared import SharedPool, shared_pool
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.worker import companion as rank_side
from hotkv_vllm.compat.kv_groups import CacheGroup
from tests.vllm.specs import full_model

BLOCKS, TOKENS, HEADS, SIZE = 10, 32, 2, 32
FORMATS = {1: ("rot2u",), 2: ("rot2u", "mean"), 5: ("rot3u",)}


def page_bytes(pages: Any, layer: int, block: int) -> bytes:
    """Sketches of a block, computed from its page."""
    keys = pages[layer][[block]]
    return b"".join(build(name, keys).tobytes() for name in FORMATS[layer])


class Keys:
    """The `KeyPages` that the worker's store of sketches calls."""

    page_bytes = 0

    def __init__(self, keys_of: Callable[[Any], Any]) -> None:
        self.keys_of = keys_of


def sparse_layer(
    name: str, index: int, group: int, shape: LayerShape, keys_of: Callable[[Any], Any]
) -> SparseLayer:
    return SparseLayer(name, index, group, shape, 0.1, Keys(keys_of))  # type: ignore[arg-type]


class Toy:
    """Sparse layers in the harness. A key is the first half of what the model writes."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def install(
        self,
        config: SparseConfig,
        vllm_config: Any,
        kv_config: Any,
        kv_caches: Any,
        centres: Any,
    ) -> SparseWorker:
        layers = []
        for group, _ in attention_layers.sparse_groups(kv_config):
            for name in kv_config.kv_cache_groups[group].layer_names[: self.num_layers]:
                pages = kv_caches[name]
                shape = LayerShape(
                    kv_config.num_blocks, TOKENS, HEADS, SIZE, tuple(config.scorers_of(1))
                )

                def keys_of(blocks: Any, pages: Any = pages) -> Any:
                    return toy_keys(pages.view(torch.int16).numpy()[blocks])

                layers.append(
                    sparse_layer(name, int(name.rpartition(".")[2]), group, shape, keys_of)
                )
        return SparseWorker(config, layers)


def toy_keys(cells: Any) -> Any:
    """int16 [blocks, heads, tokens, 2 * SIZE] to float32 [blocks, tokens, heads, SIZE]."""
    return np.ascontiguousarray(cells[..., :SIZE].transpose(0, 2, 1, 3), np.float32)


SPARSE = {
    "sparse_topk": 0.9,
    "sink_tokens": 1,
    "recent_tokens": 1,
    "min_context_tokens": 256,
    "dense_layers": [],
    "fusion": {"rot2u": 0.5, "mean": 0.5},
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    one = Toy(9)
    monkeypatch.setattr(rank_side, "install", one.install)
    return one


def sparse_engine(
    engine: Any, model: Any = full_model, sparse: dict[str, Any] | None = None, **settings: Any
) -> Any:
    extra = {"sparse": SPARSE if sparse is None else sparse} | settings.pop("extra", {})
    return engine(specs=model(), extra=extra, **settings)


def pairs(server: Any, one: Any) -> int:
    session = one.worker._worker.rank.session
    space, groups = session.space, len(session.config.key_space.groups)
    found = 0
    for kind in session.config.sketches:
        salt, count = session.config.key_space.sketch_salt(kind), 0
        for (_, number, block_hash), shards in server.blocks.items():
            if number != salt:
                continue
            count += 1
            cells = np.frombuffer(
                server.blocks[space, kind.group_index, block_hash][0], np.int16
            ).reshape(-1, HEADS, TOKENS, 2 * SIZE)
            names = dict.fromkeys(
                rows.name for rows in one.worker._worker.companion.worker.sketches.rows
            )
            expected = b"".join(
                build(name, toy_keys(page[None])).tobytes() for page in cells for name in names
            )
            assert shards[0] == expected
        found += count
    assert all(number < groups or number > 255 for _, number, _ in server.blocks)
    return found


def rows_are_right(one: Any) -> None:
    manager = one.worker._worker.companion.worker.sketches
    for layer in one.worker._worker.companion.worker.layers.values():
        marked = np.flatnonzero(manager.built(layer.index)).astype(np.int32)
        for name, source in manager.sources(layer.index).items():
            assert np.array_equal(source.pool[marked], build(name, layer.keys_of(marked))), (
                layer.name
            )


def layer_of(index: int, names: tuple[str, ...], group: int = 0, mu: Any = None) -> SparseLayer:
    shape = LayerShape(4, TOKENS, HEADS, SIZE, names, mu)
    return sparse_layer(f"l{index}", index, group, shape, lambda blocks: np.empty(0, np.float32))


def described(
    layers: list[SparseLayer], centres: Centres | None = None, num_shards: int = 1
) -> SharedPool:
    manager = BlockReprManager(
        {one.index: one.shape for one in layers}, {one.index: one.keys_of for one in layers}
    )
    groups = [
        CacheGroup(2, GroupKind.SLIDING_WINDOW, TOKENS, 64),
        CacheGroup(0, GroupKind.FULL_ATTENTION, TOKENS),
    ]
    pool = shared_pool(manager, layers, groups, num_shards, centres)
    described.kept = manager  # type: ignore[attr-defined] # its descriptor lives as long as it does
    return pool
