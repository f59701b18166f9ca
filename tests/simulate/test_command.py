"""`hotkv-server simulate` as people and programs call it."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotkv_server.cache.room.policies import POLICIES
from tests.simulate.naive import lru_hits, two_tier_hits
from tests.simulate.traces import agent_sessions, scans, write_trace
from tests.support import daemons

REQUESTS = agent_sessions(2, 120)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "agents.jsonl", REQUESTS)


def simulate(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    if not environment:
        return daemons.run("simulate", *map(str, arguments), timeout_s=240)
    return subprocess.run(
        [sys.executable, "-m", "hotkv_server", "simulate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | environment,
    )


def results(*arguments: str | Path) -> list[dict[str, Any]]:
    """Rows of a run that went well; standard output holds nothing else."""
    done = simulate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"results"}
    rows: list[dict[str, Any]] = answer["results"]
    return rows


def test_hints(trace: Path) -> None:
    plain, told = (
        results("--trace", trace, "--policy", "lru", "--capacity-percent", "10", *more)[0]
        for more in ((), ("--hints",))
    )
    assert told["hit_rate"] > plain["hit_rate"]
    refused = simulate("--trace", trace, "--hints", "--tier", "disk=30%")
    assert refused.returncode == 2 and "--hints" in refused.stderr


def test_json(trace: Path, tmp_path: Path) -> None:
    other = write_trace(tmp_path / "scans.jsonl", scans(1, 60))
    rows = results(
        "--trace",
        trace,
        "--trace",
        other,
        "--policy",
        ",".join(POLICIES),
        "--capacity-percent",
        "20,2.5",
    )
    seen = {(row["trace"], row["policy"], row["capacity_percent"]) for row in rows}
    names = [*POLICIES, "unbounded", "clairvoyant"]
    assert seen == {
        (str(path), name, percent)
        for path in (trace, other)
        for name in names
        for percent in (2.5, 20.0)
    }
    assert len(rows) == len(seen)
    accesses = sum(len(ids) for _, ids in REQUESTS)
    for row in rows:
        assert {
            "trace",
            "policy",
            "capacity_percent",
            "hit_rate",
            "block_accesses",
            "seconds",
        } <= set(row)
        assert 0 <= row["hit_rate"] <= 1 and row["seconds"] > 0
        if row["trace"] == str(trace):
            assert row["block_accesses"] == accesses
        if row["trace"] == str(trace) and row["policy"] == "lru":
            assert row["hit_rate"] == lru_hits(REQUESTS, row["capacity_blocks"]) / accesses
    rate = {(row["trace"], row["policy"], row["capacity_percent"]): row["hit_rate"] for row in rows}
    for path, name, percent in rate:
        assert (
            rate[path, name, percent]
            <= rate[path, "clairvoyant", percent]
            <= rate[path, "unbounded", percent]
            or name == "unbounded"
        )


def test_a_tier_below(trace: Path) -> None:
    accesses = sum(len(ids) for _, ids in REQUESTS)
    given = ("--trace", trace, "--policy", "lru", "--capacity-percent", "4")
    rows = results(*given, "--tier", "disk=10%", "--prefill-tokens-per-s", "1000")
    row, best, endless = rows
    assert [r["policy"] for r in rows] == ["lru", "clairvoyant", "unbounded"]
    unique = len({block for _, ids in REQUESTS for block in ids})
    size = max(1, int(unique * 0.1))
    hits, lower_hits, writes = two_tier_hits(REQUESTS, row["capacity_blocks"], size)
    assert (row["tier"], row["tier_percent"]) == ("disk", 10)
    assert row["tier_hit_rate"] == lower_hits / accesses
    assert row["hit_rate"] == (hits - lower_hits) / accesses
    assert row["total_hit_rate"] == pytest.approx(hits / accesses)
    assert (row["tier_read_blocks"], row["tier_written_blocks"]) == (lower_hits, writes)
    assert row["computed_tokens"] == (accesses - hits) * 512
    assert row["computed_s"] == row["computed_tokens"] / 1000
    assert row["total_hit_rate"] <= best["total_hit_rate"] <= endless["total_hit_rate"]


def test_a_tier_in_bytes_and_its_budget(trace: Path) -> None:
    given = ("--trace", trace, "--policy", "hotness", "--capacity-percent", "4")
    sizes = ("--block-mib", "16", "--tier", f"disk={16 * 40}MiB")
    free, *_ = results(*given, *sizes)
    day_blocks = free["tier_written_blocks"] // 2
    budget = ("--disk-write-gb-per-day", str(day_blocks * (16 << 20) / 1e9))
    gated, *_ = results(*given, *sizes, *budget)
    assert 0 < gated["tier_written_blocks"] <= day_blocks + max(len(ids) for _, ids in REQUESTS)
    table = simulate(*given, *sizes, *budget).stdout.splitlines()
    headers = " ".join(table[1].split())
    assert headers.endswith("hit rate disk both read GiB written GiB computed tokens accesses/s")


def test_table(trace: Path) -> None:
    done = simulate(
        "--trace", trace, "--policy", "lru", "--capacity-percent", "5,10", "--block-mib", "16"
    )
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{trace}: 120 requests over ")
    assert lines[1].split() == ["capacity", "blocks", "GiB", "policy", "hit", "rate", "accesses/s"]
    shown = [line.split() for line in lines[2:] if line]
    assert [(cells[0], cells[4]) for cells in shown] == [
        (p, name) for p in ("5", "10") for name in ("lru", "clairvoyant", "unbounded")
    ]
    assert all(float(cells[3].replace(",", "")) > 0 and cells[5].endswith("%") for cells in shown)


def test_defaults_are_all_policies(trace: Path) -> None:
    rows = results("--trace", trace)
    assert [row["policy"] for row in rows[: len(POLICIES)]] == list(POLICIES)
    assert sorted({row["capacity_percent"] for row in rows}) == [1, 2, 5, 10, 20]


def test_plot(trace: Path, tmp_path: Path) -> None:
    other = write_trace(tmp_path / "scans.jsonl", scans(1, 60))
    png = tmp_path / "curves.png"
    done = simulate(
        "--trace",
        trace,
        other,
        "--policy",
        "lru",
        "--plot",
        png,
        "--tier",
        "disk=30%",
        "--block-mib",
        "2",
    )
    assert done.returncode == 0, done.stderr
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--policy", "lru,mru"],
            f"--policy: unknown policy mru; allowed are {', '.join(POLICIES)}",
        ),
        (["--policy", ","], "--policy: unknown policy ','; allowed are"),
        (
            ["--capacity-percent", "5,0"],
            "--capacity-percent: '0' is no share; give percents above 0 and up to 100",
        ),
        (["--capacity-percent", "many"], "--capacity-percent: 'many' is no share"),
        (["--capacity-percent", "nan"], "--capacity-percent: 'nan' is no share"),
        (["--tier", "disk=101%"], "--tier: '101' is no share"),
        (["--tier", "disk=much"], "--tier: 'much' is no size; give bytes such as 200GiB"),
        (["--tier", "tape=1GiB"], "--tier: unknown tier 'tape'; allowed are disk"),
        (["--tier", "disk=1GiB"], "--tier: a size in bytes needs to know a block's"),
        (["--disk-write-gb-per-day", "9"], "--disk-write-gb-per-day: there is no tier"),
        (["--block-tokens", "1.5"], "--block-tokens: '1.5' is no count"),
        (["--block-mib", "-1"], "--block-mib: '-1' is no size; give a number above 0"),
        (
            ["--plot", "/nowhere/at/all.png"],
            "--plot: /nowhere/at/all.png can't be written; name a file in a folder that exists",
        ),
        (["--arena.bytes", "1GiB"], "there is no --arena.bytes"),
        (
            ["--trace", "/nowhere.jsonl"],
            "/nowhere.jsonl: No such file or directory; name a file that can be read",
        ),
    ],
)
def test_mistakes_are_named(trace: Path, arguments: list[str], message: str) -> None:
    done = simulate("--trace", trace, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_bad_line_and_late_requests(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "late.jsonl", [(5.0, [1, 2]), (1.0, [1, 3])])
    done = simulate("--trace", path, "--policy", "lru")
    assert done.returncode == 0
    assert f"{path}: 1 requests are not in order of time; sorted" in done.stderr
    path.write_text('{"timestamp": 1, "hash_ids": "x"}\n')
    done = simulate("--trace", path)
    assert done.returncode == 2
    assert done.stderr == (
        f'hotkv-server: {path}: line 1: hash_ids is "x"; give a list of whole numbers, one a '
        "block\n"
    )


def test_plot_without_matplotlib(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('as if it were not installed')\n")
    done = simulate("--trace", trace, "--plot", tmp_path / "x.png", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "--plot: matplotlib is not installed; pip install 'hotkv[simulate]'" in done.stderr
