"""Who sees the status page, decided by what the settings say and what a request shows."""

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
REBOUND = "evil.example:9433"


def sight(access: PageAccess, token: str = "", host: str = "127.0.0.1:9433") -> Sight:
    return access.judge(host, f"Bearer {token}" if token else "")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:9433", "localhost", "LOCALHOST:1", "localhost.:1", "[::1]:9433"],
)
def test_this_machine_is_known_by_names_that_nobody_else_can_have(host: str) -> None:
    assert sight(PageAccess(), host=host) is Sight.NAMES


@pytest.mark.parametrize("host", ["a.localhost:80", "192.168.0.7:9433", "node-7:9433", "NODE-7."])
def test_addresses_and_the_name_in_the_settings_will_do_as_well(host: str) -> None:
    assert sight(PageAccess(own_name="Node-7"), host=host) is Sight.NAMES


@pytest.mark.parametrize(
    "host",
    [REBOUND, "", "::1", "localhost.evil.example", "127.0.0.1.evil.example", "evil", "[", ":9433"],
)
def test_another_name_is_refused_without_a_token_and_shown_with_one(host: str) -> None:
    with pytest.raises(PageRefusal, match=r"http\.token_file") as refused:
        sight(PageAccess(), host=host)
    assert not refused.value.needs_token
    with pytest.raises(PageRefusal):
        sight(PageAccess(), ADMIN, host=host)
    assert sight(PageAccess(read=lambda: TOKEN), TOKEN, host=host) is Sight.NAMES


def test_nobody_beyond_this_machine_sees_it_without_a_token() -> None:
    """Not even under an address of this machine: a proxy may stand there."""
    with pytest.raises(PageRefusal, match=r"http\.token_file.*http\.host") as refused:
        sight(PageAccess(is_local=False))
    assert not refused.value.needs_token
    access = PageAccess(is_local=False, read=lambda: TOKEN)
    for wrong in ("", "x", TOKEN[:-1], f"{TOKEN}x", ADMIN, "é" * 30):
        with pytest.raises(PageRefusal) as refused:
            sight(access, wrong)
        assert refused.value.needs_token and TOKEN not in str(refused.value)
    assert sight(access, TOKEN) is Sight.NAMES
    assert (
        sight(PageAccess(is_local=False, control=AccessControl(admins=ADMINS)), ADMIN)
        is Sight.NAMES
    )


@pytest.mark.parametrize("kind", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_bearer_in_any_letters(kind: str) -> None:
    access = PageAccess(read=lambda: TOKEN)
    assert access.judge("a", f"{kind} {TOKEN} ") is Sight.NAMES
    for other in (f"Basic {TOKEN}", TOKEN, f"Bearer{TOKEN}", f"Token {TOKEN}"):
        with pytest.raises(PageRefusal):
            access.judge("a", other)


@pytest.mark.parametrize("is_local", [True, False])
def test_tenants_are_named_to_admins_alone(is_local: bool) -> None:
    access = PageAccess(is_local, lambda: TOKEN, AccessControl(TENANTS, ADMINS))
    assert sight(access, TOKEN) is Sight.SUMS
    assert sight(access, ADMIN) is Sight.NAMES
    control = AccessControl(TENANTS, Proofs())
    here = PageAccess(control=control)
    assert sight(here, ADMIN) is Sight.SUMS
    # As a reload does.
    control.admins = ADMINS
    assert sight(here) is sight(here, "a wrong one") is Sight.SUMS
    assert sight(here, ADMIN) is Sight.NAMES


def test_a_token_is_read_of_a_file_that_is_not_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"  {TOKEN}\n")
    assert read_token(path) == TOKEN
    for wrong in ("", "short", "x" * 5000, "é" * 20):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="openssl rand"):
            read_token(path)
    path.write_text(TOKEN)
    os.chmod(path, 0o604)
    with pytest.raises(UnsafeError, match="o-rwx"):
        read_token(path)
    with pytest.raises(OSError):
        read_token(tmp_path / "absent")
