"""Figures of `bench.gpu`, with targets, and a table of all.

`python -m bench.gpu.figures FOLDER` reads `reports.txt` (per line a benchmark's name and its
JSON object), writes `summary.json` beside it and prints the table.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.report import Bound, parser
from hotkv_client.command.tables import table


@dataclass(frozen=True, slots=True)
class Figure:
    """target: the least, or with `at_most` the greatest, acceptable value."""

    name: str
    measured: float
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target


def gpu_parser(description: str) -> argparse.ArgumentParser:
    """Has the options that all benchmarks of a GPU share."""
    options = parser(description)
    options.add_argument(
        "--quick", action="store_true", help="less of everything: to see that it runs"
    )
    options.add_argument(
        "--made-up",
        action="store_true",
        help="without a GPU, over a made-up device: bytes are checked, times mean nothing",
    )
    return options


def print_figures(figures: Sequence[Figure], details: dict[str, object], *, as_json: bool) -> None:
    print(
        table(("figure", "measured", "target", "met"), [_row(figure) for figure in figures]),
        flush=True,
    )
    if as_json:
        print(json.dumps({"figures": [asdict(figure) for figure in figures], **details}))


def _row(figure: Figure) -> tuple[object, ...]:
    target = (
        "" if figure.target is None else f"{'<=' if figure.at_most else '>='} {figure.target:g}"
    )
    return (
        figure.name,
        f"{figure.measured:.3g}",
        target,
        {None: "", True: "yes", False: "NO"}[figure.met],
    )


def read(report: str) -> list[Figure]:
    """Also of `bench.report.print_figures`. Empty if the benchmark was ended while it wrote."""
    try:
        found = json.loads(report)
    except json.JSONDecodeError:
        return []
    if "figures" in found:
        return [Figure(**figure) for figure in found["figures"]]
    figures = []
    for name, value in found.items():
        if isinstance(value, int | float):
            bound = found.get("bounds", {}).get(name)
            limit = Bound.parse(bound) if bound else None
            target = limit.value if limit else None
            figures.append(Figure(name, value, target, bool(limit and limit.at_most)))
    return figures


def main() -> int:
    folder = Path(sys.argv[1])
    reports = folder / "reports.txt"
    rows: list[tuple[object, ...]] = []
    summary: dict[str, object] = {}
    for line in reports.read_text().splitlines() if reports.exists() else ():
        name, _, report = line.partition(" ")
        figures = read(report)
        summary[name] = [{**asdict(figure), "met": figure.met} for figure in figures]
        rows += [_row(figure) for figure in figures] or [(f"{name}: no figures", "", "", "")]
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    print(table(("figure", "measured", "target", "met"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
