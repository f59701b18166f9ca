"""What engines report: requests that they have scheduled, requests that have ended, loads that have
ended.

`Hashes_co`: a sequence of bytes in an engine, words [n, 8] in the server.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from hotkv_proto.hints import NO_HINTS, Hints
from hotkv_proto.misses import Miss
from hotkv_proto.retention import NO_RETENTION, Retention

Hashes_co = TypeVar("Hashes_co", covariant=True)


@dataclass(frozen=True, slots=True)
class RequestReport(Generic[Hashes_co]):
    """A request that the engine has scheduled. `hashes`: of its prompt, one for each full hash
    block, in chain order.

    `device_hit_tokens` hit in the engine's own device cache, `hit_tokens` there or in hotkv.
    `age_s`: since it came to the engine. `session_id`: as its router has named it. `hints`: all
    that it brought; `retention` says the same of its own blocks, for those that it stores. `miss`:
    why the tokens beyond the hit missed, one of `hotkv_proto.misses.SAID_BY_ENGINES`. `saved_s`: of
    prefill, by what hit in hotkv. `wait_s`: for lookups and leases. `report_id`: names the request
    in `LoadEnd`, 0 for none.
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
    """A request that has ended, and has a session or hints. `hashes`: of prompt and answer, one for
    each full hash block, in chain order. `hints`: as they were reported, but for rejections."""

    hashes: Hashes_co
    session_id: str = ""
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """The end of a load whose request was reported before, under `report_id`. `wait_s`: from the
    beginning of the load to its end."""

    report_id: int
    wait_s: float
    failed: bool = False
