"""Why tokens of a prompt were computed although there is a cache; the numbers are those of the
wire."""

import enum


class Miss(enum.IntEnum):
    """The numbers are those of `hotkv.v1.MissReason`."""

    UNKNOWN = 0
    """Neither the engine nor the server can say."""
    ABSENT = 1
    """The engine asked, and the server had no more. The server then finds out more: one of the next
    three."""
    NEVER_STORED = 2
    """The block was never here, or was evicted so long ago that the server has forgotten it."""
    EVICTED = 3
    """The block made room for others."""
    IN_FLIGHT = 4
    """The block was being written or brought up, or became ready after the engine had asked."""
    REFUSED = 5
    """The server refused the lookup or lease, or pinned less than the lookup had found."""
    COMPUTED_SOONER = 6
    """The engine left the blocks where they lie, because it computes them sooner."""
    NO_SERVER = 7
    """The engine had no server when the request came."""
    NOT_ASKED = 8
    """The engine does not load for this request: the request or the engine's role rules it out."""
    LATE = 9
    """The server did not answer within the engine's time limit."""
    FAILED_LOAD = 10
    """The load of the hit failed."""
    PARTIAL_BLOCK = 11
    """The tokens behind the last full block of the prompt, or the block with its last token: no
    cache of blocks can have the first, and an engine always computes the second."""
    LEFT_BELOW = 12
    """The block lies in a tier below host memory and was not brought up: computing it is quicker,
    or the tier is down or busy."""


SAID_BY_ENGINES = frozenset(
    {
        Miss.ABSENT,
        Miss.REFUSED,
        Miss.COMPUTED_SOONER,
        Miss.NO_SERVER,
        Miss.NOT_ASKED,
        Miss.LATE,
    }
)
"""Reasons that engines report. The server finds out the others."""
