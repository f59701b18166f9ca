"""Runs a short form of every benchmark that has a target, and compares with targets and records:
`make bench`, or `python -m bench.targets [--only NAME ...] [--record]`.

Targets are the bounds that each benchmark prints. `--record` replaces the records
(`bench/records.json`) of those that ran, from which `tools/performance.py` makes
docs/performance.md; a record has command, machine and load, as a busy machine's figures are
unreliable.

Prints each figure once its benchmark has ended; status 1 if a target is missed or a benchmark
fails.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import Bound, parser, say
from hotkv_client.command.tables import table

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).with_name("records.json")
RUNS: dict[str, tuple[str, ...]] = {
    "cost": (),
    "lane": ("--rounds", "4"),
    "control": ("--rounds", "8"),
    "core": ("--rounds", "50"),
    "status": ("--rounds", "20"),
    "footprint": ("--repeats", "3"),
    "restart": ("--repeats", "2"),
    "soak": ("--seconds", "65"),
    "tiers": ("--rounds", "1", "--records-gib", "20"),
    "e2e": ("--rounds", "3"),
    "weights": ("--rounds", "2"),
    "multi_turn": ("--rounds", "1"),
    "never_slower": (),
    "offloading": ("--only", "4k", "--rounds", "3"),
    "handoff": ("--rounds", "2", "--store", "valkey"),
    "residency": ("--rounds", "1"),
    "sparse_engine": (),
    "sparse_quality": (),
    "sparse_needles": ("--prompts", "6"),
}
"""Arguments of a short run: fewer rounds, no case left out. `soak` needs a minute at half load,
which the server's own delays cover."""
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Figure:
    """value: None: not measured.
    bound: `str(Bound)`.
    """

    value: float | None
    bound: str

    @property
    def is_hit(self) -> bool:
        return self.value is not None and Bound.parse(self.bound).is_met(self.value)


@dataclass(frozen=True, slots=True)
class Record:
    """load: average over the minute before."""

    command: str
    machine: str
    load: float
    date: str
    commit: str
    figures: dict[str, Figure]


def figures_of(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures that have a target."""
    values = {**report, **report.get("targets", {})}
    found = {}
    for name, bound in report["bounds"].items():
        value = values.get(name)
        found[name] = Figure(None if value is None else float(f"{float(value):.4g}"), bound)
    return found


def rows_of(name: str, record: Record, last: Record | None) -> list[tuple[str, ...]]:
    """`last` is the record to compare with."""
    before = last.figures if last is not None else {}
    return [
        (
            name,
            figure,
            shown(one.value),
            one.bound,
            "hit" if one.is_hit else "MISS",
            shown(before[figure].value) if figure in before else "",
        )
        for figure, one in record.figures.items()
    ]


def shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def machine() -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} cores, {gib:.0f} GiB, {next(models, platform.machine())}"


def commit() -> str:
    """Empty outside of git."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def measure(name: str, arguments: Sequence[str]) -> Record:
    """Raises RuntimeError if it fails, or prints no bounds."""
    words = [f"bench.{name}", *arguments]
    load, date = round(os.getloadavg()[0], 1), time.strftime("%Y-%m-%d", time.gmtime())
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words, "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it did not end within {error.timeout:.0f} s") from error
    if done.returncode:
        raise RuntimeError(f"it ended with status {done.returncode}")
    try:
        found = figures_of(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, LookupError) as error:
        raise RuntimeError("its last line is no JSON object with bounds") from error
    return Record(f"python -m {' '.join(words)}", machine(), load, date, commit(), found)


def read_records(path: Path = RECORDS) -> dict[str, Record]:
    """Empty without a file."""
    if not path.exists():
        return {}
    return {
        name: Record(
            **{**one, "figures": {key: Figure(**value) for key, value in one["figures"].items()}}
        )
        for name, one in json.loads(path.read_text()).items()
    }


def write_records(records: Mapping[str, Record], path: Path = RECORDS) -> None:
    """In the order of RUNS."""
    ordered = {name: asdict(records[name]) for name in RUNS if name in records}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def main() -> int:
    flags = parser("Every benchmark with a target, short: hit or miss, beside the last record.")
    flags.add_argument("--only", nargs="+", choices=RUNS, metavar="NAME", help=", ".join(RUNS))
    flags.add_argument("--record", action="store_true", help="replace the records of what ran")
    options = flags.parse_args()
    records, failed, rows = read_records(), [], []
    for name in options.only or RUNS:
        say(f"bench.{name} {' '.join(RUNS[name])}")
        try:
            record = measure(name, RUNS[name])
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
            continue
        fresh = rows_of(name, record, records.get(name))
        print(table(("benchmark", "figure", "measured", "target", "", "last record"), fresh))
        rows += fresh
        records[name] = record
        if options.record:
            write_records(records)
    missed = [row for row in rows if row[4] != "hit"]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} targets hit", *failed, sep="\n")
    if options.json:
        print(json.dumps({"figures": rows, "failed": failed}))
    return 1 if missed or failed else 0


if __name__ == "__main__":
    sys.exit(main())
