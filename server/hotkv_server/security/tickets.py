"""One-time tickets: they tie a session on the Unix socket to the user whose process fetched them.

Always true: a ticket is good once, for TTL_S seconds, and for the peer that it was given to; the
number outstanding is bounded, for each user and in all, so that no user can use up another's. No
clock: time is passed in.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.security.identity import Peer

TTL_S = 10.0
TICKET_BYTES = 16
MAX_TICKETS = 8192
MAX_TICKETS_OF_USER = 512


class Tickets:
    """Issues tickets, and redeems each once. `fresh`: makes the bytes of one."""

    def __init__(
        self, fresh: Callable[[], bytes] = lambda: secrets.token_bytes(TICKET_BYTES)
    ) -> None:
        self._fresh = fresh
        self._issued: OrderedDict[bytes, tuple[Peer, float]] = OrderedDict()
        self._of_user: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._issued)

    def __repr__(self) -> str:
        return f"Tickets({len(self._issued)} outstanding of {len(self._of_user)} users)"

    def issue(self, peer: Peer, now_s: float) -> bytes:
        """A new ticket for the peer. Raises OVERLOADED if its user has too many outstanding."""
        self._expire(now_s)
        if (
            self._of_user.get(peer.uid, 0) >= MAX_TICKETS_OF_USER
            or len(self._issued) >= MAX_TICKETS
        ):
            raise HotKVError(
                Reason.OVERLOADED,
                f"too many tickets are outstanding for user id {peer.uid}; use them, or wait "
                f"{TTL_S:g} s",
            )
        ticket = self._fresh()
        self._issued[ticket] = peer, now_s + TTL_S
        self._of_user[peer.uid] = self._of_user.get(peer.uid, 0) + 1
        return ticket

    def redeem(self, ticket: bytes, now_s: float) -> Peer | None:
        """Uses a ticket up and returns the peer that it was given to; None if it was never given
        out, was used before or is too old."""
        self._expire(now_s)
        if ticket not in self._issued:
            return None
        return self._take(ticket)

    def _expire(self, now_s: float) -> None:
        while self._issued and next(iter(self._issued.values()))[1] <= now_s:
            self._take(next(iter(self._issued)))

    def _take(self, ticket: bytes) -> Peer:
        peer, _ = self._issued.pop(ticket)
        left = self._of_user[peer.uid] - 1
        if left:
            self._of_user[peer.uid] = left
        else:
            del self._of_user[peer.uid]
        return peer

    def check_invariants(self) -> None:
        """For tests."""
        counts: dict[int, int] = {}
        for peer, _ in self._issued.values():
            counts[peer.uid] = counts.get(peer.uid, 0) + 1
        assert counts == self._of_user
        expiries = [expiry for _, expiry in self._issued.values()]
        assert expiries == sorted(expiries)
        assert (
            len(self._issued) <= MAX_TICKETS
            and max(counts.values(), default=0) <= MAX_TICKETS_OF_USER
        )
