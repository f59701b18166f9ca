"""Tests `hotkv record`, whose traces the simulator reads."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from demo.processes import ROOT, Server
from hotkv_client import RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.command.recorder import TraceWriter, record
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.wire.admin import WatchedRequest, _read_stream
from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.monitoring.topics import MAX_ROWS
from hotkv_server.simulate.trace import load_trace
from tests.server.commands import HOTKV
from tests.server.support import hashes, number_of
from tests.support.waiting import stop, wait_for

Make = Callable[..., PagedEngine]


def test_simulator_reads_what_engines_reported(
    server: Server, engine: Make, tmp_path: Path
) -> None:
    one, stranger = engine(model="record-one"), engine(model="record-other")
    file, first, second = tmp_path / "trace.jsonl", hashes(9), hashes(8)
    # 60 tokens are rounded up to 64, so four hashes make a block.
    with AdminClient(server.target) as admin:
        number = number_of(admin, "record-one")
    command = [*HOTKV, "record", str(file), "--json"]
    command += ["--key-space", str(number), "--block-tokens", "60"]
    command += ["--target", server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        wait_for(lambda: server.counter("request_watchers") == 1, "a recording that begins")
        stranger.session.report_requests([RequestReport(second, 130, 0, 0, 0.0)])
        reports = [
            RequestReport(first, 150, 16, 32, 0.0),
            RequestReport(first[:4] + second, 200, 0, 64, 3600.0),
        ]
        one.session.report_requests(reports)
        one.session.report_requests([RequestReport(first[:3], 50, 0, 0, 0.0)])
        wait_for(lambda: file.exists() and file.read_text().count("\n") == 3, "three lines")
        process.send_signal(signal.SIGINT)
        answer: dict[str, Any] = json.loads(process.communicate(timeout=30)[0])
        assert process.returncode == 0
    text = file.read_text()
    assert not any(h.hex() in text for h in first), "hashes leave the node as numbers only"
    lines = [json.loads(line) for line in text.splitlines()]
    times = [line.pop("timestamp") for line in lines]
    assert times == sorted(times) and times[0] >= 0 and times[-1] < 60_000
    names = ("hash_ids", "input_length", "output_length", "device_hit_length", "hit_length")
    assert [tuple(line[name] for name in names) for line in lines] == [
        ([0, 1], 150, 0, 16, 32),
        ([0, 2, 3], 200, 0, 0, 64),
        ([], 50, 0, 0, 0),
    ]
    expected = {
        "block_token_count": 64,
        "request_count": 3,
        "block_count": 5,
        "unique_block_count": 4,
        "lost_request_count": 0,
    }
    assert {name: answer[name] for name in expected} == expected
    wait_for(lambda: server.counter("request_watchers") == 0, "a watcher that is gone is forgotten")
    trace = load_trace(file)
    assert trace.num_accesses == 5 and trace.num_unique_blocks == 4


def test_a_slow_watcher_is_told_what_it_missed(server: Server, engine: Make) -> None:
    one, sent = engine(model="record-slow"), 0
    report = RequestReport(hashes(512), 512 * 16, 0, 0, 0.0)
    with AdminClient(server.target) as admin:
        watch = admin.watch_requests(seconds=120)
        assert next(watch) == ([], 0)
        while not server.counter("watched_requests_lost_total"):
            one.session.report_requests([report] * 200)
            one.session.ping(30)
            sent += 200
            assert sent < 100_000, "a watcher that does not read loses nothing"
        seen = told = 0
        while seen + told < sent:
            requests, lost = next(watch)
            seen, told = seen + len(requests), told + lost
        assert seen + told == sent and told == server.counter("watched_requests_lost_total")


def test_a_watch_of_a_hung_server_fails(own_server: Server) -> None:
    """A working server sends a first answer at once, so this must be a failure."""
    with AdminClient(own_server.target) as admin:
        stop(own_server.pid)
        try:
            with pytest.raises(HotKVError):
                list(admin.watch_requests(seconds=1))
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


def test_stream_nobody_reads_is_cancelled() -> None:
    call = MagicMock(__iter__=Mock(return_value=iter([1, 2])))
    stream = _read_stream(call, 0.0)
    assert next(stream) == 1 and not call.cancel.called
    stream.close()  # type: ignore[attr-defined]
    assert call.cancel.called


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=8),
    per_block=st.integers(1, 5),
    extra_tokens=st.integers(0, 15),
    ages=st.lists(st.floats(-5, 5), min_size=8, max_size=8),
)
def test_equal_ids_are_equal_prefixes(
    prompts: list[list[int]], per_block: int, extra_tokens: int, ages: list[float]
) -> None:
    """per_block, extra_tokens: blocks of `per_block` times 16 tokens; `extra_tokens` fewer are
        asked for.
    ages: offsets of times, in seconds.
    """
    tracer = TraceWriter(8, 16, 16 * per_block - extra_tokens, 100.0)
    assert tracer.block_tokens == 16 * per_block
    seen: dict[tuple[int, ...], int] = {}
    last_ms = num_blocks = 0
    for prompt, age in zip(prompts, ages, strict=False):
        number, packed = 0, b""
        for token in prompt:
            number = (number * 5 + token + 1) % (1 << 64)
            packed += number.to_bytes(8, "big")
        request = WatchedRequest(1, packed, 16 * len(prompt), 0, 0, 100.0 + age)
        line = json.loads(tracer.line(request))
        ends = range(per_block, len(prompt) + 1, per_block)
        ids = [seen.setdefault(tuple(prompt[:end]), len(seen)) for end in ends]
        assert line["hash_ids"] == ids
        last_ms = max(last_ms, int((request.unix_time_s - 100.0) * 1000))
        assert line["timestamp"] == last_ms
        num_blocks += len(ids)
    counts = tracer.num_requests, tracer.num_blocks, tracer.num_unique_blocks
    assert counts == (len(prompts), num_blocks, len(seen))


class Told:
    """A client that gets three requests, and learns that a fourth was lost."""

    def __init__(self, num_spaces: int, pause_s: float = 0.0) -> None:
        self.num_spaces, self.pause_s, self.seconds = num_spaces, pause_s, 0.0

    def key_spaces(self, number: int = 0) -> list[dict[str, Any]]:
        space = {"hash_byte_count": 4, "hash_block_token_count": 16}
        row = {"model": "LlamaForCausalLM", "model_name": "m", "key_space": space}
        rows = [{"key_space_id": 1 + at, **row} for at in range(self.num_spaces)]
        return [one for one in rows if number in (0, one["key_space_id"])][:MAX_ROWS]

    def watch_requests(self, number: int, seconds: float) -> Iterator[Any]:
        self.seconds, began_s = seconds, time.monotonic()
        for packed, lost in ((b"aaaabbbb", 0), (b"aaaacccc", 1), (b"", 0)):
            # By its wall clock, this server lives in 1970.
            now_s = 10.0 + time.monotonic() - began_s
            yield [WatchedRequest(number, packed, 40, 0, 0, now_s)], lost
            time.sleep(self.pause_s)


@pytest.mark.parametrize(
    ("spaces", "asked", "most", "found", "counts"),
    [
        (1, 0, 100, 1, (3, 4, 3, 1, False)),
        (2, 2, 4, 2, (3, 4, 3, 1, False)),
        (300, 300, 100, 300, (3, 4, 3, 1, False)),
        (1, 1, 3, 1, (2, 4, 3, 1, True)),
        (1, 1, 2, 1, (1, 2, 2, 0, True)),
    ],
)
def test_recording_names_key_space_ends_when_full(
    tmp_path: Path, spaces: int, asked: int, most: int, found: int, counts: tuple[int, ...]
) -> None:
    client: Any = Told(spaces)
    told = record(client, tmp_path / "trace", asked, 16, 2.5, most)
    names = [f"{name}_count" for name in ("request", "block", "unique_block", "lost_request")]
    assert tuple(told[name] for name in (*names, "is_full")) == counts
    assert (told["key_space_id"], client.seconds) == (found, 2.5)


def test_times_hold_although_servers_clock_is_off(tmp_path: Path) -> None:
    client: Any = Told(1, pause_s=0.05)
    record(client, tmp_path / "trace", 0, 16, 1.0, 100)
    times_s = load_trace(tmp_path / "trace").times_s
    assert times_s[0] == 0 and times_s[1] >= 0.045


@pytest.mark.parametrize(("spaces", "asked"), [(2, 0), (0, 0), (1, 9)])
def test_absent_key_space_is_refused(tmp_path: Path, spaces: int, asked: int) -> None:
    client: Any = Told(spaces)
    known = ", ".join(f"{1 + at} (m)" for at in range(spaces)) or "none yet"
    with pytest.raises(HotKVError, match=re.escape(f"known are {known}")) as refused:
        record(client, tmp_path / "trace", asked, 16, 1.0, 1)
    assert refused.value.reason is Reason.UNKNOWN_KEY_SPACE
    with pytest.raises(ValueError, match="must be positive"):
        record(client, tmp_path / "trace", 0, 0, 1.0, 1)
    assert not list(tmp_path.iterdir())
