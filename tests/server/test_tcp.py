"""TCP: which clients are let in, with which proof, and what they can see."""

import contextlib
import json
import os
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import Server, runtime_folder
from hotkv_client import Credentials, GroupHashes, Role, Session, SessionConfig
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_proto.errors import HotKVError
from tests.server import guarded as support
from tests.server.certificates import Authority
from tests.server.guarded import TOKEN, Guarded, refused, sha256, why_absent

guarded, engine = support.guarded, support.engine


def over_tcp(guarded: Guarded, tenant: str, credentials: Credentials) -> None:
    """A session over TCP opens and looks up."""
    engine = PagedEngine(guarded.tcp, tenant=tenant)
    space, role = engine.key_space, Role.SCHEDULER
    config = SessionConfig(guarded.tcp, "remote", role, space, credentials=credentials)
    with contextlib.closing(Session(config)) as session:
        session.start()
        assert session.wait_connected(10), session
        assert not session.lookup([GroupHashes(0, [bytes(32)])]).result(60)[0].any()
        assert session.probe(0, [bytes(32)]) is None
    os.close(engine.fd)


def test_who_is_let_in_over_tcp(guarded: Guarded) -> None:
    over_tcp(guarded, "beta", guarded.credentials("beta"))
    over_tcp(guarded, "gamma", guarded.credentials("nobody", TOKEN))
    assert guarded.logged("session admitted", "tenant='beta'", "spiffe://cluster/beta")
    assert guarded.logged("session admitted", "tenant='gamma'", "with a token")
    assert TOKEN not in guarded.server.log.read_text()


@pytest.mark.parametrize(
    ("tenant", "name", "token"),
    [
        ("gamma", "nobody", "wrong"),
        ("gamma", "nobody", TOKEN[:-1]),
        ("gamma", "beta", ""),
        ("alpha", "beta", ""),
        ("beta", "nobody", TOKEN),
    ],
)
def test_a_wrong_proof_over_tcp_is_refused(
    guarded: Guarded, tenant: str, name: str, token: str
) -> None:
    why = why_absent(guarded.tcp, tenant, guarded.credentials(name, token))
    assert why.startswith("NOT_ALLOWED")
    assert guarded.logged("refused", f"tenant={tenant!r}", "NOT_ALLOWED")


@pytest.mark.parametrize("name", ["", "intruder", "expired"])
def test_without_a_good_certificate_there_is_no_connection(guarded: Guarded, name: str) -> None:
    """None, one of a foreign authority, one that has expired: whatever the token."""
    assert "TLS certificates" in why_absent(guarded.tcp, "gamma", guarded.credentials(name, TOKEN))
    assert guarded.logged("Handshake failed")


def test_a_client_refuses_a_server_it_does_not_know(guarded: Guarded) -> None:
    proof = guarded.credentials("beta", ca=guarded.foreign_ca)
    assert "TLS certificates" in why_absent(guarded.tcp, "beta", proof)


def test_a_token_is_not_sent_in_the_clear(guarded: Guarded) -> None:
    bare = Credentials(token_file=guarded.credentials("", TOKEN).token_file)
    assert "in the clear" in refused(lambda: AdminClient("node7:9000", credentials=bare))[1]
    assert why_absent("node7:9000", "gamma", bare).startswith(
        "INVALID_FIELD: token_file without tls_ca"
    )


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_tcp_shows_no_more_than_it_must(guarded: Guarded) -> None:
    proof = guarded.credentials("operator")
    secrets = grpc.ssl_channel_credentials(
        *(Path(p).read_bytes() for p in (proof.tls_ca, proof.tls_key, proof.tls_certificate))
    )
    with grpc.secure_channel(guarded.tcp, secrets) as channel:
        assert (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            next(
                reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                    iter([request])
                )
            )
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    host, port = guarded.tcp.split(":")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(proof.tls_ca)
    old.load_cert_chain(proof.tls_certificate, proof.tls_key)
    for version, fine in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        old.maximum_version = version
        old.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), 5) as plain:
            if fine:
                with old.wrap_socket(plain, server_hostname="localhost") as secured:
                    assert secured.version() == "TLSv1.2"
            else:
                with pytest.raises((ssl.SSLError, OSError)):
                    old.wrap_socket(plain, server_hostname="localhost")


@pytest.mark.long
def test_certificates_are_taken_up_when_they_change(guarded: Guarded) -> None:
    """Bad ones are named once and left alone; good ones count from the next connection on."""
    kept = {
        name: (guarded.folder / name).read_bytes()
        for name in ("server.pem", "server.key", "clients.pem")
    }
    try:
        (guarded.folder / "server.pem").write_text("no certificate")
        over_tcp(guarded, "beta", guarded.credentials("beta"))
        over_tcp(guarded, "beta", guarded.credentials("beta"))
        assert guarded.logged("new certificates can't be used, the old ones stay")
        assert guarded.server.log.read_text().count("new certificates can't be used") == 1
        new_ca = Authority(guarded.folder, "next")
        new_ca.issue("server")
        new_ca.issue("beta-next", "spiffe://cluster/beta")
        shutil.copy(new_ca.path, guarded.folder / "clients.pem")
        over_tcp(guarded, "beta", guarded.credentials("beta-next", ca=new_ca))
        assert guarded.logged("certificates reloaded")
        assert "TLS certificates" in why_absent(
            guarded.tcp, "beta", guarded.credentials("beta", ca=new_ca)
        )
    finally:
        for name, content in kept.items():
            (guarded.folder / name).write_bytes(content)
    over_tcp(guarded, "beta", guarded.credentials("beta"))


# TCP without TLS


def test_a_token_proves_a_tenant_without_tls_too() -> None:
    """Where the operator means it, say behind a proxy that speaks TLS."""
    tenants = json.dumps([{"name": "gamma", "token_sha256": [sha256(TOKEN)]}])
    with runtime_folder(64 << 20) as folder:
        (folder / "token").write_text(TOKEN)
        flags = ["--tcp-address", "localhost:0", "--security.tcp-insecure", "true"]
        flags += ["--security.tenants", tenants]
        with Server(folder, "16MiB", *flags) as server:
            server.wait_ready()
            plain = Guarded(server, folder, None, None)  # type: ignore[arg-type]
            over_tcp(plain, "gamma", Credentials(token_file=str(folder / "token")))
            assert why_absent(plain.tcp, "gamma", Credentials()).startswith("UNAUTHENTICATED")
            assert why_absent(plain.target, "gamma").startswith("NOT_ALLOWED")
            with AdminClient(plain.tcp) as admin, pytest.raises(HotKVError, match="UNIMPLEMENTED"):
                admin.info()


def test_the_admin_socket_may_lie_elsewhere() -> None:
    with runtime_folder(64 << 20) as folder:
        elsewhere = folder / "operators" / "admin.sock"
        flags = ("--security.admin-socket", str(elsewhere), "--security.admin-socket-mode", "0660")
        with Server(folder, "16MiB", *flags) as server:
            server.wait_ready()
            assert not (server.runtime_folder / "admin.sock").exists()
            assert elsewhere.stat().st_mode & 0o777 == 0o660
            with AdminClient(f"unix:{elsewhere}") as admin:
                assert admin.info()["state"] == "ready"
