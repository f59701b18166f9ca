"""Tests a real server's ledger: where tokens came from, and why blocks were missed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Server
from hotkv_client import BlockRun, GroupHashes, LoadEnd, LoadRun, RequestReport
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.command.savings_tables import show_savings
from hotkv_proto.reports import SAID_BY_ENGINES, Miss
from hotkv_server.ledger.book import pack
from hotkv_server.ledger.book.outcome import ASKS_WHY
from tests.server.page_support import groups_engine
from tests.server.places import Place, place, store
from tests.server.support import (
    PAGE_BYTES,
    GroupsEngine,
    block_ids,
    hashes,
)
from tests.server.tiered import CHAIN, tiered
from tests.support.waiting import wait_for

Make = Callable[..., GroupsEngine]
TOKENS = 16
__all__ = ["groups_engine", "place"]


def report(one: GroupsEngine, *reports: RequestReport, loads: tuple[LoadEnd, ...] = ()) -> None:
    """Waits until requests and loads are counted."""
    one.session.report_requests(list(reports), 0.0, loads=loads)
    one.session.ping(10)


def row_of(target: str, model: str, since_s: float = 0.0) -> dict[str, Any]:
    """The counts of the model's only engine. `since_s` 0: of all time."""
    with AdminClient(target) as admin:
        (row,) = [r for r in admin.savings(since_s)["rows"] if r["model"] == model]
    hits = {tier: count for tier, count in row["hits"].items() if count}
    parts = row["device_hit_token_count"], *hits.values(), *row["misses"].values()
    assert sum(parts) == row["prompt_token_count"]
    return {**row, "hits": hits}


def test_tokens_are_counted_where_they_came_from(server: Server, groups_engine: Make) -> None:
    one, prompt = groups_engine("ledger-parts"), hashes(8)
    one.store(BlockRun(0, prompt[:6], block_ids(6)))
    report(one, RequestReport(prompt, 130, 32, 96, 0.0, saved_s=0.5, wait_s=0.25))
    one.session.acquire("lease", [GroupHashes(0, prompt[:2])]).result(60)
    run = LoadRun(0, block_ids(2), block_ids(2, 10))
    one.session.load("load", "lease", [run], 20).result(60)
    row = row_of(server.target, "ledger-parts")
    assert one.key_space.fingerprint.hex().startswith(row["key_space"])
    assert row["engine_id"] == one.session.config.engine_id
    assert (row["request_count"], row["prompt_token_count"]) == (1, 130)
    assert (row["device_hit_token_count"], row["hits"]) == (32, {"host": 64})
    assert row["misses"] == {"never_stored": 32, "partial_block": 2}
    assert (row["saved_s"], row["waited_s"]) == (0.5, 0.25)
    assert (row["stored_byte_count"], row["loaded_byte_count"]) == (6 * PAGE_BYTES, 2 * PAGE_BYTES)


STORED_BUT_NOT_ASKED = {
    Miss.COMPUTED_SOONER: "computed_sooner",
    Miss.FAILED_LOAD: "failed_load",
    Miss.REFUSED: "refused",
    Miss.LATE: "late",
    # An older engine gives no reason.
    Miss.UNKNOWN: "in_flight",
}
"""The engine's reason, and the ledger's for it."""


@pytest.mark.parametrize(
    ("named", "stored", "tokens", "device", "hit", "said", "misses"),
    [
        *[
            (4, 3, 70, 16, 16, said, {reason: 32, "never_stored": 16, "partial_block": 6})
            for said, reason in STORED_BUT_NOT_ASKED.items()
        ],
        pytest.param(
            *(0, 0, 40, 0, 0, Miss.ABSENT, {"unknown": 32, "partial_block": 8}),
            id="blocks that a report does not name",
        ),
        pytest.param(
            *(3, 3, 48, 0, 32, Miss.ABSENT, {"partial_block": 16}),
            id="the engine computes the last block of a prompt that the cache has whole",
        ),
        *[
            (4, 0, 70, 0, 16, said, {said.name.lower(): 48, "partial_block": 6})
            for said in sorted(SAID_BY_ENGINES - ASKS_WHY.keys() - {Miss.PARTIAL_BLOCK})
        ],
        pytest.param(
            *(4, 4, 70, 0, 48, Miss.PARTIAL_BLOCK, {"partial_block": 22}),
            id="a drafter computes the last block of a hit anew",
        ),
    ],
)
def test_what_is_missed_has_a_reason(
    server: Server,
    groups_engine: Make,
    named: int,
    stored: int,
    tokens: int,
    device: int,
    hit: int,
    said: Miss,
    misses: dict[str, int],
) -> None:
    """named, stored: hashes in the report, and how many are ready.
    tokens, device, hit: of the prompt, hit on the device, hit in all.
    said: the engine's reason.
    misses: tokens by reason.
    """
    model = f"ledger {said.name} {named} {stored}"
    one, prompt = groups_engine(model), hashes(named)
    if stored:
        one.store(BlockRun(0, prompt[:stored], block_ids(stored)))
    report(one, RequestReport(prompt, tokens, device, hit, 0.0, miss=said))
    assert row_of(server.target, model)["misses"] == misses


