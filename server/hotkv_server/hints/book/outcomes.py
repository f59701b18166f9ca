"""Records each tenant's budget of actions, their outcomes, and how much of each was reused.

Always true: a tenant's data is bounded (`HintLimits`) and invisible to others. A repeated message
does nothing twice. Each change gives an outcome a higher sequence number than all before of its
tenant. A block counts as reused, once per action, when a request has hit it in hotkv after the
action.

A hash block is `hash_block_tokens` tokens of a prompt; a group's block is one or several of
them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.hints import Status
from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask
from hotkv_server.hints.book.chains import ChainKeys, KnownChains, chain_keys
from hotkv_server.hints.book.sessions import HintSessions

NUMBERS_PER_S = 1_000_000
"""Sequence numbers begin at the clock's seconds times this. Fewer outcomes change in a second,
so numbers stay higher than those before a drop of the tenant or a restart."""
OutcomeKey = tuple[str, str]
"""(message id, action id)."""


@dataclass(slots=True)
class HintOutcome:
    """What became of an action.

    kind: as the router sent it.
    session_id: whose blocks the action applies to; empty: those of the hint's request.
    came_s: arrival, on the monotonic clock.
    reason: for people.
    num_blocks, num_done: over all groups.
    reused_blocks: hash blocks that requests have hit since, each once, even if its load fails.
    saved_s: prefill saved by these hits; 0 if the engine's speed is unknown.
    sequence: of the last change.
    """

    message_id: str
    action_id: str
    kind: str
    session_id: str
    came_s: float
    status: Status = Status.DEFERRED
    reason: str = ""
    num_blocks: int = 0
    num_done: int = 0
    reused_blocks: int = 0
    saved_s: float = 0.0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class HintLimits:
    """Per tenant, but `tenants` and `node_bytes` for the node.

    session_bytes: hashes of the sessions' prompts.
    actions_per_s: on average; `burst_actions` at once after a pause.
    tracked: actions whose reuse is tracked.
    tracked_bytes: their keys; a copy for fast comparison takes as many again.
    node_bytes: `HintBook.session_bytes`.
    """

    sessions: int = 1024
    session_bytes: int = 16 << 20
    outcomes: int = 1024
    actions_per_s: float = 100.0
    burst_actions: int = 512
    tracked: int = 256
    tracked_bytes: int = 2 << 20
    tenants: int = 64
    node_bytes: int = 64 << 20


@dataclass(slots=True)
class _Tracked:
    """Hash blocks whose reuse is tracked for an action.

    keys: of the prompt, from its first block to the end of the range.
    start: first hash block of the range.
    seen: bool [n], hit since the action.
    """

    outcome: HintOutcome
    key_space_id: int
    keys: ChainKeys
    start: int
    seen: BoolMask

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.seen.nbytes)


@dataclass(slots=True)
class TenantHints:
    """A tenant's sessions, outcomes and budget.

    outcomes: the latest.
    tokens: actions that may still be requested now (token bucket).
    filled_s: last refill.
    tracked: actions whose reuse is tracked; `_watched` has them by key space, built on demand for
        `hit`.
    prefetch_bytes: being fetched.
    """

    limits: HintLimits
    sessions: HintSessions
    outcomes: OrderedDict[OutcomeKey, HintOutcome] = field(default_factory=OrderedDict)
    tokens: float = 0.0
    filled_s: float = 0.0
    last_sequence: int = 0
    tracked: list[_Tracked] = field(default_factory=list)
    _watched: dict[int, tuple[list[_Tracked], KnownChains]] = field(default_factory=dict)
    prefetch_bytes: int = 0
    num_prefetches: int = 0

    def may_act(self, now_s: float, count: float = 1.0) -> bool:
        """Takes `count` actions from the budget, if it has them."""
        limits = self.limits
        grown = max(0.0, now_s - self.filled_s) * limits.actions_per_s
        self.tokens = min(limits.burst_actions, self.tokens + grown)
        self.filled_s = max(self.filled_s, now_s)
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def begin(self, outcome: HintOutcome) -> HintOutcome | None:
        """None if the action arrived before. With an empty message id the earlier outcome is
        replaced."""
        key = outcome.message_id, outcome.action_id
        if outcome.message_id and key in self.outcomes:
            return None
        self.outcomes.pop(key, None)
        self.outcomes[key] = outcome
        while len(self.outcomes) > self.limits.outcomes:
            _, dropped = self.outcomes.popitem(last=False)
            self.tracked = [one for one in self.tracked if one.outcome is not dropped]
            self._watched.clear()
        self.changed(outcome)
        return outcome

    def changed(self, outcome: HintOutcome) -> None:
        """Gives the outcome a new sequence number, by which `since` finds it."""
        self.last_sequence += 1
        outcome.sequence = self.last_sequence

    def settle(self, outcome: HintOutcome, status: Status, reason: str) -> None:
        outcome.status, outcome.reason = status, reason
        self.changed(outcome)

    def since(self, cursor: int, message_id: str, most: int) -> list[HintOutcome]:
        """Outcomes changed after sequence number `cursor`, oldest change first. `message_id`:
        empty: of all messages.
        """
        found = [
            one
            for one in self.outcomes.values()
            if one.sequence > cursor and message_id in ("", one.message_id)
        ]
        return sorted(found, key=lambda one: one.sequence)[:most]

    def track(
        self, outcome: HintOutcome, key_space_id: int, hashes: Words, start: int, stop: int
    ) -> None:
        """Tracks whether requests hit hash blocks [start, stop) from now on. Keeps the hits of
        an action that is tracked from the same `start` already."""
        seen = np.zeros(stop - start, np.bool_)
        for one in self.tracked:
            if one.outcome is outcome and one.key_space_id == key_space_id and one.start == start:
                known = one.seen[: len(seen)]
                seen[: len(known)] = known
        self.tracked = [
            one
            for one in self.tracked
            if one.outcome is not outcome or one.key_space_id != key_space_id
        ]
        keys = chain_keys(hashes[:stop])
        self.tracked.append(_Tracked(outcome, key_space_id, keys, start, seen))
        while len(self.tracked) > self.limits.tracked or self._tracked_bytes() > (
            self.limits.tracked_bytes
        ):
            self.tracked.pop(0)
        self._watched.clear()

    def _tracked_bytes(self) -> int:
        return sum(one.num_bytes for one in self.tracked)

    def hit(self, key_space_id: int, hashes: Words, first: int, stop: int, block_s: float) -> None:
        """A request has hit hash blocks [first, stop) in hotkv.

        block_s: the engine's time for a hash block; 0 if unknown.
        """
        if not self.tracked or first >= stop:
            return
        if key_space_id not in self._watched:
            mine = [one for one in self.tracked if one.key_space_id == key_space_id]
            self._watched[key_space_id] = mine, KnownChains([one.keys for one in mine])
        mine, chains = self._watched[key_space_id]
        common = chains.common_blocks(chain_keys(hashes[:stop]))
        for at in np.flatnonzero(common).tolist():
            one, length = mine[at], int(common[at])
            seen = one.seen[max(0, first - one.start) : max(0, min(length, stop) - one.start)]
            num_new = int(np.count_nonzero(~seen))
            if num_new:
                seen[:] = True
                one.outcome.reused_blocks += num_new
                one.outcome.saved_s += num_new * block_s
                self.changed(one.outcome)

    def check_invariants(self) -> None:
        self.sessions.check_invariants()
        assert len(self.outcomes) <= self.limits.outcomes, "too many outcomes"
        numbers = [one.sequence for one in self.outcomes.values()]
        assert len(set(numbers)) == len(numbers), "two outcomes have one sequence number"
        assert max(numbers, default=0) <= self.last_sequence
        assert len(self.tracked) <= self.limits.tracked, "too many actions are watched"
        assert self._tracked_bytes() <= self.limits.tracked_bytes, "too many bytes are watched"
        assert 0 <= self.tokens <= self.limits.burst_actions and self.prefetch_bytes >= 0


class HintBook:
    """`TenantHints` by tenant; at a limit the least recently used goes. One with running
    prefetches is neither dropped nor counted; the next `tenant` after them may drop it."""

    def __init__(self, limits: HintLimits | None = None) -> None:
        self.limits = limits or HintLimits()
        self._tenants: OrderedDict[str, TenantHints] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"HintBook({len(self)} tenants)"

    def tenant(self, name: str, now_s: float) -> TenantHints:
        """Creates the tenant if it is new."""
        known = self._tenants.pop(name, None)
        if known is None:
            limits = self.limits
            sessions = HintSessions(limits.sessions, limits.session_bytes)
            known = TenantHints(limits, sessions)
            known.tokens, known.filled_s = float(limits.burst_actions), now_s
            # See NUMBERS_PER_S.
            known.last_sequence = int(now_s * NUMBERS_PER_S)
        self._tenants[name] = known
        known.sessions.forget_others(now_s)
        idle = [one for one, hints in self._tenants.items() if not hints.num_prefetches]
        oldest = iter(one for one in idle if one != name)
        num_over = len(idle) - self.limits.tenants
        for one in oldest:
            if num_over <= 0 and self.session_bytes() <= self.limits.node_bytes:
                break
            del self._tenants[one]
            num_over -= 1
        return known

    def session_bytes(self) -> int:
        """Of all recorded prompts of all tenants."""
        return sum(
            one.sessions.num_bytes + one.sessions.other_bytes for one in self._tenants.values()
        )

    def known(self, name: str) -> TenantHints | None:
        return self._tenants.get(name)

    def all(self) -> Iterator[tuple[str, TenantHints]]:
        """By name."""
        yield from sorted(self._tenants.items())

    def check_invariants(self) -> None:
        for hints in self._tenants.values():
            hints.check_invariants()
