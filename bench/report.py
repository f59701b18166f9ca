"""What all benchmarks print: a table, and with `--json` one JSON object as the last line."""

import argparse
import json
import statistics
from collections.abc import Sequence

from hotkv_client.command.tables import table


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--json", action="store_true", help="print one JSON object last")
    return options


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def print_report(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    figures: dict[str, object],
    *,
    as_json: bool,
) -> None:
    """The table, then the figures if they are asked for."""
    print(table(headers, rows))
    if as_json:
        print(json.dumps(figures))
