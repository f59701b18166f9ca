"""Hints that routers send with a request, in vLLM's envelope (`kv_hints`): a list of actions on
blocks.

Only this module knows names, versions and payloads. vLLM's PR #53423 defines the envelope and
leaves the actions to the receiver; RFCs #51428, #52113 and #57103 name those implemented here.

Always true: `read` never raises. A wrong action is rejected alone, with a reason that names the
field. Sizes are bounded (MAX_ACTIONS, MAX_ID_CHARS). A request is served even if its hints can't
be executed.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hotkv_proto.blocks import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention

PROTOCOL_VERSION = "0.1"
PROTOCOL_MAJORS = ("0", "1")
ACTION_VERSION = "1.0"
ACTION_MAJORS = ("0", "1")
PREFIX = "kv."
"""That an action's type may have, as in KVCR's `kv.fetch`."""
MAX_ACTIONS = 64
"""Of an envelope; all further ones get a single rejection."""
MAX_ID_CHARS = 128
MAX_REASON_CHARS = 200
MAX_DEADLINE_S = 600.0
MAX_TOKENS = 1 << 31
ENVELOPE_ACTION_ID = "*"
"""Action id of an outcome for a whole envelope, or for all its actions beyond MAX_ACTIONS."""
_UNSET: Any = object()
Kind = TypeVar("Kind", bound=enum.Enum)


class ActionType(enum.Enum):
    """What a router asks for.

    retain: evict later than others.
    pin: do not evict for a time.
    demote: evict before others.
    prefetch: promote to host memory.
    release: the user session has ended; its blocks will not be used again.
    """

    RETAIN = "retain"
    PIN = "pin"
    DEMOTE = "demote"
    PREFETCH = "prefetch"
    RELEASE = "release"


AT_END = (ActionType.DEMOTE, ActionType.RELEASE)
"""Executed after the end of the request that carried them, if they name its own blocks or user
session."""


class Status(enum.Enum):
    """The outcome of an action.

    accepted: done for all blocks.
    clipped: done for some, or with reduced values.
    deferred: not done yet, or not finished.
    rejected: not done.
    missing: unknown user session, or no block in host memory.
    """

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Target:
    """The blocks to which an action applies.

    session_id: those of this user session's latest prompt; empty: those of the request.
    start_tokens, end_tokens: only blocks with tokens in this range of the prompt (None: to its
        end).
    """

    session_id: str = ""
    start_tokens: int = 0
    end_tokens: int | None = None

    def __str__(self) -> str:
        whose = f"session {self.session_id}" if self.session_id else "request"
        if not self.start_tokens and self.end_tokens is None:
            return whose
        end = "" if self.end_tokens is None else self.end_tokens
        return f"{whose} [{self.start_tokens}:{end}]"


@dataclass(frozen=True, slots=True)
class Action:
    """An action that was read without an error.

    action_id: the router's, or the index in the envelope, such as `#0`.
    priority, ttl_s: for `retain` and `pin`.
    deadline_s: for `prefetch`, from the action's arrival at the server.
    clipped: names the values that were reduced to their bounds.
    """

    action_id: str
    kind: ActionType
    target: Target = Target()
    priority: int = 0
    ttl_s: float = 0.0
    deadline_s: float = 0.0
    clipped: str = ""

    @property
    def retention(self) -> Retention:
        match self.kind:
            case ActionType.RETAIN:
                return Retention(self.priority, self.ttl_s)
            case ActionType.PIN:
                return Retention(self.priority, self.ttl_s, pin=True)
            case ActionType.DEMOTE | ActionType.RELEASE:
                return Retention(-MAX_PRIORITY)
            case _:
                return NO_RETENTION


@dataclass(frozen=True, slots=True)
class Rejection:
    """An action that was rejected, because it has an error.

    kind: as the router wrote it, shortened.
    reason: names the wrong field.
    """

    action_id: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hints:
    """What was read from an envelope."""

    message_id: str = ""
    actions: tuple[Action, ...] = ()
    rejected: tuple[Rejection, ...] = field(default=())

    def __bool__(self) -> bool:
        return bool(self.actions or self.rejected)

    def split(self, session_id: str) -> "tuple[Hints, Hints]":
        """Hints to execute at once, with all rejections, and hints to execute after the request's
        end (AT_END).

        session_id: the request's user session, or empty.
        """
        own = ("", session_id)
        later = tuple(a for a in self.actions if a.kind in AT_END and a.target.session_id in own)
        now = tuple(a for a in self.actions if a not in later)
        return Hints(self.message_id, now, self.rejected), Hints(self.message_id, later)

    def retention(self) -> Retention:
        """Joins the actions on all blocks of the request: the highest priority and the longest
        `ttl_s` (of the pins, if there are any). Actions that retain or pin outweigh those that
        demote or release."""
        asked = [
            action.retention
            for action in self.actions
            if action.target == Target() and action.kind is not ActionType.PREFETCH
        ]
        keeping = [r for r in asked if r.ttl_s or r.priority > 0] or asked
        if not keeping:
            return NO_RETENTION
        pins = [r for r in keeping if r.pin]
        ttl_s = max(r.ttl_s for r in pins or keeping)
        return Retention(max(r.priority for r in keeping), ttl_s, bool(pins))


NO_HINTS = Hints()


class _WrongField(Exception):
    """Names the field and the fault."""


def read(envelope: Any) -> Hints:
    """Reads vLLM's `KvHintsEnvelope`, or the same as mappings decoded from JSON. A wrong
    envelope or action does not raise; it is listed in `Hints.rejected`."""
    try:
        return _read(envelope)
    except _WrongField as error:
        return Hints("", (), (Rejection(ENVELOPE_ACTION_ID, "", _short(str(error))),))


def _read(envelope: Any) -> Hints:
    message_id = _identifier(_get(envelope, "message_id"), "message_id")
    version = _get(envelope, "protocol_version", PROTOCOL_VERSION)
    actions = _get(envelope, "actions", ())
    rejected: list[Rejection] = []
    if _major(version) not in PROTOCOL_MAJORS:
        reason = f"protocol_version is {shown(version)}; {PROTOCOL_VERSION} is known"
        rejected.append(Rejection(ENVELOPE_ACTION_ID, "", reason))
        return Hints(message_id, (), tuple(rejected))
    if not isinstance(actions, list | tuple):
        raise _WrongField(f"actions is {shown(actions)}; it must be a list")
    good: list[Action] = []
    known: set[str] = set()
    for number, one in enumerate(itertools.islice(actions, MAX_ACTIONS)):
        action_id, kind = _free_id(number, known), ""
        try:
            action_id = _identifier(_get(one, "action_id", action_id), "action_id") or action_id
            kind = shown(_get(one, "action_type", ""))
            if action_id in known:
                action_id = _free_id(number, known)
                raise _WrongField("action_id stands in this message before")
            known.add(action_id)
            good.append(_action(one, action_id))
        except _WrongField as error:
            rejected.append(Rejection(action_id, kind, _short(str(error))))
    if len(actions) > MAX_ACTIONS:
        reason = f"actions has {len(actions)}; the first {MAX_ACTIONS} are read"
        rejected.append(Rejection(ENVELOPE_ACTION_ID, "", reason))
    return Hints(message_id, tuple(good), tuple(rejected))


def _free_id(number: int, known: set[str]) -> str:
    action_id = f"#{number}"
    while action_id in known:
        action_id += "'"
    return action_id


def _action(one: Any, action_id: str) -> Action:
    kind = _kind(_get(one, "action_type", ""))
    version = _get(one, "action_version", ACTION_VERSION)
    if _major(version) not in ACTION_MAJORS:
        raise _WrongField(f"action_version is {shown(version)}; {ACTION_VERSION} is known")
    payload = _get(one, "payload", None)
    payload = {} if payload is None else payload
    if not isinstance(payload, Mapping):
        raise _WrongField(f"payload is {shown(payload)}; it must be an object")
    clipped: list[str] = []
    ttl_s = _seconds(payload, "ttl_s", MAX_TTL_S, clipped)
    deadline_s = _seconds(payload, "deadline_s", MAX_DEADLINE_S, clipped)
    if kind is ActionType.PIN and not ttl_s:
        raise _WrongField("payload.ttl_s is missing: a pin has an end")
    return Action(
        action_id,
        kind,
        _target(payload),
        _priority(payload, clipped) if kind in (ActionType.RETAIN, ActionType.PIN) else 0,
        ttl_s if kind in (ActionType.RETAIN, ActionType.PIN) else 0.0,
        (deadline_s or MAX_DEADLINE_S) if kind is ActionType.PREFETCH else 0.0,
        "; ".join(clipped),
    )


def _kind(value: Any) -> ActionType:
    if isinstance(value, str) and len(value) <= MAX_ID_CHARS:
        try:
            return ActionType(value.lower().removeprefix(PREFIX))
        except ValueError:
            pass
    known = ", ".join(kind.value for kind in ActionType)
    raise _WrongField(f"action_type is {shown(value)}; there are {known}")


def _target(payload: Mapping[Any, Any]) -> Target:
    """Reads `payload.target`, or `payload` without it."""
    given = payload.get("target", _UNSET)
    where, fields = ("payload", payload) if given is _UNSET else ("payload.target", given)
    if given is not _UNSET and not isinstance(given, Mapping):
        if given in (None, "request", "prefix"):
            return Target()
        raise _WrongField(f"payload.target is {shown(given)}; it must be an object")
    session_id = _identifier(fields.get("session_id"), f"{where}.session_id")
    start, end = 0, None
    tokens = fields.get("token_range")
    if tokens is not None:
        if not isinstance(tokens, list | tuple) or len(tokens) != 2:
            raise _WrongField(f"{where}.token_range is {shown(tokens)}; give [start, end]")
        start = _tokens(tokens[0], f"{where}.token_range[0]")
        end = None if tokens[1] is None else _tokens(tokens[1], f"{where}.token_range[1]")
        if end is not None and end <= start:
            raise _WrongField(f"{where}.token_range is [{start}, {end}]; it must rise")
    return Target(session_id, start, end)


def _tokens(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_TOKENS:
        raise _WrongField(f"{name} is {shown(value)}; it must be a count of tokens")
    return value


def _priority(payload: Mapping[Any, Any], clipped: list[str]) -> int:
    value = payload.get("priority", 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _WrongField(f"payload.priority is {shown(value)}; it must be a whole number")
    bounded = max(-MAX_PRIORITY, min(value, MAX_PRIORITY))
    if bounded != value:
        clipped.append(f"payload.priority is taken as {bounded}")
    return bounded


def _seconds(payload: Mapping[Any, Any], name: str, most_s: float, clipped: list[str]) -> float:
    value = payload.get(name, 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value or value < 0:
        raise _WrongField(f"payload.{name} is {shown(value)}; it must be seconds from 0")
    if value > most_s:
        clipped.append(f"payload.{name} is taken as {most_s:.0f}")
        return most_s
    return float(value)


def _identifier(value: Any, name: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID_CHARS or not value.isprintable():
        raise _WrongField(
            f"{name} is {shown(value)}; it must be text of at most {MAX_ID_CHARS} characters"
        )
    return value


def is_identifier(value: Any) -> bool:
    """A session, a message or an action may have this id."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable()


def _major(version: Any) -> str:
    return version[:MAX_ID_CHARS].partition(".")[0] if isinstance(version, str) else ""


def _get(holder: Any, name: str, default: Any = None) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name, default)
    return getattr(holder, name, default)


def shown(value: Any) -> str:
    """A short form, for messages."""
    if isinstance(value, str):
        return repr(value[:40]) if len(value) > 40 or not value.isprintable() else value or "''"
    if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a {type(value).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else f"{text[: MAX_REASON_CHARS - 1]}…"


def short_forms(retention: Retention, *, demote: bool, release: bool) -> Iterator[Action]:
    """The actions that a request's `hotkv.*` parameters stand for, on the request's own blocks."""
    if retention.pin:
        yield Action("hotkv.pin", ActionType.PIN, Target(), retention.priority, retention.ttl_s)
    elif retention != NO_RETENTION:
        yield Action(
            "hotkv.retain", ActionType.RETAIN, Target(), retention.priority, retention.ttl_s
        )
    if demote:
        yield Action("hotkv.demote", ActionType.DEMOTE)
    if release:
        yield Action("hotkv.release", ActionType.RELEASE)
