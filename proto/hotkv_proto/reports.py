"""Reports of engines.

A hash block is a range of `hash_block_tokens` tokens, for which the engine computes one hash. A
block of a group has one or several.
"""

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.hints import NO_HINTS, Hints

# -------------------------------------------------------------------------------- why blocks missed


class Miss(enum.IntEnum):
    """Why tokens of a prompt did not hit; numbered as `hotkv.v1.MissReason`."""

    UNKNOWN = 0
    ABSENT = 1
    """At the engine's lookup. The server replaces this by NEVER_STORED, EVICTED, REMOVED,
    NO_ROOM, LEFT_BELOW or IN_FLIGHT."""
    NEVER_STORED = 2
    """Or evicted long ago."""
    EVICTED = 3
    IN_FLIGHT = 4
    """Was being written or promoted, or became ready after the lookup."""
    REFUSED = 5
    """Lookup or lease, or the lease pinned fewer blocks than were found."""
    COMPUTED_SOONER = 6
    """Computing is faster than loading."""
    NO_SERVER = 7
    """No connection when the request came."""
    NOT_ASKED = 8
    """For example because the request or the engine's role excludes it."""
    LATE = 9
    """No answer in time, or the lease had expired when it was read."""
    FAILED_LOAD = 10
    """This load of the blocks failed, or an earlier one had."""
    PARTIAL_BLOCK = 11
    """Can't hit: tokens after the last full block, and the block of the prompt's last token,
    which an engine always computes. Reported if the hit has the greatest possible length: a
    block shorter with a draft model, and with several block sizes only where blocks of all
    groups end."""
    LEFT_BELOW = 12
    """In a tier and not promoted: computing is faster, or the tier is down or busy."""
    REMOVED = 13
    """By an operator's call, by a flush, or because its bytes were damaged."""
    NO_ROOM = 14
    """Blocks in its store's way were pinned, reserved or expected to be used sooner."""


SAID_BY_ENGINES = frozenset(
    {
        Miss.ABSENT,
        Miss.REFUSED,
        Miss.COMPUTED_SOONER,
        Miss.NO_SERVER,
        Miss.NOT_ASKED,
        Miss.LATE,
        Miss.FAILED_LOAD,
        Miss.PARTIAL_BLOCK,
    }
)
"""The server determines the others."""
CANCELS = frozenset({Miss.COMPUTED_SOONER, Miss.NOT_ASKED})
"""The engine cancels a load. NOT_ASKED: because of a reset, or weights or adapter may have
changed."""


# ------------------------------------------------------------------------------- requests and loads

Hashes_co = TypeVar("Hashes_co", covariant=True)
"""In an engine a sequence of bytes, in the server uint32 [n, 8]."""


@dataclass(frozen=True, slots=True)
class RequestReport(Generic[Hashes_co]):
    """A scheduled request.

    hashes: of the prompt's full hash blocks.
    device_hit_tokens: in the engine's device cache or vLLM's CPU tier.
    hit_tokens: these and those in hotkv.
    age_s: since the request reached the engine.
    session_id: the router's, of the user's session.
    miss: behind the hit; one of `SAID_BY_ENGINES`.
    saved_s: prefill time, by hotkv.
    wait_s: for lookups and leases.
    report_id: for a later `LoadEnd`; 0: none follows.
    request_id: the engine's, for operators; may be empty.
    """

    hashes: Hashes_co
    prompt_tokens: int
    device_hit_tokens: int
    hit_tokens: int
    age_s: float
    retention: Retention = NO_RETENTION
    session_id: str = ""
    hints: Hints = NO_HINTS
    miss: Miss = Miss.UNKNOWN
    saved_s: float = 0.0
    wait_s: float = 0.0
    report_id: int = 0
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest(Generic[Hashes_co]):
    """Reported only if the request names a user session or has hints.

    hashes: of the full hash blocks of prompt and answer.
    hints: of the `RequestReport`, without rejections.
    """

    hashes: Hashes_co
    session_id: str = ""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load.

    report_id: of the `RequestReport`.
    wait_s: 0 if the request has ended before the load, which is then `failed`.
    miss: of a failed load; one of `CANCELS` if the engine has cancelled it.
    """

    report_id: int
    wait_s: float
    failed: bool = False
    miss: Miss = Miss.FAILED_LOAD
