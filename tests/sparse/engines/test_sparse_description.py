"""Engines share sketches of equal description: format, layers, centre."""

from typing import Any

import numpy as np
import pytest

from hotkv_proto.keys import Sketch
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_sparse import build
from hotkv_sparse.centre import Centres, LayerCentre
from hotkv_sparse.centre_file import write_centres
from hotkv_sparse.vllm.cpu.pool import BlockReprManager, LayerShape
from hotkv_sparse.vllm.cpu.setup import centre_of
from hotkv_sparse.vllm.cpu.shared import HANDLE
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.worker.layout import ExportedMemory

# -------------------------------------------------------------------------------------- description
from tests.sparse.engines.sparse_pools import (
    HEADS,
    SIZE,
    TOKENS,
    Toy,
    described,
    layer_of,
    sparse_engine,
    toy,
)

__all__ = ["toy"]


def test_kind_distinguishes_all_that_gives_bytes_meaning() -> None:
    random_mu = np.random.default_rng(0).standard_normal((HEADS, SIZE)).astype(np.float32)
    centres = Centres("m", 2048, {1: LayerCentre(random_mu, {})})
    plain = [layer_of(1, ("rot2u",)), layer_of(2, ("rot2u",))]
    kinds: list[Sketch] = [
        described(layers, given).kinds[0]
        for layers, given in (
            (plain, None),
            (plain[:1], None),
            ([layer_of(1, ("rot2u",)), layer_of(3, ("rot2u",))], None),
            ([layer_of(1, ("rot2u",)), layer_of(2, ("rot3u",))], None),
            ([layer_of(1, ("rot2u", "mean")), layer_of(2, ("rot2u",))], None),
            ([layer_of(1, ("mean", "rot2u")), layer_of(2, ("rot2u",))], None),
            ([layer_of(1, ("rot2u",), mu=random_mu), layer_of(2, ("rot2u",))], centres),
        )
    ]
    assert len({kind.version for kind in kinds}) == len(kinds)
    assert all(kind.group_index == 1 for kind in kinds)
    assert kinds[0].format == "rot2u"
    assert kinds[3].format == "rot2u+rot3u"
    assert kinds[5].format == "mean+rot2u"
    assert described(plain[::-1]).kinds == described(plain).kinds
    # quest uses no centre.
    summaries = [layer_of(1, ("quest",), mu=random_mu)]
    assert described(summaries, centres).kinds == described([layer_of(1, ("quest",))]).kinds
    # A rank has its own heads only, but the description of all.
    half = [layer_of(1, ("rot2u",), mu=random_mu[:1]), layer_of(2, ("rot2u",))]
    assert described(half, centres, 2).kinds[0].version == kinds[6].version
    assert described(half, centres, 2).kinds[0].shard_bytes == kinds[6].shard_bytes * 2


def test_no_hotkv_group_means_nothing_to_share() -> None:
    with pytest.raises(Unsupported, match="no group"):
        described([layer_of(1, ("rot2u",), group=7)])


def test_the_pool_lies_beside_the_pages() -> None:
    pool = described([layer_of(1, ("rot2u",)), layer_of(4, ("rot2u", "mean"))])
    pages = PageTensor(0, "kv0", 0, 64, 64, 0)
    memory = pool.beside(ExportedMemory(Layout(0, 4, (MemoryHandle("kv0", 256),), (pages,)), {}), 2)
    assert [tensor.group_index for tensor in memory.layout.tensors] == [0, 2, 2, 2]
    assert set(memory.fds) == {HANDLE}
    rows = sum(tensor.page_bytes for tensor in memory.layout.tensors[1:])
    assert rows == pool.kinds[0].slot_bytes
    assert [handle.handle_id for handle in memory.layout.handles] == ["kv0", HANDLE]
    memory.close()


# ------------------------------------------------------------------------------------------ centres


def test_a_rank_takes_its_heads_of_a_centre() -> None:
    mu = np.arange(4 * SIZE, dtype=np.float32).reshape(4, SIZE)
    centres = Centres("m", 2048, {3: LayerCentre(mu, {"rot2u": 0.2, "rot3u": 0.05})})
    found, biases = centre_of(3, ("rot2u", "mean"), 2, 2, centres)
    assert found is not None and np.array_equal(found, mu[2:]) and biases == {"rot2u": 0.2}
    assert centre_of(4, ("rot2u",), 0, 2, centres) == (None, {})
    assert centre_of(3, ("rot2u",), 0, 2, None) == (None, {})
    shape = LayerShape(4, TOKENS, 2, SIZE, ("rot2u", "mean"), found, biases)
    keys = np.random.default_rng(0).standard_normal((4, TOKENS, 2, SIZE)).astype(np.float32)
    manager = BlockReprManager({3: shape}, {3: lambda blocks: keys[blocks]})
    manager.update(3, np.arange(4, dtype=np.int32))
    sources = manager.sources(3)
    assert np.array_equal(sources["rot2u"].pool, build("rot2u", keys, found))
    assert sources["rot2u"].mu is found
    assert np.array_equal(sources["mean"].pool, build("mean", keys)) and sources["mean"].mu is None
    assert (sources["rot2u"].bias, sources["mean"].bias) == (0.2, None)


def test_centres_of_another_model_are_refused(
    engine: Any, server: Any, toy: Toy, tmp_path: Any
) -> None:
    path, ones = tmp_path / "centres.npz", np.ones((2, 32), np.float32)
    write_centres(path, Centres("m", 2048, {77: LayerCentre(ones, {})}))
    with pytest.raises(ConfigError, match=r"hotkv\.sparse_centre.*layer 77"):
        sparse_engine(engine, extra={"sparse_centre": str(path)})
    write_centres(path, Centres("m", 2048, {0: LayerCentre(ones, {})}))
    sparse_engine(engine, extra={"sparse_centre": str(path)})


def test_a_centre_that_cannot_be_read_is_named(tmp_path: Any) -> None:
    config = ConnectorConfig.from_extra_config(
        {"hotkv.sparse": {}, "hotkv.sparse_centre": f"{tmp_path}/none.npz"}
    )
    with pytest.raises(ConfigError, match=r"hotkv\.sparse_centre = '.*none\.npz'"):
        config.companion.read_centres()
    config = ConnectorConfig.from_extra_config({"hotkv.sparse": {}})
    assert config.companion.read_centres() is None
