"""Records for each tenant its budget of actions, the outcomes of the actions that its hints
request, and how many blocks of each action were reused.

Always true: all data of a tenant is bounded (`HintLimits`), and tenants can't see each other's
data. An action is done once, even if its message arrives again. Each change of an outcome gives the
outcome a new sequence number, higher than all earlier numbers of this tenant. A block counts as
reused once a request has hit it in hotkv after the action; an action counts each of its blocks
once.

A hash block is a range of `hash_block_tokens` tokens of a prompt: engines compute one hash for each
such range. A block of a KV cache group consists of one or several hash blocks.
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
"""A new tenant's sequence numbers begin at the clock's seconds times this number. Fewer outcomes
than this can change in a second. So the numbers are higher than all numbers that the tenant had
before it was dropped, or before the server was restarted."""
OutcomeKey = tuple[str, str]
"""Identifies the outcome of an action: id of the router's message, and id of the action in this
message."""


@dataclass(slots=True)
class HintOutcome:
    """The outcome of an action of a hint.

    kind: type of the action, as the router sent it.
    session_id: the router's session to whose blocks the action applies; empty: the blocks of the
        hint's request.
    came_s: when the hint arrived, on the monotonic clock.
    reason: explanation of the status, for people.
    num_blocks: number of blocks to which the action applies, over all groups.
    num_done: number of blocks for which the action was done.
    reused_blocks: number of the action's hash blocks that requests have hit since the action. Each
        block counts once, even if the load of its first hit fails.
    saved_s: seconds of prefill that these hits saved; 0 if the engine's speed is unknown.
    sequence: sequence number of the outcome's last change.
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
    """Limits of the memory and work for hints. `tenants` and `node_bytes` apply to the node, the
    other limits to each tenant.

    sessions: most sessions of routers (such as users' conversations) that are remembered.
    session_bytes: most bytes of the block hashes of these sessions' prompts.
    outcomes: most outcomes of actions that are remembered.
    actions_per_s: actions accepted per second on average.
    burst_actions: actions accepted at once after a pause.
    tracked: most actions for which it is tracked whether requests reuse the action's blocks.
    tracked_bytes: most bytes of the keys of these blocks. A copy of the keys for fast comparison
        takes as many bytes again.
    tenants: most tenants whose hints are remembered.
    node_bytes: most bytes of the remembered prompts of all tenants (`HintBook.session_bytes`).
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
    """A range of hash blocks of a prompt (see the module) to which an action applied, and whose
    reuse is tracked.

    keys: keys of the prompt's hash blocks, from the first block to the end of the range.
    start: index of the first hash block of the range.
    seen: for each hash block of the range, True if a request has hit it since the action, bool [n].
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
    """The state of a tenant's hints: its sessions, the outcomes of its actions, and its budget of
    actions.

    sessions: the router's sessions, with their latest prompts.
    outcomes: the latest outcomes, by message and action.
    tokens: number of actions that the tenant may still request now (a token bucket).
    filled_s: when `tokens` was last refilled.
    last_sequence: highest sequence number of an outcome.
    tracked: actions for which the reuse of their blocks is tracked.
    prefetch_bytes: bytes of the blocks that running prefetches are fetching.
    num_prefetches: number of running prefetches.

    `_watched` has the tracked actions by key space, in the form that `hit` compares; it is built on
    demand.
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
        """Returns whether the tenant's routers may request `count` more actions now, and if so,
        subtracts them from the tenant's budget of actions, which is refilled over time."""
        limits = self.limits
        grown = max(0.0, now_s - self.filled_s) * limits.actions_per_s
        self.tokens = min(limits.burst_actions, self.tokens + grown)
        self.filled_s = max(self.filled_s, now_s)
        if self.tokens < count:
            return False
        self.tokens -= count
        return True

    def begin(self, outcome: HintOutcome) -> HintOutcome | None:
        """Adds the outcome of an action that begins, and returns it. Returns None if an action with
        the same message id and action id arrived before. With an empty message id, replaces the
        earlier outcome."""
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
        """Assigns a new sequence number to an outcome that has changed, by which `since` finds the
        change."""
        self.last_sequence += 1
        outcome.sequence = self.last_sequence

    def settle(self, outcome: HintOutcome, status: Status, reason: str) -> None:
        """Sets the status and reason of an action's outcome, and assigns a new sequence number, by
        which `since` finds the change."""
        outcome.status, outcome.reason = status, reason
        self.changed(outcome)

    def since(self, cursor: int, message_id: str, most: int) -> list[HintOutcome]:
        """Returns up to `most` outcomes that have changed since the change with sequence number
        `cursor`, the oldest change first.

        message_id: only outcomes of this message; empty: of all messages.
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
        """Starts to track the blocks of an action (such as pin or prefetch): whether requests hit
        them after the action was done. The blocks are the hash blocks [start, stop) of a prompt
        (see the module).

        If the action is already tracked in this key space from the same `start` on, keeps the hits
        counted so far.

        hashes: hashes of the prompt's hash blocks, uint32 words [n, 8].
        """
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
        """Records that a request has hit the hash blocks [first, stop) of its prompt in hotkv (see
        the module). Counts the hits for the actions that applied to these blocks before.

        hashes: hashes of the prompt's hash blocks, uint32 words [n, 8].
        block_s: seconds that the engine needs to compute a hash block; 0 if unknown.
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
    """Records the state of the hints of all tenants (`TenantHints`). If a limit is exceeded, drops
    the least recently used tenants.

    A tenant with running prefetches is not dropped and does not count for the limit of tenants.
    After its prefetches have ended, the next call of `tenant` may drop it.
    """

    def __init__(self, limits: HintLimits | None = None) -> None:
        self.limits = limits or HintLimits()
        self._tenants: OrderedDict[str, TenantHints] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"HintBook({len(self)} tenants)"

    def tenant(self, name: str, now_s: float) -> TenantHints:
        """Returns the hints of a tenant. Creates them if the tenant is new."""
        known = self._tenants.pop(name, None)
        if known is None:
            limits = self.limits
            sessions = HintSessions(limits.sessions, limits.session_bytes)
            known = TenantHints(limits, sessions)
            known.tokens, known.filled_s = float(limits.burst_actions), now_s
            # Begin with a number that is higher than all numbers of an earlier server, and higher
            # than the numbers that this tenant had if it was dropped before.
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
        """Returns how many bytes the recorded prompts of all tenants take: the hashes of the
        prompts of routers' sessions (such as users' conversations), and the keys of the prompts of
        requests without a session."""
        return sum(
            one.sessions.num_bytes + one.sessions.other_bytes for one in self._tenants.values()
        )

    def known(self, name: str) -> TenantHints | None:
        """Returns the hints of a tenant; None if the tenant is unknown."""
        return self._tenants.get(name)

    def all(self) -> Iterator[tuple[str, TenantHints]]:
        """Yields the name and the hints of each tenant, in order of name."""
        yield from sorted(self._tenants.items())

    def check_invariants(self) -> None:
        """Raises AssertionError if a bound of a tenant is broken."""
        for hints in self._tenants.values():
            hints.check_invariants()
