"""Hints of routers, as vLLM brings them with a request (`kv_hints`, `session_id`), on their way to
the server; once with real vLLM and a real daemon."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hotkv_client.hints import HintClient
from hotkv_client.types import EndedRequest, RequestReport
from hotkv_proto.blocks import MAX_PRIORITY, NO_RETENTION, Retention
from hotkv_proto.hints import MAX_ACTIONS, Action, ActionType, Hints, Target, is_identifier
from tests.support.waiting import wait_for
from tests.vllm.harness import prompt
from tests.vllm.processes import Daemon, EngineProcess, Engines
from tests.vllm.runs import prompts, settled, usable
from tests.vllm.tiny import BLOCK_TOKENS, write_model

PROMPT = prompt(1, 200)


def envelope(*actions: tuple[str, dict[str, Any]], message_id: str = "m") -> KvHintsEnvelope:
    return KvHintsEnvelope(
        "0.1",
        message_id,
        [KvHintAction(str(i), kind, "1.0", payload) for i, (kind, payload) in enumerate(actions)],
    )


def reports(server: Any) -> list[RequestReport]:
    return [report for kind, batch in server.calls if kind == "report_requests" for report in batch]


def ended(server: Any) -> list[EndedRequest]:
    return [one for kind, batch in server.calls if kind == "ended" for one in batch]


def test_hints_go_with_the_report_and_wait_for_the_end(engine: Any, server: Any) -> None:
    one = engine()
    asked = envelope(
        ("pin", {"ttl_s": 60, "token_range": [0, 64]}), ("kv.release", {}), ("explode", {})
    )
    one.add("a", PROMPT, 40, kv_hints=asked, session_id="s")
    one.run()
    (report,) = reports(server)
    pin = Action("0", ActionType.PIN, Target("", 0, 64), 0, 60.0)
    release = Action("1", ActionType.RELEASE)
    assert report.session_id == "s" and report.hints.message_id == "m"
    assert report.hints.actions == (pin, release)
    assert [one.action_id for one in report.hints.rejected] == ["2"]
    # The session has ended: what is stored for it is the first to go.
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
    one.run()
    assert [(r.session_id, bool(r.hints)) for r in reports(server)] == [("s", False), ("t", False)]
    assert {e.session_id for e in ended(server)} == {"s", "t"}


def test_requests_that_ask_nothing_tell_nothing_at_their_end(engine: Any, server: Any) -> None:
    one = engine()
    one.generate("a", PROMPT, 3)
    assert not ended(server) and not reports(server)[0].hints


@pytest.mark.parametrize(
    ("transfer", "kinds", "retention"),
    [
        ({"hotkv.priority": 3}, ["hotkv.retain"], Retention(3)),
        ({"hotkv.ttl_s": 9, "hotkv.pin": True}, ["hotkv.pin"], Retention(0, 9.0, True)),
        ({"hotkv.demote": True}, ["hotkv.demote"], Retention(-MAX_PRIORITY)),
        (
            {"hotkv.release": True, "hotkv.session": "s"},
            ["hotkv.release"],
            Retention(-MAX_PRIORITY),
        ),
        ({"hotkv.release": False}, [], NO_RETENTION),
        ({"hotkv.release": 1, "hotkv.session": "\n"}, [], NO_RETENTION),
    ],
)
def test_short_forms_are_the_same_actions(
    engine: Any, server: Any, transfer: dict[str, Any], kinds: list[str], retention: Retention
) -> None:
    one = engine()
    one.add("a", PROMPT, 3, transfer=transfer)
    one.run()
    (report,) = reports(server)
    assert [action.action_id for action in report.hints.actions] == kinds
    assert report.retention == retention
    assert not kinds or report.hints.message_id == "request a"


def test_a_client_may_choose_any_id_for_its_request(engine: Any, server: Any) -> None:
    one = engine()
    for name in ("a\nb\ud800", "x" * 500):
        one.add(name, PROMPT, 2, transfer={"hotkv.priority": 1})
    one.run()
    names = [report.hints.message_id for report in reports(server)]
    assert names[0] == "request ab" and all(map(is_identifier, names))


@pytest.mark.parametrize(
    "odd",
    [
        envelope(*[("demote", {})] * 5000),
        KvHintsEnvelope("7", "m", []),
        envelope(("pin", {"ttl_s": [1] * 100_000})),
        envelope(("retain", {"target": {"session_id": "x" * 1_000_000}})),
        "no envelope",
        5,
    ],
    ids=["many", "version", "long list", "long name", "text", "number"],
)
def test_odd_hints_never_touch_a_request(engine: Any, server: Any, odd: Any) -> None:
    one = engine()
    one.add("a", PROMPT, 3, kv_hints=odd, session_id={"odd": 1})
    one.run()
    (report,) = reports(server)
    assert len(one.outputs["a"]) == 3 and report.session_id == ""
    assert len(report.hints.actions) <= MAX_ACTIONS and "hook_errors" not in one.counters


def test_requests_of_a_vllm_without_hints_are_served(engine: Any, server: Any) -> None:
    one = engine()
    request = one.add("a", PROMPT, 3)
    del request.kv_hints, request.session_id
    one.run()
    assert len(reports(server)) == 1


# ---------------------------------------------------------------------------------- real vLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def start(model: Path, engines: Engines) -> Callable[..., EngineProcess]:
    return functools.partial(engines.start, model)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_router_pins_and_releases_through_vllm(
    daemon: Daemon, start: Callable[..., EngineProcess]
) -> None:
    daemon.start()
    engine = start(daemon.target)
    (text,) = prompts(5, (333,))

    def ask(message_id: str, kind: str, **payload: Any) -> None:
        action = {"action_id": "a", "action_type": kind, "action_version": "1.0"}
        asked = {
            "protocol_version": "0.1",
            "message_id": message_id,
            "actions": [{**action, "payload": payload}],
        }
        engine.ask("hinted", prompt=text, max_tokens=40, hints=asked, session="chat")

    def outcome(message_id: str) -> dict[str, Any]:
        with HintClient(daemon.target) as client:
            return client.outcomes(message_id)[0][0]

    ask("pin", "pin", ttl_s=600)
    settled(engine)
    wait_for(lambda: outcome("pin")["status"] != "deferred")
    num_blocks = (333 + 39) // BLOCK_TOKENS
    assert outcome("pin")["status"] == "accepted" and outcome("pin")["block_count"] == num_blocks
    block_bytes = 2 * 2 * 2 * 32 * BLOCK_TOKENS * 2
    assert daemon.admin("tiers")[0]["pinned_byte_count"] == num_blocks * block_bytes
    engine.ask("reset")
    ask("release", "release")
    settled(engine)
    wait_for(lambda: outcome("release")["status"] != "deferred")
    assert outcome("release")["status"] == "accepted"
    assert outcome("release")["session_id"] == "chat"
    assert daemon.admin("tiers")[0]["pinned_byte_count"] == 0
    hash_tokens = daemon.admin("key_spaces")[0]["key_space"]["hash_block_token_count"]
    assert outcome("pin")["reused_block_count"] * hash_tokens == usable(text)
    assert "hook_errors" not in engine.ask("stats")["totals"]
