"""Retention hints of a request, out of its `kv_transfer_params`.

Keys `hotkv.priority`, `hotkv.ttl_s` and `hotkv.pin`; keys without our prefix are other connectors'
and pass by. A wrong hint is left out, counted, and named in the log at most once in
`LOG_INTERVAL_S`; it never touches the request.
"""

import math
from typing import Any

from hotkv.retention import MAX_PRIORITY, MAX_TTL_S, NO_RETENTION, Retention
from hotkv_vllm.config import PREFIX
from hotkv_vllm.link import logger
from hotkv_vllm.stats import HotKVStats

LOG_INTERVAL_S = 60.0

_ALLOWED = {
    "priority": f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}",
    "ttl_s": f"a number of seconds from 0 to {MAX_TTL_S:.0f}",
    "pin": "true and false",
}


class HintReader:
    """Reads hints and says what is wrong with them."""

    def __init__(self, stats: HotKVStats) -> None:
        self._stats = stats
        self._quiet_until_s = -math.inf

    def read(self, params: Any, now_s: float) -> Retention:
        """The hints that can be used; NO_RETENTION for none."""
        if not isinstance(params, dict):
            return NO_RETENTION
        given = {
            key.removeprefix(PREFIX): value
            for key, value in params.items()
            if isinstance(key, str) and key.startswith(PREFIX)
        }
        if not given:
            return NO_RETENTION
        good: dict[str, Any] = {}
        for name, value in given.items():
            if _is_good(name, value):
                good[name] = value
            elif name in _ALLOWED:
                self._complain(now_s, f"{PREFIX}{name} = {value!r}: allowed is {_ALLOWED[name]}")
            else:
                self._complain(
                    now_s,
                    (
                        f"{PREFIX}{name}: there is no such hint; there are "
                        f"{', '.join(PREFIX + n for n in _ALLOWED)}"
                    ),
                )
        if good.get("pin") and not good.get("ttl_s"):
            self._complain(
                now_s,
                f"{PREFIX}pin = True: needs {PREFIX}ttl_s, how many seconds to keep the blocks",
            )
            del good["pin"]
        return Retention(
            good.get("priority", 0), float(good.get("ttl_s", 0.0)), good.get("pin", False)
        )

    def _complain(self, now_s: float, what: str) -> None:
        self._stats.add("wrong_hints")
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + LOG_INTERVAL_S
            logger.warning(
                "hotkv: a request's kv_transfer_params: %s; the hint is ignored (said once in "
                "%.0f s)",
                what,
                LOG_INTERVAL_S,
            )


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
        case "pin":
            return isinstance(value, bool)
    return False
