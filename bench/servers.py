"""Servers to measure, and blocks to fill them with."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from demo.processes import Server, ends_cleanly, runtime_folder
from hotkv_client import BlockRun, Session
from hotkv_client.paged_engine import PagedEngine

MIB, GIB = 1 << 20, 1 << 30
ROOM_BYTES = 256 * MIB
"""A server's folder besides the arena: table, state, logs."""
STORED_BLOCKS = 50_000


@contextmanager
def serving(arena_bytes: int, *flags: str, command: Sequence[str] = ()) -> Iterator[Server]:
    """Ready. Stopped, and its folder removed, at the end or with this process. command: empty:
    the usual one."""
    with (
        ends_cleanly(),
        runtime_folder(arena_bytes + ROOM_BYTES) as folder,
        Server(folder, str(arena_bytes), *flags, command=command) as server,
    ):
        server.wait_ready()
        yield server


def new_hashes(count: int) -> list[bytes]:
    data = os.urandom(count * 32)
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def session_over(target: str, hashes: Sequence[bytes], page_bytes: int = 4096) -> Session:
    """Stores a block under each hash, all from one page, so that a client with little memory
    fills a server."""
    session = PagedEngine(target, layers=1, num_blocks=1, page_bytes=page_bytes).connect().session
    for start in range(0, len(hashes), STORED_BLOCKS):
        some = hashes[start : start + STORED_BLOCKS]
        run = BlockRun(0, some, np.zeros(len(some), np.int32))
        result = session.store(f"fill-{start}", f"fill-{start}", [run], 60).result(60)
        assert np.all(result.results[0] == 1), "the arena is too small for the benchmark"
    return session
