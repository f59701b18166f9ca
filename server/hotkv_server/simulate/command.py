"""`hotkv-server simulate`: reports the hit rate of a trace, by policy and capacity."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

from hotkv_proto.command_line import show_progress
from hotkv_server.cache.room.policies.hotness import Hotness
from hotkv_server.simulate import sizing
from hotkv_server.simulate.replay import (
    BLOCK_TOKENS,
    MakePolicy,
    Progress,
    clairvoyant,
    derive_hints,
    next_uses,
    replay,
    unbounded,
)
from hotkv_server.simulate.report import (
    CLAIRVOYANT,
    UNBOUNDED,
    LowerFigures,
    PlotError,
    ReportRow,
    Units,
    as_json,
    as_table,
    check_plot,
    write_plot,
)
from hotkv_server.simulate.sizing import Wanted
from hotkv_server.simulate.trace import Int64s, Trace, TraceError, load_trace

USAGE_ERROR = 2
MIB, BYTES_PER_GB = 1 << 20, 1e9
LEAST_SIZE, MOST_SIZE, MOST_COUNT = 1e-6, 1e15, 1 << 30
"""Within these bounds all figures are finite."""
MOST_BYTES = 1 << 60
TIERS = ("disk",)
AUTO = "auto"
OWN: Mapping[str, MakePolicy] = {"hotness": Hotness}
"""The server's policy, by name."""
DEFAULT_PERCENTS = (1.0, 2.0, 5.0, 10.0, 20.0)


