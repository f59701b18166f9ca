"""Writes docs/performance.md from the last recorded figures: `bench/records.json`, and
`bench/gpu/records.json`, which a person writes from the output of a GPU machine.

`python -m tools.performance` writes the page. `--check` fails if the page is out of date."""

import argparse
import json
import sys
from pathlib import Path

from bench.gpu.figures import Figure
from bench.targets import Record, read_records, shown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BUSY_LOAD = 1.0
"""Load per core above which a machine is called busy."""
HEAD = """# Measured against targets

`make bench` runs every benchmark with a target, in short form, and prints hit or miss beside the
last recorded figures, shown below. `make bench BENCH=--record` writes them to `bench/records.json`.
A benchmark needs minutes, and a quiet machine: a target that was missed while other work had the
cores is marked *busy*. `bench/NAME.py` says what a figure means; `tools/performance.py` makes this
page.
"""
GPU_RECORDS = Path(__file__).resolve().parent.parent / "bench" / "gpu" / "records.json"
GPU_HEAD = """
## On a GPU

Nothing else used the GPU. `bench/gpu/records.json` has all figures, and
[cuda.md](cuda.md#measured-on-a-gpu) explains them.
"""


def page(records: dict[str, Record]) -> str:
    machines = list(dict.fromkeys(one.machine for one in records.values()))
    parts = [HEAD, *(f"Machine: {one}.\n" for one in machines)]
    parts.append("| figure | measured | target |\n|---|---|---|")
    for record in records.values():
        cores = int(record.machine.split()[0])
        missed = "busy" if record.load > BUSY_LOAD * cores else "missed"
        parts.append(f"| **`{record.command}`** {record.date} | | |")
        parts += [
            f"| {name} | {shown(one.value)} | {one.bound}, {'hit' if one.is_hit else missed} |"
            for name, one in record.figures.items()
        ]
    return "\n".join([*parts, *gpu_part()]) + "\n"


def gpu_part() -> list[str]:
    """Returns the lines of the page about figures measured on a GPU."""
    records = json.loads(GPU_RECORDS.read_text())
    machines = dict.fromkeys(one["machine"] for one in records)
    parts = [GPU_HEAD, *(f"Machine: {one}.\n" for one in machines)]
    parts.append("| figure | measured | target |\n|---|---|---|")
    for record in records:
        figures = [Figure(**one) for one in record["figures"] if one.get("target") is not None]
        if record["busy"] or not figures:
            continue
        parts.append(f"| **`{record['command']}`** {record['date']} | | |")
        for figure in figures:
            bound = f"{'<=' if figure.at_most else '>='} {figure.target:g}"
            hit = "hit" if figure.met else "missed"
            parts.append(f"| {figure.name} | {shown(figure.measured)} | {bound}, {hit} |")
    return parts


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--check", action="store_true", help="only compare")
    made = page(read_records())
    if not flags.parse_args().check:
        PAGE.write_text(made)
        return 0
    if PAGE.exists() and PAGE.read_text() == made:
        return 0
    print(f"{PAGE.name} is out of date; run: python -m tools.performance", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
