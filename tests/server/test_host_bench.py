"""Tests `hotkv bench`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hotkv_client.command import cli, host_bench
from hotkv_client.command.host_bench import BLOCK_BYTES, BenchError, Times, timed
from tests.support.waiting import wait_for


def left(prefix: str) -> list[str]:
    return [name for at in ("/dev/shm", "/tmp") for name in os.listdir(at) if prefix in name]


@pytest.mark.long
def test_a_host_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_bench, "PREFIX", f"hotkv-bench-{os.getpid()}-")
    # Variables of a server in use, which must be ignored.
    monkeypatch.setenv("HOTKV_TIERS__DISK__PATH", str(tmp_path / "theirs"))
    answer = host_bench.run(1.0, 256, tmp_path / "tier", None, say=lambda what: None)
    figures = {row["what"]: row["value"] for row in answer["rows"]}
    assert {"store", "load", "call", "lookup of 1,000 blocks"} <= figures.keys()
    assert any(what.startswith("disk, blocks of 1.0 MiB: read") for what in figures)
    assert all(value > 0 for value in figures.values()) and not answer["problems"]
    assert answer["host"]["cores"] == len(os.sched_getaffinity(0))
    assert "devices" in answer["devices"]
    assert not left(host_bench.PREFIX) and not list(tmp_path.iterdir())
    shown = host_bench.show(json.loads(json.dumps(answer)))
    assert "what it means for you" in shown and "tokens/s" in shown


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_whatever_ends_it_ends_its_server_too(how: signal.Signals) -> None:
    prefix = f"hotkv-bench-{how}-{os.getpid()}-"
    program = (
        "from hotkv_client.command import cli, host_bench\n"
        f"host_bench.PREFIX = '{prefix}'\n"
        "cli.main(['bench', '--arena-mib', '256'])"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert bench.stderr is not None
    while "memcpy" not in bench.stderr.readline():
        assert bench.poll() is None
    os.killpg(bench.pid, how)
    bench.wait(60)
    bench.stderr.close()
    wait_for(lambda: not left(prefix))


def test_server_that_does_not_stop_is_killed() -> None:
    late = subprocess.TimeoutExpired("hotkv-server", host_bench.STOP_S)
    process = Mock(wait=Mock(side_effect=[late, 0]))
    host_bench._stop(process)
    assert process.kill.called and process.wait.call_count == 2


def test_a_machine_without_room_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_bench, "COMMAND", ("true",))
    for short, said in ((1, "has 4 MiB free; the benchmark takes 5 MiB"), (0, "it said nothing")):
        usage = SimpleNamespace(free=(5 << 20) - short)
        monkeypatch.setattr(host_bench.shutil, "disk_usage", lambda _, found=usage: found)
        with pytest.raises(BenchError, match=said), host_bench.own_server(4 << 20):
            pass


def test_a_tier_that_does_not_work_is_said(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    timings, problems = host_bench.check_tiers(["--tiers.disk.path", str(taken)])
    assert not timings and problems and "disk" in problems[0]


def test_variables_complete_the_settings_of_a_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables may have access keys for the file's stores. Without `--config`, they are meant
    for another server."""
    settings, taken = tmp_path / "hotkv.toml", tmp_path / "file"
    settings.touch()
    taken.write_text("no folder")
    monkeypatch.setenv("HOTKV_TIERS__DISK__PATH", str(taken))
    _, problems = host_bench.check_tiers(["--config", str(settings)])
    assert str(taken) in problems[0]
    _, problems = host_bench.check_tiers(["--tiers.disk.path", "/dev/null/own"])
    assert str(taken) not in problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "--config: there is no file"),
        (
            "[arena]\nbyte = 1\n[copy]\nthreads = -1",
            "is no setting; did you mean arena.bytes?; copy.",
        ),
        ("", "the settings have no tier"),
    ],
)
def test_wrong_tier_settings_are_named_before_measuring(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    said: str,
) -> None:
    monkeypatch.setattr(host_bench, "own_server", Mock(side_effect=AssertionError))
    config = tmp_path / "hotkv.toml"
    if text is not None:
        config.write_text(text)
    assert cli.main(["bench", "--config", str(config)]) == 2
    assert said in capsys.readouterr().err


def test_rows_say_what_the_figures_are() -> None:
    found = {
        "memcpy_1": Times((1.0,), 10**10),
        "memcpy": Times((1.0,), 2 * 10**10),
        "lookup": Times((2e-4,)),
        "call": Times((1e-4,)),
        "store": Times((1.0,), 128 * 1024 * 1000),
        "load": Times((1.0,), 128 * 1024 * 20_000),
        "small_hit": Times((0.002,), BLOCK_BYTES),
    }
    rows = {row.what: row for row in host_bench.rows_of(found, 4)}
    assert rows["memcpy, 4 threads"].shown == "20 GB/s"
    assert rows["lookup of 1,000 blocks"].shown == "200 us"
    assert "prefill of 1,000 tokens/s" in rows["store"].means
    assert "takes 0.50 s" in rows["load"].means and "20,000 tokens/s" in rows["load"].means
    assert "below 8,000 tokens/s" in rows["hit of one block"].means
    timing = {"tier": "disk", "block_bytes": BLOCK_BYTES, "write_ms": 3.0, "read_ms": 4.0}
    write, read = host_bench.tier_rows([timing])
    assert (write.what, write.shown) == ("disk, blocks of 2.0 MiB: write", "3 ms")
    assert (read.what, read.shown) == ("disk, blocks of 2.0 MiB: read", "4 ms")
    assert "4,000 tokens/s" in read.means
    assert len(timed(lambda: None, 0).seconds) == 5
    assert timed(lambda: 2.0, 0, 10).bytes_per_s == 5.0
