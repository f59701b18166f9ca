"""Helpers of tests of tiers: blocks in a `CacheCore`, calls without waiting, broken and slow
connections."""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.values import Run
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.sums import add_sums
from hotkv_server.tiers.protocol import Codes
from hotkv_server.tiers.remote.workers import Timeouts
from tests.contracts.tier_contract import WAIT_S, Bench
from tests.core.support import begin_store, words_of
from tests.doubles.fault_proxy import FaultProxy, nothing
from tests.server.certificates import Authority
from tests.support.waiting import wait_for


@contextlib.contextmanager
def broken(proxy: FaultProxy) -> Iterator[None]:
    """New connections end at their first request."""

    def refuse(piece: bytes) -> Iterator[bytes]:
        raise ConnectionAbortedError
        yield piece

    proxy.on_command = refuse
    proxy.drop()
    try:
        yield
    finally:
        proxy.on_command = nothing


@contextlib.contextmanager
def tls_proxy(
    target: Any, authority: Authority, *, asks_for_certificate: bool = False
) -> Iterator[FaultProxy]:
    """TLS, in front of a server without it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("store"))
    if asks_for_certificate:
        context.load_verify_locations(authority.path)
        context.verify_mode = ssl.CERT_REQUIRED
    with contextlib.closing(FaultProxy(target, context)) as proxy:
        yield proxy


def quickest_s(call: Callable[[], object], times: int) -> float:
    """Shortest of several calls: a busy machine slows some, a wait inside slows all."""
    took = []
    for _ in range(times):
        began_s = time.monotonic()
        call()
        took.append(time.monotonic() - began_s)
    return min(took)


@dataclass
class Store:
    """A real store behind `proxy`.

    bench, direct: open a tier through the proxy, and without it.
    set_generation: of the key space `flush_contract.NAME`; None removes it.
    name: begins each of the tier's error messages.
    """

    proxy: FaultProxy
    bench: Callable[..., AbstractContextManager[Bench]]
    direct: Callable[..., AbstractContextManager[Bench]]
    set_generation: Callable[[bytes | None], object]
    name: str

    @property
    def is_valkey(self) -> bool:
        return self.name.startswith("valkey")


class Gate:
    """For `FaultProxy`: holds requests with this method and `part` in their path until `opened`
    is set; sets `is_full` when one waits."""

    def __init__(self, method: bytes, part: str) -> None:
        self.is_full, self.opened = threading.Event(), threading.Event()
        self._method, self._part = method, part.encode()

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        line = piece[:500].partition(b"\r\n")[0]
        if line.startswith(self._method + b" ") and self._part in line:
            self.is_full.set()
            self.opened.wait(60)
        yield piece


class Asked:
    """Calls a `Bench`'s tier without waiting. `codes`: results by name of the call."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.codes: dict[object, list[int]] = {}

    def write(self, name: object, numbers: Sequence[int]) -> None:
        """Writes block n from slot n."""
        self._bench.tier.write(self._bench.blocks(numbers, numbers), self._end(name))

    def read(
        self, name: object, numbers: Sequence[int], slots: Sequence[int], within_s: float = WAIT_S
    ) -> None:
        deadline_s = time.monotonic() + within_s
        self._bench.tier.read(self._bench.blocks(numbers, slots), deadline_s, self._end(name))

    def wait(self, name: object) -> list[int]:
        wait_for(lambda: name in self.codes, f"{name} did not end")
        return self.codes[name]

    def _end(self, name: object) -> Callable[..., None]:
        def end(codes: Codes, seals: object = None) -> None:
            assert name not in self.codes, f"{name} ended twice"
            self.codes[name] = codes.tolist()

        return end


_kept: list["np.ndarray[Any, np.dtype[np.uint8]]"] = []


def arena_of(num_bytes: int) -> Region:
    """Its memory is never freed."""
    memory = np.zeros(num_bytes, np.uint8)
    _kept.append(memory)
    return Region(memory.ctypes.data, num_bytes, "arena")


def content(number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.random.default_rng(number).integers(0, 256, SLOT_ALIGN, np.uint8)


def store_blocks(
    core: CacheCore, arena: Region, session: int, name: str, blocks: list[int]
) -> None:
    """In one call, to group 0; content follows from a block's number."""
    now_s, memory = time.monotonic(), arena.array()
    runs = [Run(0, words_of(blocks))]
    (slots,) = begin_store(core, session, name, name, runs, 0, 0.0, now_s)
    for position, offset in zip(slots.positions.tolist(), slots.offsets.tolist(), strict=True):
        memory[offset : offset + SLOT_ALIGN] = content(blocks[position])
    sums = np.zeros(len(slots.offsets), np.uint64)
    strides = np.ones(len(sums), np.int64)
    add_sums(arena, slots.offsets, SLOT_ALIGN, 0, strides, sums)
    core.end_store(session, name, True, now_s, [sums])


def timeouts_of(options: dict[str, Any], usual: Timeouts) -> Timeouts:
    """Takes `connect_timeout_s` and `timeout_s` out of a tier's options."""
    connect_s = options.pop("connect_timeout_s", usual.connect_s)
    return Timeouts(connect_s, options.pop("timeout_s", usual.batch_s))
