"""Measures what tracing costs a lookup: without, with, and with a span for each call. `python -m
bench.tracing [--before FOLDER] [--rounds N] [--json]`.

Four servers with the same blocks take turns: two without tracing, whose difference is the noise;
one whose clients trace no call; one with a span for each call, sent to a collector in another
process. `--before`: a checkout from before tracing, as a further variant.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.report import median, parser, percentile, print_report
from bench.servers import MIB, new_hashes, serving, session_over
from hotkv_client import GroupHashes
from tests.doubles.otlp_receiver import OtlpReceiver
from tests.doubles.with_constants import COMMAND, constant

COUNTS = (64, 1024)
BLOCKS = 4096
ROUNDS = 400
WARMERS = 3
OFF, OFF_TOO, ON, TRACED, BEFORE = "off", "off, again", "on, untraced", "each traced", "before"
PACKAGES = ("proto", "sparse", "client", "server")


def command_of(checkout: Path) -> Sequence[str]:
    """Of another checkout's server."""
    path = os.pathsep.join(str(checkout.absolute() / name) for name in PACKAGES)
    return ("env", f"PYTHONPATH={path}", sys.executable, "-m", "hotkv_server.cli", "run")


def collect(pipe: Connection) -> None:
    """Sends its URL, waits for a message, then sends the number of spans received."""
    with OtlpReceiver() as one:
        pipe.send(one.url)
        pipe.recv()
        pipe.send(len(one.spans))


@contextmanager
def collector() -> Iterator[Connection]:
    """In another process: it must not slow down this one's calls."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,))
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def main() -> int:
    options = parser("Time lookups with and without traces.")
    options.add_argument("--before", type=Path, help="a checkout from before there were traces")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    asked = options.parse_args()
    hashes = new_hashes(BLOCKS)
    times: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        pipe = stack.enter_context(collector())
        many = constant("tracing.capability.MAX_SPANS_PER_S", 10**6)
        flags = ("--tracing.endpoint", str(pipe.recv()), *many)
        flags_of = {OFF: (), OFF_TOO: (), ON: flags, TRACED: flags}
        if asked.before is not None:
            flags_of[BEFORE] = ()
        calls: dict[str, Callable[[list[GroupHashes]], object]] = {}
        for name, own in flags_of.items():
            command = command_of(asked.before) if name == BEFORE else COMMAND
            server = stack.enter_context(serving(64 * MIB, *own, command=command))
            session = session_over(server.target, hashes)
            stack.callback(session.close)
            parent = f"00-{1:032x}-{1:016x}-01" if name == TRACED else None
            calls[name] = lambda groups, session=session, parent=parent: session.lookup(  # type: ignore[misc]
                groups, parent
            ).result(10)
        random = np.random.default_rng(1)
        for _ in range(asked.rounds):
            for count in COUNTS:
                groups = [GroupHashes(0, [hashes[i] for i in random.integers(0, BLOCKS, count)])]
                for name in random.permutation(list(calls)).tolist():
                    for _ in range(WARMERS):
                        calls[name](groups)
                    start_s = time.perf_counter()
                    calls[name](groups)
                    times.setdefault((name, count), []).append(
                        (time.perf_counter() - start_s) * 1e6
                    )
        pipe.send("count")
        num_spans = int(pipe.recv())
    p50 = {key: median(values) for key, values in times.items()}
    rows = [
        (
            name,
            count,
            round(p50[name, count], 1),
            round(percentile(times[name, count], 0.9), 1),
            round(p50[name, count] / p50[OFF, count], 3),
        )
        for count in COUNTS
        for name in calls
    ]
    figures: dict[str, object] = {
        f"{name.replace(', ', '_').replace(' ', '_')}_over_off": {
            count: p50[name, count] / p50[OFF, count] for count in COUNTS
        }
        for name in calls
        if name != OFF
    }
    figures |= {"off_us_p50": {count: p50[OFF, count] for count in COUNTS}, "spans": num_spans}
    print_report(
        ("variant", "hashes", "p50 us", "p90 us", "over off"), rows, figures, as_json=asked.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
