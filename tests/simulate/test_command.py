"""Tests `hotkv-server simulate`, mostly as `bench.simulate` calls it for all policies."""

import contextlib
import io
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.policies import POLICIES
from bench.simulate import main
from hotkv_server.simulate import sizing
from hotkv_server.simulate.trace import make_trace
from tests.simulate.naive import lru_hits, two_tier_hits
from tests.simulate.traces import agent_sessions, scans, write_trace
from tests.support import daemons

REQUESTS = agent_sessions(2, 120)
BOUNDS = ("clairvoyant", "unbounded")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "agents.jsonl", REQUESTS)


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    given, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(given)
        except SystemExit as end:
            status = int(str(end.code))
    return subprocess.CompletedProcess(given, status, out.getvalue(), err.getvalue())


def results(*arguments: str | Path) -> list[dict[str, Any]]:
    """Nothing else may be on standard output."""
    done = simulate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"results"}
    rows: list[dict[str, Any]] = answer["results"]
    return rows


def test_the_server_simulates_its_own_policy(trace: Path) -> None:
    given = ("--trace", str(trace), "--capacity-percent", "10", "--json")
    own = json.loads(daemons.run("simulate", *given, timeout_s=240).stdout)["results"]
    same = [one for one in results(*given[:-1]) if one["policy"] in ("hotness", *BOUNDS)]
    assert [one["policy"] for one in own] == ["hotness", *BOUNDS]
    for one in (*own, *same):
        del one["seconds"]
    assert own == same
    refused = daemons.run("simulate", *given, "--policy", "lru", timeout_s=240)
    assert refused.returncode == 2 and "there is no --policy" in refused.stderr


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
    rows = results("--trace", trace, other, "--capacity-percent", "20,2.5")
    rate = {(row["trace"], row["policy"], row["capacity_percent"]): row["hit_rate"] for row in rows}
    names = [*POLICIES, "unbounded", "clairvoyant"]
    paths = (str(trace), str(other))
    assert rate.keys() == set(itertools.product(paths, names, (2.5, 20.0)))
    assert len(rows) == len(rate) and all(row["seconds"] > 0 for row in rows)
    accesses = sum(len(ids) for _, ids in REQUESTS)
    for row in rows:
        path, name, percent = row["trace"], row["policy"], row["capacity_percent"]
        best, most = (rate[path, bound, percent] for bound in ("clairvoyant", "unbounded"))
        assert 0 <= row["hit_rate"] <= (most if name == "unbounded" else best) <= most <= 1
        if path == str(trace):
            assert row["block_accesses"] == accesses
            hits = lru_hits(REQUESTS, row["capacity_blocks"])
            assert name != "lru" or row["hit_rate"] == hits / accesses


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
    sizes = ("--capacity-percent", "5,10", "--block-mib", "16", "--prefill-tokens-per-s", "9")
    done = simulate("--trace", trace, "--policy", "lru", *sizes)
    assert done.returncode == 0 and done.stderr == ""
    first, head, *lines = done.stdout.splitlines()
    assert first.startswith(f"{trace}: 120 requests over ")
    assert " ".join(head.split()[4:]) == "hit rate computed tokens prefill s accesses/s"
    shown = [(cells[0], cells[4]) for cells in (line.split() for line in lines if line)]
    computed = [line.replace(",", "").split()[6:8] for line in lines if line]
    assert all(f"{int(tokens) / 9:.0f}" == seconds for tokens, seconds in computed)
    assert shown == [*itertools.product(("5", "10"), ("lru", "clairvoyant", "unbounded"))]


