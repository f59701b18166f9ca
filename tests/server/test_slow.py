"""Tests `hotkv slow` on a real server: stages of slow requests and transfers."""

import json

import pytest

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadEnd, LoadRun, RequestReport
from tests.server.commands import runner
from tests.server.support import FULL, PAGE_BYTES, GroupsEngine, block_ids, hashes

STAGES = ("room_s", "ready_s", "queue_s", "copy_s")


def test_slow_shows_transfers_and_requests_by_stage(
    own_server: Server, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(capsys, own_server.target)
    empty = run("slow")[1]
    assert "no request has waited" in empty and "no transfer has ended" in empty
    one, prompt = GroupsEngine(own_server.target, (FULL,), "slow-model"), hashes(8)
    request.addfinalizer(one.close)
    one.store(BlockRun(0, prompt[:6], block_ids(6)))
    one.session.acquire("lease", [GroupHashes(0, prompt[:2])]).result(60)
    one.session.load("load", "lease", [LoadRun(0, block_ids(2), block_ids(2, 10))], 20).result(60)
    reports = [
        RequestReport(prompt, 130, 0, 96, 0.0, saved_s=0.5, wait_s=0.25),
        RequestReport(prompt, 130, 0, 96, 0.0, wait_s=0.125, report_id=7),
        RequestReport(prompt, 130, 0, 96, 0.0, wait_s=0.0),
    ]
    one.session.report_requests(reports, 0.0, loads=(LoadEnd(7, 0.5, failed=True),))
    one.session.ping(10)
    told = json.loads(run("slow", "--json")[1])
    first, second = told["requests"]
    assert (first["took_s"], first["lookup_s"], first["load_s"]) == (0.625, 0.125, 0.5)
    assert first["failed"] and (second["took_s"], second["failed"]) == (0.25, False)
    assert second["saved_s"] == 0.5 and second["model_name"] == "slow-model"
    moved = {row["direction"]: row for row in told["transfers"]}
    assert moved["store"]["byte_count"] == 6 * PAGE_BYTES
    assert moved["load"]["byte_count"] == 2 * PAGE_BYTES
    for row in moved.values():
        assert row["outcome"] == "done" and min(row[stage] for stage in STAGES) >= 0
        assert row["took_s"] == pytest.approx(sum(row[stage] for stage in STAGES))
    assert told["transfers"] == sorted(told["transfers"], key=lambda row: -row["took_s"])
    shown = run("slow", "--limit", "1")[1]
    assert "625.0" in shown and "250.0" not in shown and "load failed" in shown
