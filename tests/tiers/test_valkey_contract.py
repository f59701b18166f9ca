"""Runs `tier_contract` with Valkey over TCP, Unix sockets and TLS, and as a user with few
rights; wrong certificates are refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.contracts.tier_contract import check_tier
from tests.server.certificates import Authority
from tests.support.waiting import wait_for
from tests.tiers.support import tls_proxy
from tests.tiers.valkey_support import Server, bench_over, rig_maker, running

PASSWORD = "correct-horse-battery"
RIGHTS = "+get +set +exists +unlink +incrby +select +info +hello +client|setname"
ACL = f"kv on >{PASSWORD} ~hotkv/1/* {RIGHTS}"


@pytest.mark.parametrize(
    ("address", "options"), [("127.0.0.1:{0.port}", {}), ("unix:{0.path}", {"connections": 1})]
)
def test_each_address_keeps_the_contract(
    server: Server, address: str, options: dict[str, int]
) -> None:
    check_tier(rig_maker(server, lambda: address.format(server), **options), seed=1)


def test_an_acl_user_keeps_the_contract(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(PASSWORD + "\n")
    with running(tmp_path / "server", user=ACL) as server:
        make = rig_maker(
            server, lambda: f"localhost:{server.port}", user="kv", password_file=password_file
        )
        check_tier(make, seed=5)


def test_tls_keeps_the_contract(server: Server, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    with tls_proxy(server.path, authority, asks_for_certificate=True) as proxy:
        certificate, key = authority.issue("hotkv")
        options = {"ca_file": authority.path, "cert_file": certificate, "key_file": key}
        make = rig_maker(server, lambda: f"127.0.0.1:{proxy.port}", tls=True, **options)
        check_tier(make, seed=6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ca_file": "other"}, "certificate that does not pass"),
        ({"ca_file": "key"}, "because of ca_file"),
        ({"server_name": "elsewhere.example"}, "certificate that does not pass"),
        ({"mode": 0o644}, "can be read by every user"),
    ],
)
def test_other_certificates_do_not_pass(
    server: Server, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    authority, other = Authority(tmp_path, "ca"), Authority(tmp_path, "other")
    certificate, key = authority.issue("hotkv")
    key.chmod(options.pop("mode", 0o600))
    if ca_file := options.get("ca_file"):
        options = {"ca_file": other.path if ca_file == "other" else key}
    given = {"tls": True, "ca_file": authority.path, "cert_file": certificate, "key_file": key}
    with (
        tls_proxy(server.path, authority, asks_for_certificate=True) as proxy,
        bench_over(f"127.0.0.1:{proxy.port}", **{**given, **options}) as bench,
    ):
        wait_for(bench.tier.problem, "no problem")
        assert words in bench.tier.problem()
