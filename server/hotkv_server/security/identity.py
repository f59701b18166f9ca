"""Decides for which tenant a peer (the other end of a connection) may act. The proof of a peer's
identity is the user or group of its process, a token, or a client certificate. Also keeps the
single-use tickets with which users on the Unix socket prove their identity.

Always true:

- if the settings list tenants, a peer acts for a tenant only with a proof that the tenant lists. If
  the settings list no tenants, every peer may name any tenant;
- a peer that may not act for a tenant gets the same refusal, whether or not the tenant exists;
- the server keeps only the SHA-256 of secrets, and compares them in constant time.

Pure: no I/O and no clock.
"""

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hotkv_proto.errors import HotKVError, Reason

# --------------------------------------------------------------------------- Peers, proofs, tenants

_PLAIN_NAME = re.compile(r"[A-Za-z0-9@*/:._+-]+")


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, with the proofs of its identity; by default without proofs.

    `where`: the peer's address, for messages.
    `uid`: user id of the peer's process; -1 if unknown.
    `gids`: all groups of the peer's process.
    `token_digest`: SHA-256 of the bearer token that the peer sent; empty without a token.
    `certificate_names`: names in the client certificate that the TLS handshake has verified.
    """

    where: str = "nobody"
    uid: int = -1
    gids: frozenset[int] = frozenset()
    token_digest: bytes = field(default=b"", repr=False)
    certificate_names: frozenset[str] = frozenset()

    @property
    def has_proof(self) -> bool:
        """True if the peer has shown a proof of its identity of any kind."""
        return self.uid >= 0 or bool(self.token_digest) or bool(self.certificate_names)

    def __str__(self) -> str:
        names = (
            f" certificate={','.join(map(_shown, sorted(self.certificate_names)))}"
            if self.certificate_names
            else ""
        )
        return f"{self.where}{names}{' with a token' if self.token_digest else ''}"


def _shown(name: str) -> str:
    """Returns a name in a certificate as text for messages. Quotes a name with unusual characters,
    so that it can't be mistaken for other text."""
    return name if _PLAIN_NAME.fullmatch(name) else repr(name)


def digest_of(token: str) -> bytes:
    """Returns the SHA-256 of a token; empty bytes for an empty token."""
    return hashlib.sha256(token.encode()).digest() if token else b""


@dataclass(frozen=True, slots=True)
class Proofs:
    """The proofs of identity that a tenant, or the list of admins, accepts. A peer (the other end
    of a connection) needs only one of these proofs.

    `uids`, `gids`: users, and groups, of the peer's process.
    `token_digests`: SHA-256 of tokens, 32 bytes each.
    `certificate_names`: names in a client certificate.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token_digests: frozenset[bytes] = frozenset()
    certificate_names: frozenset[str] = frozenset()

    def match(self, peer: Peer) -> bool:
        """Returns True if the peer has at least one of these proofs."""
        is_known_user = peer.uid >= 0 and (
            peer.uid in self.uids or not self.gids.isdisjoint(peer.gids)
        )
        return (
            is_known_user
            or self._has_token(peer.token_digest)
            or not self.certificate_names.isdisjoint(peer.certificate_names)
        )

    def _has_token(self, digest: bytes) -> bool:
        matches = [hmac.compare_digest(digest, known) for known in self.token_digests]
        return bool(digest) and any(matches)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant from the settings, which may share the server with other tenants but not their
    blocks.

    `proofs`: a peer with one of these proofs of identity may act for the tenant.
    `sees_table`: True if the tenant's sessions may map the block table.
    `max_sessions`: most sessions of the tenant; 0: no limit for this tenant.
    """

    name: str
    proofs: Proofs
    sees_table: bool = False
    max_sessions: int = 0


