"""Tests `PageAccess`: who may see the status page."""

import hashlib
import os
from pathlib import Path

import pytest

from hotkv_server.security.identity import AccessControl, Proofs, Tenant
from hotkv_server.security.page_access import PageAccess, PageRefusal, Sight, read_token
from hotkv_server.security.path_checks import UnsafeError

TOKEN, ADMIN = "viewer-0123456789abcdef", "admin-0123456789abcdef"
ADMINS = Proofs(token_digests=frozenset([hashlib.sha256(ADMIN.encode()).digest()]))
TENANTS = {"blue": Tenant("blue", Proofs(frozenset([1])))}
HERE = "127.0.0.1:9433"
BEARER = f"Bearer {TOKEN}"
TO_ADMIN = f"Bearer {ADMIN}"
OWN = ("127.0.0.1", HERE, "localhost", "LOCALHOST:1", "localhost.:1", "[::1]:9433")
ADDRESSES = ("a.localhost:80", "192.168.0.7:9433", "node-7:9433", "NODE-7.")
FOREIGN = ("evil:9433", "", "::1", "localhost.evil.net", "127.0.0.1.evil.net", "evil", "[", ":9433")
ODD = (f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}", f"Token {TOKEN}")
WRONG = ("x", TOKEN[:-1], f"{TOKEN}x", ADMIN, "é" * 30)

LOCAL, NAMED = PageAccess(), PageAccess(own_name="Node-7")
WITH_TOKEN, FAR = PageAccess(read=lambda: TOKEN), PageAccess(False, lambda: TOKEN)
TENANTS_HERE = PageAccess(True, lambda: TOKEN, AccessControl(TENANTS, ADMINS))
TENANTS_FAR = PageAccess(False, lambda: TOKEN, AccessControl(TENANTS, ADMINS))


@pytest.mark.parametrize(
    ("access", "host", "shown", "sight"),
    [
        *[(LOCAL, host, "", Sight.NAMES) for host in OWN],
        *[(NAMED, host, "", Sight.NAMES) for host in ADDRESSES],
        *[(WITH_TOKEN, host, BEARER, Sight.NAMES) for host in FOREIGN],
        *[(FAR, HERE, f"{kind} {TOKEN} ", Sight.NAMES) for kind in ("bearer", "BEARER")],
        (PageAccess(False, control=AccessControl(admins=ADMINS)), HERE, TO_ADMIN, Sight.NAMES),
        *[(one, HERE, BEARER, Sight.SUMS) for one in (TENANTS_HERE, TENANTS_FAR)],
        *[(one, HERE, TO_ADMIN, Sight.NAMES) for one in (TENANTS_HERE, TENANTS_FAR)],
    ],
)
def test_it_is_shown(access: PageAccess, host: str, shown: str, sight: Sight) -> None:
    assert access.judge(host, shown) is sight


@pytest.mark.parametrize(
    ("access", "host", "shown", "needs_token"),
    [
        # A page elsewhere could let its own name resolve to this machine.
        *[(LOCAL, host, shown, False) for host in FOREIGN for shown in ("", TO_ADMIN)],
        # Beyond this machine, a proxy may run at this address.
        (PageAccess(is_local=False), HERE, "", False),
        *[(FAR, HERE, f"Bearer {token}", True) for token in ("", *WRONG)],
        *[(WITH_TOKEN, HERE, shown, True) for shown in ODD],
    ],
)
def test_it_is_refused(access: PageAccess, host: str, shown: str, needs_token: bool) -> None:
    with pytest.raises(PageRefusal, match=r"http\.token_file") as refused:
        access.judge(host, shown)
    assert refused.value.needs_token == needs_token and TOKEN not in str(refused.value)


def test_token_file_must_not_be_everybodys(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"  {TOKEN}\n")
    assert read_token(path) == TOKEN
    for wrong in ("", "short", "x" * 5000, "é" * 20, f"{TOKEN}\n{TOKEN}"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="openssl rand"):
            read_token(path)
    path.write_text(TOKEN)
    os.chmod(path, 0o604)
    with pytest.raises(UnsafeError):
        read_token(path)
    with pytest.raises(OSError):
        read_token(tmp_path / "absent")
