"""The agreements of two sides of a session: protocol versions, features, roles, and the longest
message.

Always true: a session speaks the newest version that both sides know, so either side may be
upgraded first. It uses a feature only if both sides named it. A new version changes the meaning of
messages; a change that only adds to them is a feature.
"""

import enum
from collections.abc import Iterable
from typing import Final

OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
MAX_MESSAGE_BYTES = 4 << 20
"""Most bytes of a message to the server. A longer message ends its stream, so clients split it."""
MAX_BATCH_BYTES = 64 << 10
"""Most bytes that either side puts into a batch. Larger messages travel alone."""


class Role(enum.IntEnum):
    """The role of a session in its engine; numbered as `hotkv.v1.SessionRole`."""

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class Feature(enum.IntEnum):
    """A capability that a session uses only if both sides know it; numbered as
    `hotkv.v1.Feature`."""

    RESIDENCY = 1
    """The server reserves and pins a request's blocks, and publishes words behind its arena."""
    TIERS = 2
    """The server has tiers below host memory: a lookup also finds blocks that are not in the block
    table."""
    EVENTS = 3
    """Engines publish the server's events as their own."""
    RESIDENCY_GROWTH = 4
    """An open residency that is opened again for more blocks grows."""
    BATCHES = 5
    """A message of the stream may carry several requests, or several answers and notices."""


FEATURES: Final = frozenset(Feature)


def agreed_version(oldest: int, newest: int) -> int | None:
    """Returns the newest version that this software and a peer both speak; None if they share no
    version."""
    version = min(newest, NEWEST_VERSION)
    return version if version >= max(oldest, OLDEST_VERSION) else None


def agreed_features(numbers: Iterable[int]) -> frozenset[Feature]:
    """Returns the features that this software and a peer both know."""
    return FEATURES & frozenset(numbers)
