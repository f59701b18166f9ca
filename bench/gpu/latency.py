"""Measures three short times on a GPU: a load's submission to its first byte, a round trip to the
server, and a step's time in an engine's thread.

`python -m bench.gpu.latency [--json]`, on a machine with a GPU, half a minute. A separate engine
for each order of waiting for the device's earlier work: `events` (the server waits for a CUDA
event), `flags` (for a number that the device writes into its memory), `host` (the engine waits
before it submits).

The first byte is polled on a separate stream; `read`, a poll with its pause, bounds the error. A
step is the connector's work in the engine's thread without vLLM: a mark, a store and a load that
wait for it, and a look for ended transfers. Each order is also measured while the engine stores.
"""

import ctypes
import sys
import time
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import numpy as np

from bench.gpu.engine import (
    DEADLINE_S,
    Engine,
    Shape,
    Side,
    about,
    done,
    find_side,
    half_leased,
    operation_bytes,
    settled,
    until,
)
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.methods import Background
from bench.report import median, percentile
from bench.servers import GIB, new_hashes
from hotkv_client import TransferResult
from hotkv_client.command.tables import table

ORDERS = ("events", "flags", "host")
PAGE_BYTES, LAYERS = 64 << 10, 32
SIZES = {"1 block": 1, "16 blocks": 16, "64 blocks": 64}
"""Blocks of 2 MiB; 16 hold 256 tokens."""
HEADLINE = "16 blocks"
STEP_STORE_BLOCKS, STEP_LOAD_BLOCKS = 4, 4
STEP_S, MAX_FLYING = 0.002, 32
POLL_S = 10e-6
PR_SET_TIMERSLACK = 29
FIRST_BYTE_TARGET_US, STEP_TARGET_US = 300.0, 100.0


class FirstBytes:
    """Polls a load's first byte until it changes."""

    def __init__(self, side: Side, engine: Engine) -> None:
        self._side, self._engine, self._stream = side, engine, side.stream()

    def read(self, block: int) -> int:
        """Waits for the device. The block's first byte."""
        with self._stream:
            return int(self._engine.memory[block * PAGE_BYTES].item())

    def of_load(self, lease: str, sources: np.ndarray, ids: np.ndarray) -> tuple[float, float]:
        """Seconds from submission to the first byte, and to the server's answer. sources: the
        blocks from which the lease was stored."""
        engine = self._engine
        block, end_s = int(ids[0]), time.monotonic() + DEADLINE_S
        engine.memory[block * PAGE_BYTES] = 255 - self.read(int(sources[0]))
        before = self.read(block)
        self._side.synchronize()
        start_s = perf_counter()
        mark = engine.marks.make(engine.session.order_kind)
        if not mark.lets_send():
            self._side.synchronize()
        transfer = engine.load(lease, ids, mark.after)
        while self.read(block) == before and time.monotonic() < end_s:
            # The session's thread needs the GIL.
            time.sleep(POLL_S)
        first_s = perf_counter() - start_s
        done(transfer)
        whole_s = perf_counter() - start_s
        engine.marks.done(mark)
        if self.read(block) == before:
            raise AssertionError("a load has ended, and its first byte is not there")
        return first_s, whole_s


def steps_us(engine: Engine, lease: str, count: int) -> list[float]:
    """Each step's time in the engine's thread, two milliseconds apart, without the first tenth."""
    flying: list[tuple[Future[TransferResult], object]] = []
    marks = engine.marks
    found = []
    half = engine.shape.num_blocks // 2
    stores = np.arange(STEP_STORE_BLOCKS, dtype=np.int32)
    loads = np.arange(half, half + STEP_LOAD_BLOCKS, dtype=np.int32)
    for number in range(count):
        names = new_hashes(STEP_STORE_BLOCKS)
        start_s = perf_counter()
        mark = marks.make(engine.session.order_kind)
        if mark.lets_send():
            flying.append((engine.store(names, stores, mark.after), marks.use(mark)))
            flying.append((engine.load(lease, loads, mark.after), marks.use(mark)))
        ended = [pair for pair in flying if pair[0].done()]
        flying = [pair for pair in flying if not pair[0].done()]
        for _, its_mark in ended:
            marks.done(its_mark)  # type: ignore[arg-type]
        marks.done(mark)
        taken_us = (perf_counter() - start_s) * 1e6
        if number >= count // 10:
            found.append(taken_us)
        for transfer, _ in ended:
            done(transfer)
        time.sleep(STEP_S)
        if len(flying) > MAX_FLYING:
            until(lambda: flying[-1][0].done(), "the end of stores and loads")  # noqa: B023
    for transfer, its_mark in flying:
        done(transfer)
        marks.done(its_mark)  # type: ignore[arg-type]
    return found


