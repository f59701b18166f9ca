"""Compares the server's methods of copying (setting `copy.method`) with `auto`: speed, and how much
loads slow down matrix products in the engine.

`python -m bench.gpu.methods [--json]`, on a machine with a GPU, 20 s and a server per method. An
operation copies 1 GiB in contiguous pages; every load's bytes are compared. The products run in
the engine's process in bfloat16, in windows with and without loads. The row `plain` has the
slow-down by this process' plain copies: no load costs less.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

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
from bench.servers import GIB, MIB
from demo.processes import ends_cleanly
from hotkv_client.command.tables import table

METHODS = ("auto", "kernel", "staged", "batch", "memcpy")
PAGES = (16 << 10, 64 << 10, 4 << 10, 2 << 20)
LOSS_PAGE = 64 << 10
LOSS_TARGET = 0.03
PRODUCT_SIZE = 8192
WINDOW_PRODUCTS = 60
"""Of a window: about 80 ms on an H200."""


class Products:
    """Matrix products on a separate stream."""

    def __init__(self, side: Side) -> None:
        self._side = side
        size, kind = (64, torch.float32) if side.is_made_up else (PRODUCT_SIZE, torch.bfloat16)
        device = side.scratch(1).device
        self._a, self._b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._stream = side.stream()

    def window_ms(self) -> float:
        """Measured by device events if there are any."""
        if self._side.is_made_up:
            torch.mm(self._a, self._b, out=self._out)
            return 1.0
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._stream:
            begin.record()
            for _ in range(WINDOW_PRODUCTS):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


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
    products: Products, background: Callable[[Callable[[], None]], "Background"], rounds: int
) -> Loss:
    """Windows in turns: alone, and in the background's company. `background`: made from a
    function to call after each repetition."""
    found = Loss()
    products.window_ms()
    for _ in range(rounds):
        found.alone_ms.append(products.window_ms())

        def count() -> None:
            found.copies += 1

        with background(count).running():
            found.beside_ms.append(products.window_ms())
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


def loss_beside_loads(
    side: Side, target: str, products: Products, shape: Shape, rounds: int
) -> Loss:
    """The server loads half of the shape's blocks again and again."""
    with half_leased(side, target, shape) as (engine, _, others, lease):

        def load() -> None:
            done(engine.load(lease, others))

        return loss_of(products, lambda ended: Background(load, ended), rounds)


def loss_beside_plain(side: Side, products: Products, plain: PlainCopies, rounds: int) -> Loss:
    own = threading.local()

    def copy() -> None:
        if not hasattr(own, "stream"):
            own.stream = side.stream()
        plain.copy_in(own.stream)

    return loss_of(products, lambda ended: Background(copy, ended), rounds)


@dataclass(slots=True)
class Found:
    """ratios: to plain copies' speed, by method, page bytes and direction.
    losses: share of the products' speed lost beside loads, by method.
    rates_gb_s: of these loads.
    """

    side: Side
    ratios: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    rates_gb_s: dict[str, float] = field(default_factory=dict)

    def lose(self, method: str, lost: Loss, num_bytes: int) -> None:
        self.losses[method], self.rates_gb_s[method] = lost.share(), lost.rate(num_bytes)

    def row(self, method: str) -> tuple[object, ...]:
        found = self.ratios.get(method, {})
        cells = (
            f"{found[size]['store']:.2f} / {found[size]['load']:.2f}" if size in found else ""
            for size in PAGES
        )
        return (method, *cells, f"{self.losses[method]:.3f}", f"{self.rates_gb_s[method]:.1f}")

    def report(self, *, as_json: bool) -> None:
        rows = [self.row(method) for method in self.losses]
        print(
            table(
                ("method", *(f"{size >> 10} KiB" for size in PAGES), "products lose", "while GB/s"),
                rows,
            )
        )
        figures = [
            Figure(
                f"matrix products lose while loads run, {method}",
                loss,
                None if method == "plain" else LOSS_TARGET,
                True,
            )
            for method, loss in self.losses.items()
        ]
        details: dict[str, object] = {
            "losses": self.losses,
            "rates_gb_s": self.rates_gb_s,
            "ratios": self.ratios,
        }
        print_figures(
            figures,
            about(self.side) | details,
            as_json=as_json,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """windows: time windows of matrix products."""

    op_bytes: int
    rounds: int
    windows: int

    def shape(self, page_bytes: int) -> Shape:
        layers = layers_of(page_bytes, self.op_bytes)
        return Shape(page_bytes, layers, 2 * self.op_bytes // layers // page_bytes, "LBHNC")


def measure_method(
    found: Found, method: str, plan: Plan, plain: PlainCopies, products: Products
) -> None:
    """Adds a method's figures to `found`, with a server of its own."""
    side, arena_bytes = found.side, ARENA_OPERATIONS * plan.op_bytes
    flags = ("--copy.method", method)
    with settled(side, arena_bytes, *flags, is_calibrated=method == "auto") as server:
        lost = loss_beside_loads(side, server.target, products, plan.shape(LOSS_PAGE), plan.windows)
        found.lose(method, lost, plan.op_bytes)
        for page_bytes in PAGES:
            times = measure(
                side, server.target, plain, plan.shape(page_bytes), plan.rounds, with_both=False
            )
            found.ratios.setdefault(method, {})[page_bytes] = times.ratios()


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
        operation_bytes(16 * MIB if options.made_up else GIB, ARENA_OPERATIONS),
        2 if short else 3,
        2 if short else 8,
    )
    found = Found(side)
    with ends_cleanly():
        try:
            plain, products = PlainCopies(side, plan.op_bytes), Products(side)
            found.lose(
                "plain", loss_beside_plain(side, products, plain, plan.windows), plan.op_bytes
            )
            for method in options.methods:
                if time.monotonic() - begin_s < options.seconds:
                    measure_method(found, method, plan, plain, products)
                    print(*found.row(method), flush=True)
                else:
                    print(f"{method}: no time left", flush=True)
        finally:
            found.report(as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