@dataclass(slots=True)
class AccessControl:
    """Decides for which tenants peers (the other ends of connections) may act. If there are no
    tenants, every peer has access.

    `tenants`: the tenants by name.
    `admins`: proofs of identity that admins need over TCP.

    Both may be replaced while the server runs. A server with tenants must keep at least one tenant;
    a server without tenants must not get any.
    """

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    admins: Proofs = Proofs()

    @property
    def is_open(self) -> bool:
        """True if a peer needs no proof to act for a tenant, because there are no tenants."""
        return not self.tenants

    def admit(self, peer: Peer, tenant_name: str) -> Tenant | None:
        """Returns the tenant with this name if the peer (the other end of a connection) may act for
        it; None if access is open (`is_open`). Raises HotKVError with the reason UNAUTHENTICATED if
        the peer has no proof, or NOT_ALLOWED if the tenant does not exist or accepts none of the
        peer's proofs."""
        if self.is_open:
            return None
        if not peer.has_proof:
            raise HotKVError(
                Reason.UNAUTHENTICATED,
                "this server has tenants, and the session has no proof of its own: connect over "
                "the Unix socket with a client that sends a "
                "ticket, or over TCP with a token or a client certificate",
            )
        tenant = self.tenants.get(tenant_name)
        if tenant is None or not tenant.proofs.match(peer):
            raise HotKVError(
                Reason.NOT_ALLOWED,
                f"key_space.tenant is {tenant_name!r}, for which this peer may not act; set "
                "hotkv.tenant to that of this user, token or "
                "certificate, or have the operator list it in security.tenants",
            )
        return tenant

    def admit_admin(self, peer: Peer) -> None:
        """Checks that the peer (the other end of a connection) is an admin. Raises HotKVError with
        the reason UNAUTHENTICATED if the peer has no proof, or NOT_ALLOWED if it is no admin."""
        if not peer.has_proof:
            raise HotKVError(
                Reason.UNAUTHENTICATED,
                "the admin API over TCP needs an admin's token or client certificate; none came",
            )
        if not self.admins.match(peer):
            raise HotKVError(
                Reason.NOT_ALLOWED,
                "this token or certificate is no admin's; list it in "
                "security.admin_token_sha256 or its names",
            )

    def may_link(self, peer: Peer) -> bool:
        """Returns True if the peer may use the descriptor socket (over which engines and the server
        pass file descriptors, and engines fetch tickets), because a tenant accepts one of the
        peer's proofs."""
        return any(tenant.proofs.match(peer) for tenant in self.tenants.values())


# ------------------------------------------------------------------------------------------ Tickets
# A ticket proves, over gRPC on the Unix socket, which user a session belongs to. A process of the
# user fetches it from the descriptor socket: the server's other Unix socket, for file descriptors,
# on which the kernel tells the server the process's user.
#
# Always true: a ticket can be redeemed once, within TTL_S seconds, and proves the identity of the
# peer that fetched it. The number of outstanding tickets (not redeemed and not expired) is bounded,
# per user and in total, so a single user can't use up all of them.

TTL_S = 10.0
"""Time for which a ticket is valid."""
TICKET_BYTES = 16
MAX_TICKETS = 8192
"""Most outstanding tickets of all users together."""
MAX_TICKETS_OF_USER = 512
"""Most outstanding tickets of a user."""


class Tickets:
    """Issues tickets, and redeems each ticket once. A ticket proves to which user a session on the
    Unix socket belongs: a process of this user has fetched the ticket from the descriptor socket. A
    ticket is outstanding until it is redeemed or expires.

    `fresh`: returns the random bytes for a new ticket.
    """

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
        """Returns a new ticket for the peer. Raises HotKVError with the reason OVERLOADED if too
        many tickets are outstanding: MAX_TICKETS_OF_USER of the peer's user, or MAX_TICKETS of all
        users.

        `now_s`: the time in seconds; `redeem` must get the time of the same clock.
        """
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
        """Redeems a ticket, which is then no longer valid, and returns the peer for which the
        ticket was issued. Returns None if the ticket is unknown, was redeemed before, or was issued
        more than TTL_S ago."""
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
        """Raises AssertionError if the counts of outstanding tickets (not redeemed and not expired)
        are wrong, or if a limit on their number is exceeded."""
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
