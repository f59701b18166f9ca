"""What hints of routers have come to, by tenant: outcomes, budgets, and whether an action paid.

Always true: everything of a tenant is bounded (`HintLimits`), and nothing of one is seen by
another; an action is done once, however often its message comes; the outcomes of a tenant have
rising sequence numbers, a new one with each change. An action has paid for a block when a request
has hit the block here afterwards; each block counts once.
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

OutcomeKey = tuple[str, str]
"""Message and action."""


@dataclass(slots=True)
class HintOutcome:
    """What has come of one action of a hint. `num_blocks`: meant, of all groups; `num_done`: for
    which it was done. `reused_blocks`: hash blocks that requests have hit since; `saved_s`: prefill
    saved by them, 0 if the speed is not known."""

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
    """Bounds, of one tenant unless they say otherwise. `actions_per_s`: as many are taken on
    average, `burst_actions` at once. `tracked`, `tracked_bytes`: actions of which it is watched
    whether they pay; their keys take the same once more. `tenants`: of the node; `node_bytes`: of
    the sessions of all of them."""

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
    """Blocks [start, stop) of a chain that an action meant. `seen` [stop - start]: hit since."""

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
    """Of one tenant. `outcomes`: the latest, by message and action. `tokens`: actions that may be
    taken now. `_watched`: what is tracked in a key space, made when a request comes."""

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
        """Takes so many of the actions that the tenant may do now; False if there are fewer."""
        limits = self.limits
        grown = max(0.0, now_s - self.filled_s) * limits.actions_per_s
        self.tokens = min(limits.burst_actions, self.tokens + grown)
        self.filled_s = max(self.filled_s, now_s)
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def begin(self, outcome: HintOutcome) -> HintOutcome | None:
        """Notes an action; None if it came before, under the same ids."""
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
        """Gives an outcome that has changed a new sequence number."""
        self.last_sequence += 1
        outcome.sequence = self.last_sequence

    def settle(self, outcome: HintOutcome, status: Status, reason: str) -> None:
        """An action has come to this."""
        outcome.status, outcome.reason = status, reason
        self.changed(outcome)

    def since(self, cursor: int, message_id: str, most: int) -> list[HintOutcome]:
        """Outcomes that have changed since, the oldest change first."""
        found = [
            one
            for one in self.outcomes.values()
            if one.sequence > cursor and message_id in ("", one.message_id)
        ]
        return sorted(found, key=lambda one: one.sequence)[:most]

    def track(
        self, outcome: HintOutcome, key_space_id: int, hashes: Words, start: int, stop: int
    ) -> None:
        """From now on it is watched whether requests hit these hash blocks [start, stop). What was
        watched for the same action in this key space goes on."""
        if start >= stop:
            return
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
        """A request with this prompt has hit its hash blocks [first, stop) here. `block_s`: to
        compute one takes so long; 0 if that is not known."""
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
        """Raises AssertionError if a bound is broken or sequence numbers repeat."""
        self.sessions.check_invariants()
        assert len(self.outcomes) <= self.limits.outcomes, "too many outcomes"
        numbers = [one.sequence for one in self.outcomes.values()]
        assert len(set(numbers)) == len(numbers), "two outcomes have one sequence number"
        assert max(numbers, default=0) <= self.last_sequence
        assert len(self.tracked) <= self.limits.tracked, "too many actions are watched"
        assert self._tracked_bytes() <= self.limits.tracked_bytes, "too many bytes are watched"
        assert 0 <= self.tokens <= self.limits.burst_actions and self.prefetch_bytes >= 0


class HintBook:
    """All tenants' hints. The tenant that was heard of longest ago goes first. Tenants with
    prefetches under way stay and do not count; when those end they go with the next that is heard
    of."""

    def __init__(self, limits: HintLimits | None = None) -> None:
        self.limits = limits or HintLimits()
        self._tenants: OrderedDict[str, TenantHints] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"HintBook({len(self)} tenants)"

    def tenant(self, name: str, now_s: float) -> TenantHints:
        """The hints of a tenant, which may be new."""
        known = self._tenants.pop(name, None)
        if known is None:
            limits = self.limits
            sessions = HintSessions(limits.sessions, limits.session_bytes)
            known = TenantHints(limits, sessions)
            known.tokens, known.filled_s = float(limits.burst_actions), now_s
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
        """Bytes of the chains of all sessions, and of prompts without one."""
        return sum(
            one.sessions.num_bytes + one.sessions.other_bytes for one in self._tenants.values()
        )

    def known(self, name: str) -> TenantHints | None:
        """The hints of a tenant; None if there are none."""
        return self._tenants.get(name)

    def all(self) -> Iterator[tuple[str, TenantHints]]:
        """Names and hints of all tenants, in order of name."""
        yield from sorted(self._tenants.items())

    def check_invariants(self) -> None:
        """Raises AssertionError if a bound of a tenant is broken."""
        for hints in self._tenants.values():
            hints.check_invariants()
