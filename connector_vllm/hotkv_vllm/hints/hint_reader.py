"""Reads a request's hints once, when it arrives: from vLLM's `kv_hints` and `session_id`, and in a
short form from `kv_transfer_params`.

Keys of the short form begin with `hotkv.`; others are ignored. `hotkv.cache_control` has the values
of Anthropic's field, which vLLM drops from a request's body. vLLM before 0.32 has no `kv_hints`.

A wrong hint never affects the request: it is dropped, counted and logged.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from hotkv_proto import hints
from hotkv_proto.blocks import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_proto.hints import MAX_ID_CHARS, NO_HINTS, Hints
from hotkv_vllm.config import PREFIX
from hotkv_vllm.link import logger
from hotkv_vllm.stats import HotKVStats

LOG_INTERVAL_S = 60.0

CACHE_TTL = "5m"
"""For a `cache_control` without `ttl`, as in Anthropic's API."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"([0-9]{1,6})([smh])")

_ALLOWED = {
    "priority": f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}",
    "ttl_s": f"a number of seconds from 0 to {MAX_TTL_S:.0f}",
    "cache_control": (
        'an object with type "ephemeral" and perhaps ttl, or the ttl alone: "5m", "1h", at most 24h'
    ),
    "pin": "true and false",
    "session": f"a printable name of at most {MAX_ID_CHARS} characters",
    "demote": "true and false",
    "release": "true and false",
}


@dataclass(frozen=True, slots=True)
class RequestHints:
    """retention: of all blocks; goes with the request's stores.
    session_id: of the client, such as a conversation; empty if not named.
    hints: all, for the report to the server.
    """

    retention: Retention = NO_RETENTION
    session_id: str = ""
    hints: Hints = NO_HINTS

    @property
    def lasts(self) -> bool:
        """Whether the request's end must be reported: a client session, or actions."""
        return bool(self.session_id or self.hints.actions)

    def at_end(self) -> Hints:
        """Only the actions, some of which take effect at the end."""
        return Hints(self.hints.message_id, self.hints.actions)


NOTHING = RequestHints()


class HintReader:
    def __init__(self, stats: HotKVStats) -> None:
        self._stats = stats
        self._quiet_until_s = -math.inf

    def asked(self, request: Any, now_s: float) -> RequestHints:
        """now_s: limits how often wrong hints are logged."""
        params = request.kv_transfer_params
        envelope, session = getattr(request, "kv_hints", None), getattr(request, "session_id", None)
        if envelope is None and session is None and not params:
            return NOTHING
        retention, given = self._short(params, now_s)
        session = given.get("session", session)
        if session is not None and not hints.is_identifier(session):
            self._complain(now_s, f"session_id: allowed is {_ALLOWED['session']}")
            session = None
        full = NO_HINTS if envelope is None else hints.read(envelope)
        for one in full.rejected:
            self._complain(now_s, f"kv_hints: action {one.action_id}: {one.reason}")
        actions = (
            *hints.short_forms(
                retention,
                demote=given.get("demote", False),
                release=given.get("release", False),
            ),
            *full.actions,
        )
        if not actions and not full.rejected and not session:
            return NOTHING
        message_id = full.message_id or _message_id(request.request_id)
        together = Hints(message_id, actions[: hints.MAX_ACTIONS], full.rejected)
        return RequestHints(together.retention(), session or "", together)

    def read(self, params: Any, now_s: float) -> Retention:
        """Retention in the short form only."""
        return self._short(params, now_s)[0]

    def _short(self, params: Any, now_s: float) -> tuple[Retention, dict[str, Any]]:
        """Retention, and all valid hints by name."""
        if not isinstance(params, dict):
            return NO_RETENTION, {}
        given = {
            key.removeprefix(PREFIX): value
            for key, value in params.items()
            if isinstance(key, str) and key.startswith(PREFIX)
        }
        if not given:
            return NO_RETENTION, {}
        good: dict[str, Any] = {}
        for name, value in given.items():
            if _is_good(name, value):
                good[name] = value
            elif name in _ALLOWED:
                shown = hints.shown(value)
                self._complain(now_s, f"{PREFIX}{name} = {shown}: allowed is {_ALLOWED[name]}")
            else:
                self._complain(
                    now_s,
                    (
                        f"{PREFIX}{hints.shown(name)}: there is no such hint; there are "
                        f"{', '.join(PREFIX + n for n in _ALLOWED)}"
                    ),
                )
        if "cache_control" in good:
            good.setdefault("ttl_s", _cache_ttl_s(good["cache_control"]))
        if good.get("pin") and not good.get("ttl_s"):
            self._complain(
                now_s,
                f"{PREFIX}pin = True: needs {PREFIX}ttl_s, how many seconds to keep the blocks",
            )
            del good["pin"]
        retention = Retention(
            good.get("priority", 0), float(good.get("ttl_s", 0.0)), good.get("pin", False)
        )
        return retention, good

    def _complain(self, now_s: float, what: str) -> None:
        self._stats.add("wrong_hints")
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + LOG_INTERVAL_S
            logger.warning(
                "hotkv: hints of a request: %s; the hint is ignored (said once in %.0f s)",
                what,
                LOG_INTERVAL_S,
            )


def _message_id(request_id: str) -> str:
    """From the request's id, without the unprintable characters that clients may choose."""
    printable = "".join(filter(str.isprintable, request_id[:MAX_ID_CHARS]))
    return f"request {printable}"[:MAX_ID_CHARS]


def _is_good(name: str, value: Any) -> bool:
    match name:
        case "priority":
            return (
                isinstance(value, int)
                and not isinstance(value, bool)
                and -MAX_PRIORITY <= value <= MAX_PRIORITY
            )
        case "ttl_s":
            return (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and 0 <= value <= MAX_TTL_S
            )
        case "cache_control":
            return _cache_ttl_s(value) is not None
        case "session":
            return hints.is_identifier(value)
        case "pin" | "demote" | "release":
            return isinstance(value, bool)
    return False


def _cache_ttl_s(value: Any) -> float | None:
    """None if the value is wrong."""
    if isinstance(value, dict):
        if value.get("type") != "ephemeral":
            return None
        value = value.get("ttl", CACHE_TTL)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    ttl_s = float(int(found[1]) * _SECONDS[found[2]])
    return ttl_s if ttl_s <= MAX_TTL_S else None