def test_plot(trace: Path, tmp_path: Path) -> None:
    other, png = write_trace(tmp_path / "scans.jsonl", scans(1, 60)), tmp_path / "curves.png"
    tier = ("--tier", "disk=30%", "--block-mib", "2")
    done = simulate("--trace", trace, other, "--policy", "lru", "--plot", png, *tier)
    assert done.returncode == 0, done.stderr
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and png.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--policy", "lru,mru", "unknown policy mru"),
        ("--policy", ",", "unknown policy ','"),
        ("--capacity-percent", "5,0", "'0' is no share"),
        ("--capacity-percent", "many", "'many' is no share"),
        ("--capacity-percent", "nan", "'nan' is no share"),
        ("--tier", "disk=101%", "'101' is no share"),
        ("--tier", "disk=much", "'much' is no size"),
        ("--tier", f"disk={1 << 60}0", "0' is no size"),
        ("--arena", f"{1 << 60}0", "0' is no size"),
        ("--tier", "tape=1GiB", "unknown tier 'tape'"),
        ("--tier", "disk=1GiB", "a size in bytes needs to know a block's"),
        ("--disk-write-gb-per-day", "9", "there is no tier"),
        ("--block-tokens", "1.5", "'1.5' is no count"),
        ("--block-tokens", "1e300", "'1e300' is no count"),
        ("--block-mib", "-1", "'-1' is no size"),
        ("--block-mib", "1e-320", "'1e-320' is no size"),
        ("--plot", "/nowhere/at/all.png", "/nowhere/at/all.png can't be written"),
        ("--arena.bytes", "1GiB", ""),
        ("--trace", "/nowhere.jsonl", "No such file or directory"),
        ("--arena", "1GiB", "give both or neither"),
        ("--policy", "lru,arc --arena auto --bytes-per-token 9", "needs one policy"),
        ("--hints", "--arena auto --bytes-per-token 9", "sizes host memory alone"),
        ("--plot", "a.png --arena auto --bytes-per-token 9", "draws no plot"),
    ],
)
def test_mistakes_are_named(trace: Path, flag: str, value: str, message: str) -> None:
    done = simulate("--trace", trace, flag, *value.split())
    assert done.returncode == 2 and done.stdout == ""
    assert (value if flag == "--trace" else flag) in done.stderr and message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_largest_default_arena_holds_all_blocks() -> None:
    """Blocks of 784 tokens, as of hybrid models, make bytes per token a fraction."""
    bytes_per_token, block_tokens = 32941.33673469388, 784
    requests = [(float(time_s), [time_s % 4]) for time_s in range(8)]
    trace = make_trace("twice", requests, [(784, 0)] * 8)
    wanted = sizing.Wanted((), bytes_per_token, block_tokens)
    done = sizing.size(trace, wanted, POLICIES["lru"])
    assert done.sizes[-1].hit_tokens == done.endless.hit_tokens == 4 * (block_tokens - 1)


def test_device_hits_are_hits_in_every_arena() -> None:
    tokens = [(90, 32), (90, 32), (40, 8)]
    trace = make_trace("device", [(0.0, [1, 2]), (1.0, [1, 2]), (2.0, [])], tokens)
    done = sizing.size(trace, sizing.Wanted((1, 320), 1.0, 40), POLICIES["lru"])
    assert done.device_hit_tokens == 72
    assert [(one.hit_tokens, one.saved_tokens) for one in done.sizes] == [(72, 0), (120, 48)]
    assert done.endless.hit_tokens == 120


def test_blockless_requests_time_counts_for_savings() -> None:
    requests = [(0.0, [1, 2]), (1.0, [1, 2]), (1800.0, [])]
    trace = make_trace("idle", requests, [(81, 0), (81, 0), (10, 0)])
    done = sizing.size(trace, sizing.Wanted((320,), 1.0, 40, 1000.0), POLICIES["lru"])
    assert done.endless.saved_tokens == 80 and done.saved_s_per_hour(done.endless) == 0.16


def test_hit_is_at_most_what_lease_pins() -> None:
    """A quarter of the arena: 4 or 8 blocks. Device hits need no lease."""
    prompt, tokens = list(range(8)), [(321, 0), (321, 0), (321, 80)]
    trace = make_trace("long", [(float(at), prompt) for at in range(3)], tokens)
    done = sizing.size(trace, sizing.Wanted((16 * 40, 32 * 40), 1.0, 40), POLICIES["lru"])
    hits = [(one.hit_tokens, one.saved_tokens) for one in done.sizes]
    assert hits == [(4 * 40 + 6 * 40, 4 * 40 + 4 * 40), (2 * 320, 320 + 240)]
    assert done.endless.hit_tokens == 2 * 320


def test_a_bad_line_and_late_requests(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "late.jsonl", [(5.0, [1, 2]), (1.0, [1, 3])])
    done = simulate("--trace", path, "--policy", "lru")
    assert done.returncode == 0 and f"{path}: 1 requests are not in order" in done.stderr
    path.write_text('{"timestamp": 1, "hash_ids": "x"}\n')
    done = simulate("--trace", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f'{path}: line 1: hash_ids is "x"' in done.stderr
