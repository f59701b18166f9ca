"""Tests the parser of hints: no malformed envelope makes it raise."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_proto import hints
from hotkv_proto.blocks import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_proto.hints import Action, ActionType, Hints, Rejection, Target, read
from hotkv_proto.messages.hints import read_request_hints
from hotkv_proto.v1 import hints_pb2


def envelope(*actions: Any, **fields: Any) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions), **fields}


def action(kind: Any = "retain", action_id: Any = "a", **payload: Any) -> dict[str, Any]:
    named = {"action_id": action_id, "action_type": kind, "payload": payload}
    return {**named, "action_version": "1.0"}


@pytest.mark.parametrize(
    ("given_action", "expected"),
    [
        (action("retain", priority=3, ttl_s=60), Action("a", ActionType.RETAIN, Target(), 3, 60.0)),
        (action("kv.Pin", ttl_s=1.5), Action("a", ActionType.PIN, Target(), 0, 1.5)),
        (action("demote", target={"session_id": "s"}), Action("a", ActionType.DEMOTE, Target("s"))),
        (
            action("prefetch", session_id="s", deadline_s=2, priority=3),
            Action("a", ActionType.PREFETCH, Target("s"), 0, 0.0, 2.0),
        ),
        (action("prefetch"), Action("a", ActionType.PREFETCH, deadline_s=hints.MAX_DEADLINE_S)),
        (
            action("release", target={"token_range": [16, None]}),
            Action("a", ActionType.RELEASE, Target("", 16)),
        ),
        (action("retain", token_range=[0, 32], target="request"), Action("a", ActionType.RETAIN)),
    ],
)
def test_actions_are_read(given_action: dict[str, Any], expected: Action) -> None:
    assert read(envelope(given_action)) == Hints("m", (expected,))


@pytest.mark.parametrize(
    ("given_action", "field", "most"),
    [
        (action("retain", priority=10**9), "priority", MAX_PRIORITY),
        (action("pin", ttl_s=float("inf")), "ttl_s", MAX_TTL_S),
    ],
)
def test_what_is_too_much_is_clipped(given_action: dict[str, Any], field: str, most: int) -> None:
    (found,) = read(envelope(given_action)).actions
    assert getattr(found, field) == most
    assert found.clipped == f"payload.{field} is taken as {most:g}"


@pytest.mark.parametrize(
    ("given_action", "field"),
    [
        (action("fetch"), "action_type is fetch; there are retain, pin, demote"),
        (action(5), "action_type is 5"),
        (action(action_id="x" * 200), "action_id"),
        (action(action_id="\n"), "action_id"),
        ({**action(), "action_version": "2.0"}, "action_version is 2.0"),
        ({**action(), "action_version": 1}, "action_version is 1"),
        ({**action(), "payload": [1]}, "payload is a list"),
        (action("pin"), "payload.ttl_s is missing"),
        (action("retain", ttl_s=-1), "payload.ttl_s is -1"),
        (action("retain", ttl_s=float("nan")), "payload.ttl_s is nan"),
        (action("retain", ttl_s="60"), "payload.ttl_s is 60"),
        (action("retain", priority=1.5), "payload.priority is 1.5"),
        (action("retain", priority=True), "payload.priority is True"),
        (action("retain", target=5), "payload.target is 5"),
        (action("retain", target={"session_id": ["s"]}), "payload.target.session_id is a list"),
        (action("retain", token_range=[5]), "payload.token_range is a list"),
        (action("retain", token_range=[5, 5]), "payload.token_range is [5, 5]; it must rise"),
        (action("retain", token_range=[-1, 5]), "payload.token_range[0] is -1"),
        (action("retain", token_range=[0, 10**30]), "payload.token_range[1] is a int"),
        (7, "action_type is ''"),
    ],
)
def test_bad_action_alone_is_rejected_by_field(given_action: Any, field: str) -> None:
    good = action("demote", "good")
    result = read(envelope(good, given_action))
    assert [one.action_id for one in result.actions] == ["good"]
    (rejected,) = result.rejected
    assert rejected.reason.startswith(field) and len(rejected.reason) <= hints.MAX_REASON_CHARS


@pytest.mark.parametrize(
    ("given_envelope", "reason"),
    [
        (envelope(action(), protocol_version="9.0"), "protocol_version is 9.0"),
        (envelope(action(), message_id=["m"]), "message_id is a list"),
        (envelope(actions="all"), "actions is all"),
        ({"actions": {"a": 1}}, "actions is a dict"),
    ],
)
def test_a_bad_envelope_is_rejected_as_a_whole(given_envelope: Any, reason: str) -> None:
    result = read(given_envelope)
    assert not result.actions
    assert [one.action_id for one in result.rejected] == [hints.ENVELOPE_ACTION_ID]
    assert result.rejected[0].reason.startswith(reason)


@pytest.mark.parametrize("nothing", [None, 5, "text", [], {}, object()])
def test_what_has_no_field_asks_nothing(nothing: Any) -> None:
    assert not read(nothing)


def test_id_counts_once_and_gaps_are_numbered() -> None:
    result = read(envelope(action("demote"), action("demote"), action("demote", None)))
    assert [one.action_id for one in result.actions] == ["a", "#2"]
    assert [(one.action_id, one.kind) for one in result.rejected] == [("#1", "demote")]


def test_index_as_id_names_no_other_action() -> None:
    """An action without id gets `#1` by default; outcomes must stay apart."""
    result = read(envelope(action("demote", action_id="#1"), action("release", action_id=None)))
    assert [one.action_id for one in result.actions] == ["#1", "#1'"] and not result.rejected


def test_client_text_about_hints_is_printable() -> None:
    odd = "\x1b[2J" + "\n" * 300
    sent = hints_pb2.RequestHints(
        message_id="m",
        actions=[hints_pb2.HintAction(action_type=hints_pb2.HINT_ACTION_TYPE_RETAIN, clipped=odd)],
        rejections=[
            hints_pb2.HintRejection(action_type=odd, reason=odd),
            hints_pb2.HintRejection(action_type="explode", reason="there are pin, demote…"),
        ],
    )
    found = read_request_hints("hints", sent)
    odd_one, good_one = found.rejected
    for text in (found.actions[0].clipped, odd_one.kind, odd_one.reason):
        assert text.startswith("'\\x1b[2J") and text.isprintable()
        assert len(text) <= hints.MAX_REASON_CHARS
    assert good_one == Rejection("", "explode", "there are pin, demote…")


def test_million_actions_cost_at_most_the_bound() -> None:
    result = read(envelope(*[{"action_type": "demote"}] * 1_000_000))
    assert len(result.actions) == hints.MAX_ACTIONS
    assert result.rejected[0].reason.startswith("actions has 1000000")


def test_what_waits_for_the_end_of_a_request() -> None:
    pin, mine = Action("p", ActionType.PIN, ttl_s=1.0), Action("m", ActionType.RELEASE)
    named = Action("n", ActionType.RELEASE, Target("own"))
    other = Action("o", ActionType.DEMOTE, Target("other"))
    rejected = (Rejection("x", "", "why"),)
    now, later = Hints("m", (pin, mine, named, other), rejected).split("own")
    assert now == Hints("m", (pin, other), rejected) and later == Hints("m", (mine, named))


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ([], NO_RETENTION),
        ([action("prefetch")], NO_RETENTION),
        ([action("retain", priority=2, ttl_s=5)], Retention(2, 5.0)),
        ([action("retain", priority=-2)], Retention(-2)),
        (
            [action("retain", "a", priority=2, ttl_s=5), action("pin", "b", ttl_s=3)],
            Retention(2, 3.0, True),
        ),
        (
            [action("retain", ttl_s=86_400), *(action("pin", str(s), ttl_s=s) for s in (10, 9))],
            Retention(0, 10.0, True),
        ),
        ([action("release")], Retention(-MAX_PRIORITY)),
        ([action("prefetch", "a"), action("retain", "b", priority=-2)], Retention(-2)),
        ([action("release", "a"), action("retain", "b", ttl_s=5)], Retention(0, 5.0)),
        ([action("pin", ttl_s=5, session_id="s")], NO_RETENTION),
        ([action("pin", ttl_s=5, token_range=[0, 5])], NO_RETENTION),
    ],
)
def test_stores_carry_the_requests_wish_for_blocks(actions: list[Any], expected: Retention) -> None:
    assert read(envelope(*actions)).retention() == expected


SCALARS = st.none() | st.booleans() | st.integers() | st.floats()
VALUES = st.recursive(
    SCALARS | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ["target", "session_id", "token_range", "priority", "ttl_s", "deadline_s", "odd"]


def maps(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any value, or a dict with some of these fields."""
    return VALUES | st.fixed_dictionaries({}, optional=fields)


ACTIONS = maps(
    action_id=VALUES,
    action_type=VALUES | st.sampled_from([kind.value for kind in ActionType]),
    action_version=VALUES | st.just("1.0"),
    payload=VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES),
)
ENVELOPES = maps(
    protocol_version=VALUES | st.just("0.1"),
    message_id=VALUES,
    actions=VALUES | st.lists(ACTIONS, max_size=5),
)


@given(ENVELOPES)
def test_nothing_breaks_the_reader(odd: Any) -> None:
    result = read(odd)
    for one in result.actions:
        assert isinstance(one.retention, Retention) and hints.is_identifier(one.action_id)
        assert 0 <= one.target.start_tokens < (one.target.end_tokens or hints.MAX_TOKENS)
        assert 0 <= one.deadline_s <= hints.MAX_DEADLINE_S and len(one.clipped) < 200
        assert one.target.session_id == "" or hints.is_identifier(one.target.session_id)
    for bad in result.rejected:
        assert bad.reason and len(bad.reason) <= hints.MAX_REASON_CHARS
        json.dumps([bad.action_id, bad.kind, bad.reason])
    assert isinstance(result.retention(), Retention)
