"""What a selection by the server costs: a `SelectBlocks` round trip beside the same selection in
this process.

A real server holds the representations of one layer, stored by an engine: 8 KV heads of 4 query
heads, 128 channels, blocks of 16 tokens. Both ways score the same bytes with the same queries, in
turns.
"""

import mmap
import os
import time

import numpy as np
from numpy.typing import NDArray

import hotkv_sparse
from bench.report import median
from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, EngineMemory, Role, SelectConfig, Session, SessionConfig
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Representation
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_sparse.selection import Source, select_layer

KV_HEADS = 8
QUERY_HEADS = 32
HEAD_SIZE = 128
BLOCK_TOKENS = 16
PAGE_BYTES = 4096
"""Stands for a block's KV, which a selection does not read."""
DISTINCT_BLOCKS = 1024
CONFIG = hotkv_sparse.SparseConfig(sparse_topk=0.1, dense_layers=())
ARENA_BYTES = 512 << 20


def service_figures(num_blocks: int = 8192, rounds: int = 200) -> dict[str, float]:
    """Median and least microseconds of a selection over so many blocks: `service_select_us`,
    `service_select_min_us`, and, of the same in this process, `local_select_us`,
    `local_select_min_us`. Takes seconds; starts a server and ends it.
    """
    with (
        runtime_folder(ARENA_BYTES + (64 << 20)) as folder,
        Server(folder, str(ARENA_BYTES)) as server,
    ):
        server.wait_ready()
        server.wait_filled()
        engine = _Engine(server.target, num_blocks)
        try:
            return engine.measure(rounds)
        finally:
            engine.close()


class _Engine:
    """A session whose memory holds the representations of `num_blocks` random blocks."""

    def __init__(self, target: str, num_blocks: int) -> None:
        random = np.random.default_rng(num_blocks)
        keys = random.standard_normal(
            (DISTINCT_BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE), np.float32
        )
        built = np.tile(
            hotkv_sparse.build(CONFIG.scorer, keys), (-(-num_blocks // DISTINCT_BLOCKS), 1, 1)
        )[:num_blocks]
        size = built[0].size
        self.queries = random.standard_normal((64, QUERY_HEADS, HEAD_SIZE), np.float32)
        self.fds = {
            "kv": os.memfd_create("bench-kv"),
            "representations": os.memfd_create("bench-representations"),
        }
        for name, page in (("kv", PAGE_BYTES), ("representations", size)):
            os.posix_fallocate(self.fds[name], 0, num_blocks * page)
        memory = np.frombuffer(mmap.mmap(self.fds["representations"], num_blocks * size), np.uint8)
        self.pool: NDArray[np.uint8] = memory.reshape(built.shape)
        self.pool[:] = built
        groups = (GroupSpec(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, (PAGE_BYTES,)),)
        kind = Representation(0, CONFIG.scorer, 1, (size,))
        key_space = KeySpace("bench-select", "bench-select", "bfloat16", groups, BLOCK_TOKENS)
        config = SessionConfig(
            target, "bench-select", Role.WORKER, key_space, representations=(kind,)
        )
        self.group = config.representation_group(kind)
        tensors = (
            PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),
            PageTensor(self.group, "representations", 0, size, size, 0),
        )
        handles = (
            MemoryHandle("kv", num_blocks * PAGE_BYTES),
            MemoryHandle("representations", num_blocks * size),
        )
        self.session = Session(
            config, EngineMemory(Layout(0, num_blocks, handles, tensors, "LBHNC"), self.fds)
        )
        self.session.start()
        assert self.session.wait_connected(20), "the server does not answer"
        hashes = [os.urandom(32) for _ in range(num_blocks)]
        ids = np.arange(num_blocks, dtype=np.int32)
        self.session.store(
            "s", "s", [BlockRun(group, hashes, ids) for group in (0, self.group)], 60
        ).result(60)
        select = SelectConfig(CONFIG, self.group, (0,), KV_HEADS, HEAD_SIZE)
        created = self.session.create_sequence("bench", 0, hashes, select).result(60)
        assert created.covered_blocks == num_blocks, "the server does not cover all blocks"
        self.rows = ids
        self.log_mass = np.full(QUERY_HEADS, 5.0, np.float32)

    def measure(self, rounds: int) -> dict[str, float]:
        """See `service_figures`."""
        tokens = len(self.rows) * BLOCK_TOKENS
        source = {CONFIG.scorer: Source(self.pool)}
        times_s: dict[str, list[float]] = {"service": [], "local": []}
        with self.session.selects() as stream:
            stream.select("bench", 0, self.queries[0], tokens, self.log_mass)
            for number in range(rounds):
                query = self.queries[number % len(self.queries)]
                began_s = time.perf_counter()
                answer = stream.select("bench", 0, query, tokens, self.log_mass)
                between_s = time.perf_counter()
                local = select_layer(
                    CONFIG, 0, query, source, self.rows, self.log_mass, tokens, BLOCK_TOKENS
                )
                times_s["local"].append(time.perf_counter() - between_s)
                times_s["service"].append(between_s - began_s)
                assert np.array_equal(answer.positions, local.blocks), (
                    "server and engine select different blocks"
                )
        figures = {f"{name}_select_us": median(values) * 1e6 for name, values in times_s.items()}
        return figures | {
            f"{name}_select_min_us": min(values) * 1e6 for name, values in times_s.items()
        }

    def close(self) -> None:
        """Ends the session."""
        self.session.close()
        for fd in self.fds.values():
            os.close(fd)
