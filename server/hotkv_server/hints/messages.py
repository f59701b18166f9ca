"""Hints and their outcomes on the wire."""

import json
from collections.abc import Sequence
from typing import Any

from hotkv_proto import hints
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.hints import Action, ActionType, Hints, Rejection, Status, Target
from hotkv_proto.v1 import hints_pb2
from hotkv_server.cache.values import Outcome
from hotkv_server.wire import convert

KINDS = {
    hints_pb2.HINT_ACTION_TYPE_RETAIN: ActionType.RETAIN,
    hints_pb2.HINT_ACTION_TYPE_PIN: ActionType.PIN,
    hints_pb2.HINT_ACTION_TYPE_DEMOTE: ActionType.DEMOTE,
    hints_pb2.HINT_ACTION_TYPE_PREFETCH: ActionType.PREFETCH,
    hints_pb2.HINT_ACTION_TYPE_RELEASE: ActionType.RELEASE,
}
STATUSES = {
    Status.ACCEPTED: hints_pb2.HINT_STATUS_ACCEPTED,
    Status.CLIPPED: hints_pb2.HINT_STATUS_CLIPPED,
    Status.DEFERRED: hints_pb2.HINT_STATUS_DEFERRED,
    Status.REJECTED: hints_pb2.HINT_STATUS_REJECTED,
    Status.MISSING: hints_pb2.HINT_STATUS_MISSING,
}
MAX_ENVELOPE_CHARS = 64 << 10
MAX_REJECTIONS = hints.MAX_ACTIONS + 1


def request_hints(field: str, message: hints_pb2.RequestHints) -> Hints:
    """Hints that an engine has read. Raises INVALID_FIELD for what no engine would send."""
    if len(message.actions) > hints.MAX_ACTIONS or len(message.rejections) > MAX_REJECTIONS:
        raise HotKVError(
            Reason.TOO_LARGE,
            f"{field}: {len(message.actions)} actions and {len(message.rejections)} rejections; "
            f"at most {hints.MAX_ACTIONS} and {MAX_REJECTIONS} are accepted",
        )
    return Hints(
        identifier(f"{field}.message_id", message.message_id),
        tuple(_action(f"{field}.actions", one) for one in message.actions),
        tuple(
            Rejection(
                identifier(f"{field}.rejections.action_id", one.action_id),
                _shown(one.action_type, hints.MAX_ID_CHARS),
                _shown(one.reason, hints.MAX_REASON_CHARS),
            )
            for one in message.rejections
        ),
    )


def _action(field: str, message: hints_pb2.HintAction) -> Action:
    kind = KINDS.get(message.action_type)
    if kind is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{field}.action_type is {message.action_type}; allowed are 1 to {len(KINDS)}",
        )
    end = message.end_token or None
    if not 0 <= message.start_token < (end or hints.MAX_TOKENS) <= hints.MAX_TOKENS:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{field}.start_token is {message.start_token}, end_token {message.end_token}; they "
            "must rise",
        )
    priority = message.priority if kind in (ActionType.RETAIN, ActionType.PIN) else 0
    action = Action(
        identifier(f"{field}.action_id", message.action_id),
        kind,
        Target(identifier(f"{field}.session_id", message.session_id), message.start_token, end),
        priority,
        convert.seconds(f"{field}.ttl_ms", message.ttl_ms),
        min(convert.seconds(f"{field}.deadline_ms", message.deadline_ms), hints.MAX_DEADLINE_S),
        _shown(message.clipped, hints.MAX_REASON_CHARS),
    )
    try:
        _ = action.retention
    except ValueError as error:
        raise HotKVError(Reason.INVALID_FIELD, f"{field}: {error}") from error
    return action


def _shown(text: str, most: int) -> str:
    """A client's words as operators may see them on a terminal: short and printable."""
    text = text[:most]
    return text if text.isprintable() else repr(text)[:most]


def envelope(text: str) -> Hints:
    """A router's envelope in JSON. Raises INVALID_FIELD or TOO_LARGE for what is no envelope."""
    if len(text) > MAX_ENVELOPE_CHARS:
        raise HotKVError(
            Reason.TOO_LARGE,
            f"kv_hints has {len(text)} characters; at most {MAX_ENVELOPE_CHARS} are accepted",
        )
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HotKVError(Reason.INVALID_FIELD, f"kv_hints is no JSON: {error}"[:200]) from error
    if not isinstance(value, dict):
        raise HotKVError(Reason.INVALID_FIELD, "kv_hints is no JSON object")
    return hints.read(value)


def identifier(field: str, text: str) -> str:
    """A name that a router has chosen; may be empty."""
    if text and not hints.is_identifier(text):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"{field} must be printable, of at most {hints.MAX_ID_CHARS} characters",
        )
    return text


def outcomes(found: Sequence[Outcome], tenant: str, now_s: float) -> list[hints_pb2.HintOutcome]:
    """What has come of actions."""
    return [
        hints_pb2.HintOutcome(
            message_id=one.message_id,
            action_id=one.action_id,
            action_type=one.kind,
            session_id=one.session_id,
            status=STATUSES[one.status],
            reason=one.reason,
            block_count=one.num_blocks,
            done_block_count=one.num_done,
            reused_block_count=one.reused_blocks,
            saved_s=one.saved_s,
            age_s=max(0.0, now_s - one.came_s),
            sequence=one.sequence,
            tenant=tenant,
        )
        for one in found
    ]
