"""Tests reports of requests: what they mark as used, pin, and count."""

import time
from collections.abc import Callable
from unittest.mock import Mock

from demo.processes import Server
from hotkv_client import BlockRun, RequestReport, Retention
from hotkv_client.admin import AdminClient
from hotkv_proto.blocks import StoreOptions
from hotkv_proto.reports import LoadEnd
from hotkv_server.node.capability import NodeEvents
from hotkv_server.node.reports import MAX_OPEN_LOADS, Reports
from tests.server.page_support import groups_engine
from tests.server.support import FULL, WIDE, WINDOW, GroupsEngine, block_ids, hashes, number_of

__all__ = ["groups_engine"]
Make = Callable[..., GroupsEngine]


def listed(server: Server, one: GroupsEngine, field: str) -> dict[tuple[int, bytes], float]:
    """The field by (group, hash), from the admin API."""
    with AdminClient(server.target) as admin:
        rows = admin.blocks(number_of(admin, one.key_space.model), 1000)["blocks"]
    return {(b["group_index"], bytes.fromhex(b["block_hash"])): float(b[field]) for b in rows}


def touched(server: Server, one: GroupsEngine, report: RequestReport) -> set[tuple[int, bytes]]:
    """Blocks that are used later than one that is stored before."""
    mark = hashes(1)
    one.store(BlockRun(0, mark, block_ids(1)))
    # Longer than the eviction policy's time step.
    time.sleep(0.1)
    one.session.report_requests([report])
    one.session.ping(10)
    idle_s = listed(server, one, "idle_s")
    return {key for key in idle_s if idle_s[key] < idle_s[0, mark[0]]}


def test_a_device_hit_touches_the_blocks_it_needed(server: Server, groups_engine: Make) -> None:
    one, prompt = groups_engine("reports-groups", FULL, WINDOW, WIDE), hashes(8)
    wide = prompt[1::2]
    runs = [
        BlockRun(g, some, block_ids(len(some))) for g, some in enumerate((prompt, prompt, wide))
    ]
    one.store(*runs)
    full, window = {(0, h) for h in prompt[:4]}, {(1, h) for h in prompt[2:4]}
    expected = full | window | {(2, h) for h in wide[:2]}
    assert touched(server, one, RequestReport(prompt, 130, 64, 64, 0.0)) == expected
    assert touched(server, one, RequestReport(prompt, 130, 0, 64, 0.0)) == set()


def test_retention_reaches_all_ready_blocks_of_prompt(server: Server, groups_engine: Make) -> None:
    one, prompt = groups_engine("reports-retention", FULL, WINDOW), hashes(6)
    one.store(BlockRun(0, prompt[:5], block_ids(5)), BlockRun(1, prompt[2:4], block_ids(2)))
    expected = {(0, h) for h in prompt[:5]} | {(1, h) for h in prompt[2:4]}
    report = RequestReport(prompt, 100, 16, 16, 0.5, Retention(ttl_s=60, pin=True))
    assert touched(server, one, report) == expected
    pins = listed(server, one, "pin_count")
    assert {key for key, count in pins.items() if count} == expected
    assert server.counter("held_blocks_total") >= 7


def test_stores_and_reservations_carry_their_retention(server: Server, groups_engine: Make) -> None:
    one, pin = groups_engine("reports-store"), Retention(pin=True, ttl_s=60)
    kept, passing, reserved = names = hashes(3)
    one.session.reserve("c", [BlockRun(0, [reserved])], 60, pin).result(10)
    options = StoreOptions(pin), StoreOptions(Retention(priority=-8)), StoreOptions()
    for lease, block, option in zip("abc", names, options, strict=True):
        run = BlockRun(0, [block], block_ids(1))
        one.session.store(lease, lease, [run], 10, option).result(60)
    assert listed(server, one, "pin_count") == {(0, kept): 1, (0, passing): 0, (0, reserved): 1}


def test_reports_are_counted(server: Server, groups_engine: Make) -> None:
    one = groups_engine("reports-counted")
    names = [f"reported_{n}_total" for n in ("requests", "prompt_tokens", "device_hit_tokens")]
    names.append("reported_hit_tokens_total")
    before = server.status()["counters"]
    one.session.report_requests(
        [RequestReport(hashes(2), 40, 16, 32, 0.0), RequestReport([], 5, 0, 0, 1.0)]
    )
    one.session.ping(10)
    after = server.status()["counters"]
    assert [after[name] - before[name] for name in names] == [2, 45, 16, 32]


def test_a_hit_counts_once_its_load_has_succeeded(server: Server, groups_engine: Make) -> None:
    """If its load fails, the prompt is computed."""
    one = groups_engine("reports-loads")
    before = server.counter("reported_hit_tokens_total")
    reports = [RequestReport(hashes(2), 40, 8, 32, 0.0, report_id=number) for number in (1, 2)]
    for ends, hits in (
        ([], 2 * 8),
        ([LoadEnd(1, 0.1, failed=True)], 2 * 8),
        ([LoadEnd(2, 0.1, failed=False)], 2 * 8 + 24),
        ([LoadEnd(2, 0.1, failed=False)], 2 * 8 + 24),
    ):
        one.session.report_requests(reports, loads=ends)
        one.session.ping(10)
        reports = []
        assert server.counter("reported_hit_tokens_total") - before == hits


async def test_unfinished_loads_take_no_more_memory() -> None:
    made, session = Reports(Mock(), NodeEvents()), Mock(secret_id="a")
    made.watched = Mock()
    session.key_space.groups = ()
    hit = {"prompt_tokens": 2, "device_hit_tokens": 0, "hit_tokens": 1, "age_s": 0.0}
    numbers = range(1, MAX_OPEN_LOADS + 2)
    await made.note(session, [Mock(report_id=number, **hit) for number in numbers])
    made.ended(session, [], [LoadEnd(number, 0.1, failed=False) for number in numbers])
    assert made.counters.hit_tokens == MAX_OPEN_LOADS


def test_refused_report_is_logged_once(server: Server, groups_engine: Make) -> None:
    one = groups_engine("reports-logged")
    for _ in range(3):
        one.session.report_requests([RequestReport([], 5, 4, 3, 0.0)])
    one.session.ping(10)
    (refusal,) = [
        line for line in server.log.read_text().splitlines() if "refused without an answer" in line
    ]
    assert "must rise in this order" in refusal


def test_prefill_speed_is_known_until_renewed(server: Server, groups_engine: Make) -> None:
    session = groups_engine("reports-speed").session
    for said, known in ((None, 0.0), (1234.5, 1234.5), (0.0, 1234.5), (8.0, 8.0)):
        if said is not None:
            session.report_requests([RequestReport([], 5, 0, 0, 0.0)], said)
        session.ping(10)
        with AdminClient(server.target) as admin:
            rows = {row["engine_id"]: row for row in admin.sessions()}
        assert rows[session.config.engine_id]["prefill_tokens_per_s"] == known
