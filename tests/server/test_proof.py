"""Tests `hotkv prove` on real servers: what a request loaded, and from where."""

import json
import time
from typing import Any

import pytest

from demo.processes import Server
from hotkv_client import BlockResult, BlockRun, GroupHashes, LoadEnd, LoadRun, RequestReport
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.reports import Miss
from tests.server.commands import runner
from tests.server.places import store
from tests.server.support import FULL, WIDE, WINDOW, GroupsEngine, block_ids, hashes
from tests.server.tiered import Tiered, place

__all__ = ["place"]


class Prover:
    """`place`'s engine as one that reports, and `hotkv prove`."""

    def __init__(self, place: Tiered, capsys: pytest.CaptureFixture[str]) -> None:
        self._place, self._capsys = place, capsys

    @property
    def engine(self) -> PagedEngine:
        assert self._place.engine is not None
        return self._place.engine

    def prove(self, *words: str) -> tuple[int, str, str]:
        assert self._place.server is not None
        return runner(self._capsys, self._place.server.target)("prove", *words)

    def record(self, name: str) -> dict[str, Any]:
        status, shown, errors = self.prove(name, "--json")
        assert not status, errors
        request: dict[str, Any] = json.loads(shown)["request"]
        return request

    def load(self, name: str, prompt: list[bytes], report_id: int, *, failed: bool = False) -> None:
        """As an engine with one block of the prompt on its device."""
        session = self.engine.session
        session.acquire(name, [GroupHashes(0, prompt[1:])]).result(60)
        count = len(prompt) - 1
        report = RequestReport(
            prompt, 16 * len(prompt) + 3, 16, 16 * len(prompt), 0.0,
            report_id=report_id, request_id=name,
        )  # fmt: skip
        session.report_requests([report], 0.0)
        run = LoadRun(0, block_ids(count), block_ids(count, 100))
        session.load(name, name, [run], 20).result(60)
        session.release(name)
        session.report_requests([], 0.0, loads=(LoadEnd(report_id, 0.5, failed=failed),))
        session.ping(10)


def test_a_record_says_who_stored_and_what_is_unknown(
    place: Tiered, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotkv_client.command.proving.PAGE", 3)
    place.start_tiered()
    place.connect()
    prover, before_ms = Prover(place, capsys), int(time.time()) * 1000
    assert "no engine has reported a request" in prover.prove()[1]
    old, new = hashes(3), hashes(2)
    place.fill(old)
    prover.load("cmpl-first-0", old, 1)
    first = prover.record("cmpl-first")
    assert (first["outcome"], first["hit_token_count"], first["block_count"]) == ("loaded", 48, 2)
    for at, block in enumerate(first["blocks"], 1):
        assert block["hash_prefix"] == old[at][:8].hex() and block["position"] == at
        assert (block["origin"], block["tier"], block["engine_name"]) == (
            "stored",
            "host",
            "engine",
        )
        assert block["unix_time_ms"] >= before_ms and len(block["checksum"]) == 16

    # A restart forgets who stored a block.
    place.stop()
    place.start_tiered()
    status, _, errors = prover.prove("cmpl-first")
    assert status == 2 and "no request is known as cmpl-first" in errors
    assert store(prover.engine, new) == {BlockResult.STORED}
    prover.load("cmpl-second-0", old + new, 2)
    second = prover.record("second")
    assert [one["origin"] for one in second["blocks"]] == ["restored"] * 2 + ["stored"] * 2
    assert [one["engine_name"] for one in second["blocks"]] == ["", "", "engine", "engine"]
    assert [one["unix_time_ms"] > 0 for one in second["blocks"]] == [False] * 2 + [True] * 2
    checks = [[one["checksum"] for one in row["blocks"]] for row in (first, second)]
    assert checks[1][:2] == checks[0], "the same bytes"

    # A block that comes back from a tier has no engine either; the tier is told at every load.
    place.forget()
    for report_id in (3, 4):
        prover.load(f"cmpl-third-{report_id}", old, report_id, failed=report_id == 4)
        third = prover.record(f"cmpl-third-{report_id}")
        assert {(one["origin"], one["tier"]) for one in third["blocks"]} == {("promoted", "disk")}
        assert [one["checksum"] for one in third["blocks"]] == checks[0]
        assert third["outcome"] == ("failed" if report_id == 4 else "loaded")
    status, _, errors = prover.prove("cmpl-third")
    assert status == 2 and "2 requests begin with cmpl-third" in errors
    shown = prover.prove("cmpl-third-3")[1]
    assert "2 blocks promoted from disk" in shown and checks[0][0] in shown
    listed = json.loads(prover.prove("--json", "--limit", "2")[1])
    assert [row["request_id"] for row in listed["requests"]] == ["cmpl-third-4", "cmpl-third-3"]


def test_a_record_without_blocks_says_so(place: Tiered, capsys: pytest.CaptureFixture[str]) -> None:
    place.start_tiered()
    engine = place.connect()
    prover, prompt = Prover(place, capsys), hashes(4)
    reports = [
        RequestReport(prompt, 70, 32, 32, 0.0, report_id=5, request_id="on-device"),
        RequestReport(prompt, 70, 0, 64, 0.0, report_id=6, request_id="gone"),
        RequestReport(prompt, 70, 0, 64, 0.0, report_id=7, request_id="late"),
    ]
    late = LoadEnd(7, 0.5, failed=True, miss=Miss.COMPUTED_SOONER)
    engine.session.report_requests(reports, 0.0, loads=(late,))
    engine.session.ping(10)
    assert prover.record("on-device")["outcome"] == "computed"
    assert "no block of hotkv is in this answer" in prover.prove("on-device")[1]
    gone = prover.record("gone")
    assert gone["outcome"] == "loading" and gone["block_count"] == 4
    assert {(one["origin"], one["checksum"]) for one in gone["blocks"]} == {("unknown", "")}
    assert prover.record("late")["outcome"] == "cancelled"


def test_each_group_has_the_blocks_that_its_load_needs(
    own_server: Server, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """WINDOW needs the blocks of 24 tokens, WIDE has every second hash."""
    one = GroupsEngine(own_server.target, (FULL, WINDOW, WIDE), "groups")
    request.addfinalizer(one.close)
    prompt = hashes(6)
    one.store(
        BlockRun(0, prompt, block_ids(6)),
        BlockRun(1, prompt[3:], block_ids(3), depth=3),
        BlockRun(2, prompt[1::2], block_ids(3)),
    )
    report = RequestReport(prompt + hashes(2), 130, 32, 96, 0.0, request_id="groups")
    one.session.report_requests([report], 0.0)
    one.session.ping(10)
    told = json.loads(runner(capsys, own_server.target)("prove", "groups", "--json")[1])["request"]
    places = [(block["group_index"], block["position"]) for block in told["blocks"]]
    assert places == [(0, 2), (0, 3), (0, 4), (0, 5), (1, 4), (1, 5), (2, 1), (2, 2)]
    assert {block["origin"] for block in told["blocks"]} == {"stored"}
    assert told["outcome"] == "loaded", "no end of a load follows"
