"""Protocol version, features, roles, limits of messages.

Always true: a session uses the newest version that both sides know, so either side may be
upgraded first, and a feature only if both named it. A change of messages' meaning is a new
version; added fields or calls are a feature.
"""

import enum
from collections.abc import Iterable
from typing import Final

OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
MAX_MESSAGE_BYTES = 4 << 20
"""To the server. A larger message would end its stream, so clients split it."""
MAX_PARTS = 1 << 15
"""Fields, list entries and messages of a message to the server: 20 ms of its event loop. A
layout of 100 layers has a tenth."""


class Role(enum.IntEnum):
    """In an engine; numbered as `hotkv.v1.SessionRole`. Tools are all others."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class Feature(enum.IntEnum):
    """Used only if both sides know it; numbered as `hotkv.v1.Feature`."""

    RESIDENCY = 1
    """Residencies, which may grow later, and validity words as in `hotkv_proto.words`."""
    TIERS = 2
    """Calls look up blocks in tiers, which the block table lacks."""
    EVENTS = 3
    """A session reads its key space's events."""
    CUDA_RANGES = 5
    """Layouts may have ranges of CUDA's virtual memory."""
    END_WORDS = 6
    """Ends of transfers are reported in words, before the answers."""


FEATURES: Final = frozenset(Feature)


def agreed_version(oldest: int, newest: int) -> int | None:
    """None without one."""
    version = min(newest, NEWEST_VERSION)
    return version if version >= max(oldest, OLDEST_VERSION) else None


def agreed_features(numbers: Iterable[int]) -> frozenset[Feature]:
    """Ignores numbers of newer software."""
    return FEATURES & frozenset(numbers)
