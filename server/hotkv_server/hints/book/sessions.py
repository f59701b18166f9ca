"""Remembers the sessions that a router has named (for example conversations), each with the block
hashes of its latest prompt in each key space (a model in a configuration). Also remembers the
prompts of requests without a session.

The data belongs to one tenant. Always true: there are at most `most_sessions` sessions, and their
hashes have at most `most_bytes` together; the least recently used session is dropped first. Prompts
without a session have a separate bound over all key spaces, and expire. This module pins no blocks.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from hotkv_proto.table import Words
from hotkv_server.hints.book.chains import ChainKeys, chain_keys, common_blocks
from hotkv_server.hints.book.returns import ReturnTimes, SessionGaps

MAX_OTHERS = 128
"""Most prompts of requests without a session (such as a user's conversation) that are remembered.
The oldest prompt is dropped first."""
MAX_OTHERS_BYTES = 1 << 20
RECENT_S = 600.0
"""Time for which the prompt of a request without a session (such as a user's conversation) counts
as likely to be repeated, in seconds."""


@dataclass(slots=True)
class SessionReceipt:
    """Sums over the requests of a router's session (such as a user's conversation), from the
    engine's report about each request when it was scheduled.

    device_hit_tokens: tokens that hit in the engine's own cache.
    hit_tokens: tokens that hit in the engine's own cache or in hotkv.
    saved_s: seconds of prefill that hits in hotkv saved; 0 if the engine's speed is unknown.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    hit_tokens: int = 0
    saved_s: float = 0.0

    def add(self, other: "SessionReceipt") -> None:
        """Adds the sums of another receipt to this receipt."""
        self.num_requests += other.num_requests
        self.prompt_tokens += other.prompt_tokens
        self.device_hit_tokens += other.device_hit_tokens
        self.hit_tokens += other.hit_tokens
        self.saved_s += other.saved_s


@dataclass(slots=True)
class HintSession:
    """A session of a router, such as a user's conversation.

    used_s: when a request last used the session.
    chains: by key space, the block hashes of the session's latest prompt, uint32 words [n, 8].
    keys: by key space, the first eight bytes of each of these hashes (`chain_keys`); views of the
        memory of `chains`.
    message_id: id of the hint message that came with the last request; empty without hints.
    before_s: when the session was last used by a request with an earlier hint message than
        `message_id`.
    receipt: hit tokens and saved time, summed over the session's requests to this server.
    gaps: the session's pauses, for `HintSessions.returns`.
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
        """Records that a request of the session (such as a user's conversation) was scheduled or
        has ended.

        message_id: id of the request's hint message; empty without hints.
        """
        if not message_id or message_id != self.message_id:
            self.before_s = self.used_s
        self.message_id, self.used_s = message_id, now_s

    def used_beside_s(self, message_id: str) -> float:
        """Returns when a request with another hint message than `message_id` last used the session;
        -inf if there was no such request. With an empty `message_id`, every request counts.

        The reason for this rule: one API request with `n` > 1 becomes several requests with the
        same hint message. They must not count as other users of the session.
        """
        return self.before_s if message_id and message_id == self.message_id else self.used_s


class HintSessions:
    """A tenant's sessions (of a router, such as users' conversations) with their latest prompts,
    and the tenant's prompts without a session.

    num_bytes: bytes of the hashes of the sessions' prompts.
    other_bytes: bytes of the keys of prompts without a session.
    returns: predicts when sessions return.
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
        """Returns the router's session (such as a user's conversation) with this id, or None."""
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
        """Records the prompt of a request of the session. Opens the session if it is new.

        A prompt whose hashes alone exceed `most_bytes` is truncated.

        message_id: id of the request's hint message; empty without hints.
        receipt: counts of the request when it was scheduled; None at the request's end.
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
        """Records the prompt of a request without a session (such as a user's conversation),
        because later requests may share its blocks."""
        if not len(hashes):
            return
        keys = chain_keys(hashes)
        self._others.append((now_s, key_space_id, keys))
        self.other_bytes += keys.nbytes
        while len(self._others) > MAX_OTHERS or self.other_bytes > MAX_OTHERS_BYTES:
            self._drop_other()
        self.forget_others(now_s)

    def forget_others(self, now_s: float) -> None:
        """Drops prompts without a session that have expired."""
        while self._others and self._others[0][0] < now_s - RECENT_S:
            self._drop_other()

    def _drop_other(self) -> None:
        self.other_bytes -= self._others.popleft()[2].nbytes

    def end(self, session_id: str) -> None:
        """Drops a router's session (such as a user's conversation) and its prompts."""
        ended = self._by_id.pop(session_id, None)
        if ended is not None:
            self.num_bytes -= ended.num_bytes

    def shared_blocks(self, key_space_id: int, hashes: Words, session_id: str, now_s: float) -> int:
        """Returns the number of leading blocks of a prompt that other sessions (such as users'
        conversations), or recent requests without a session, may use again.

        A recorded prompt without a session does not count if the given prompt begins with all
        blocks of the recorded prompt: then the given prompt probably continues the recorded one.

        hashes: hashes of the prompt's blocks.
        session_id: the session of the prompt; empty if it has no session.
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
        """Raises AssertionError if bytes are miscounted or a bound is broken."""
        assert self.num_bytes == sum(one.num_bytes for one in self._by_id.values()), "miscounted"
        assert len(self._by_id) <= self._most_sessions and self.num_bytes <= self._most_bytes
        assert self.other_bytes == sum(keys.nbytes for _, _, keys in self._others), "miscounted"
        assert len(self._others) <= MAX_OTHERS and self.other_bytes <= MAX_OTHERS_BYTES
        assert all(one.chains for one in self._by_id.values()), "a session without a chain"
