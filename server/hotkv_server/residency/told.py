"""What the core tells of its residencies: frozen answers, as `inspect`."""

from dataclasses import dataclass

from hotkv_server.cache.core import CacheCore
from hotkv_server.residency.book.register import Refusal
from hotkv_server.residency.book.residency import Residency


@dataclass(frozen=True, slots=True)
class ResidencyTotals:
    """All residencies together. `pinned_bytes`: each entry once; both it and `promised_bytes`, at
    most `bound_bytes` together, count slots with what their slabs lose. `grace_bytes`: slots that
    are kept for readers of the server before this one, until `grace_until_s`; inf if that is not
    known yet. `num_opened`, `num_refused`: since the start. `num_waiting`: engines that were
    refused last."""

    count: int
    pinned_bytes: int
    promised_bytes: int
    bound_bytes: int
    grace_bytes: int
    grace_until_s: float
    num_opened: int
    num_refused: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class ResidencyFigures:
    """One residency. `pinned_bytes`: of its slots, which others may pin, too."""

    engine_id: str
    residency_id: str
    key_space_id: int
    session_number: int
    opened_s: float
    num_blocks: int
    max_blocks: int
    pinned_bytes: int
    promised_bytes: int


def totals(core: CacheCore) -> ResidencyTotals:
    """All residencies together."""
    residencies = core.residencies
    bound, book, grace = residencies.bound, residencies.book, residencies.grace
    return ResidencyTotals(
        len(book),
        bound.pinned_bytes,
        bound.promised_bytes,
        bound.bound_bytes,
        grace.num_bytes,
        grace.until_s if grace.is_on else 0.0,
        book.num_opened,
        book.num_refused,
        len(book.refusals()),
    )


def counts_by_session(core: CacheCore) -> dict[int, int]:
    """How many residencies each session has opened; sessions without one left out."""
    counts: dict[int, int] = {}
    for residency in core.residencies.book.all():
        counts[residency.session_number] = counts.get(residency.session_number, 0) + 1
    return counts


def largest(core: CacheCore, most: int) -> list[ResidencyFigures]:
    """The residencies with the most room, `most` of them at most."""
    ordered = sorted(core.residencies.book.all(), key=lambda r: -sum(r.asked.values()))
    return [_figures(core, residency) for residency in ordered[:most]]


def _figures(core: CacheCore, residency: Residency) -> ResidencyFigures:
    index = core.space.index
    return ResidencyFigures(
        residency.engine_id,
        residency.residency_id,
        residency.key_space_id,
        residency.session_number,
        residency.opened_s,
        residency.num_blocks,
        sum(residency.asked.values()),
        sum(int(index.slot_bytes(pinned).sum()) for pinned in residency.pinned()),
        core.residencies.bound.costs(residency.left()),
    )


def refusals(core: CacheCore) -> list[Refusal]:
    """What engines were refused last and have not opened since, the most attempts first."""
    return sorted(core.residencies.book.refusals(), key=lambda refusal: -refusal.num_attempts)
