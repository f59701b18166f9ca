"""Reports of engines: scheduled requests, ended requests, ended loads, reasons of misses, and
counters of sparse decode.

A hash block is a range of `hash_block_tokens` tokens of a prompt: the engine computes one hash for
each such range. A block of a KV cache group consists of one or several hash blocks.
"""

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.hints import NO_HINTS, Hints

# -------------------------------------------------------------------------------- why blocks missed


class Miss(enum.IntEnum):
    """The reason why tokens of a prompt did not hit and were computed; numbered as
    `hotkv.v1.MissReason`."""

    UNKNOWN = 0
    """The engine and the server do not know the reason."""
    ABSENT = 1
    """The server did not have the block when the engine looked it up. The server replaces this
    reason by NEVER_STORED, EVICTED, REMOVED, NO_ROOM, LEFT_BELOW or IN_FLIGHT."""
    NEVER_STORED = 2
    """The block was never stored in this server, or was evicted so long ago that the server has
    forgotten it."""
    EVICTED = 3
    """The block was evicted to make room for other blocks."""
    IN_FLIGHT = 4
    """The block was being written or promoted, or became ready after the engine's lookup."""
    REFUSED = 5
    """The server refused the lookup or lease, or the lease pinned fewer blocks than the lookup had
    found."""
    COMPUTED_SOONER = 6
    """The engine did not load the blocks, because computing them is faster."""
    NO_SERVER = 7
    """The engine had no connection to a server when the request came."""
    NOT_ASKED = 8
    """The engine did not look the blocks up in hotkv, for example because the request or the
    engine's role excludes it."""
    LATE = 9
    """The server did not answer within the engine's time limit, or its lease had expired when the
    engine read the answer."""
    FAILED_LOAD = 10
    """The load of these blocks failed, or an earlier load of the blocks had failed."""
    PARTIAL_BLOCK = 11
    """Tokens that can't hit: the tokens after the prompt's last full block, because only full
    blocks are stored, and the block of the prompt's last token, because an engine always computes
    that token. An engine reports this reason if its hit has the greatest possible length. With
    speculative decoding by a draft model, that length is one block shorter. With groups of several
    block sizes, a hit can end only where blocks of all groups end."""
    LEFT_BELOW = 12
    """The block lies in a tier below host memory and was not promoted: computing it is faster, or
    the tier is down or busy."""
    REMOVED = 13
    """The block was removed by an operator's call, by a flush, or because its bytes were
    damaged."""
    NO_ROOM = 14
    """The block was not stored, because its store found no room: the blocks in its way were pinned,
    reserved for others or expected to be used sooner."""


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
"""Reasons that engines report. The server determines the other reasons."""
CANCELS = frozenset({Miss.COMPUTED_SOONER, Miss.NOT_ASKED})
"""Reasons for which an engine cancels a load. NOT_ASKED: because of a reset, or because the
engine's weights or the request's adapter may have changed."""


# ------------------------------------------------------------------------ counters of sparse decode

SPARSE_COUNTERS: tuple[str, ...] = (
    "selects",
    "context_blocks",
    "selected_blocks",
    "attended_blocks",
    "seeded_blocks",
    "corrected_blocks",
    "prefetched_blocks",
    "wanted_blocks",
    "hit_blocks",
    "estimated_mass",
    "swap_bytes",
    "select_s",
    "built_blocks",
    "build_s",
    "recall_samples",
    "recall",
    "true_mass",
    "faults",
    "loaded_blocks",
)
"""Names of the counters that engines keep per layer; `hotkv.v1.LayerCounters` defines them."""


def sparse_figures(counters: dict[str, float]) -> dict[str, float | None]:
    """Computes the figures that operators see from the counters of a layer, which are given by
    their names in SPARSE_COUNTERS. A figure is None if its denominator is 0.

    hit_ratio: share of the selected blocks that were already on the device (in the hot set), not
        counting the blocks that are always kept.
    recall_ratio: share of the truly best blocks to which the layer attended, as a mean over sampled
        selections.
    mean_estimated_mass: estimated share of the attention that the selected blocks receive, as a
        mean.
    mean_selected_blocks, mean_select_s: blocks and seconds per selection.
    """

    def ratio(part: str, whole: str) -> float | None:
        return counters[part] / counters[whole] if counters[whole] > 0 else None

    return {
        "hit_ratio": ratio("hit_blocks", "wanted_blocks"),
        "recall_ratio": ratio("recall", "recall_samples"),
        "mean_estimated_mass": ratio("estimated_mass", "selects"),
        "mean_selected_blocks": ratio("selected_blocks", "selects"),
        "mean_select_s": ratio("select_s", "selects"),
    }


# ------------------------------------------------------------------------------- requests and loads

Hashes_co = TypeVar("Hashes_co", covariant=True)
"""Type of the block hashes: in an engine a sequence of bytes, in the server uint32 [n, 8]."""


@dataclass(frozen=True, slots=True)
class RequestReport(Generic[Hashes_co]):
    """A request that the engine has scheduled.

    hashes: block hashes of the prompt, one for each full hash block (see the module), from the
        first block on.
    device_hit_tokens: tokens that hit in the engine's own device cache, or in vLLM's CPU tier.
    hit_tokens: `device_hit_tokens`, plus the tokens that hit in hotkv.
    age_s: time since the request reached the engine.
    retention: how long the request wants its blocks to be retained.
    session_id: id that the router has given to the user's session; empty without an id.
    hints: all hints of the request.
    miss: why the tokens behind the hit missed; one of `SAID_BY_ENGINES`.
    saved_s: prefill time that the hit in hotkv has saved.
    wait_s: time that the request waited for lookups and leases.
    report_id: number by which a later `LoadEnd` names the request; 0: no `LoadEnd` will follow.
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


@dataclass(frozen=True, slots=True)
class EndedRequest(Generic[Hashes_co]):
    """A request that has ended. Engines report it only if the request names a user session or has
    hints.

    hashes: block hashes of prompt and answer, one for each full hash block (see the module), from
        the first block on.
    session_id: id that the router has given to the user's session; empty without an id.
    hints: the hints of the request's `RequestReport`, without the rejections.
    """

    hashes: Hashes_co
    session_id: str = ""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load.

    report_id: the `report_id` of the load's request in its earlier `RequestReport`.
    wait_s: time from the start of the load to its end; 0 if the request has ended before the load.
    failed: whether the load failed, or the request has ended before the load.
    miss: why the blocks of a failed load missed: one of `CANCELS` if the engine itself has
        cancelled the load.
    """

    report_id: int
    wait_s: float
    failed: bool = False
    miss: Miss = Miss.FAILED_LOAD
