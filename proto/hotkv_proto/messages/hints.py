"""Converts the hints that an engine has read from a request to messages and back (hints.proto),
and reads envelopes that routers send outside a request."""

import json
from typing import Any

from hotkv_proto import hints
from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.hints import Action, ActionType, Hints, Rejection, Target
from hotkv_proto.messages import fields
from hotkv_proto.v1 import hints_pb2

ACTION_TYPES = {
    kind: hints_pb2.HintActionType.Value(f"HINT_ACTION_TYPE_{kind.name}") for kind in ActionType
}
KINDS = {number: kind for kind, number in ACTION_TYPES.items()}
MAX_ENVELOPE_CHARS = 64 << 10
MAX_REJECTIONS = hints.MAX_ACTIONS + 1


def request_hints_message(value: Hints) -> hints_pb2.RequestHints | None:
    """None for no hints."""
    if not (value.actions or value.rejected):
        return None
    return hints_pb2.RequestHints(
        message_id=value.message_id,
        actions=[
            hints_pb2.HintAction(
                action_id=one.action_id,
                action_type=ACTION_TYPES[one.kind],
                session_id=one.target.session_id,
                start_token=one.target.start_tokens,
                end_token=one.target.end_tokens or 0,
                priority=one.priority,
                ttl_ms=fields.whole_ms(one.ttl_s),
                deadline_ms=fields.whole_ms(one.deadline_s),
                clipped=one.clipped,
            )
            for one in value.actions
        ],
        rejections=[
            hints_pb2.HintRejection(
                action_id=one.action_id, action_type=one.kind, reason=one.reason
            )
            for one in value.rejected
        ],
    )


def read_request_hints(field: str, message: hints_pb2.RequestHints) -> Hints:
    """Raises INVALID_FIELD or TOO_LARGE for values that no engine sends.

    field: path, for errors.
    """
    if len(message.actions) > hints.MAX_ACTIONS or len(message.rejections) > MAX_REJECTIONS:
        raise HotKVError(
            Reason.TOO_LARGE,
            f"{field}: {len(message.actions)} actions and {len(message.rejections)} rejections; "
            f"at most {hints.MAX_ACTIONS} and {MAX_REJECTIONS} are accepted",
        )
    return Hints(
        hint_identifier(f"{field}.message_id", message.message_id),
        tuple(_action(f"{field}.actions", one) for one in message.actions),
        tuple(
            Rejection(
                hint_identifier(f"{field}.rejections.action_id", one.action_id),
                _shown(one.action_type, hints.MAX_ID_CHARS),
                _shown(one.reason, hints.MAX_REASON_CHARS),
            )
            for one in message.rejections
        ),
    )


def _action(field: str, message: hints_pb2.HintAction) -> Action:
    kind = KINDS.get(message.action_type)
    if kind is None:
        raise invalid(
            f"{field}.action_type is {message.action_type}; allowed are 1 to {len(KINDS)}"
        )
    end = message.end_token or None
    if not 0 <= message.start_token < (end or hints.MAX_TOKENS) <= hints.MAX_TOKENS:
        raise invalid(
            f"{field}.start_token is {message.start_token}, end_token {message.end_token}; they "
            "must rise"
        )
    priority = message.priority if kind in (ActionType.RETAIN, ActionType.PIN) else 0
    action = Action(
        hint_identifier(f"{field}.action_id", message.action_id),
        kind,
        Target(
            hint_identifier(f"{field}.session_id", message.session_id), message.start_token, end
        ),
        priority,
        fields.seconds(f"{field}.ttl_ms", message.ttl_ms),
        min(fields.seconds(f"{field}.deadline_ms", message.deadline_ms), hints.MAX_DEADLINE_S),
        _shown(message.clipped, hints.MAX_REASON_CHARS),
    )
    try:
        _ = action.retention
    except ValueError as error:
        raise invalid(f"{field}: {error}") from error
    return action


def _shown(text: str, most: int) -> str:
    """Safe in an operator's terminal: what can't be printed becomes its `repr`."""
    text = text[:most]
    return text if text.isprintable() else repr(text)[:most]


def hint_identifier(field: str, text: str) -> str:
    """A router's id, which may be empty. Raises INVALID_FIELD for more than MAX_ID_CHARS
    characters, or for some that can't be printed."""
    if text and not hints.is_identifier(text):
        raise invalid(f"{field} must be printable, of at most {hints.MAX_ID_CHARS} characters")
    return text


def read_envelope(text: str) -> Hints:
    """Reads JSON. A wrong action is listed in `Hints.rejected`. Raises INVALID_FIELD if the text
    is no JSON object, TOO_LARGE if it is too long."""
    check_most(MAX_ENVELOPE_CHARS, len(text), "kv_hints has {} characters")
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"kv_hints is no JSON: {error}"[:200]) from error
    if not isinstance(value, dict):
        raise invalid("kv_hints is no JSON object")
    return hints.read(value)
