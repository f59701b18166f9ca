"""Tests how a client connects and proves who it is, with fakes of gRPC's functions."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from hotkv_client import channels
from hotkv_client.channels import OPTIONS, metadata, open_channel
from hotkv_client.targets import NO_CREDENTIALS, Credentials, admin_target, is_unix
from hotkv_proto.errors import HotKVError, Reason
from tests.server.certificates import Authority

UNIX, FAR, NEAR = "unix:/run/hotkv/grpc.sock", "far.example:7000", "127.0.0.1:7000"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(grpc, "insecure_channel", lambda *args: calls.append(("plain", *args)))
    monkeypatch.setattr(grpc, "secure_channel", lambda *args: calls.append(("tls", *args)))
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda *args: args)
    return calls


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Only the CA's file has a real certificate."""
    names = {name: str(tmp_path / name) for name in ("certificate", "key", "token")}
    for name, path in names.items():
        Path(path).write_text(name)
    return names | {"ca": str(Authority(tmp_path, "ca").path)}


def test_the_admin_socket_lies_beside_the_users() -> None:
    assert admin_target(UNIX) == "unix:/run/hotkv/admin.sock"
    for target in ("unix:/run/hotkv/other.sock", "unix:/run/grpc.sock.old", FAR):
        assert admin_target(target) == target
    # This is a host name, although it looks like a path.
    assert admin_target("host/grpc.sock") == "host/grpc.sock"
    assert is_unix(UNIX) and not is_unix(FAR)


@pytest.mark.parametrize(("target", "name"), [(UNIX, None), (FAR, None), (UNIX, "tls_ca")])
def test_channel_without_tls_or_distance_is_plain(
    opened: list[Any], files: dict[str, str], target: str, name: str | None
) -> None:
    open_channel(target, Credentials(**{name: files["ca"]}) if name else NO_CREDENTIALS)
    assert opened == [("plain", target, OPTIONS)]


@pytest.mark.parametrize(
    ("names", "secrets"),
    [
        (("ca",), ("ca", None, None)),
        (("certificate", "key"), (None, "key", "certificate")),
        (("ca", "certificate", "key"), ("ca", "key", "certificate")),
    ],
)
def test_any_tls_setting_makes_a_channel_secure(
    opened: list[Any],
    files: dict[str, str],
    names: tuple[str, ...],
    secrets: tuple[str | None, ...],
) -> None:
    open_channel(FAR, Credentials(**{f"tls_{name}": files[name] for name in names}))
    contents = tuple(name and Path(files[name]).read_bytes() for name in secrets)
    assert opened == [("tls", FAR, contents, OPTIONS)]


def test_another_name_may_be_expected_in_the_certificate(opened: list[Any]) -> None:
    open_channel(FAR, Credentials(tls_server_name="node"))
    expected = (("grpc.ssl_target_name_override", "node"), *OPTIONS)
    assert opened == [("tls", FAR, (None, None, None), expected)]


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_missing_file_and_half_pair_are_refused(
    opened: list[Any], files: dict[str, str], name: str
) -> None:
    paths = {f"tls_{one}": files[one] for one in ("ca", "certificate", "key")}
    cases = [(paths | {f"tls_{name}": "/none"}, f"tls_{name} '/none': No such file")]
    if name != "ca":
        cases.append(({f"tls_{name}": files["key"]}, "set both or neither"))
    for given, words in cases:
        with pytest.raises(HotKVError, match=words) as refused:
            open_channel(FAR, Credentials(**given))
        assert refused.value.reason is Reason.INVALID_FIELD and not opened


def test_a_token_travels_where_nobody_can_read_it(files: dict[str, str]) -> None:
    bearer = (("authorization", "Bearer token"),)
    token = files["token"]
    assert metadata(FAR, NO_CREDENTIALS) == ()
    assert metadata(UNIX, Credentials(token_file=token)) == ()
    for given in ({"tls_ca": "x"}, {"tls_server_name": "x"}, {"tls_certificate": "x"}):
        assert metadata(FAR, Credentials(token_file=token, **given)) == bearer
    for target in (NEAR, "localhost:7000", "[::1]:7000", "localhost", "::1"):
        assert metadata(target, Credentials(token_file=token)) == bearer
    for target in (FAR, "127.far.example:7000", "localhost.far.example:7000", "10.0.0.127:7000"):
        with pytest.raises(HotKVError, match="in the clear") as refused:
            metadata(target, Credentials(token_file=token))
        assert refused.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", "schlüssel".encode(), b"\xff", b"a\x00"])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(HotKVError, match="holds no token") as refused:
        metadata(NEAR, Credentials(token_file=str(tmp_path / "token")))
    assert refused.value.reason is Reason.INVALID_FIELD
    assert channels._read("token_file", "") is None
