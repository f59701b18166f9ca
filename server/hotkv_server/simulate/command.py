"""`hotkv-server simulate`: how much of a trace would hit, by policy and capacity."""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotkv_server.core.policies import POLICIES
from hotkv_server.simulate.bounds import clairvoyant, next_uses, unbounded
from hotkv_server.simulate.plot import PlotError, check_plot, write_plot
from hotkv_server.simulate.replay import Progress, replay, replay_two_tiers
from hotkv_server.simulate.report import CLAIRVOYANT, UNBOUNDED, Row, SecondTier, as_json, as_table
from hotkv_server.simulate.trace import Int64s, Trace, TraceError, load_trace

USAGE_ERROR = 2
DEFAULT_PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Replays traces of requests (Mooncake's format: JSON lines with timestamp in ms and "
        "hash_ids) through the cache's own core and "
        "says which share of the blocks would hit, beside what a cache without end (unbounded) "
        "and one that knows the future "
        "(clairvoyant) would reach."
    )
    parser.add_argument(
        "--trace",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="FILE",
        help="traces, gzipped or not",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=tuple(POLICIES),
        metavar="NAME[,NAME...]",
        help=f"of {_allowed()} (default: all)",
    )
    parser.add_argument(
        "--capacity-percent",
        type=_percents,
        default=DEFAULT_PERCENTS,
        metavar="P[,P...]",
        help="size of the cache, in percent of the trace's unique blocks (default: 1,2,5,10,20)",
    )
    parser.add_argument(
        "--block-mib",
        type=_size,
        metavar="MIB",
        help="size of a block: shows capacities in GiB too",
    )
    parser.add_argument(
        "--second-tier-percent",
        type=_percent,
        metavar="P",
        help="models a second tier of this size, which takes what is evicted",
    )
    parser.add_argument(
        "--second-tier-gate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "whether only blocks used at least twice are written to the second tier (default: yes)"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw the miss-ratio curves"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status: 0, or 2 for bad input."""
    try:
        if options.plot is not None:
            check_plot(options.plot)
        traces = [load_trace(path) for path in dict.fromkeys(options.trace)]
        for trace in traces:
            if trace.num_late:
                _say(f"{trace.name}: {trace.num_late:,} requests are not in order of time; sorted")
        rows = _simulate(traces, options)
        if options.plot is not None:
            write_plot(options.plot, rows, options.block_mib)
    except (TraceError, PlotError) as error:
        _say(str(error))
        return USAGE_ERROR
    except OSError as error:
        _say(
            f"{error.filename}: {error.strerror}; name a file that can be read (--trace) or "
            "written (--plot)"
        )
        return USAGE_ERROR
    print(
        as_json(rows, options.block_mib)
        if options.json
        else as_table(rows, traces, options.block_mib)
    )
    return 0


def _simulate(traces: list[Trace], options: argparse.Namespace) -> list[Row]:
    """By trace and capacity: the policies, then the bounds."""
    percents = sorted(set(options.capacity_percent))
    rows: list[Row] = []
    with _progress_bar(
        sum(trace.num_requests for trace in traces) * len(percents) * len(options.policy)
    ) as progress:
        for trace in traces:
            following = next_uses(trace.blocks)
            for percent in percents:
                rows += [
                    _replayed(trace, percent, policy, options, progress)
                    for policy in options.policy
                ]
                rows += _bounds(trace, percent, options.second_tier_percent, following)
    return rows


def _replayed(
    trace: Trace,
    percent: float,
    policy: str,
    options: argparse.Namespace,
    progress: Progress | None,
) -> Row:
    capacity = trace.capacity_blocks(percent)
    lower_percent = options.second_tier_percent
    if lower_percent is None:
        done = replay(trace, capacity, POLICIES[policy], progress)
    else:
        lower = trace.capacity_blocks(lower_percent)
        done = replay_two_tiers(
            trace,
            capacity,
            lower,
            POLICIES[policy],
            gated=options.second_tier_gate,
            progress=progress,
        )
    num_hits = trace.hit_blocks(done.prefix)
    second = None
    if lower_percent is not None:
        second = SecondTier(
            lower_percent,
            done.num_second_tier_hits / trace.num_accesses,
            done.num_second_tier_writes,
        )
    hit_rate = (num_hits - done.num_second_tier_hits) / trace.num_accesses
    return Row(
        trace.name, policy, percent, capacity, hit_rate, trace.num_accesses, done.seconds, second
    )


def _bounds(
    trace: Trace, percent: float, lower_percent: float | None, following: Int64s
) -> list[Row]:
    """The bounds; as second tier, the gain of the clairvoyant cache from being that much larger."""
    capacity = trace.capacity_blocks(percent)
    rows = []
    for name in (CLAIRVOYANT, UNBOUNDED):
        started_s = time.perf_counter()
        prefix = unbounded(trace) if name == UNBOUNDED else clairvoyant(trace, capacity, following)
        seconds = time.perf_counter() - started_s
        hit_rate = trace.hit_blocks(prefix) / trace.num_accesses
        second = None
        if lower_percent is not None:
            larger = (
                clairvoyant(trace, capacity + trace.capacity_blocks(lower_percent), following)
                if name == CLAIRVOYANT
                else prefix
            )
            second = SecondTier(
                lower_percent, trace.hit_blocks(larger) / trace.num_accesses - hit_rate, 0
            )
        rows.append(
            Row(trace.name, name, percent, capacity, hit_rate, trace.num_accesses, seconds, second)
        )
    return rows


@contextmanager
def _progress_bar(num_requests: int) -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal and tqdm is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield None
        return
    with tqdm(
        total=num_requests, unit=" requests", unit_scale=True, leave=False, file=sys.stderr
    ) as bar:
        yield bar.update


def _say(message: str) -> None:
    print(f"hotkv-server: {message}", file=sys.stderr)


def _allowed() -> str:
    return ", ".join(POLICIES)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown policy {', '.join(unknown) or repr(text)}; allowed are {_allowed()}"
        )
    return names


def _percent(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share; give percents above 0 and up to 100"
        )
    return value


def _percents(text: str) -> tuple[float, ...]:
    return tuple(_percent(part) for part in text.split(","))


def _size(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number of MiB above 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else math.nan
