"""Hints that vLLM passes on: how they are read and sent."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hotkv_client.hints import HintClient
from hotkv_client.types import EndedRequest
from hotkv_proto.blocks import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_proto.hints import MAX_ACTIONS, Action, ActionType, Hints, Target, is_identifier
from hotkv_vllm.hints.hint_reader import LOG_INTERVAL_S, HintReader
from hotkv_vllm.stats import HotKVStats
from tests.support.waiting import wait_for
from tests.vllm.harness import prompt
from tests.vllm.oracle import reports_to
from tests.vllm.processes import Daemon, Engines
from tests.vllm.runs import prompts, settled, usable
from tests.vllm.tiny import BLOCK_TOKENS, write_model

PROMPT = prompt(1, 200)


def envelope(*actions: tuple[str, dict[str, Any]]) -> KvHintsEnvelope:
    made = [KvHintAction(str(i), kind, "1.0", payload) for i, (kind, payload) in enumerate(actions)]
    return KvHintsEnvelope("0.1", "m", made)


def ended(server: Any) -> list[EndedRequest]:
    return [one for kind, batch in server.calls if kind == "ended" for one in batch]


def test_hints_go_with_report_await_the_end(engine: Any, server: Any) -> None:
    one = engine()
    pinned = {"ttl_s": 60, "token_range": [0, 64]}
    asked = envelope(("pin", pinned), ("kv.release", {}), ("explode", {}))
    one.add("a", PROMPT, 40, kv_hints=asked, session_id="s")
    one.run()
    (report,) = reports_to(server)
    pin = Action("0", ActionType.PIN, Target("", 0, 64), 0, 60.0)
    release = Action("1", ActionType.RELEASE)
    assert report.session_id == "s" and report.hints.message_id == "m"
    assert report.hints.actions == (pin, release)
    assert [one.action_id for one in report.hints.rejected] == ["2"]
    # The request ends its session: lowest priority.
    assert report.retention == Retention(-MAX_PRIORITY)
    (over,) = ended(server)
    assert over.session_id == "s" and over.hints == Hints("m", (pin, release))
    hashes = one.requests["a"].block_hashes
    assert list(over.hashes) == list(hashes) and len(hashes) == 239 // BLOCK_TOKENS
    assert one.counters["wrong_hints"] == 1


def test_a_session_is_told_of_without_hints(engine: Any, server: Any) -> None:
    one = engine()
    one.add("a", PROMPT, 2, session_id="s")
    one.add("b", prompt(2, 60), 2, transfer={"hotkv.session": "t"})
    one.add("nothing", prompt(3, 60), 2)
    # Older vLLM has no hints.
    old = one.add("old", prompt(4, 60), 2)
    del old.kv_hints, old.session_id
    one.run()
    names = [(report.session_id, bool(report.hints)) for report in reports_to(server)]
    assert names == [("s", False), ("t", False), ("", False), ("", False)]
    assert {e.session_id for e in ended(server)} == {"s", "t"}


RETAIN, PIN = ["hotkv.retain"], ["hotkv.pin"]
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("params", "kinds", "retention", "num_wrong"),
    [
        (None, [], NO_RETENTION, 0),
        ("no mapping", [], NO_RETENTION, 0),
        ({"other.priority": 3, 5: 6}, [], NO_RETENTION, 0),
        ({"hotkv.priority": MAX_PRIORITY}, RETAIN, Retention(MAX_PRIORITY), 0),
        ({"hotkv.priority": -MAX_PRIORITY}, RETAIN, Retention(-MAX_PRIORITY), 0),
        ({"hotkv.priority": MAX_PRIORITY + 1}, [], NO_RETENTION, 1),
        ({"hotkv.priority": -MAX_PRIORITY - 1}, [], NO_RETENTION, 1),
        ({"hotkv.priority": True}, [], NO_RETENTION, 1),
        ({"hotkv.priority": 1.0}, [], NO_RETENTION, 1),
        ({"hotkv.ttl_s": MAX_TTL_S}, RETAIN, Retention(0, MAX_TTL_S), 0),
        ({"hotkv.ttl_s": 0, "hotkv.pin": False}, [], NO_RETENTION, 0),
        ({"hotkv.ttl_s": MAX_TTL_S + 1}, [], NO_RETENTION, 1),
        ({"hotkv.ttl_s": -1}, [], NO_RETENTION, 1),
        ({"hotkv.ttl_s": True}, [], NO_RETENTION, 1),
        ({"hotkv.ttl_s": float("nan")}, [], NO_RETENTION, 1),
        ({"hotkv.ttl_s": 5, "hotkv.pin": True}, PIN, Retention(0, 5.0, True), 0),
        ({"hotkv.pin": 1, "hotkv.ttl_s": 5}, RETAIN, Retention(0, 5.0), 1),
        ({"hotkv.pin": True}, [], NO_RETENTION, 1),
        ({"hotkv.pin": True, "hotkv.ttl_s": 0}, [], NO_RETENTION, 1),
        ({"hotkv.cache_control": {"type": "ephemeral"}}, RETAIN, Retention(0, 300.0), 0),
        ({"hotkv.cache_control": HOUR, "hotkv.pin": True}, PIN, Retention(0, 3600.0, True), 0),
        ({"hotkv.cache_control": "24h"}, RETAIN, Retention(0, 86_400.0), 0),
        ({"hotkv.cache_control": "1h", "hotkv.ttl_s": 9}, RETAIN, Retention(0, 9.0), 0),
        ({"hotkv.cache_control": {"type": "lasting"}}, [], NO_RETENTION, 1),
        ({"hotkv.cache_control": "25h"}, [], NO_RETENTION, 1),
        ({"hotkv.cache_control": "1h "}, [], NO_RETENTION, 1),
        ({"hotkv.demote": True}, ["hotkv.demote"], Retention(-MAX_PRIORITY), 0),
        ({"hotkv.release": True}, ["hotkv.release"], Retention(-MAX_PRIORITY), 0),
        ({"hotkv.release": False}, [], NO_RETENTION, 0),
        ({"hotkv.release": 1, "hotkv.session": "\n"}, [], NO_RETENTION, 2),
        ({"hotkv.such": 1}, [], NO_RETENTION, 1),
        ({"hotkv.priority": 10**5000, "hotkv.\n" + "x" * 500: 1}, [], NO_RETENTION, 2),
        ({"hotkv.\n" + "x" * 500: 1}, [], NO_RETENTION, 1),
        ({"hotkv.priority": 2, "hotkv.ttl_s": "x", "hotkv.pin": True}, RETAIN, Retention(2), 2),
    ],
)
def test_short_forms_are_actions_wrong_ones_logged(
    warnings: list[str], params: Any, kinds: list[str], retention: Retention, num_wrong: int
) -> None:
    """Wrong values are counted each time, and logged once in LOG_INTERVAL_S."""
    stats = HotKVStats()
    reader, request = HintReader(stats), SimpleNamespace(request_id="a", kv_transfer_params=params)
    for now_s, num_logged in ((1.0, 1), (LOG_INTERVAL_S, 1), (1.0 + LOG_INTERVAL_S, 2)):
        asked = reader.asked(request, now_s)
        assert [action.action_id for action in asked.hints.actions] == kinds
        assert asked.retention == retention
        assert len(warnings) == num_logged * bool(num_wrong)
        assert all(line.isprintable() and len(line) < 300 for line in warnings)
    assert stats.data.get("wrong_hints", 0) == 3 * num_wrong


def test_client_may_choose_any_request_id(engine: Any, server: Any) -> None:
    one = engine()
    for name in ("a\nb\ud800", "x" * 500):
        one.add(name, PROMPT, 3, transfer={"hotkv.priority": 3})
    one.run()
    first, second = reports_to(server)
    assert first.hints.message_id == "request ab" and is_identifier(second.hints.message_id)


KEYS = st.sampled_from(["hotkv.priority", "hotkv.ttl_s", "hotkv.pin", "hotkv.x", "remote_host"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(st.one_of(st.none(), st.text(), st.dictionaries(st.one_of(st.integers(), KEYS), VALUES)))
def test_no_hint_breaks_a_request(params: Any) -> None:
    request = SimpleNamespace(request_id="a", kv_transfer_params=params)
    assert isinstance(HintReader(HotKVStats()).asked(request, 0.0).retention, Retention)


def test_odd_hints_never_touch_a_request(engine: Any, server: Any) -> None:
    one = engine()
    many, other_version = envelope(*[("demote", {})] * 5000), KvHintsEnvelope("7", "m", [])
    long_list = envelope(("pin", {"ttl_s": [1] * 100_000}))
    long_name = envelope(("retain", {"target": {"session_id": "x" * 1_000_000}}))
    for odd in (many, other_version, long_list, long_name, "no envelope", 5):
        one.add("a", PROMPT, 3, kv_hints=odd, session_id={"odd": 1})
        one.run()
        report = reports_to(server)[-1]
        assert len(one.outputs["a"]) == 3 and report.session_id == ""
        assert len(report.hints.actions) <= MAX_ACTIONS
    assert len(reports_to(server)) == 6 and "callback_errors" not in one.counters
    assert one.counters["wrong_hints"] == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pins_releases_and_resets_reach_the_server(
    daemon: Daemon, engines: Engines, tmp_path: Path
) -> None:
    target = daemon.start().target
    engine = engines.start(write_model(tmp_path / "model"), target)
    (text,) = prompts(5, (333,))
    block_bytes = 2 * 2 * 2 * 32 * BLOCK_TOKENS * 2

    def outcome(message_id: str) -> dict[str, Any]:
        with HintClient(target) as client:
            return client.outcomes(message_id)[0][0]

    def num_pinned() -> int:
        return int(daemon.admin("tiers")[0]["pinned_byte_count"]) // block_bytes

    def ask(kind: str, **payload: Any) -> None:
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0"}
        actions = [action | {"payload": payload}]
        asked = {"protocol_version": "0.1", "message_id": kind, "actions": actions}
        engine.ask("hinted", prompt=text, max_tokens=40, hints=asked, session="chat")
        settled(engine)
        wait_for(lambda: outcome(kind)["status"] != "deferred")
        assert outcome(kind)["status"] == "accepted"

    ask("pin", ttl_s=600)
    num_blocks = (333 + 39) // BLOCK_TOKENS
    # Blocks of the answer may be pinned later.
    assert outcome("pin")["block_count"] in (333 // BLOCK_TOKENS, num_blocks)
    wait_for(lambda: num_pinned() == num_blocks, "the pins")
    engine.ask("reset")
    ask("release")
    assert outcome("release")["session_id"] == "chat"
    wait_for(lambda: num_pinned() == 0, "the release")
    hash_tokens = daemon.admin("key_spaces")[0]["key_space"]["hash_block_token_count"]
    assert outcome("pin")["reused_block_count"] * hash_tokens == usable(text)
    (other,) = prompts(9, (300,))
    hints = {"hotkv.pin": True, "hotkv.ttl_s": 600, "hotkv.priority": "high"}
    engine.ask("generate", prompts=[other], max_tokens=8, transfer=hints)
    assert settled(engine)["wrong_hints"] == 1 and "hotkv.priority = high" in engine.log()
    wait_for(lambda: num_pinned() == usable(other) // BLOCK_TOKENS, "the pins")
    assert engine.ask("reset", connector=True)["done"]
    assert daemon.admin("blocks")["blocks"] == [] and num_pinned() == 0
    for cached in (0, usable(other)):
        assert engine.ask("generate", prompts=[other], max_tokens=8)["cached"] == [cached]
        settled(engine)
        engine.ask("reset")
    totals = engine.ask("stats")["totals"]
    assert totals["resets"] == 1 and not {"failed_loads", "callback_errors"} & totals.keys()