def test_a_load_that_fails_takes_its_savings_back(server: Server, groups_engine: Make) -> None:
    one, prompt = groups_engine("ledger-failed"), hashes(4)
    one.store(BlockRun(0, prompt, block_ids(4)))
    report(
        one,
        RequestReport(prompt, 70, 16, 64, 0.0, saved_s=2.0, report_id=1),
        RequestReport(prompt, 70, 0, 32, 0.0, saved_s=1.0, report_id=2),
    )
    assert row_of(server.target, "ledger-failed")["saved_s"] == 3.0
    report(one, loads=(LoadEnd(1, 0.5, failed=True), LoadEnd(2, 0.25)))
    row = row_of(server.target, "ledger-failed")
    assert (row["saved_s"], row["waited_s"], row["failed_load_count"]) == (1.0, 0.75, 1)
    assert row["hits"] == {"host": 32} and row["misses"]["failed_load"] == 48
    # The engine computed instead: this is no failure.
    report(one, RequestReport(prompt, 70, 16, 64, 0.0, saved_s=2.0, report_id=4))
    report(one, loads=(LoadEnd(4, 0.5, failed=True, miss=Miss.COMPUTED_SOONER),))
    row = row_of(server.target, "ledger-failed")
    assert (row["saved_s"], row["waited_s"], row["failed_load_count"]) == (1.0, 1.25, 1)
    assert row["misses"]["computed_sooner"] == 48
    # The engine disconnects during a load, which counts as failed.
    report(one, RequestReport(prompt, 70, 16, 64, 0.0, saved_s=2.0, report_id=3))
    one.session.close()
    wait_for(lambda: row_of(server.target, "ledger-failed")["saved_s"] == 1.0)
    row = row_of(server.target, "ledger-failed")
    assert row["failed_load_count"] == 1 and row["misses"]["failed_load"] == 96


def test_command_shows_a_row_each_and_outlook(server: Server, groups_engine: Make) -> None:
    one = groups_engine("ledger-command")
    report(one, RequestReport(hashes(4), 70, 7, 32, 0.0, saved_s=90.0, wait_s=1.0))

    def text() -> str:
        return server.cli("savings", "--by", "engine", "--since", "1h")

    # The ledger's timer computes it.
    wait_for(lambda: "an endless cache would hit" in text())
    (line,) = [line for line in text().splitlines() if "ledger-command" in line]
    assert one.session.config.engine_id in line
    assert "10.0%" in line and "1m 30s" in line and "1m 29s" in line
    answer = json.loads(server.cli("savings", "--json"))
    assert answer["by"] == "model" and answer["total"]["request_count"] >= 1
    for waited_s, net in ((1.0, "  0.0s  "), (3.5, "  -2.5s  ")):
        rows = [{**row, "saved_s": 1.0, "waited_s": waited_s} for row in answer["rows"]]
        assert net in show_savings({**answer, "rows": rows})
    assert server.cli("savings", "--by", "tenant")
    for wrong in ("1w", "9d", "-1h", "h"):
        assert cli.main(["--target", server.target, "savings", f"--since={wrong}"]), wrong


def test_hit_promoted_from_disk_counts_once() -> None:
    with tiered() as place:
        place.start_tiered()
        one = place.connect()
        chains = [hashes(CHAIN) for _ in range(10)]
        contents = [place.fill(chain) for chain in chains]
        assert not one.session.probe(0, chains[0]).any()
        assert place.loads(chains[0], contents[0])
        prompt_tokens = CHAIN * TOKENS + 1
        for _ in range(2):
            hit = RequestReport(chains[0], prompt_tokens, 0, CHAIN * TOKENS, 0.0)
            one.session.report_requests([hit])
        # It is on the disk, but the engine has not asked for it.
        one.session.report_requests([RequestReport(chains[1], prompt_tokens, 0, 0, 0.0)])
        one.session.ping(10)
        assert place.server is not None
        row = row_of(place.server.target, "paged-engine")
    assert row["hits"] == {"disk": CHAIN * TOKENS, "host": CHAIN * TOKENS}
    assert row["misses"] == {"left_below": CHAIN * TOKENS, "partial_block": 3}


# ----------------------------------------------------------------------------------------- restarts


def ledger_of(place: Place) -> Path:
    return place.folder / "arena" / "ledger"


def savings(place: Place) -> dict[str, Any]:
    assert place.server is not None
    with AdminClient(place.server.target) as admin:
        return admin.savings()


def use(place: Place) -> None:
    """Stores eight blocks; a request hits half of them."""
    engine, chain = place.engine or place.connect(), hashes(8)
    store(engine, chain)
    hit = RequestReport(chain, 130, 0, 64, 0.0, saved_s=0.5, wait_s=0.125)
    engine.session.report_requests([hit])
    engine.session.ping(10)


def is_written(place: Place) -> bool:
    """The file has exactly one request."""
    if not ledger_of(place).exists():
        return False
    kept = pack.unpack(ledger_of(place).read_bytes())
    at = kept.names.index("requests")
    return bool(sum(row.total[at] for _, row in kept.rows) == 1)


def test_ledger_survives_a_kill_and_another_arena(place: Place) -> None:
    place.start()
    use(place)
    before = savings(place)
    wait_for(lambda: is_written(place))
    place.stop(signal.SIGKILL)
    place.start()
    after = savings(place)
    assert after["rows"] == before["rows"] and after["rows"][0]["saved_s"] > 0
    assert after["began_unix_time_ms"] == before["began_unix_time_ms"]
    use(place)
    rows = savings(place)["rows"]
    assert rows[0]["request_count"] == before["rows"][0]["request_count"] + 1
    place.stop(signal.SIGTERM)
    place.start(arena="32MiB")
    assert savings(place)["rows"] == rows


def test_server_that_keeps_nothing_leaves_no_file(place: Place) -> None:
    place.start("--arena.keep", "false")
    use(place)
    wait_for(lambda: is_written(place))
    place.stop(signal.SIGTERM)
    assert not (place.folder / "arena").exists()
