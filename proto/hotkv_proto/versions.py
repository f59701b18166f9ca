"""The protocol version, the features, the roles of sessions, and the limits of messages.

Client and server agree on version and features when a session (connection of a client) opens.
Always true: a session uses the newest version that both sides know, so either side may be upgraded
first. It uses a feature only if both sides named the feature. A change of the protocol that changes
the meaning of messages gets a new version; a change that only adds fields or calls is a feature.
"""

import enum
from collections.abc import Iterable
from typing import Final

OLDEST_VERSION: Final = 1
NEWEST_VERSION: Final = 1
MAX_MESSAGE_BYTES = 4 << 20
"""Largest size of a message to the server, in bytes. A larger message would end its stream, so
clients split it."""
MAX_PARTS = 1 << 15
"""Largest number of parts (fields, list entries and messages) of a message to the server. Parsing
so many takes about 20 ms of the server's event loop. A layout of 100 layers has a tenth of this
number."""
MAX_BATCH_BYTES = 64 << 10
"""Largest size of a batch (several requests or answers in one message), in bytes. A message that is
larger than this is sent alone."""


class Role(enum.IntEnum):
    """The role of a session (connection to the server) in its engine; numbered as
    `hotkv.v1.SessionRole`.

    scheduler: looks up blocks and holds leases.
    worker: registers memory and transfers blocks.
    tool: all other clients, such as tools and tests.
    """

    SCHEDULER = 1
    WORKER = 2
    TOOL = 3


class Feature(enum.IntEnum):
    """A part of the protocol that a session (connection to the server) uses only if client and
    server both know it; numbered as `hotkv.v1.Feature`."""

    RESIDENCY = 1
    """The server reserves room for a request's blocks, pins them, and publishes validity words
    behind its arena (`hotkv_proto.words`). A client may reserve more blocks later."""
    TIERS = 2
    """The server has tiers below host memory, so clients also look blocks up by calls: a call finds
    blocks in tiers, which are not in the block table in shared memory."""
    EVENTS = 3
    """A session can read the events of its key space (blocks became ready, blocks were removed).
    Engines publish these events together with their own events."""
    BATCHES = 5
    """A message of a session's gRPC stream may carry several requests, or several answers and
    notices."""


FEATURES: Final = frozenset(Feature)


def agreed_version(oldest: int, newest: int) -> int | None:
    """Returns the newest version that this software and the other end of the connection both speak;
    None if they share no version.

    oldest, newest: range of versions that the other end speaks.
    """
    version = min(newest, NEWEST_VERSION)
    return version if version >= max(oldest, OLDEST_VERSION) else None


def agreed_features(numbers: Iterable[int]) -> frozenset[Feature]:
    """Returns the features that this software and the other end of the connection both know.

    numbers: the numbers of the other end's features. Unknown numbers, of newer software, are
        ignored.
    """
    return FEATURES & frozenset(numbers)
