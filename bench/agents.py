"""Compares eviction rules for the blocks that an agent's session leaves in the cache between two
turns, by replaying traces through the cache's core: `python -m bench.agents --trace FILE ...
[--capacity-percent 2,5] [--json]`.

`derive_hints` divides a trace into sessions: a session's next turn is the first later request that
continues its prompt. Traces do not name the tools that an agent calls, so a rule can learn only
from the gaps (times between turns) of sessions. The rules:

- `lru`, `hotness`: policies of the server; `hotness` is its default.
- `hints`: `hotness`, which also gets the session ends and pauses that `hotkv-server simulate
  --hints` derives from the trace. In this replay a turn ends at the moment it begins.
- `learnt`: `hotness`, which protects a session's blocks from eviction until its next turn is
  expected.
- `continuum`: Continuum (arXiv 2511.02230) pins a session's KV for a time to live t, which
  maximizes P(gap <= t) * benefit - t over the latest gaps. P is the share of gaps, here of all
  sessions, that are at most t. The benefit is the time that a hit saves: the paper derives it from
  prefill and queueing, here it is an option. Blocks past their time to live are evicted by LRU. New
  blocks that find no space beside pinned blocks are not stored. The paper also orders requests;
  this is left out, because it does not concern a cache.
- `cachewise`: CacheWise (arXiv 2606.16824) evicts the block with the longest predicted idle time
  first, and breaks ties by LRU. The paper predicts a request's idle time from the tools that it
  calls; here the prediction is the mean gap of the session. `cachewise_told` knows the true gap
  instead, which the authors' source can use too.
- `clairvoyant`: knows all later requests. No rule can have more hits.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.report import parser, print_report
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies import POLICIES
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
"""How `Gaps.expected_s` guesses the time until a session's next turn, its gap, if the session has
had few gaps: it adds PRIOR_GAPS gaps with the mean of all sessions to them. Before the first gap of
any session, this mean is FIRST_GAP_S. Gaps shorter than LEAST_GAP_S count as LEAST_GAP_S."""
LATEST_GAPS, NEW_GAPS = 1000, 20
"""The rule `continuum` chooses its time to live by the latest LATEST_GAPS gaps between turns, and
chooses again after every NEW_GAPS gaps."""
NEVER_S = 1e6
RULES = ("continuum", "cachewise", "cachewise_told")
ROWS = ("lru", "hotness", "hints", "learnt", *RULES, "clairvoyant")


@dataclass(slots=True)
class Gaps:
    """The gaps in time between consecutive turns of each session, up to the replay's current
    request.

    gaps_s: gaps of all sessions together, in order of time.
    """

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
        """Returns the geometric mean of a session's gaps in seconds. So that few gaps do not decide
        alone, the mean over all sessions counts like PRIOR_GAPS further gaps."""
        of_all = self._log_sum / len(self.gaps_s) if self.gaps_s else float(np.log(FIRST_GAP_S))
        count, total = self._sums.get(session, (0, 0.0))
        return float(np.exp((total + PRIOR_GAPS * of_all) / (count + PRIOR_GAPS)))


def best_ttl_s(gaps_s: list[float], benefit_s: float) -> float:
    """Returns the time to live in seconds for which the rule `continuum` pins a session's blocks:
    the t that maximizes P(gap <= t) * benefit - t, or 0 if no value of t makes it positive. While
    there are fewer than NEW_GAPS gaps, returns `benefit_s`.

    gaps_s: all gaps between turns so far; only the latest LATEST_GAPS count.
    benefit_s: the time that a hit saves.
    """
    if len(gaps_s) < NEW_GAPS:
        return benefit_s
    times_s = np.sort(gaps_s[-LATEST_GAPS:])
    worth = np.arange(1, len(times_s) + 1) / len(times_s) * benefit_s - times_s
    at = int(np.argmax(worth))
    return float(times_s[at]) if worth[at] > 0 else 0.0


@dataclass(slots=True)
class Turn:
    """The request that is being replayed.

    now_s: time of the request.
    until_s: the time until which the session's blocks are protected from eviction. For the rules
        `cachewise` and `cachewise_told` it is the session's idle time, predicted or true.
    depth: position in the prompt, in blocks, of the next block to be stored.
    """

    now_s: float = 0.0
    until_s: float = 0.0
    depth: int = 0


class SessionRule:
    """The eviction policy of the rules `continuum` and `cachewise`. All blocks that a request uses
    or stores get the same time, `turn.until_s`.

    holds: if True (`continuum`), blocks are protected from eviction until that time, and then
        evicted by LRU. If False (`cachewise`), the block with the largest time is evicted first.
    """

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
        """Does nothing. The server's policies count the blocks before a new block as used here; in
        these rules only a request's own use changes the times of blocks."""

    def decline(
        self, keys: Keys, depth: int, now_s: float, retention: Retention = NO_RETENTION
    ) -> None:
        """Does nothing. The server's policies learn here from blocks that were not stored for lack
        of space; these rules don't."""

    def allow_keeping(self, allowed: bool) -> None:
        """Does nothing: in a replay, a policy may always hold blocks back from eviction."""

    def demote(self, entries: Entries, keys: Keys, now_s: float) -> None:
        """Does nothing. The server's policies mark blocks here that will probably not be used
        again; these rules know no such marks."""

    def hold(self, entries: Entries, until_s: float) -> None:
        """Does nothing: these rules read the time until which blocks are protected from `turn`."""

    def forget(self, entries: Entries, keys: Keys, *, evicted: bool) -> None:
        self._used_s[entries] = -np.inf

    def sweep(self, slot_bytes: int, count: int, evictable: Evictable) -> Iterator[None]:
        return iter(())

    def victims(
        self, slot_bytes: int, count: int, evictable: Evictable, *, keep_at_s: float | None = None
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

    def check_invariants(self) -> None:
        """Does nothing: the rule has no redundant state to check."""


def replay_rule(
    trace: Trace, capacity: int, rule: str, hints: ReplayHints, benefit_s: float
) -> NDArray[np.int64]:
    """Replays a trace in a cache of `capacity` blocks that evicts by a rule of RULES (`continuum`,
    `cachewise` or `cachewise_told`, see the module). Returns for each request how many blocks from
    the start of its prompt hit, int64 [requests].

    hints: the session of each request, and the pause that follows it.
    benefit_s: the time that a hit saves, which `continuum` uses.
    """
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
    """Replays a trace in a cache of `capacity` blocks with the policy `hotness`, which protects a
    session's blocks from eviction until its next turn is expected. The expected time is learnt from
    the session's earlier gaps between turns. Returns for each request how many blocks from the
    start of its prompt hit, int64 [requests]."""
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
    """Returns the share of a trace's block accesses that hit if the cache evicts by the rule `row`
    (one of ROWS, the rows of the result's table).

    percent: size of the cache, in percent of the trace's blocks.
    benefit_s: the time that a hit saves, which `continuum` uses.
    """
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
    """Replays each trace under each rule in ROWS, at each cache size. Returns the hit rates:
    {"TRACE PERCENT %": {rule: rate}}.

    percents: cache sizes, in percent of the trace's blocks.
    """
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
