"""Compares eviction rules for what an agent's session leaves in the cache between two turns, by
replaying traces through the cache's core: `python -m bench.agents --trace FILE ...
[--capacity-percent 2,5] [--json]`.

`derive_hints` finds sessions: the next turn is the first later request that continues the prompt.
Traces do not name tools, so rules learn only from the gaps between turns. The rules:

- `lru`, `hotness`: the server's policies; `hotness` is its default.
- `hints`: `hotness` with the session ends and pauses that `hotkv-server simulate --hints` derives.
  A turn ends when it begins.
- `learnt`: `hotness` that protects a session's blocks until its next turn is expected.
- `continuum`: Continuum (arXiv 2511.02230) pins a session's KV for the time t that maximizes P(gap
  <= t) * benefit - t over the latest gaps, here of all sessions. The benefit is what a hit saves:
  an option here, derived from prefill and queueing in the paper. Then LRU; new blocks without space
  beside pinned ones are not stored. The paper's order of requests is left out.
- `cachewise`: CacheWise (arXiv 2606.16824) evicts the longest predicted idle time first, ties by
  LRU. Predicted is the session's mean gap (the paper: from the called tools); `cachewise_told`
  knows the true gap, as the authors' source may.
- `clairvoyant`: knows all later requests. No rule can have more hits.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.policies import POLICIES
from bench.report import parser, print_report
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Evictable, Keys
from hotkv_server.hints.book.returns import ReturnTimes, SessionGaps
from hotkv_server.simulate.replay import (
    ReplayHints,
    SimulatedTier,
    clairvoyant,
    derive_hints,
    prefix_of,
    replay,
    warm_up,
)
from hotkv_server.simulate.trace import Trace, load_trace

PRIOR_GAPS, FIRST_GAP_S, LEAST_GAP_S = 3.0, 5.0, 0.02
"""`Gaps.expected_s` adds PRIOR_GAPS gaps of all sessions' mean (FIRST_GAP_S at first). Shorter
gaps count as LEAST_GAP_S."""
LATEST_GAPS, NEW_GAPS = 1000, 20
"""`continuum` chooses by the latest LATEST_GAPS, anew after every NEW_GAPS."""
NEVER_S = 1e6
RULES = ("continuum", "cachewise", "cachewise_told")
ROWS = ("lru", "hotness", "hints", "learnt", *RULES, "clairvoyant")


@dataclass(slots=True)
class Gaps:
    """Of each session, up to the current request. `gaps_s`: of all sessions, in order of time."""

    gaps_s: list[float] = field(default_factory=list)
    _log_sum: float = 0.0
    _last_s: dict[int, float] = field(default_factory=dict)
    _sums: dict[int, tuple[int, float]] = field(default_factory=dict)

    def turn(self, session: int, now_s: float) -> None:
        if session in self._last_s:
            gap_s = max(now_s - self._last_s[session], LEAST_GAP_S)
            count, total = self._sums.get(session, (0, 0.0))
            self._sums[session] = count + 1, total + float(np.log(gap_s))
            self._log_sum += float(np.log(gap_s))
            self.gaps_s.append(gap_s)
        self._last_s[session] = now_s

    def expected_s(self, session: int) -> float:
        """Geometric mean; all sessions' mean counts like PRIOR_GAPS further gaps."""
        of_all = self._log_sum / len(self.gaps_s) if self.gaps_s else float(np.log(FIRST_GAP_S))
        count, total = self._sums.get(session, (0, 0.0))
        return float(np.exp((total + PRIOR_GAPS * of_all) / (count + PRIOR_GAPS)))


def best_ttl_s(gaps_s: list[float], benefit_s: float) -> float:
    """The t > 0 that maximizes P(gap <= t) * benefit - t, or 0 if none is worth it. `benefit_s`
    itself while there are fewer than NEW_GAPS."""
    if len(gaps_s) < NEW_GAPS:
        return benefit_s
    times_s = np.sort(gaps_s[-LATEST_GAPS:])
    worth = np.arange(1, len(times_s) + 1) / len(times_s) * benefit_s - times_s
    at = int(np.argmax(worth))
    return float(times_s[at]) if worth[at] > 0 else 0.0


@dataclass(slots=True)
class Turn:
    """until_s: end of the session's protection; for `cachewise` its idle time, predicted or true.
    depth: of the next block to be stored.
    """

    now_s: float = 0.0
    until_s: float = 0.0
    depth: int = 0


