"""Measures /api/v1/status on a node with many blocks: on the event loop, and on the HTTP server's
thread.

A full cache of 4 KiB slots, as in `bench.core`; the most accounts that a ledger may have;
NUM_SESSIONS sessions, each in its own key space. `--json` prints a JSON object last:

- `loop_ms`: an answer's longest processor time on the event loop.
- `survey_ms`: of a whole survey, the walk over all blocks in the background; `survey_step_ms`: its
  longest step.
- `write_ms`: an answer as JSON, on the HTTP server's thread.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bench.core import SIZES, Bench
from bench.report import at_most, median, parser, print_figures
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache import inspect
from hotkv_server.ledger.book.accounts import MAX_ACCOUNTS, Account, Usage
from hotkv_server.ledger.capability import LedgerCapability
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.ledger.history import NUM_SAMPLES, STEP_S
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.monitoring.pages.routes import Reply
from hotkv_server.monitoring.status import as_json_values, read_status
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.startup import process
from hotkv_sparse.server.select.capability import SparseCapability

BOUNDS = {"loop_ms": at_most(10.0)}
NUM_SESSIONS = 1000
"""About as many as a server accepts; a status lists the first."""
T = TypeVar("T")


class NoCopies:
    """A copy engine that is never used."""

    num_queued = 0
    busy_s = 0.0


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Processor time in ms."""
    began_s = time.thread_time()
    result = call()
    return result, (time.thread_time() - began_s) * 1e3


def make_node(core: Any, folder: Path) -> Node:
    """With a full ledger, and an hour of samples for charts."""
    memory = NodeMemory.open(folder / "node", 1 << 20, 1 << 16, 64, 1, prefault=False)
    copies: Any = NoCopies()
    node = Node(core, memory, copies)
    ledger = LedgerCapability(node, LiveLedger(core))
    node.capabilities += [ledger, SparseCapability(node)]
    accounts, minute = ledger.ledger.accounts, int(time.time() // 60)
    usage = Usage(1, 100_000, 30_000, 1.0, 0.1, 0, 1 << 30, 1 << 30, {"host": 50_000})
    for number in range(MAX_ACCOUNTS):
        who = Account("", f"model-{number}", f"{number:016x}", f"engine-{number}")
        accounts.add(who, accounts.columns.values(usage), minute)
    groups = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (SLOT_ALIGN,)),)
    for number in range(NUM_SESSIONS):
        key_space = KeySpace(f"model-{number}", "bench", "bfloat16", groups, 16)
        record = core.open_session(f"engine-{number}", "worker", key_space, 0.0)
        # As `Sessions.open`, without a stream.
        node.sessions._open[str(number)] = LiveSession(
            record, str(number), key_space, "bench", node.names
        )
    now_s = time.monotonic()
    for number in range(NUM_SAMPLES):
        accounts.add(who, accounts.columns.values(usage), minute)
        ledger.history.turn(now_s + number * STEP_S)
    return node


async def measure(node: Node, rounds: int) -> tuple[list[float], list[float], int, int]:
    """(ms of each answer on the event loop, ms of each as JSON, bytes of an answer, cells of its
    map of the arena)."""
    while node.survey.latest(time.monotonic()) is None:
        await asyncio.sleep(0.05)
    read_ms, write_ms, text = [], [], b""
    for _ in range(rounds):
        status, took_ms = timed(lambda: read_status(node, has_names=True))
        read_ms.append(took_ms)
        text, took_ms = timed(lambda: Reply.json(as_json_values(status)).body)  # noqa: B023
        write_ms.append(took_ms)
        await asyncio.sleep(0)
    node.survey.close()
    return read_ms, write_ms, len(text), len(json.loads(text)["arena"]["used_ratios"])


def survey_steps_ms(node: Node) -> list[float]:
    steps = []
    for walk in (inspect.census(node.core), inspect.arena_map(node.core, time.monotonic())):
        while True:
            step, took_ms = timed(lambda: next(walk, "end"))  # noqa: B023
            steps.append(took_ms)
            if step == "end":
                break
    return steps


def main() -> int:
    flags = parser("Cost of the status page's API.")
    flags.add_argument("--blocks", type=int, default=SIZES[-1])
    flags.add_argument("--policy", default="hotness")
    flags.add_argument("--rounds", type=int, default=50)
    options = flags.parse_args()
    bench = Bench(options.blocks, options.policy)
    with tempfile.TemporaryDirectory() as folder:
        node = make_node(bench.core, Path(folder))
        process.settle()
        steps = survey_steps_ms(node)
        read_ms, write_ms, num_bytes, num_cells = asyncio.run(measure(node, options.rounds))
        node.memory.remove()
    figures = {
        "loop_ms": max(read_ms),
        "loop_median_ms": median(read_ms),
        "write_ms": median(write_ms),
        "survey_ms": sum(steps),
        "survey_step_ms": max(steps),
        "answer_bytes": num_bytes,
        "cells": num_cells,
    }
    beside = {"policy": options.policy, "blocks": options.blocks}
    print_figures(figures, BOUNDS, as_json=options.json, beside=beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
