"""Decides for which tenant a peer may act, and keeps the single-use tickets with which users on the
Unix socket prove their identity.

Always true: with tenants, a peer acts for one only with a proof that the tenant lists; without,
every peer may name any. A refusal does not say whether the tenant exists. Only the SHA-256 of
secrets is kept, and compared in constant time. Pure: no I/O and no clock.
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
    """The other end of a connection, with the proofs of its identity.

    where: for messages.
    uid, gids: of its process; -1 if unknown.
    token_digest: SHA-256 of its bearer token; empty without one.
    certificate_names: as the TLS handshake has verified.
    """

    where: str = "nobody"
    uid: int = -1
    gids: frozenset[int] = frozenset()
    token_digest: bytes = field(default=b"", repr=False)
    certificate_names: frozenset[str] = frozenset()

    @property
    def has_proof(self) -> bool:
        return self.uid >= 0 or bool(self.token_digest) or bool(self.certificate_names)

    def __str__(self) -> str:
        names = (
            f" certificate={','.join(map(_shown, sorted(self.certificate_names)))}"
            if self.certificate_names
            else ""
        )
        return f"{self.where}{names}{' with a token' if self.token_digest else ''}"


def _shown(name: str) -> str:
    """Quotes unusual characters, so that a certificate's name can't pass for other text."""
    return name if _PLAIN_NAME.fullmatch(name) else repr(name)


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest() if token else b""


@dataclass(frozen=True, slots=True)
class Proofs:
    """One is enough, for a tenant or for an admin.

    token_digests: SHA-256, 32 bytes each.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    token_digests: frozenset[bytes] = frozenset()
    certificate_names: frozenset[str] = frozenset()

    def match(self, peer: Peer) -> bool:
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
    """sees_table: its sessions may map the block table.
    max_sessions: 0: no limit for this tenant.
    """

    name: str
    proofs: Proofs
    sees_table: bool = False
    max_sessions: int = 0


@dataclass(slots=True)
class AccessControl:
    """Without tenants, every peer has access.

    admins: proofs that admins need over TCP.

    Both may be replaced while the server runs; `tenants` neither becomes nor stops being empty.
    """

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    admins: Proofs = Proofs()

    @property
    def is_open(self) -> bool:
        return not self.tenants

    def admit(self, peer: Peer, tenant_name: str) -> Tenant | None:
        """None if access is open. Raises UNAUTHENTICATED without a proof, NOT_ALLOWED if there
        is no such tenant or it accepts none of the proofs."""
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
        """Raises UNAUTHENTICATED without a proof, NOT_ALLOWED if the peer is no admin."""
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
        """True if the peer may use the descriptor socket."""
        return any(tenant.proofs.match(peer) for tenant in self.tenants.values())


# ------------------------------------------------------------------------------------------ Tickets
#
# A ticket proves, over gRPC on the Unix socket, which user a session belongs to. The user fetches
# it from the descriptor socket, where the kernel names the user.
#
# Always true: a ticket can be redeemed once, within TTL_S. Outstanding tickets are bounded, also
# per user, so that none can use up all.

TTL_S = 10.0
TICKET_BYTES = 16
MAX_TICKETS = 8192
MAX_TICKETS_OF_USER = 512


class Tickets:
    """`fresh`: random bytes for a new ticket."""

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
        """Raises OVERLOADED. `now_s`: of the same clock as in `redeem`."""
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
        """The peer to which it was issued; None if it is unknown, was redeemed before, or has
        expired."""
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