def add_arguments(
    parser: argparse.ArgumentParser, policies: Mapping[str, MakePolicy] = OWN
) -> None:
    """policies: to choose from, by name; `run` must get the same."""
    parser.description = (
        "Replays traces of requests (Mooncake's format: JSON lines with timestamp in ms and "
        "hash_ids) through the cache's own core and "
        "says which share of the blocks would hit, beside what a cache without end (unbounded) "
        "and one that knows the future (clairvoyant) would reach."
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
    if len(policies) == 1:
        parser.set_defaults(policy=tuple(policies))
    else:
        parser.add_argument(
            "--policy",
            type=partial(_policies, policies),
            default=tuple(policies),
            metavar="NAME[,NAME...]",
            help=f"of {', '.join(policies)} (default: all)",
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
        "--block-tokens",
        type=_count,
        metavar="N",
        help="tokens of a block (default: 512, as in Mooncake's traces; with --arena: as the "
        "trace's lengths say)",
    )
    parser.add_argument(
        "--arena",
        type=_bytes_list,
        metavar="SIZE[,SIZE...]",
        help="answer in GiB and seconds instead: which share of prompt tokens arenas of these "
        "sizes, such as 40GiB, would hit, and what they save; `auto` chooses sizes (needs "
        "--bytes-per-token)",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=_size,
        metavar="N",
        help="bytes of a token in all layers, for --arena",
    )
    parser.add_argument(
        "--trace-seconds",
        type=_size,
        metavar="N",
        help="for --arena: how long the trace was recorded (default: from its first request to its "
        "last)",
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=_size,
        metavar="N",
        help="how fast an engine prefills: shows how long it computed what was not there",
    )
    parser.add_argument(
        "--tier",
        type=_tier,
        metavar="NAME=SIZE",
        help="adds a tier below, such as disk=200GiB (needs --block-mib) or disk=30%%",
    )
    parser.add_argument(
        "--disk-write-gb-per-day",
        type=_size,
        metavar="GB",
        help="what may be written to that tier in 24 hours of the trace (needs --block-mib; "
        "default: no limit)",
    )
    parser.add_argument(
        "--hints",
        action="store_true",
        help="also tell the policies when a session of the trace has ended, and when it pauses for "
        "half a minute or more, as agents' routers can (not with --tier)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw hit rates over capacity"
    )


def run(options: argparse.Namespace, policies: Mapping[str, MakePolicy] = OWN) -> int:
    """Exit status: 0, or 2 for bad input."""
    try:
        if options.plot is not None:
            check_plot(options.plot)
        _check_units(options, policies)
        traces = [load_trace(path) for path in dict.fromkeys(options.trace)]
        for trace in traces:
            if trace.num_late:
                _say(f"{trace.name}: {trace.num_late:,} requests are not in order of time; sorted")
        if options.arena is not None:
            print(_sized(traces, options, policies))
            return 0
        options.block_tokens = options.block_tokens or BLOCK_TOKENS
        rows = _simulate(traces, options, policies)
        if options.plot is not None:
            write_plot(options.plot, rows, options.block_mib)
        units = Units(options.block_tokens, options.block_mib, options.prefill_tokens_per_s)
    except (TraceError, PlotError, UnitsError) as error:
        _say(str(error))
        return USAGE_ERROR
    except OSError as error:
        _say(
            f"{error.filename}: {error.strerror}; name a file that can be read (--trace) or "
            "written (--plot)"
        )
        return USAGE_ERROR
    print(as_json(rows, units) if options.json else as_table(rows, traces, units))
    return 0


class UnitsError(ValueError):
    """Options contradict each other, or need the size of a block."""


def _check_units(options: argparse.Namespace, policies: Mapping[str, MakePolicy]) -> None:
    tier: TierSize | None = options.tier
    if (options.arena is None) != (options.bytes_per_token is None):
        raise UnitsError("--arena and --bytes-per-token: give both or neither")
    if options.arena is not None:
        if len(options.policy) > 1 and options.policy != tuple(policies):
            raise UnitsError("--policy: --arena needs one policy")
        for flag, is_set in (("--tier", tier is not None), ("--hints", options.hints)):
            if is_set:
                raise UnitsError(f"{flag}: --arena sizes host memory alone; leave it out")
        if options.plot is not None:
            raise UnitsError("--plot: --arena draws no plot; leave it out")
    if options.disk_write_gb_per_day is not None and tier is None:
        raise UnitsError("--disk-write-gb-per-day: there is no tier; add --tier disk=SIZE")
    if options.hints and tier is not None:
        raise UnitsError("--hints: a tier below does not know them; leave out --tier")
    for name, needs in (
        ("--tier", tier is not None and tier.mib is not None),
        ("--disk-write-gb-per-day", options.disk_write_gb_per_day is not None),
    ):
        if needs and options.block_mib is None:
            raise UnitsError(f"{name}: a size in bytes needs to know a block's; add --block-mib")


@dataclass(frozen=True, slots=True)
class TierSize:
    """Either in percent of all different blocks, or in MiB; the other is None."""

    name: str
    percent: float | None
    mib: float | None

    def blocks(self, trace: Trace, block_mib: float | None) -> int:
        """At least 1, at most all different blocks. `block_mib`: needed for a size in MiB."""
        if self.percent is not None:
            return trace.capacity_blocks(self.percent)
        assert self.mib is not None and block_mib is not None, "sizes were not checked"
        return min(trace.num_unique_blocks, max(1, int(self.mib / block_mib)))


def _simulate(
    traces: list[Trace], options: argparse.Namespace, policies: Mapping[str, MakePolicy]
) -> list[ReportRow]:
    """Rows by trace and capacity; at each, policies before ideal caches."""
    percents = sorted(set(options.capacity_percent))
    rows: list[ReportRow] = []
    with _progress_bar(
        sum(trace.num_requests for trace in traces) * len(percents) * len(options.policy)
    ) as progress:
        for trace in traces:
            following = next_uses(trace.blocks)
            for percent in percents:
                rows += [
                    _replayed(trace, percent, policy, policies[policy], options, progress)
                    for policy in options.policy
                ]
                rows += _bounds(trace, percent, options, following)
    return rows


def _sized(
    traces: list[Trace], options: argparse.Namespace, policies: Mapping[str, MakePolicy]
) -> str:
    """For `--arena`."""
    make_policy = policies[options.policy[0]] if len(options.policy) == 1 else Hotness
    wanted = Wanted(
        options.arena,
        options.bytes_per_token,
        options.block_tokens or 0,
        options.prefill_tokens_per_s,
        options.trace_seconds or 0.0,
    )
    num_sizes = len(wanted.arena_bytes) or len(sizing.DEFAULT_SHARES)
    with _progress_bar(sum(trace.num_requests for trace in traces) * num_sizes) as progress:
        done = [sizing.size(trace, wanted, make_policy, progress) for trace in traces]
    return sizing.as_json(done) if options.json else sizing.as_text(done)


def _replayed(
    trace: Trace,
    percent: float,
    policy: str,
    make_policy: MakePolicy,
    options: argparse.Namespace,
    progress: Progress | None,
) -> ReportRow:
    capacity = trace.capacity_blocks(percent)
    tier: TierSize | None = options.tier
    if tier is None:
        hints = derive_hints(trace) if options.hints else None
        done = replay(trace, capacity, make_policy, progress, hints)
    else:
        # A single tier can be simulated without the folder `tiers`.
        from hotkv_server.simulate.two_tiers import replay_two_tiers

        gb_per_day = options.disk_write_gb_per_day
        done = replay_two_tiers(
            trace,
            capacity,
            tier.blocks(trace, options.block_mib),
            make_policy,
            block_tokens=options.block_tokens,
            writes_per_day=gb_per_day and gb_per_day * BYTES_PER_GB / options.block_mib / MIB,
            progress=progress,
        )
    num_hits = trace.hit_blocks(done.prefix)
    lower, num_below = None, done.num_second_tier_hits
    if tier is not None:
        lower = LowerFigures(
            tier.name,
            _percent_of(trace, tier, options),
            num_below / trace.num_accesses,
            num_below,
            done.num_second_tier_writes,
        )
    hit_rate = (num_hits - num_below) / trace.num_accesses
    return ReportRow(
        trace.name, policy, percent, capacity, hit_rate, trace.num_accesses, done.seconds, lower
    )


def _percent_of(trace: Trace, tier: TierSize, options: argparse.Namespace) -> float:
    blocks = tier.blocks(trace, options.block_mib)
    return tier.percent or round(100 * blocks / trace.num_unique_blocks, 2)


def _bounds(
    trace: Trace, percent: float, options: argparse.Namespace, following: Int64s
) -> list[ReportRow]:
    """Two ideal caches. With a lower tier, `lower.hit_rate` is what an ideal cache as large as
    both tiers gains over host memory alone; 0 for the unbounded cache."""
    capacity, tier = trace.capacity_blocks(percent), options.tier
    rows = []
    for name in (CLAIRVOYANT, UNBOUNDED):
        started_s = time.perf_counter()
        prefix = unbounded(trace) if name == UNBOUNDED else clairvoyant(trace, capacity, following)
        seconds = time.perf_counter() - started_s
        hit_rate = trace.hit_blocks(prefix) / trace.num_accesses
        lower = None
        if tier is not None:
            larger = (
                clairvoyant(trace, capacity + tier.blocks(trace, options.block_mib), following)
                if name == CLAIRVOYANT
                else prefix
            )
            gain = trace.hit_blocks(larger) / trace.num_accesses - hit_rate
            lower = LowerFigures(tier.name, _percent_of(trace, tier, options), gain)
        rows.append(
            ReportRow(
                trace.name, name, percent, capacity, hit_rate, trace.num_accesses, seconds, lower
            )
        )
    return rows


@contextmanager
def _progress_bar(num_requests: int) -> Iterator[Progress]:
    """On standard error, if it is a terminal."""
    num_done = 0

    def progress(count: int) -> None:
        nonlocal num_done
        num_done += count
        show_progress(num_done / max(1, num_requests), f"{num_done:,} of {num_requests:,} requests")

    yield progress
    show_progress()


def _say(message: str) -> None:
    print(f"hotkv-server: {message}", file=sys.stderr)


def _policies(policies: Mapping[str, MakePolicy], text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in policies]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown policy {', '.join(unknown) or repr(text)}; allowed are {', '.join(policies)}"
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
    if not LEAST_SIZE <= value <= MOST_SIZE:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; give a number from {LEAST_SIZE:g} to {MOST_SIZE:g}"
        )
    return value


def _bytes_list(text: str) -> tuple[int, ...]:
    """Empty for `auto`."""
    return () if text == AUTO else tuple(_bytes(part.strip()) for part in text.split(","))


def _bytes(text: str) -> int:
    try:
        found = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        found = 0
    if not 0 < found <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give bytes such as 40GiB")
    return found


def _tier(text: str) -> TierSize:
    name, _, size = text.partition("=")
    if name not in TIERS:
        raise argparse.ArgumentTypeError(
            f"unknown tier {name!r}; allowed are {', '.join(TIERS)}, as in disk=200GiB"
        )
    if size.endswith("%"):
        return TierSize(name, _percent(size[:-1].strip()), None)
    try:
        return TierSize(name, None, _bytes(size) / MIB)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{size!r} is no size; give bytes such as 200GiB, or a share of the unique blocks such "
            "as 30%"
        ) from None


def _count(text: str) -> int:
    value = _number(text)
    if not 1 <= value <= MOST_COUNT or value != int(value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no count; give a whole number from 1 to {MOST_COUNT:,}"
        )
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else math.nan
