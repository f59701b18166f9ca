"""Reports of scheduled requests, and retention: blocks that they touch or keep, and refusals."""

import time
from collections.abc import Callable, Iterator

import pytest

from demo.processes import Server
from hotkv_client import BlockRun, RequestReport, Retention
from hotkv_client.admin import AdminClient
from hotkv_proto.blocks import StoreOptions
from hotkv_proto.groups import GroupSpec
from tests.server.support import FULL, WIDE, WINDOW, GroupsEngine, block_ids, hashes, number_of

Make = Callable[..., GroupsEngine]


@pytest.fixture
def engine(server: Server) -> Iterator[Make]:
    made: list[GroupsEngine] = []

    def make(model: str, *groups: GroupSpec) -> GroupsEngine:
        made.append(GroupsEngine(server.target, groups or (FULL,), model))
        return made[-1]

    yield make
    for one in made:
        one.close()


def blocks(admin: AdminClient, model: str) -> dict[tuple[int, bytes], dict[str, object]]:
    """What is listed of a model's blocks, by group and hash."""
    listed = admin.blocks(number_of(admin, model), 1000)["blocks"]
    return {(b["group_index"], bytes.fromhex(b["block_hash"])): b for b in listed}


def touched(server: Server, engine: GroupsEngine, report: RequestReport) -> set[tuple[int, bytes]]:
    """Which blocks a report touches: those used after one that is stored right before it."""
    mark = hashes(1)
    engine.store(BlockRun(0, mark, block_ids(1)))
    # Longer than the steps in which a policy keeps time.
    time.sleep(0.1)
    engine.session.report_requests([report])
    engine.session.ping(10)
    with AdminClient(server.target) as admin:
        idle_s = {
            key: float(str(b["idle_s"])) for key, b in blocks(admin, engine.key_space.model).items()
        }
    return {key for key in idle_s if idle_s[key] < idle_s[0, mark[0]]}


def test_a_device_hit_touches_the_blocks_it_needed(server: Server, engine: Make) -> None:
    one = engine("reports-groups", FULL, WINDOW, WIDE)
    prompt = hashes(8)
    wide = prompt[1::2]
    one.store(
        BlockRun(0, prompt, block_ids(8)),
        BlockRun(1, prompt, block_ids(8)),
        BlockRun(2, wide, block_ids(4)),
    )
    expected = (
        {(0, h) for h in prompt[:4]} | {(1, h) for h in prompt[2:4]} | {(2, h) for h in wide[:2]}
    )
    assert touched(server, one, RequestReport(prompt, 130, 64, 64, 0.0)) == expected
    assert touched(server, one, RequestReport(prompt, 130, 0, 64, 0.0)) == set()


def test_a_retention_reaches_all_ready_blocks_of_the_prompt(server: Server, engine: Make) -> None:
    one = engine("reports-retention", FULL, WINDOW)
    prompt = hashes(6)
    one.store(BlockRun(0, prompt[:5], block_ids(5)), BlockRun(1, prompt[2:4], block_ids(2)))
    report = RequestReport(prompt, 100, 16, 16, 0.5, Retention(ttl_s=60, pin=True))
    assert touched(server, one, report) == {(0, h) for h in prompt[:5]} | {
        (1, h) for h in prompt[2:4]
    }
    with AdminClient(server.target) as admin:
        pins = {key: b["pin_count"] for key, b in blocks(admin, "reports-retention").items()}
        assert {key for key, count in pins.items() if count} == {(0, h) for h in prompt[:5]} | {
            (1, h) for h in prompt[2:4]
        }
        assert admin.info()["counters"]["held_blocks_total"] >= 7


def test_stores_and_reservations_carry_their_retention(server: Server, engine: Make) -> None:
    one = engine("reports-store")
    kept, passing, reserved = hashes(3)
    one.session.store(
        "a",
        "a",
        [BlockRun(0, [kept], block_ids(1))],
        10,
        StoreOptions(Retention(pin=True, ttl_s=60)),
    ).result(60)
    one.session.store(
        "b", "b", [BlockRun(0, [passing], block_ids(1))], 10, StoreOptions(Retention(priority=-8))
    ).result(60)
    one.session.reserve("c", [BlockRun(0, [reserved])], 60, Retention(pin=True, ttl_s=60)).result(
        10
    )
    one.session.store("c", "c", [BlockRun(0, [reserved], block_ids(1))], 10).result(60)
    with AdminClient(server.target) as admin:
        pins = {
            block_hash: b["pin_count"]
            for (_, block_hash), b in blocks(admin, "reports-store").items()
        }
    assert pins == {kept: 1, passing: 0, reserved: 1}


def test_reports_are_counted(server: Server, engine: Make) -> None:
    one = engine("reports-counted")
    names = ("requests", "prompt_tokens", "device_hit_tokens", "hit_tokens")
    with AdminClient(server.target) as admin:
        before = admin.info()["counters"]
        one.session.report_requests(
            [RequestReport(hashes(2), 40, 16, 32, 0.0), RequestReport([], 5, 0, 0, 1.0)]
        )
        one.session.ping(10)
        after = admin.info()["counters"]
    assert [after[f"reported_{n}_total"] - before[f"reported_{n}_total"] for n in names] == [
        2,
        45,
        16,
        32,
    ]


def test_a_refused_report_is_in_the_servers_log_once(server: Server, engine: Make) -> None:
    one = engine("reports-logged")
    for _ in range(3):
        one.session.report_requests([RequestReport([], 5, 4, 3, 0.0)])
    one.session.ping(10)
    refusals = [
        line for line in server.log.read_text().splitlines() if "refused without an answer" in line
    ]
    assert len(refusals) == 1 and "must rise in this order" in refusals[0]


def test_an_engines_prefill_speed_is_known_until_it_says_another(
    server: Server, engine: Make
) -> None:
    one = engine("reports-speed", FULL)

    def told() -> float:
        one.session.ping(10)
        with AdminClient(server.target) as admin:
            (found,) = [
                s for s in admin.sessions() if s["engine_id"] == one.session.config.engine_id
            ]
        return float(found["prefill_tokens_per_s"])

    assert told() == 0
    for said, known in ((1234.5, 1234.5), (0.0, 1234.5), (8.0, 8.0)):
        one.session.report_requests([RequestReport([], 5, 0, 0, 0.0)], said)
        assert told() == known
