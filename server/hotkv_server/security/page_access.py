"""Decides whether a request may see the status page and its API, with names or only sums.

Always true: a request needs a token if other machines can reach the HTTP server, or if one is set.
With tenants, names need an admin's token. If no token is needed, the Host header must name this
machine. Otherwise another site could let its own name resolve to this address, and its page could
read the answer in the user's browser (DNS rebinding).

Pure, but for the token's file, which is read at each request that needs it.
"""

import enum
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hotkv_server.security.identity import AccessControl, Peer, Proofs, digest_of
from hotkv_server.security.path_checks import check_secret

MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 4096
BEARER = "bearer "


class Sight(enum.Enum):
    """What a request may see: NAMES are those of tenants, models and engines."""

    SUMS = enum.auto()
    NAMES = enum.auto()


class PageRefusal(Exception):
    """The message says how to get access. `needs_token`: a token would be enough."""

    def __init__(self, message: str, *, needs_token: bool) -> None:
        super().__init__(message)
        self.needs_token = needs_token


def read_token(path: Path) -> str:
    """Raises OSError, UnsafeError (`check_secret`), ValueError if there is no token."""
    check_secret(path)
    token = path.read_text().strip()
    is_line = token.isascii() and token.isprintable()
    if not (MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH and is_line):
        raise ValueError(
            f"{path} has no token: write a line of {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} ASCII "
            "characters, such as the output of `openssl rand -hex 16`"
        )
    return token


@dataclass(frozen=True, slots=True)
class PageAccess:
    """is_local: only this machine can reach the HTTP server.
    read: the token that gives access; raises like `read_token`. None without one.
    control: has the admins, whose tokens give access too; may change while the server runs.
    own_name: the host name on which the server listens. If no token is needed, the Host header
        must be this name, localhost, a name that ends in .localhost, or any IP address.
    """

    is_local: bool = True
    read: Callable[[], str] | None = None
    control: AccessControl = field(default_factory=AccessControl)
    own_name: str = ""

    @property
    def asks_for_token(self) -> bool:
        return not self.is_local or self.read is not None

    def judge(self, host: str, authorization: str) -> Sight:
        """Raises PageRefusal, or any error of `read_token`.

        host, authorization: headers; empty if missing.
        """
        peer = Peer(token_digest=digest_of(_bearer(authorization)))
        is_admin = self.control.admins.match(peer)
        if self.asks_for_token:
            self._check_token(peer, is_admin=is_admin)
        elif not self._is_own(host):
            raise PageRefusal(
                f"this page is served to this machine alone, and {_name_of(host)[:80]!r} may be "
                "the name of another: open it as 127.0.0.1 or localhost, or set http.token_file, "
                "with which any name will do",
                needs_token=False,
            )
        return Sight.NAMES if is_admin or self.control.is_open else Sight.SUMS

    def _check_token(self, peer: Peer, *, is_admin: bool) -> None:
        if self.read is None and not self.control.admins.token_digests:
            raise PageRefusal(
                "the server listens beyond this machine and has no token for its pages: set "
                'http.token_file, or http.host = "127.0.0.1"',
                needs_token=False,
            )
        tokens = [] if is_admin or self.read is None else [digest_of(self.read())]
        if not is_admin and not Proofs(token_digests=frozenset(tokens)).match(peer):
            raise PageRefusal(
                "a token is needed: send `Authorization: Bearer …` with what is in the file of "
                "http.token_file, or a token of security.admin_token_sha256",
                needs_token=True,
            )

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        return bool(name) and (
            name in ("localhost", self.own_name.lower().rstrip("."))
            or name.endswith(".localhost")
            or is_address(name)
        )


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".")


def _bearer(authorization: str) -> str:
    kind, token = authorization[: len(BEARER)], authorization[len(BEARER) :]
    return token.strip() if kind.lower() == BEARER else ""
