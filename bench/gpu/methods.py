"""Compares the server's methods of copying (setting `copy.method`) with `auto`: speed of loads and
stores by the length of a contiguous run, idle and beside a busy engine, and how much they slow that
engine down.

`python -m bench.gpu.methods [--json]`, on a machine with a GPU, 25 s and a server per method. An
operation copies 256 MiB; every load's bytes are compared. The engine's work, in the process that
asks for the copies, in windows with and without them: matrix products in bfloat16, or a CUDA graph
of 1,000 small kernels, as decoding is. The row `plain` has the slow-down by this process' plain
loads: none costs less.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from bench.gpu.engine import (
    DEADLINE_S,
    PlainCopies,
    Shape,
    Side,
    about,
    done,
    find_side,
    half_leased,
    operation_bytes,
    settled,
)
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.transfer import ARENA_OPERATIONS, layers_of, measure
from bench.report import median
from bench.servers import MIB, new_hashes
from demo.processes import ends_cleanly
from hotkv_client.command.tables import table
from tests.doubles.with_constants import copies_by

METHODS = ("auto", "batch", "memcpy", "kernel", "staged")
RUNS = tuple(kib << 10 for kib in (2048, 640, 64, 16, 4, 256, 28, 8))
"""Bytes, the most informative first: a block of an 8B model, and of a rank of a 70B model over
eight, in the layout of vLLM's engines on CUDA."""
LOSS_RUNS = (2 << 20, 64 << 10)
LOSS_TARGET = 0.03
LEAST_ARENA_BYTES = 256 * MIB
PRODUCT_SIZE = 8192
WINDOW_PRODUCTS = 60
"""Of a window: about 80 ms on an H200."""


GRAPH_KERNELS, WINDOW_GRAPHS = 1000, 25


class Work(Protocol):
    """What an engine computes, on a separate stream."""

    def window_ms(self) -> float:
        """Measured by device events if there are any."""


class Graphs:
    """A CUDA graph of small kernels, again and again."""

    def __init__(self, side: Side) -> None:
        self._side, self._stream = side, side.stream()
        self._numbers = torch.zeros(1024, device=side.scratch(1).device)
        if side.is_made_up:
            return
        self._numbers.add_(1)
        side.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(GRAPH_KERNELS):
                self._numbers.add_(1)

    def window_ms(self) -> float:
        if self._side.is_made_up:
            self._numbers.add_(1)
            return 1.0
        return timed_ms(self._stream, WINDOW_GRAPHS, self._graph.replay)


