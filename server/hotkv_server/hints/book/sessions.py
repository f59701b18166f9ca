"""Remembers a tenant's sessions as routers name them (for example conversations) with their latest
prompts, and prompts without a session.

Always true: sessions and the bytes of their hashes are bounded, the least recently used goes
first. Prompts without a session have a bound of their own over all key spaces, and expire.
Nothing is pinned here.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.table import Words
from hotkv_server.hints.book.chains import ChainKeys, chain_keys, common_blocks
from hotkv_server.hints.book.returns import ReturnTimes, SessionGaps

MAX_OTHERS = 128
"""Remembered prompts without a session; the oldest goes first."""
MAX_OTHERS_BYTES = 1 << 20
RECENT_S = 600.0
"""How long a prompt without a session counts as likely to be repeated."""


@dataclass(slots=True)
class SessionReceipt:
    """Sums over a session's requests, as engines reported them when scheduled.

    hit_tokens: in the engine's own cache or in hotkv.
    saved_s: prefill saved by hotkv; 0 if the engine's speed is unknown.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    hit_tokens: int = 0
    saved_s: float = 0.0

    def add(self, other: "SessionReceipt") -> None:
        self.num_requests += other.num_requests
        self.prompt_tokens += other.prompt_tokens
        self.device_hit_tokens += other.device_hit_tokens
        self.hit_tokens += other.hit_tokens
        self.saved_s += other.saved_s


@dataclass(slots=True)
class HintSession:
    """A router's session.

    chains: by key space, hashes of the latest prompt, uint32 words [n, 8].
    keys: their `chain_keys`, as views.
    message_id: of the last request's hints; empty without.
    before_s: last use with an earlier message than `message_id`.
    """

    used_s: float
    chains: dict[int, Words] = field(default_factory=dict)
    keys: dict[int, ChainKeys] = field(default_factory=dict)
    message_id: str = ""
    before_s: float = -math.inf
    receipt: SessionReceipt = field(default_factory=SessionReceipt)
    gaps: SessionGaps = field(default_factory=SessionGaps)

    @property
    def num_bytes(self) -> int:
        return sum(chain.nbytes for chain in self.chains.values())

    def use(self, message_id: str, now_s: float) -> None:
        """A request was scheduled or has ended."""
        if not message_id or message_id != self.message_id:
            self.before_s = self.used_s
        self.message_id, self.used_s = message_id, now_s

    def used_beside_s(self, message_id: str) -> float:
        """Last use by a request with another message; -inf if none. With an empty id every request
        counts.

        An API request with `n` > 1 becomes several with one hint message, which are not other
        users of the session.
        """
        return self.before_s if message_id and message_id == self.message_id else self.used_s


class HintSessions:
    """A tenant's sessions, and its prompts without one.

    num_bytes: of the sessions' hashes.
    other_bytes: of the keys of prompts without a session.
    """

    def __init__(self, most_sessions: int, most_bytes: int) -> None:
        self._most_sessions = most_sessions
        self._most_bytes = most_bytes
        self._by_id: OrderedDict[str, HintSession] = OrderedDict()
        self._others: deque[tuple[float, int, ChainKeys]] = deque()
        self.num_bytes = 0
        self.other_bytes = 0
        self.returns = ReturnTimes()

    def __len__(self) -> int:
        return len(self._by_id)

    def __repr__(self) -> str:
        return f"HintSessions({len(self)}, {self.num_bytes} B)"

    def get(self, session_id: str) -> HintSession | None:
        return self._by_id.get(session_id)

    def use(
        self,
        session_id: str,
        key_space_id: int,
        hashes: Words,
        now_s: float,
        message_id: str = "",
        receipt: SessionReceipt | None = None,
    ) -> None:
        """Records a request's prompt, truncated to `most_bytes`; opens the session if it is new.

        message_id: empty without hints.
        receipt: None at the request's end.
        """
        session = self._by_id.pop(session_id, None) or HintSession(-math.inf)
        if receipt is not None:
            session.receipt.add(receipt)
            self.returns.began(session.gaps, now_s)
        self.num_bytes -= session.num_bytes
        session.use(message_id, now_s)
        chain = np.ascontiguousarray(hashes[: self._most_bytes // 32])
        session.chains[key_space_id] = chain
        session.keys[key_space_id] = chain.view(np.uint64)[:, 0]
        self._by_id[session_id] = session
        self.num_bytes += session.num_bytes
        while len(self._by_id) > self._most_sessions or self.num_bytes > self._most_bytes:
            _, dropped = self._by_id.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def use_without(self, key_space_id: int, hashes: Words, now_s: float) -> None:
        """Records a prompt without a session: later requests may share its blocks."""
        if not len(hashes):
            return
        keys = chain_keys(hashes)
        self._others.append((now_s, key_space_id, keys))
        self.other_bytes += keys.nbytes
        while len(self._others) > MAX_OTHERS or self.other_bytes > MAX_OTHERS_BYTES:
            self._drop_other()
        self.forget_others(now_s)

    def forget_others(self, now_s: float) -> None:
        while self._others and self._others[0][0] < now_s - RECENT_S:
            self._drop_other()

    def _drop_other(self) -> None:
        self.other_bytes -= self._others.popleft()[2].nbytes

    def end(self, session_id: str) -> None:
        ended = self._by_id.pop(session_id, None)
        if ended is not None:
            self.num_bytes -= ended.num_bytes

    def shared_blocks(self, key_space_id: int, hashes: Words, session_id: str, now_s: float) -> int:
        """Leading blocks of a prompt that other sessions, or recent requests without one, may use
        again. A recorded prompt without a session does not count if the given one begins with all
        of it, as it is probably continued.

        session_id: of the prompt; empty without.
        """
        keys, shared = chain_keys(hashes), 0
        for name, one in self._by_id.items():
            if name != session_id and key_space_id in one.chains:
                shared = common_blocks(one.keys[key_space_id], keys, shared)
        for used_s, number, other in self._others:
            if number == key_space_id and used_s >= now_s - RECENT_S:
                common = common_blocks(other, keys, shared)
                if common < len(other):
                    shared = common
        return shared

    def check_invariants(self) -> None:
        assert self.num_bytes == sum(one.num_bytes for one in self._by_id.values()), "miscounted"
        assert len(self._by_id) <= self._most_sessions and self.num_bytes <= self._most_bytes
        assert self.other_bytes == sum(keys.nbytes for _, _, keys in self._others), "miscounted"
        assert len(self._others) <= MAX_OTHERS and self.other_bytes <= MAX_OTHERS_BYTES
        assert all(one.chains for one in self._by_id.values()), "a session without a chain"