class SessionRule:
    """All blocks that a request uses or stores get `turn.until_s`. If `holds` (`continuum`),
    they are protected until then, and LRU afterwards; else the largest time goes first."""

    def __init__(self, capacity: int, turn: Turn, *, holds: bool) -> None:
        self._turn, self._holds = turn, holds
        self._used_s = np.full(capacity + 1, -np.inf)
        self._until_s = np.zeros(capacity + 1)
        self._depth = np.zeros(capacity + 1, np.int64)

    def touch(
        self, entries: Entries, keys: Keys, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        stop = self._turn.depth + len(entries)
        self._used_s[entries], self._until_s[entries] = now_s, self._turn.until_s
        self._depth[entries] = np.arange(self._turn.depth, stop)
        self._turn.depth = stop

    admit = touch

    def refresh(self, entries: Entries, now_s: float) -> None:
        """Only a request's own use changes the times of blocks."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None: ...

    def allow_keeping(self, allowed: bool) -> None: ...

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None: ...

    def hold(self, entries: Entries, until_s: float) -> None:
        """These rules read the time from `turn`."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        self._used_s[entries] = -np.inf

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        return iter(())

    def victims(
        self,
        slot_bytes: int,
        count: int,
        evictable: Evictable,
        *,
        refusable_at_s: float | None = None,
    ) -> Entries:
        entries = np.flatnonzero(np.isfinite(self._used_s)).astype(np.uint32)
        entries = entries[evictable(entries)]
        if self._holds:
            entries = entries[self._until_s[entries] < self._turn.now_s]
            order = np.lexsort((-self._depth[entries], self._used_s[entries]))
        else:
            order = np.lexsort(
                (-self._depth[entries], self._used_s[entries], -self._until_s[entries])
            )
        chosen: Entries = entries[order[: max(0, count)]]
        return chosen

    def heat(self, entries: Entries) -> NDArray[np.float64]:
        return self._used_s[entries]

    last_used_s = heat

    def figures(self) -> dict[str, float]:
        return {}

    def check_invariants(self) -> None: ...


def replay_rule(
    trace: Trace, capacity: int, rule: str, hints: ReplayHints, benefit_s: float
) -> NDArray[np.int64]:
    """Hit blocks from the start of each prompt, int64 [requests]. `benefit_s`: for `continuum`."""
    turn, gaps, ttl_s, num_gaps = Turn(), Gaps(), benefit_s, 0
    tier = SimulatedTier(
        capacity, lambda blocks: SessionRule(blocks, turn, holds=rule == "continuum")
    )
    prefix = np.zeros(trace.num_requests, np.int64)
    for request, now_s in enumerate(trace.times_s.tolist()):
        session = int(hints.sessions[request])
        gaps.turn(session, now_s)
        if rule == "continuum" and len(gaps.gaps_s) >= num_gaps + NEW_GAPS:
            num_gaps = len(gaps.gaps_s)
            ttl_s = best_ttl_s(gaps.gaps_s, benefit_s)
        turn.until_s = {
            "continuum": now_s + ttl_s,
            "cachewise": gaps.expected_s(session),
            "cachewise_told": min(float(hints.pauses_s[request]), NEVER_S),
        }[rule]
        turn.now_s, turn.depth = now_s, 0
        hashes = trace.hashes[trace.starts[request] : trace.starts[request + 1]]
        entries = tier.find(hashes)
        prefix[request] = prefix_of(entries)
        tier.store(hashes, entries, int(prefix[request]), now_s)
        tier.space.removal.take_effects()
    return prefix


def replay_learnt(trace: Trace, capacity: int, hints: ReplayHints) -> NDArray[np.int64]:
    """Hit blocks from the start of each prompt, int64 [requests]."""
    tier, returns = SimulatedTier(capacity, POLICIES["hotness"]), ReturnTimes()
    sessions: dict[int, SessionGaps] = {}
    prefix = np.zeros(trace.num_requests, np.int64)
    for request, now_s in enumerate(trace.times_s.tolist()):
        session = sessions.setdefault(int(hints.sessions[request]), SessionGaps())
        returns.began(session, now_s)
        hashes = trace.hashes[trace.starts[request] : trace.starts[request + 1]]
        entries = tier.find(hashes)
        prefix[request] = prefix_of(entries)
        tier.store(hashes, entries, int(prefix[request]), now_s)
        tier.space.removal.take_effects()
        hold_s = returns.ended(session, now_s)
        if hold_s:
            entries = tier.find(hashes)
            tier.space.policy.hold(entries[entries != 0], now_s + hold_s)
    return prefix


def hit_rate(trace: Trace, percent: float, row: str, benefit_s: float) -> float:
    """Share of block accesses that hit. `percent`: the cache, of the trace's blocks."""
    capacity, hints = trace.capacity_blocks(percent), derive_hints(trace)
    if row == "clairvoyant":
        prefix = clairvoyant(trace, capacity)
    elif row == "learnt":
        prefix = replay_learnt(trace, capacity, hints)
    elif row in RULES:
        prefix = replay_rule(trace, capacity, row, hints, benefit_s)
    else:
        told = hints if row == "hints" else None
        policy = POLICIES["hotness" if row == "hints" else row]
        prefix = replay(trace, capacity, policy, hints=told).prefix
    return trace.hit_blocks(prefix) / trace.num_accesses


def compare(
    traces: list[Trace], percents: list[float], benefit_s: float
) -> dict[str, dict[str, float]]:
    """Hit rates: {"TRACE PERCENT %": {rule: rate}}."""
    found: dict[str, dict[str, float]] = {}
    for trace in traces:
        warm_up(trace, POLICIES["lru"])
        for percent in percents:
            found[f"{Path(trace.name).stem} {percent:g} %"] = {
                row: hit_rate(trace, percent, row, benefit_s) for row in ROWS
            }
    return found


def main() -> int:
    options = parser("Rules for agents' blocks between turns, compared on traces.")
    options.add_argument("--trace", type=Path, nargs="+", required=True, metavar="FILE")
    options.add_argument("--capacity-percent", default="1,2,5,10,20", metavar="P[,P...]")
    options.add_argument("--benefit-s", type=float, default=60.0, metavar="S")
    chosen = options.parse_args()
    percents = [float(part) for part in chosen.capacity_percent.split(",")]
    found = compare([load_trace(path) for path in chosen.trace], percents, chosen.benefit_s)
    rows = [(name, *(f"{100 * rates[row]:.1f}" for row in ROWS)) for name, rates in found.items()]
    print_report(("trace, capacity", *ROWS), rows, {"hit_rate": found}, as_json=chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
