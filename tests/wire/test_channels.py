"""What a client proves of itself before any server is asked: targets, TLS settings, tokens. No
server; grpc's own functions are noted."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from hotkv_client import channels
from hotkv_client.channels import OPTIONS, admin_target, is_unix, metadata, open_channel
from hotkv_client.types import NO_CREDENTIALS, Credentials
from hotkv_proto.errors import HotKVError, Reason

UNIX, FAR, NEAR = "unix:/run/hotkv/grpc.sock", "far.example:7000", "127.0.0.1:7000"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Channels that were opened, by their arguments."""
    calls: list[Any] = []
    monkeypatch.setattr(grpc, "insecure_channel", lambda *args: calls.append(("plain", *args)))
    monkeypatch.setattr(grpc, "secure_channel", lambda *args: calls.append(("tls", *args)))
    monkeypatch.setattr(grpc, "ssl_channel_credentials", lambda *args: args)
    return calls


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A file of each kind, whose content is its name."""
    names = {name: str(tmp_path / name) for name in ("ca", "certificate", "key", "token")}
    for name, path in names.items():
        Path(path).write_text(name)
    return names


def test_the_admin_socket_lies_beside_the_users() -> None:
    assert admin_target(UNIX) == "unix:/run/hotkv/admin.sock"
    for target in ("unix:/run/hotkv/other.sock", "unix:/run/grpc.sock.old", FAR):
        assert admin_target(target) == target
    # A host is no folder, whatever it is called.
    assert admin_target("host/grpc.sock") == "host/grpc.sock"
    assert is_unix(UNIX) and not is_unix(FAR)


@pytest.mark.parametrize("target", [UNIX, FAR])
def test_without_tls_settings_a_channel_is_plain(opened: list[Any], target: str) -> None:
    open_channel(target, NO_CREDENTIALS)
    assert opened == [("plain", target, OPTIONS)]


def test_a_unix_socket_needs_no_tls(opened: list[Any], files: dict[str, str]) -> None:
    open_channel(UNIX, Credentials(tls_ca=files["ca"]))
    assert opened == [("plain", UNIX, OPTIONS)]


@pytest.mark.parametrize(
    "given, secrets",
    [
        ({"tls_ca": "ca"}, (b"ca", None, None)),
        (
            {"tls_certificate": "certificate", "tls_key": "key"},
            (None, b"key", b"certificate"),
        ),
        (
            {"tls_ca": "ca", "tls_certificate": "certificate", "tls_key": "key"},
            (b"ca", b"key", b"certificate"),
        ),
    ],
)
def test_any_tls_setting_makes_a_channel_secure(
    opened: list[Any], files: dict[str, str], given: dict[str, str], secrets: Any
) -> None:
    open_channel(FAR, Credentials(**{name: files[file] for name, file in given.items()}))
    assert opened == [("tls", FAR, secrets, OPTIONS)]


def test_another_name_may_be_expected_in_the_certificate(opened: list[Any]) -> None:
    open_channel(FAR, Credentials(tls_server_name="node"))
    expected = (("grpc.ssl_target_name_override", "node"), *OPTIONS)
    assert opened == [("tls", FAR, (None, None, None), expected)]


@pytest.mark.parametrize("name", ["tls_certificate", "tls_key"])
def test_a_certificate_without_its_key_is_refused(
    opened: list[Any], files: dict[str, str], name: str
) -> None:
    with pytest.raises(HotKVError, match="set both or neither") as refused:
        open_channel(FAR, Credentials(**{name: files["key"]}))
    assert refused.value.reason is Reason.INVALID_FIELD and not opened


@pytest.mark.parametrize("name", ["tls_ca", "tls_certificate", "tls_key"])
def test_a_file_that_is_not_there_is_named(
    opened: list[Any], files: dict[str, str], name: str
) -> None:
    paths = {
        "tls_ca": files["ca"],
        "tls_certificate": files["certificate"],
        "tls_key": files["key"],
    }
    with pytest.raises(HotKVError, match=f"{name} '/none': No such file") as refused:
        open_channel(FAR, Credentials(**paths | {name: "/none"}))
    assert refused.value.reason is Reason.INVALID_FIELD and not opened


# ------------------------------------------------------------------------------------------- tokens


def test_a_token_travels_where_nobody_can_read_it(files: dict[str, str]) -> None:
    bearer = (("authorization", "Bearer token"),)
    token = files["token"]
    assert metadata(FAR, NO_CREDENTIALS) == ()
    assert metadata(UNIX, Credentials(token_file=token)) == ()
    for given in ({"tls_ca": "x"}, {"tls_server_name": "x"}, {"tls_certificate": "x"}):
        assert metadata(FAR, Credentials(token_file=token, **given)) == bearer
    for target in (NEAR, "localhost:7000", "[::1]:7000"):
        assert metadata(target, Credentials(token_file=token)) == bearer
    with pytest.raises(HotKVError, match="in the clear") as refused:
        metadata(FAR, Credentials(token_file=token))
    assert refused.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", "schlüssel".encode(), b"\xff", b"a\x00"])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(HotKVError, match="holds no token") as refused:
        metadata(NEAR, Credentials(token_file=str(tmp_path / "token")))
    assert refused.value.reason is Reason.INVALID_FIELD
    assert channels._read("token_file", "") is None
