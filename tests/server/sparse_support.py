"""An engine with real sketches."""

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import hotkv_sparse
from demo.processes import Server
from hotkv_client import BlockRun, EngineMemory, Role, SelectConfig, Session, SessionConfig
from hotkv_client.types import Evicted, Int32s
from hotkv_proto.errors import HotKVError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.selection import Source
from tests.server.support import block_ids
from tests.sparse.support import F32

NUM_BLOCKS = 128
BLOCK_TOKENS = 16
KV_HEADS = 2
QUERY_HEADS = 8
HEAD_SIZE = 64
PAGE_BYTES = 4096
LOG_MASS = np.full(QUERY_HEADS, 3.0, np.float32)
"""The mass of the blocks that are always kept."""
LAYERS = (2, 5)
CONFIG = SparseConfig(
    sparse_topk=0.2,
    sink_tokens=16,
    recent_tokens=40,
    dense_layers=(),
    scorer="rot2u",
    max_correction_blocks=2,
)


class SketchEngine:
    """A worker session that stores blocks with sketches. Must be closed."""

    def __init__(
        self,
        target: str,
        model: str,
        engine_id: str = "",
        centres: Centres | None = None,
        *,
        version: int = 7,
        with_pages: bool = True,
        on_evicted: Callable[[Evicted], None] | None = None,
    ) -> None:
        self.centres = centres
        random = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
        shape = (NUM_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE)
        scorers = {layer: next(iter(CONFIG.scorers_of(layer))) for layer in LAYERS}
        mus = {2: centres.mu(2)} if centres is not None else {}
        built = {
            layer: hotkv_sparse.build(
                scorer, random.standard_normal(shape, np.float32), mus.get(layer)
            )
            for layer, scorer in scorers.items()
        }
        self.shard_bytes = sum(pool[0].size for pool in built.values())
        sizes = {"kv": NUM_BLOCKS * PAGE_BYTES, "sketches": NUM_BLOCKS * self.shard_bytes}
        self.fds = {name: os.memfd_create(f"hotkv-engine-{name}") for name in sizes}
        for name, size in sizes.items():
            os.posix_fallocate(self.fds[name], 0, size)
        self.kv, memory = (
            np.frombuffer(mmap.mmap(self.fds[name], size), np.uint8).reshape(NUM_BLOCKS, -1)
            for name, size in sizes.items()
        )
        self.kv[:] = random.integers(0, 256, self.kv.shape, np.uint8)
        group = GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, (PAGE_BYTES,))
        self.key_space = KeySpace(model, model, "bfloat16", (group,), BLOCK_TOKENS)
        version += centres is not None
        kind = Sketch(0, "rot2u", version, (self.shard_bytes,))
        config = SessionConfig(
            target,
            engine_id or os.urandom(8).hex(),
            Role.WORKER,
            self.key_space,
            sketches=(kind,),
            on_evicted=on_evicted,
            reconnect_max_s=0.5,
        )
        self.group = config.sketch_group(kind)
        tensors = [PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0)]
        self.pools: dict[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
        at = 0
        for layer, pool in built.items():
            size, first = pool[0].size, at * NUM_BLOCKS
            place = memory.reshape(-1)[first : first + pool.size]
            self.pools[layer] = place.reshape(pool.shape)
            self.pools[layer][:] = pool
            if with_pages:
                tensors.append(PageTensor(self.group, "sketches", first, size, size, at))
            at += size
        handles = tuple(MemoryHandle(name, size) for name, size in sizes.items())
        self.layout = Layout(0, NUM_BLOCKS, handles, tuple(tensors), "LBHNC")
        self.session = Session(config, EngineMemory(self.layout, self.fds))
        self.session.start()
        assert self.session.wait_connected(20), repr(self.session)

    def store(self, blocks: Sequence[bytes], *, first: int = 0, with_sketches: bool = True) -> None:
        name = os.urandom(8).hex()
        groups = (0, self.group) if with_sketches else (0,)
        runs = [BlockRun(group, blocks, block_ids(len(blocks), first)) for group in groups]
        self.session.store(name, name, runs, 20).result(60)

    def select_config(self, hot_blocks: int = 0, config: SparseConfig = CONFIG) -> SelectConfig:
        return SelectConfig(
            config, self.group, LAYERS, KV_HEADS, HEAD_SIZE, hot_blocks, centres=self.centres
        )

    def sources(self, layer: int) -> dict[str, Source]:
        name = next(iter(CONFIG.scorers_of(layer)))
        if self.centres is None or name != "rot2u":
            return {name: Source(self.pools[layer])}
        return {
            name: Source(self.pools[layer], self.centres.mu(layer), self.centres.bias(layer, name))
        }

    def close(self) -> None:
        self.session.close()
        for fd in self.fds.values():
            os.close(fd)


Make = Callable[..., SketchEngine]


def queries(count: int) -> F32:
    """Random [count, Q, D]."""
    return np.random.default_rng(count).standard_normal((count, QUERY_HEADS, HEAD_SIZE), np.float32)


def refused(call: Callable[[], Any]) -> HotKVError:
    with pytest.raises(HotKVError) as caught:
        call()
    return caught.value


def ints(values: list[int]) -> Int32s:
    return np.array(values, np.int32)


@pytest.fixture
def sparse_engine(server: Server) -> Iterator[Callable[..., SketchEngine]]:
    """Makes engines that store sketches, by default of one model."""
    with contextlib.ExitStack() as stack:
        model = uuid.uuid4().hex

        def make(
            *,
            target: str = server.target,
            engine_id: str = "",
            model: str = model,
            centres: Centres | None = None,
        ) -> SketchEngine:
            made = SketchEngine(target, model, engine_id, centres)
            stack.callback(made.close)
            return made

        yield make
