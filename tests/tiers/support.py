"""Blocks of tests in a core over plain memory, and faults of stores."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.sums import add_sums
from hotkv_server.testing.fault_proxy import FaultProxy, nothing
from tests.core.support import begin_store, words_of


@contextlib.contextmanager
def broken(proxy: FaultProxy) -> Iterator[None]:
    """All connections end, and new ones at their first request."""

    def refuse(piece: bytes) -> Iterator[bytes]:
        raise ConnectionAbortedError
        yield piece

    proxy.on_command = refuse
    proxy.drop()
    try:
        yield
    finally:
        proxy.on_command = nothing


def quickest_s(call: Callable[[], object], times: int) -> float:
    """Seconds that the quickest of so many calls took: a busy machine slows some of them, a wait in
    the call slows all."""
    took = []
    for _ in range(times):
        began_s = time.monotonic()
        call()
        took.append(time.monotonic() - began_s)
    return min(took)


def content(number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Returns a block's bytes."""
    return np.random.default_rng(number).integers(0, 256, SLOT_ALIGN, np.uint8)


def store_blocks(
    core: CacheCore, arena: Region, session: int, name: str, blocks: list[int]
) -> None:
    """Stores blocks of group 0 as a session does in one call, each with bytes of its own."""
    now_s, memory = time.monotonic(), arena.array()
    runs = [Run(0, words_of(blocks))]
    (slots,) = begin_store(core, session, name, name, runs, 0, 0.0, now_s)
    for position, offset in zip(slots.positions.tolist(), slots.offsets.tolist(), strict=True):
        memory[offset : offset + SLOT_ALIGN] = content(blocks[position])
    sums = np.zeros(len(slots.offsets), np.uint64)
    strides = np.ones(len(sums), np.int64)
    add_sums(arena, slots.offsets, SLOT_ALIGN, 0, strides, sums)
    core.end_store(session, name, True, now_s, [sums])