def beside_stores_us(side: Side, target: str, order: str, rounds: int) -> float:
    """Median time to the first byte of a load of HEADLINE, while the engine stores other blocks
    again and again."""
    count = SIZES[HEADLINE]
    shape = Shape(PAGE_BYTES, LAYERS, 4 * max(SIZES.values()), "LBHNC")
    with half_leased(side, target, shape, order=order) as (engine, ids, others, lease):
        probe = FirstBytes(side, engine)

        def store() -> None:
            done(engine.store(new_hashes(len(ids) - count), ids[count:]))

        with Background(store, lambda: None).running():
            times = [probe.of_load(lease, ids, others[:count])[0] for _ in range(rounds)]
        done(engine.load(lease, others))
        return 1e6 * median(times)


def measure(side: Side, target: str, order: str, rounds: int) -> dict[str, Any]:
    """Raises AssertionError if a load has wrong bytes."""
    shape = Shape(PAGE_BYTES, LAYERS, 2 * max(SIZES.values()), "LBHNC")
    with half_leased(side, target, shape, order=order) as (engine, ids, others, lease):
        probe = FirstBytes(side, engine)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in SIZES}
        reads = []
        for _ in range(rounds):
            for name, count in SIZES.items():
                start_s = perf_counter()
                probe.read(0)
                time.sleep(POLL_S)
                reads.append(perf_counter() - start_s)
                times[name].append(probe.of_load(lease, ids[:count], others[:count]))
        steps = steps_us(engine, lease, 4 * rounds)
        pings = [engine.session.ping(DEADLINE_S) for _ in range(rounds)]
        firsts_us = {name: [1e6 * first for first, _ in pairs] for name, pairs in times.items()}
        wholes_us = {name: [1e6 * whole for _, whole in pairs] for name, pairs in times.items()}
        return {
            "order": engine.session.order_kind.name.lower(),
            "message": engine.session.order_message,
            "read_us": median(reads) * 1e6,
            "ping_us": median(pings) * 1e6,
            "first_us": {name: median(values) for name, values in firsts_us.items()},
            "first_p90_us": {name: percentile(values, 0.9) for name, values in firsts_us.items()},
            "whole_us": {name: median(values) for name, values in wholes_us.items()},
            "step_us": median(steps),
            "step_p99_us": percentile(steps, 0.99),
        }


def report(side: Side, found: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    rows: list[tuple[object, ...]] = []
    figures = []
    for order, one in found.items():
        first, whole = one["first_us"], one["whole_us"]
        cells = [f"{first[name]:.0f} / {whole[name]:.0f}" for name in SIZES]
        steps = f"{one['step_us']:.0f} / {one['step_p99_us']:.0f}"
        rows.append(
            (order, one["order"], f"{one['ping_us']:.0f}", f"{one['read_us']:.0f}", *cells, steps)
        )
        target = FIRST_BYTE_TARGET_US if one["order"] != "host" else None
        name = (
            f"submission to first byte, {HEADLINE}, order "
            f"{order}{'' if one['order'] == order else ' (got ' + one['order'] + ')'}, us"
        )
        figures.append(Figure(name, first[HEADLINE], target, True))
        figures.append(Figure(f"{name}, beside stores", one["beside_us"]))
        figures.append(
            Figure(
                f"engine's thread a step, order {order}, us", one["step_us"], STEP_TARGET_US, True
            )
        )
    print(
        table(
            (
                "order",
                "taken",
                "ping us",
                "read us",
                *(f"{name}: first / whole us" for name in SIZES),
                "step us / p99",
            ),
            rows,
        )
    )
    for order, one in found.items():
        if one["message"]:
            print(f"{order}: {one['message']}")
    print_figures(figures, {**about(side), "orders": found}, as_json=as_json)


def main() -> int:
    options = gpu_parser("Time first bytes, round trips and an engine thread's steps.").parse_args()
    # Linux may otherwise end a sleep 50 us late.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    side, rounds = find_side(options.made_up), 20 if options.quick or options.made_up else 150
    arena_bytes = operation_bytes(GIB, 1)
    found: dict[str, dict[str, Any]] = {}
    with settled(side, arena_bytes) as server:
        try:
            for order in ORDERS:
                one = measure(side, server.target, order, rounds)
                one["beside_us"] = beside_stores_us(side, server.target, order, rounds)
                found[order] = one
            until(
                lambda: server.devices()["open_allocation_count"] == 0, "closing of engines' memory"
            )
        finally:
            report(side, found, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
