"""Output of all benchmarks: a table, and with `--json` a JSON object as the last line."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotkv_client.command.tables import human_bytes, table


def parser(description: str) -> argparse.ArgumentParser:
    """Has the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON object last")
    return options


def percentile(values: Sequence[float], share: float) -> float:
    """`share` is from 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def say(what: str) -> None:
    """Prints to standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {what}", file=sys.stderr, flush=True)


def print_report(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    figures: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    print(table(headers, rows))
    print_json(figures, as_json)


def print_json(figures: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))


def rows_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Headers are the keys, equal in all rows. Bytes have a unit."""
    cells = [[_shown(name, value) for name, value in row.items()] for row in rows]
    return table([name.replace("_", " ") for name in rows[0]], cells)


def _shown(name: str, value: object) -> object:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return human_bytes(float(str(value)))
    return f"{value:.4g}" if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Bound:
    """At most, or at least, `value`."""

    value: float
    at_most: bool = False

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"

    @classmethod
    def parse(cls, text: str) -> "Bound":
        """Such as `<= 1.5`, as `str(Bound)` writes it."""
        sign, value = text.split()
        return cls(float(value), at_most=sign == "<=")

    def is_met(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value


def at_most(value: float) -> Bound:
    return Bound(value, at_most=True)


def at_least(value: float) -> Bound:
    return Bound(value)


def print_figures(
    figures: Mapping[str, object],
    bounds: Mapping[str, Bound],
    *,
    as_json: bool = False,
    beside: Mapping[str, object] | None = None,
) -> None:
    """With each figure's bound, and if it misses that. `beside`: more for the JSON."""
    rows = []
    for name, value in figures.items():
        bound, is_number = bounds.get(name), isinstance(value, int | float)
        missed = bound is not None and is_number and not bound.is_met(float(value))  # type: ignore[arg-type]
        shown = f"{value:.4g}" if is_number else str(value)
        rows.append((name, shown, "" if bound is None else str(bound), "missed" if missed else ""))
    headers = ("figure", "measured", "bound", "")
    told = {**(beside or {}), **figures, **bounds_json(bounds)}
    print_report(headers, rows, told, as_json=as_json)


def bounds_json(bounds: Mapping[str, Bound]) -> dict[str, object]:
    """`bench.targets` reads this form."""
    return {"bounds": {name: str(bound) for name, bound in bounds.items()}}
