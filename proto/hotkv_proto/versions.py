"""What two sides of a session agree on: protocol versions, features, roles, and how long a message
may be.

Always true: a session speaks the newest version that both sides know, so either side may be
upgraded first, and uses a feature only if both sides named it. A version changes what messages
mean; what only adds to them is a feature.
"""

import enum
from collections.abc import Iterable
from typing import Final

OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
MAX_MESSAGE_BYTES = 4 << 20
"""Of a message to the server: a stream whose message is longer ends, so clients send several."""


class Role(enum.IntEnum):
    """What a session does in its engine; the numbers are those of `hotkv.v1.SessionRole`."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class Feature(enum.IntEnum):
    """What a session does only if both sides know it; the numbers are those of
    `hotkv.v1.Feature`."""

    RESIDENCY = 1
    """The server reserves and pins a request's blocks, and has words behind its arena."""
    TIERS = 2
    """The server has tiers below host memory: a lookup also finds what the block table has not."""


FEATURES: Final = frozenset(Feature)


def agreed_version(oldest: int, newest: int) -> int | None:
    """Newest version that this software and a peer speak; None if they have none in common."""
    version = min(newest, NEWEST_VERSION)
    return version if version >= max(oldest, OLDEST_VERSION) else None


def agreed_features(numbers: Iterable[int]) -> frozenset[Feature]:
    """Features that this software and a peer know."""
    return FEATURES & frozenset(numbers)
