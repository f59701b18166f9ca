"""Measures what no copy through the server can beat: a hop between threads, a call of the driver
that does nothing, and plain copies of 1 GiB from four kinds of pinned host memory.

`python -m bench.gpu.plain [--json] [--quick]`, on a machine with a GPU, half a minute, 2 GiB of
device and of host memory. The kinds: torch's pinned memory; a file in /dev/shm, registered whole
and in pieces of 64 MiB, as the server registers its arena; and anonymous memory with transparent
huge pages, registered.
"""

import asyncio
import ctypes
import mmap
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from bench.gpu.engine import Side, about, find_side, operation_bytes
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.report import median
from bench.servers import GIB, MIB
from demo.processes import SHM

PIECE_BYTES = 64 * MIB
CALLS = 400


def hop_us(rounds: int) -> float:
    """There and back between two threads by queues; median of one way."""
    there, back, times = SimpleQueue[int](), SimpleQueue[int](), list[float]()

    def echo() -> None:
        while there.get():
            back.put(1)

    thread = threading.Thread(target=echo)
    thread.start()
    for _ in range(rounds):
        begin_s = time.perf_counter()
        there.put(1)
        back.get()
        times.append(1e6 * (time.perf_counter() - begin_s) / 2)
    there.put(0)
    thread.join()
    return median(times)


def loop_hop_us(rounds: int) -> float:
    """From an event loop to a thread and back; median of both ways."""

    async def hops() -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        with ThreadPoolExecutor(1) as pool:
            for _ in range(rounds):
                begin_s = time.perf_counter()
                await loop.run_in_executor(pool, int)
                times.append(1e6 * (time.perf_counter() - begin_s))
        return times

    return median(asyncio.run(hops()))


def driver_us(rounds: int) -> float:
    """Median of `cuCtxGetCurrent`, by ctypes."""
    call, found = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent, ctypes.c_void_p()
    times = []
    for _ in range(rounds):
        begin_s = time.perf_counter()
        call(ctypes.byref(found))
        times.append(1e6 * (time.perf_counter() - begin_s))
    return median(times)


# -------------------------------------------------------------------------------------- Host memory


@contextmanager
def registered(side: Side, memory: mmap.mmap, piece_bytes: int) -> Iterator[list[torch.Tensor]]:
    """uint8 [bytes] for each piece: no copy may cross their bounds."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole.zero_()
    pieces = list(whole.split(piece_bytes))
    cudart = None if side.is_made_up else torch.cuda.cudart()
    if cudart is None:
        yield pieces
        return
    for piece in pieces:
        status = cudart.cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
        if int(status):
            raise RuntimeError(f"cudaHostRegister failed with {status}")
    try:
        yield pieces
    finally:
        for piece in pieces:
            cudart.cudaHostUnregister(piece.data_ptr())


@contextmanager
def torchs(side: Side, num_bytes: int) -> Iterator[list[torch.Tensor]]:
    yield [side.pinned(num_bytes)]


@contextmanager
def in_shm(side: Side, num_bytes: int, piece_bytes: int) -> Iterator[list[torch.Tensor]]:
    with tempfile.TemporaryFile(dir=SHM if SHM.is_dir() else None) as file:
        file.truncate(num_bytes)
        with registered(side, mmap.mmap(file.fileno(), num_bytes), piece_bytes) as pieces:
            yield pieces


@contextmanager
def huge(side: Side, num_bytes: int) -> Iterator[list[torch.Tensor]]:
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    with registered(side, memory, num_bytes) as pieces:
        yield pieces


def copy_s(side: Side, device: torch.Tensor, pieces: list[torch.Tensor], what: str) -> float:
    side.synchronize()
    begin_s = time.perf_counter()
    for there, here in zip(device.split(pieces[0].numel()), pieces, strict=True):
        target, source = (there, here) if what == "load" else (here, there)
        target.copy_(source, non_blocking=True)
    side.synchronize()
    return time.perf_counter() - begin_s


def copies(side: Side, num_bytes: int, rounds: int) -> list[Figure]:
    """GB/s, by the kind of host memory and the direction."""
    kinds: dict[str, Callable[[], object]] = {
        "torch's": lambda: torchs(side, num_bytes),
        "/dev/shm, whole": lambda: in_shm(side, num_bytes, num_bytes),
        "/dev/shm, pieces of 64 MiB": lambda: in_shm(side, num_bytes, PIECE_BYTES),
        "huge pages": lambda: huge(side, num_bytes),
    }
    device, figures = side.scratch(num_bytes), []
    for kind, made in kinds.items():
        with made() as pieces:  # type: ignore[attr-defined]
            for what in ("load", "store"):
                copy_s(side, device, pieces, what)
                took_s = median([copy_s(side, device, pieces, what) for _ in range(rounds)])
                figures.append(Figure(f"plain {what}, {kind}, GB/s", num_bytes / took_s / 1e9))
    return figures


def main() -> int:
    options = gpu_parser("Hops, calls of the driver, and plain copies.").parse_args()
    side, short = find_side(options.made_up), options.quick or options.made_up
    figures = [
        Figure("hop between threads, us", hop_us(CALLS)),
        Figure("hop from an event loop and back, us", loop_hop_us(CALLS)),
    ]
    try:
        if not side.is_made_up:
            side.synchronize()
            figures.append(Figure("call of the driver, us", driver_us(CALLS)))
        num_bytes = operation_bytes(128 * MIB if side.is_made_up else GIB, 1)
        figures += copies(side, num_bytes, 2 if short else 8)
    finally:
        print_figures(figures, about(side), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
