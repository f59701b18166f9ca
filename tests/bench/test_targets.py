"""Tests `make bench`: comparing figures with targets, recording them, and the page of
measurements."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import targets
from bench.report import at_least, at_most, bounds_json
from bench.targets import RUNS, Figure, Record, figures_of
from tools.performance import GPU_RECORDS, MEANINGS, gpu_part, meaning, page

FIGURES = {"store_cpu_ms": Figure(0.5, "<= 0.45"), "served_ratio": Figure(1.0, ">= 0.999")}
RECORD = Record(
    "python -m bench.cost", "2 cores, 4 GiB, some CPU", 0.1, "2026-11-01", "abc", FIGURES
)
ROOT = Path(targets.__file__).parent.parent


def test_figures_come_with_their_bounds() -> None:
    report = {"a": 0.5, "targets": {"of a text": 3}, "b": True, "other": 7}
    bounds = {"a": at_most(0.4), "of a text": at_least(3), "b": at_least(1), "left out": at_most(1)}
    found = figures_of(report | bounds_json(bounds))
    assert found == {
        "a": Figure(0.5, "<= 0.4"),
        "of a text": Figure(3.0, ">= 3"),
        "b": Figure(1.0, ">= 1"),
        "left out": Figure(None, "<= 1"),
    }
    assert [one.is_hit for one in found.values()] == [False, True, True, False]


def test_page_shows_each_record_and_busy_machines() -> None:
    shown = page({"cost": RECORD, "core": replace(RECORD, command="core", load=9.0)})
    assert "(`store_cpu_ms`) | 0.5 | ≤0.45, missed |" in shown
    assert "(`served_ratio`) | 1 | ≥0.999, met |" in shown
    assert "**`python -m bench.cost`** 2026-11-01 |" in shown
    assert "(`store_cpu_ms`) | 0.5 | ≤0.45, busy |" in shown


def test_page_shows_what_was_measured_on_a_gpu() -> None:
    records = json.loads(GPU_RECORDS.read_text())
    lines = gpu_part()
    for record in records:
        targets = [one for one in record["figures"] if "target" in one]
        shown = any(f"`{record['command']}`" in line for line in lines)
        assert shown == (bool(targets) and not record["busy"])
        assert all(
            any(line.startswith(f"| {meaning(one['name'])} |") for line in lines) == shown
            for one in targets
            if not record["busy"]
        )


def test_every_benchmark_with_a_target_is_run() -> None:
    """The benchmark `tiers` runs `compression`."""
    names = {
        path.stem
        for path in (ROOT / "bench").glob("*.py")
        if any(call in path.read_text() for call in ("BOUNDS", "bounds_json("))
    }
    assert names - {"report", "compression"} == RUNS.keys()


def test_every_figure_with_target_is_explained() -> None:
    sources = [path.read_text() for path in (ROOT / "bench").glob("*.py")]
    keys = {key for source in sources for key in re.findall(r'"(\w+)": at_(?:most|least)', source)}
    assert len(keys) > 40 and keys <= MEANINGS.keys()


def test_a_benchmark_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(words: list[str], **kwargs: Any) -> Any:
        line = json.dumps({"loop_ms": 3.0} | bounds_json({"loop_ms": at_most(10.0)}))
        failed = "bench.cost" in words
        return subprocess.CompletedProcess(words, int(failed), "a table\n" + line)

    monkeypatch.setattr(targets.subprocess, "run", run)
    monkeypatch.setattr(targets, "commit", lambda: "abc")
    monkeypatch.setattr(targets, "RECORDS", tmp_path / "records.json")
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "cost", "status"])
    assert targets.main() == 1
    shown = capsys.readouterr().out
    assert "1 of 1 targets hit" in shown and "cost: it ended with status 1" in shown
