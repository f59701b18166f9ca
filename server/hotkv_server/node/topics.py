"""Topics: what a server tells of itself, as plain figures that any view can show.

Field names are those that `hotkv --json` shows; numbers are plain, hashes are hexadecimal, states
are words. An answer is made on the event loop and is bounded.
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hotkv_proto.errors import HotKVError, Reason

Figures = dict[str, Any]
"""Ready for JSON."""
MAX_KEY_SPACE_ID = (1 << 31) - 1


class Filters:
    """What a question is narrowed to: texts by name. Raises INVALID_FIELD for a value that can't be
    meant."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"Filters({dict(self._given)!r})"

    def text(self, name: str) -> str:
        """Empty if it is not given."""
        return self._given.get(name, "")

    def whole(self, name: str, most: int) -> int:
        """A whole number from 0 to `most`; 0 if it is not given."""
        text = self.text(name) or "0"
        if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > most:
            raise HotKVError(
                Reason.INVALID_FIELD, f"{name} is {text[:40]!r}; give a whole number, 0 to {most}"
            )
        return int(text)

    def page_size(self, default: int, most: int) -> int:
        """How many rows to tell of; `default` for 0 and if it is not given."""
        return self.whole("page_size", most) or default

    def seconds(self, name: str) -> float:
        """A time; 0 if it is not given."""
        text = self.text(name) or "0"
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found >= 0):
            raise HotKVError(
                Reason.INVALID_FIELD, f"{name} is {text[:40]!r}; give seconds, 0 for all"
            )
        return found


NO_FILTERS = Filters({})


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `filters`: the names of those that it heeds."""

    tell: Callable[[Filters], "Figures | Awaitable[Figures]"]
    filters: tuple[str, ...] = ()


async def tell(topics: Mapping[str, Topic], name: str, given: Mapping[str, str]) -> Figures:
    """What there is to say of one topic; of no topic the list of topics. Raises INVALID_FIELD, and
    as the topic."""
    if not name:
        return {"topics": {name: list(topic.filters) for name, topic in topics.items()}}
    topic = topics.get(name)
    if topic is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"topic is {name[:40]!r}; this server tells of {', '.join(topics)}",
        )
    for known in given:
        if known not in topic.filters:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"filters has {known[:40]!r}; {name} heeds {', '.join(topic.filters) or 'none'}",
            )
    told = topic.tell(Filters(given))
    return told if isinstance(told, dict) else await told