def timed_ms(stream: Any, count: int, run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with stream:
        begin.record()
        for _ in range(count):
            run()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


class Products:
    """Matrix products."""

    def __init__(self, side: Side) -> None:
        self._side = side
        size, kind = (64, torch.float32) if side.is_made_up else (PRODUCT_SIZE, torch.bfloat16)
        device = side.scratch(1).device
        self._a, self._b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._stream = side.stream()

    def window_ms(self) -> float:
        if self._side.is_made_up:
            torch.mm(self._a, self._b, out=self._out)
            return 1.0
        return timed_ms(
            self._stream, WINDOW_PRODUCTS, lambda: torch.mm(self._a, self._b, out=self._out)
        )


@dataclass(slots=True)
class Loss:
    """Windows alone and beside copies; `copies` ended meanwhile."""

    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    copies: int = 0

    def share(self) -> float:
        """Of its speed, lost by the loop beside copies."""
        return 1 - median(self.alone_ms) / median(self.beside_ms)

    def rate(self, num_bytes: int) -> float:
        """GB/s of the copies, of `num_bytes` each."""
        return self.copies * num_bytes / sum(self.beside_ms) / 1e6


def loss_of(
    work: Work, background: Callable[[Callable[[], None]], "Background"], rounds: int
) -> Loss:
    """Windows in turns: alone, and in the background's company. `background`: made from a
    function to call after each repetition."""
    found = Loss()
    work.window_ms()
    for _ in range(rounds):
        found.alone_ms.append(work.window_ms())

        def count() -> None:
            found.copies += 1

        with background(count).running():
            found.beside_ms.append(work.window_ms())
    return found


class Background:
    """Repeats an operation on two threads."""

    def __init__(self, operation: Callable[[], None], ended: Callable[[], None]) -> None:
        self._operation, self._ended = operation, ended
        self._enough = threading.Event()
        self._begun = threading.Event()
        self._error: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block begins once the first operation has ended. Raises a failed one's error."""
        threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            self._begun.wait(DEADLINE_S)
            yield
        finally:
            self._enough.set()
            for thread in threads:
                thread.join()
        if self._error:
            raise self._error[0]

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                self._operation()
                if self._begun.is_set() and not self._enough.is_set():
                    self._ended()
                self._begun.set()
        except (AssertionError, RuntimeError, OSError, TimeoutError) as error:
            self._error.append(error)
            self._begun.set()


def losses_beside(
    side: Side, target: str, works: Mapping[str, Work], shape: Shape, rounds: int
) -> dict[tuple[str, str], Loss]:
    """By work and direction: the server copies half of the shape's blocks again and again."""
    found = {}
    with half_leased(side, target, shape) as (engine, stored, others, lease):

        def load() -> None:
            done(engine.load(lease, others))

        def store() -> None:
            done(engine.store(new_hashes(len(stored)), stored))

        for name, work in works.items():
            for what, copy in (("load", load), ("store", store)):
                found[name, what] = loss_of(work, partial(Background, copy), rounds)
    return found


def loss_beside_plain(side: Side, work: Work, plain: PlainCopies, rounds: int) -> Loss:
    own = threading.local()

    def copy() -> None:
        if not hasattr(own, "stream"):
            own.stream = side.stream()
        plain.copy_in(own.stream)

    return loss_of(work, partial(Background, copy), rounds)


@dataclass(slots=True)
class Found:
    """ratios: to plain copies' speed, by method, bytes of a run, and direction.
    losses: share of the work's speed lost beside copies, and their GB/s; by method, bytes of a run,
    work and direction.
    """

    side: Side
    ratios: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    losses: dict[tuple[str, int, str, str], tuple[float, float]] = field(default_factory=dict)

    def row(self, method: str) -> tuple[object, ...]:
        found = self.ratios.get(method, {})
        cells = (
            f"{found[run]['store']:.2f} / {found[run]['load']:.2f}" if run in found else ""
            for run in sorted(RUNS)
        )
        return (method, *cells)

    def report(self, *, as_json: bool) -> None:
        print("\nstore / load over plain copies, by KiB of a run")
        heads = ("method", *(f"{run >> 10}" for run in sorted(RUNS)))
        print(table(heads, [self.row(method) for method in self.ratios]))
        print("\nbeside an engine's work")
        rows = [
            (method, run >> 10, work, what, f"{loss:.3f}", f"{rate:.1f}")
            for (method, run, work, what), (loss, rate) in self.losses.items()
        ]
        print(table(("method", "KiB", "work", "copies", "lost", "copies' GB/s"), rows))
        figures = [
            Figure(f"{what}, runs of {run >> 10} KiB, {method}, of plain copy", ratio)
            for method, by_run in self.ratios.items()
            for run, by_way in by_run.items()
            for what, ratio in by_way.items()
        ]
        figures += [
            Figure(
                f"{work} lose beside {what}s, runs of {run >> 10} KiB, {method}",
                loss,
                None if method == "plain" else LOSS_TARGET,
                True,
            )
            for (method, run, work, what), (loss, _) in self.losses.items()
        ]
        print_figures(figures, about(self.side), as_json=as_json)


@dataclass(frozen=True, slots=True)
class Plan:
    """windows: time windows of an engine's work."""

    op_bytes: int
    rounds: int
    windows: int

    def shape(self, run_bytes: int) -> Shape:
        """Blocks of two operations, which may be a little smaller than `op_bytes`."""
        layers = layers_of(run_bytes, self.op_bytes)
        return Shape(run_bytes, layers, 2 * (self.op_bytes // layers // run_bytes), "LBHNC")


def measure_method(
    found: Found, method: str, plan: Plan, plain: PlainCopies, works: Mapping[str, Work]
) -> None:
    """Adds a method's figures to `found`, with a server of its own."""
    side, arena_bytes = found.side, max(ARENA_OPERATIONS * plan.op_bytes, LEAST_ARENA_BYTES)
    flags = copies_by(method)
    with settled(side, arena_bytes, *flags, is_calibrated=method == "auto") as server:
        for run_bytes in RUNS:
            shape = plan.shape(run_bytes)
            times = measure(side, server.target, plain, shape, plan.rounds, with_both=False)
            share = shape.num_bytes / 2 / plan.op_bytes
            ratios = {what: share * ratio for what, ratio in times.ratios().items()}
            found.ratios.setdefault(method, {})[run_bytes] = ratios
        for run_bytes in LOSS_RUNS:
            shape = plan.shape(run_bytes)
            lost = losses_beside(side, server.target, works, shape, plan.windows)
            for (work, what), loss in lost.items():
                told = loss.share(), loss.rate(shape.num_bytes // 2)
                found.losses[method, run_bytes, work, what] = told


def main() -> int:
    flags = gpu_parser("Time each method of copying, and what it costs an engine's kernels.")
    flags.add_argument(
        "--methods", nargs="+", choices=METHODS, default=METHODS, help="those, in this order"
    )
    flags.add_argument(
        "--seconds", type=float, default=600, help="begin no further method after so long"
    )
    options = flags.parse_args()
    side, begin_s = find_side(options.made_up), time.monotonic()
    short = options.quick or options.made_up
    plan = Plan(
        operation_bytes((16 if options.made_up else 256) * MIB, ARENA_OPERATIONS),
        2 if short else 4,
        1 if short else 4,
    )
    found = Found(side)
    with ends_cleanly():
        try:
            plain = PlainCopies(side, plan.op_bytes)
            works: dict[str, Work] = {"products": Products(side), "graphs": Graphs(side)}
            for name, work in works.items():
                loss = loss_beside_plain(side, work, plain, plan.windows)
                told = loss.share(), loss.rate(plan.op_bytes)
                found.losses["plain", plan.op_bytes, name, "load"] = told
            for method in options.methods:
                if time.monotonic() - begin_s < options.seconds:
                    measure_method(found, method, plan, plain, works)
                    print(*found.row(method), flush=True)
                else:
                    print(f"{method}: no time left", flush=True)
        finally:
            found.report(as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
