"""Who may do what, on a real server with tenants, TLS and admins: what is refused is refused with a canonical code, and logged."""

import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import ROOT, ChildError, Server, runtime_folder
from hotkv.errors import HotKVError, Reason
from hotkv.results import TransferStatus
from hotkv.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc, events_pb2, events_pb2_grpc, session_pb2, session_pb2_grpc
from hotkv_client import BlockRun, Credentials, GroupHashes, LinkState, LoadRun, Role, Session, SessionConfig, _wire, cli
from hotkv_client.admin import AdminClient
from hotkv_client.channels import admin_target
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.testing import PagedEngine
from hotkv_server.rpc.errors import CODES
from hotkv_server.rpc.session_service import MAX_KEY_SPACES_OF_TENANT
from hotkv_server.security.tickets import TTL_S
from tests.server.certificates import Authority
from tests.server.test_refusals import reason_of

OTHER_UID, OTHER_GID, STRANGER_UID = 4242, 4343, 5151
TOKEN, ADMIN_TOKEN = "a-token-of-gamma", "an-admin-token"
MINE = os.getuid()


@dataclass(frozen=True)
class Guarded:
    """A server with tenants. Of this user: alpha (may map the table), blind (may not), tiny (one session), hoarder. beta: OTHER_UID, or a
    certificate; gamma: a token; by_group: OTHER_GID.
    """

    server: Server
    folder: Path
    ca: Authority
    foreign_ca: Authority

    @property
    def target(self) -> str:
        return self.server.target

    @property
    def tcp(self) -> str:
        found = re.search(r"tcp_port=(\d+)", self.server.log.read_text())
        assert found is not None
        return f"localhost:{found[1]}"

    def credentials(self, name: str = "", token: str = "", ca: Authority | None = None) -> Credentials:
        token_file = self.folder / f"token-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        token_file.write_text(token + "\n")
        client = (str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")) if name else ("", "")
        return Credentials(str((ca or self.ca).path), *client, token_file=str(token_file) if token else "")

    def logged(self, *words: str) -> bool:
        """Whether one line of the log has all of them, within a moment."""
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            if any(all(word in line for word in words) for line in self.server.log.read_text().splitlines()):
                return True
            time.sleep(0.02)
        return False


def sha256(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def config(folder: Path) -> str:
    return f"""
tcp_address = "localhost:0"
[security]
socket_mode = "0666"
admin_on_tcp = true
admin_token_sha256 = ["{sha256(ADMIN_TOKEN)}"]
admin_certificate_names = ["spiffe://cluster/operator"]
[security.tls]
certificate = "{folder}/server.pem"
key = "{folder}/server.key"
client_ca = "{folder}/clients.pem"
[[security.tenants]]
name = "alpha"
uids = [{MINE}]
table = "mapped"
[[security.tenants]]
name = "blind"
uids = [{MINE}]
[[security.tenants]]
name = "tiny"
uids = [{MINE}]
max_sessions = 1
[[security.tenants]]
name = "hoarder"
uids = [{MINE}]
[[security.tenants]]
name = "beta"
uids = [{OTHER_UID}]
certificate_names = ["spiffe://cluster/beta"]
[[security.tenants]]
name = "gamma"
token_sha256 = ["{sha256(TOKEN)}"]
[[security.tenants]]
name = "by_group"
gids = [{OTHER_GID}]
"""


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    with runtime_folder(256 << 20) as folder:
        folder.chmod(0o711)
        ca, foreign_ca = Authority(folder, "clients"), Authority(folder, "foreign")
        ca.issue("server")
        ca.issue("beta", "spiffe://cluster/beta")
        ca.issue("nobody", "spiffe://cluster/nobody")
        ca.issue("operator", "spiffe://cluster/operator")
        ca.issue("expired", "spiffe://cluster/beta", lifetime=timedelta(days=-1))
        foreign_ca.issue("intruder", "spiffe://cluster/beta")
        (folder / "hotkv.toml").write_text(config(folder))
        with Server(folder, "64MiB", "--config", str(folder / "hotkv.toml"), "--arena.slab-bytes", "256KiB") as server:
            server.wait_ready()
            (folder / "run").chmod(0o755)
            yield Guarded(server, folder, ca, foreign_ca)


@pytest.fixture
def engine(guarded: Guarded) -> Iterator[Callable[..., PagedEngine]]:
    with contextlib.ExitStack() as stack:

        def make(tenant: str, **settings: Any) -> PagedEngine:
            made = PagedEngine(guarded.target, **{"engine_id": os.urandom(4).hex(), "tenant": tenant, **settings}).connect()
            stack.callback(made.close)
            return made

        yield make


Make = Callable[..., PagedEngine]


def store(engine: PagedEngine, count: int = 4) -> list[bytes]:
    blocks, name = [os.urandom(32) for _ in range(count)], os.urandom(8).hex()
    result = engine.session.store(name, name, [BlockRun(0, blocks, np.arange(count, dtype=np.int32))], 10).result(10)
    assert (result.results[0] == 1).all()
    return blocks


def why_absent(target: str, tenant: str, credentials: Credentials | None = None, *, ticket: bytes | None = None) -> str:
    """Why a session of this process is refused."""
    states: queue.Queue[tuple[LinkState, str]] = queue.Queue()
    engine = PagedEngine(target, tenant=tenant)
    more = {} if credentials is None else {"credentials": credentials}
    session = Session(
        SessionConfig(
            target, "refused", Role.SCHEDULER, engine.key_space, on_state=lambda *news: states.put(news), connect_timeout_s=3.0, **more
        )
    )
    if ticket is not None:
        session._ticket = lambda: (ticket, "")  # type: ignore[method-assign]
    session.start()
    try:
        state, why = states.get(timeout=20)
        assert state is LinkState.ABSENT, (state, why)
        return why
    finally:
        session.close()
        os.close(engine.fd)


def refused(call: Callable[[], Any]) -> tuple[Reason, str]:
    with pytest.raises((HotKVError, grpc.RpcError)) as caught:
        call()
    error = caught.value
    if isinstance(error, HotKVError):
        return error.reason, error.message
    assert error.code() == CODES[Reason(reason_of(error))]
    return Reason(reason_of(error)), error.details()


# Users of this node


def test_a_user_acts_for_its_own_tenants_only(guarded: Guarded, engine: Make) -> None:
    for tenant in ("alpha", "blind"):
        store(engine(tenant))
    for tenant in ("beta", "gamma", "no such tenant", ""):
        assert why_absent(guarded.target, tenant).startswith("NOT_ALLOWED")
        assert guarded.logged("refused", f"tenant={tenant!r}", f"uid={MINE}", "NOT_ALLOWED")


@pytest.mark.skipif(MINE != 0, reason="only root may become another user")
def test_other_users(guarded: Guarded) -> None:
    def act(uid: int, groups: str, tenant: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.server.other_user", str(uid), groups, guarded.target, tenant]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        assert "UNAVAILABLE" in answer["admin"], "the admin socket is the owner's"
        return answer

    beta = act(OTHER_UID, "", "beta")
    assert (beta["state"], beta["results"], beta["is_mapped"]) == ("connected", [1], False)
    assert act(OTHER_UID, str(OTHER_GID), "by_group")["results"] == [1]
    assert act(OTHER_UID, "", "by_group")["why"].startswith("NOT_ALLOWED")
    assert act(OTHER_UID, "", "alpha")["why"].startswith("NOT_ALLOWED")
    stranger = act(STRANGER_UID, "", "alpha")["why"]
    assert stranger.startswith("UNAUTHENTICATED") and f"user id {STRANGER_UID} may not link" in stranger
    assert guarded.logged("refused descriptor socket", f"uid={STRANGER_UID}")
    assert guarded.logged("session admitted", "tenant='beta'", f"uid={OTHER_UID}")


@pytest.mark.slow
def test_a_ticket_is_good_once_and_not_for_long(guarded: Guarded) -> None:
    path = descriptor_socket(guarded.target)
    assert path is not None
    for ticket in (b"", b"guess", bytes(16), b"x" * 10_000):
        assert why_absent(guarded.target, "alpha", ticket=ticket).startswith("UNAUTHENTICATED")
    assert guarded.logged("refused", "UNAUTHENTICATED: this server has tenants")
    assert guarded.logged("refused", "UNAUTHENTICATED: ticket was used before")
    old = fetch_ticket(path, 5)
    first = fetch_ticket(path, 5)
    assert why_absent(guarded.target, "beta", ticket=first).startswith("NOT_ALLOWED")
    assert why_absent(guarded.target, "alpha", ticket=first).startswith("UNAUTHENTICATED"), "it was used"
    time.sleep(TTL_S)
    assert why_absent(guarded.target, "alpha", ticket=old).startswith("UNAUTHENTICATED"), "it is too old"


def test_a_tenant_has_so_many_sessions(guarded: Guarded, engine: Make) -> None:
    engine("tiny")
    assert why_absent(guarded.target, "tiny").startswith("OVERLOADED: 1 sessions of this tenant are open")


# Nobody sees another tenant's


def test_a_tenant_can_not_probe_another(guarded: Guarded, engine: Make) -> None:
    """Neither by calls nor by names of leases, transfers, sequences and key spaces; what exists is refused as what does not."""
    one, other = engine("alpha", engine_id="shared-name"), engine("blind", engine_id="shared-name")
    blocks = store(one)
    one.session.acquire("lease", [GroupHashes(0, blocks)], 60).result(5)
    at = np.arange(1, dtype=np.int32)
    assert not other.session.lookup([GroupHashes(0, blocks)]).result(5)[0].any()
    assert not other.session.acquire("own", [GroupHashes(0, blocks)]).result(5).pinned[0].any()
    theirs = refused(lambda: other.session.load("t", "lease", [LoadRun(0, at, at)], 5).result(5))
    unknown = refused(lambda: other.session.load("t", "never", [LoadRun(0, at, at)], 5).result(5))
    assert theirs[0] is unknown[0] is Reason.UNKNOWN_LEASE
    assert theirs[1].replace("lease'", "…") == unknown[1].replace("never'", "…")
    assert guarded.logged("refused", "engine=blind/shared-name", "FOREIGN_LEASE")
    assert not other.session._call(lambda: _wire.release("lease")).result(5)
    assert one.session.load("t", "lease", [LoadRun(0, at, at)], 5).result(5).num_bytes, "it still has its lease"
    assert not other.session._call(lambda: _wire.cancel("t")).result(5)

    mine, its = (e.session._connection for e in (one, other))
    assert mine is not None and its is not None
    with AdminClient(guarded.target) as admin:
        space = {s["engine_id"]: s["key_space_id"] for s in admin.sessions()}["alpha/shared-name"]
    with grpc.insecure_channel(guarded.target) as channel:
        lookup = cache_pb2_grpc.CacheServiceStub(channel).Lookup
        groups = [cache_pb2.GroupHashes(hashes=b"".join(blocks))]
        there = refused(lambda: lookup(cache_pb2.LookupRequest(session_id=its.session_id, key_space_id=space, groups=groups)))
        nowhere = refused(lambda: lookup(cache_pb2.LookupRequest(session_id=its.session_id, key_space_id=3333, groups=groups)))
        assert there[0] is nowhere[0] is Reason.UNKNOWN_KEY_SPACE
        assert there[1].replace(str(space), "…") == nowhere[1].replace("3333", "…")
        assert refused(lambda: lookup(cache_pb2.LookupRequest(key_space_id=space, groups=groups)))[0] is Reason.UNAUTHENTICATED
        assert refused(lambda: lookup(cache_pb2.LookupRequest(session_id="guess", groups=groups)))[0] is Reason.UNKNOWN_SESSION
        assert all(lookup(cache_pb2.LookupRequest(session_id=mine.session_id, groups=groups)).groups[0].flags)
    assert guarded.logged("refused", "UNKNOWN_KEY_SPACE")
    assert guarded.logged("refused", "UNKNOWN_SESSION")
    one.session.release("lease")


def test_eviction_notices_go_to_the_tenant_alone(guarded: Guarded, engine: Make) -> None:
    seen: dict[str, list[Any]] = {"alpha": [], "blind": []}
    one, other = (engine(tenant, model="same", on_evicted=seen[tenant].append) for tenant in seen)
    blocks = store(one)
    store(other)
    with AdminClient(guarded.target) as admin:
        space = next(k["key_space_id"] for k in admin.key_spaces() if k["fingerprint"] == one.key_space.fingerprint.hex())
        admin.evict(space, hashes=b"".join(blocks))
    other.session.ping(5)
    one.session.ping(5)
    assert [h for e in seen["alpha"] for g in e.groups for h in g.hashes] and not seen["blind"]


def test_only_who_may_maps_the_table_and_nobody_the_arena(guarded: Guarded, engine: Make) -> None:
    one, other = engine("alpha"), engine("blind")
    blocks = store(one)
    assert one.session.probe(0, blocks) is not None
    assert other.session.probe(0, blocks) is None
    own = store(other)
    assert other.session.lookup([GroupHashes(0, own)]).result(5)[0].all(), "it looks up by calls"
    for session, sizes in ((one, (0, 1)), (other, (0, 0))):
        bare = Session(SessionConfig(guarded.target, "bare", Role.TOOL, session.key_space, use_table=False))
        bare.start()
        assert bare.wait_connected(10) and bare._connection is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(descriptor_socket(guarded.target)))
            peer.send(_wire.link_request(bare._connection.session_id, []))
            answer, fds, _, _ = socket.recv_fds(peer, 65536, 4)
            assert tuple(map(bool, _wire.link_sizes(answer))) == tuple(map(bool, sizes)) and len(fds) == sum(sizes)
            for fd in fds:
                with pytest.raises(OSError):
                    os.write(fd, b"x")
                os.close(fd)
        bare.close()


@pytest.mark.skipif(MINE != 0, reason="only root may become another user")
def test_a_link_needs_the_same_proof(guarded: Guarded, engine: Make) -> None:
    """A session id that leaked is of no use on the descriptor socket to another user."""
    one = engine("alpha")
    assert one.session._connection is not None
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(4242); os.setuid(4242)\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); peer.connect(sys.argv[1]); peer.send(bytes.fromhex(sys.argv[2]))\n"
        "answer, fds, _, _ = socket.recv_fds(peer, 65536, 4); print(answer.hex(), len(fds))"
    )
    packet = _wire.link_request(one.session._connection.session_id, []).hex()
    command = [sys.executable, "-c", code, str(descriptor_socket(guarded.target)), packet]
    answer, num_fds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert session_pb2.LinkResponse.FromString(bytes.fromhex(answer)).error.reason == Reason.NOT_ALLOWED and num_fds == "0"
    assert guarded.logged("refused descriptor socket", f"uid={OTHER_UID}", "NOT_ALLOWED")


def test_memory_that_is_none_is_refused(guarded: Guarded, engine: Make, tmp_path: Path) -> None:
    bare = Session(SessionConfig(guarded.target, "bare", Role.TOOL, engine("alpha").key_space, use_table=False))
    bare.start()
    assert bare.wait_connected(10) and bare._connection is not None
    pipe, (one, other) = os.pipe(), socket.socketpair()
    short = os.memfd_create("short")
    cases = [(pipe[0], "no file"), (one.fileno(), "no file"), (os.open("/dev/zero", os.O_RDWR), "no file"), (short, "fence")]
    cases.append((os.open("/usr/bin/env", os.O_RDONLY), "on a disk"))
    for fd, words in cases:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.connect(str(descriptor_socket(guarded.target)))
            name = "hotkv-fence" if words == "fence" else "../../etc/passwd"
            socket.send_fds(peer, [_wire.link_request(bare._connection.session_id, [name])], [fd])
            answer, fds, _, _ = socket.recv_fds(peer, 65536, 4)
        error = session_pb2.LinkResponse.FromString(answer).error
        assert (error.reason, words in error.message, fds) == (Reason.INVALID_LAYOUT, True, []), error
    for fd in (*pipe, short, cases[2][0], cases[4][0]):
        os.close(fd)
    one.close()
    other.close()
    bare.close()


# Admins


def test_the_admin_api_is_on_its_own_socket(guarded: Guarded) -> None:
    path = Path(admin_target(guarded.target).removeprefix("unix:"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert Path(guarded.target.removeprefix("unix:")).stat().st_mode & 0o777 == 0o666
    with grpc.insecure_channel(guarded.target) as channel:
        for call in (
            lambda: admin_pb2_grpc.AdminServiceStub(channel).ListBlocks(admin_pb2.ListBlocksRequest(), timeout=5),
            lambda: admin_pb2_grpc.AdminServiceStub(channel).Explain(admin_pb2.ExplainRequest(hashes=bytes(32)), timeout=5),
            lambda: next(admin_pb2_grpc.AdminServiceStub(channel).WatchRequests(admin_pb2.WatchRequestsRequest(), timeout=5)),
            lambda: next(events_pb2_grpc.EventServiceStub(channel).Subscribe(events_pb2.SubscribeRequest(), timeout=5)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(admin_target(guarded.target)) as channel, pytest.raises(grpc.RpcError) as caught:
        list(session_pb2_grpc.SessionServiceStub(channel).Connect(iter([session_pb2.ConnectRequest()]), timeout=5))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert guarded.server.cli("status")


def test_admins_over_tcp_prove_it(guarded: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    for proof in (guarded.credentials("operator"), guarded.credentials("nobody", ADMIN_TOKEN)):
        with AdminClient(guarded.tcp, credentials=proof) as admin:
            assert admin.info()["state"] == "ready"
            next(admin.events(seconds=5))
            next(admin.watch_requests(seconds=5))
    for proof in (guarded.credentials("nobody"), guarded.credentials("beta"), guarded.credentials("nobody", TOKEN)):
        with AdminClient(guarded.tcp, credentials=proof) as admin:
            assert refused(admin.info)[0] is Reason.NOT_ALLOWED
            assert refused(lambda admin=admin: next(admin.events(seconds=5)))[0] is Reason.NOT_ALLOWED
            assert refused(lambda admin=admin: next(admin.watch_requests(seconds=5)))[0] is Reason.NOT_ALLOWED
    assert guarded.logged("refused", "NOT_ALLOWED: this token or certificate is no admin's")
    proof = guarded.credentials("operator")
    flags = ["--target", guarded.tcp, "--tls-ca", proof.tls_ca, "--tls-certificate", proof.tls_certificate, "--tls-key", proof.tls_key]
    assert cli.main(["status", *flags]) == 0
    assert "hotkv-server" in capsys.readouterr().out
    assert cli.main(["status", *flags[:-1], "/nowhere"]) == 1
    assert "tls_key '/nowhere'" in capsys.readouterr().err


# TCP


def over_tcp(guarded: Guarded, tenant: str, credentials: Credentials) -> None:
    """A session over TCP opens and looks up."""
    engine = PagedEngine(guarded.tcp, tenant=tenant)
    session = Session(SessionConfig(guarded.tcp, "remote", Role.SCHEDULER, engine.key_space, credentials=credentials))
    session.start()
    assert session.wait_connected(10), session
    assert not session.lookup([GroupHashes(0, [bytes(32)])]).result(5)[0].any()
    assert session.probe(0, [bytes(32)]) is None
    session.close()
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
def test_a_wrong_proof_over_tcp_is_refused(guarded: Guarded, tenant: str, name: str, token: str) -> None:
    assert why_absent(guarded.tcp, tenant, guarded.credentials(name, token)).startswith("NOT_ALLOWED")
    assert guarded.logged("refused", f"tenant={tenant!r}", "NOT_ALLOWED")


@pytest.mark.parametrize("name", ["", "intruder", "expired"])
def test_without_a_good_certificate_there_is_no_connection(guarded: Guarded, name: str) -> None:
    """None, one of a foreign authority, one that has expired: the handshake fails, whatever the token."""
    assert "TLS certificates" in why_absent(guarded.tcp, "gamma", guarded.credentials(name, TOKEN))
    assert guarded.logged("Handshake failed")


def test_a_client_refuses_a_server_it_does_not_know(guarded: Guarded) -> None:
    assert "TLS certificates" in why_absent(guarded.tcp, "beta", guarded.credentials("beta", ca=guarded.foreign_ca))


def test_a_token_is_not_sent_in_the_clear(guarded: Guarded) -> None:
    bare = Credentials(token_file=guarded.credentials("", TOKEN).token_file)
    assert "in the clear" in refused(lambda: AdminClient("node7:9000", credentials=bare))[1]
    assert why_absent("node7:9000", "gamma", bare).startswith("INVALID_FIELD: token_file without tls_ca")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_tcp_shows_no_more_than_it_must(guarded: Guarded) -> None:
    proof = guarded.credentials("operator")
    secrets = grpc.ssl_channel_credentials(*(Path(p).read_bytes() for p in (proof.tls_ca, proof.tls_key, proof.tls_certificate)))
    with grpc.secure_channel(guarded.tcp, secrets) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request])))
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


def test_certificates_are_taken_up_when_they_change(guarded: Guarded) -> None:
    """Bad ones are named once and left alone; good ones count from the next connection on."""
    kept = {name: (guarded.folder / name).read_bytes() for name in ("server.pem", "server.key", "clients.pem")}
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
        assert "TLS certificates" in why_absent(guarded.tcp, "beta", guarded.credentials("beta", ca=new_ca))
    finally:
        for name, content in kept.items():
            (guarded.folder / name).write_bytes(content)
    over_tcp(guarded, "beta", guarded.credentials("beta"))


# Floods


def test_a_message_of_too_many_parts_is_refused_before_it_is_parsed(guarded: Guarded, engine: Make) -> None:
    one = engine("alpha")
    bomb = session_pb2.ConnectRequest()
    bomb.lookup.groups.extend([cache_pb2.GroupHashes()] * 40_000)
    one.session._send_only(bomb)
    with grpc.insecure_channel(guarded.target) as channel:
        lookup = cache_pb2_grpc.CacheServiceStub(channel).Lookup
        assert refused(lambda: lookup(bomb.lookup))[0] is Reason.TOO_LARGE
    del bomb.lookup.groups[2000:]
    assert refused(lambda: one.session._call(lambda: bomb).result(5))[0] is Reason.TOO_LARGE
    assert refused(lambda: one.session.lookup([GroupHashes(0, [bytes(32)] * ((1 << 17) + 1))]).result(10))[0] is Reason.TOO_LARGE
    with AdminClient(guarded.target) as admin:
        assert admin.info()["counters"]["refused_total"] > 0
    store(one)


def test_a_tenant_has_so_many_key_spaces(guarded: Guarded, engine: Make) -> None:
    """They are kept for ever, so its share of them must not be another's."""
    first = engine("hoarder", model="first")
    most = MAX_KEY_SPACES_OF_TENANT
    request = _wire.open_session(first.session.config)
    reasons = set()
    with grpc.insecure_channel(guarded.target) as channel:
        path = descriptor_socket(guarded.target)
        assert path is not None
        for number in range(most + 1):
            request.open_session.key_space.model, request.open_session.ticket = f"model {number}", fetch_ticket(path, 5)
            try:
                next(session_pb2_grpc.SessionServiceStub(channel).Connect(iter([request])))
            except grpc.RpcError as error:
                reasons.add(reason_of(error))
    assert reasons == {Reason.OVERLOADED}
    engine("hoarder", model="first")
    engine("blind", model="its own")


def test_a_session_has_so_many_transfers_in_flight(guarded: Guarded, engine: Make) -> None:
    """A flood of stores is shed with a canonical code; the session goes on, and so does its neighbour."""
    one, neighbour = engine("alpha", num_blocks=512, page_bytes=65536), engine("blind")
    blocks = [os.urandom(32) for _ in range(400)]
    futures = []
    for i in range(3000):
        futures.append(one.session.store(f"f{i}", f"f{i}", [BlockRun(0, blocks, np.arange(400, dtype=np.int32))], 60))
    neighbour.session.ping(20)
    reasons = {getattr(future.exception(60), "reason", None) for future in futures}
    assert reasons <= {None, Reason.OVERLOADED}
    store(one)
    store(neighbour)


# Memory that goes away


def test_a_client_that_cuts_its_memory_short_ends_no_server(guarded: Guarded, engine: Make) -> None:
    """In the middle of copies, at any moment: its transfers fail, nothing of them is kept, and everybody else goes on."""
    neighbour = engine("blind")
    random = np.random.default_rng(4)
    outcomes = set()
    for i in range(16):
        one = engine("alpha", num_blocks=32, page_bytes=1 << 18, layers=4)
        blocks = [os.urandom(32) for _ in range(32)]
        future = one.session.store(f"cut{i}", f"cut{i}", [BlockRun(0, blocks, np.arange(32, dtype=np.int32))], 20)
        time.sleep(random.uniform(0, 0.006))
        os.ftruncate(one.fd, 0)
        error = future.exception(20)
        outcomes.add(error.reason if isinstance(error, HotKVError) else future.result().status)
        kept = error is None and future.result().status is TransferStatus.DONE
        assert neighbour.session.lookup([GroupHashes(0, blocks)]).result(10)
        assert one.session.lookup([GroupHashes(0, blocks)]).result(10)[0].any() == kept
        one.session.close()
    assert TransferStatus.FAILED in outcomes
    assert guarded.logged("memory cut short", "engine=alpha/")
    store(neighbour)


def test_a_fault_elsewhere_still_ends_the_server() -> None:
    with runtime_folder(64 << 20) as folder:
        for cause in ("signal", "arena"):
            with Server(folder, "16MiB", "--arena.slab-bytes", "64KiB") as server:
                server.wait_ready()
                one = PagedEngine(server.target).connect()
                if cause == "signal":
                    os.kill(server.pid, signal.SIGBUS)
                else:
                    os.truncate(folder / "arena" / "arena", 0)
                    one.session.store("s", "s", [BlockRun(0, [os.urandom(32)], np.zeros(1, np.int32))], 5)
                assert server._child.process.wait(20) == -signal.SIGBUS
                one.close()


# TCP without TLS


def test_a_token_proves_a_tenant_without_tls_too() -> None:
    """Where the operator means it, say behind a proxy that speaks TLS."""
    tenants = json.dumps([{"name": "gamma", "token_sha256": [sha256(TOKEN)]}])
    with runtime_folder(64 << 20) as folder:
        (folder / "token").write_text(TOKEN)
        flags = ["--tcp-address", "localhost:0", "--security.tcp-insecure", "true", "--security.tenants", tenants]
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
        with Server(folder, "16MiB", "--security.admin-socket", str(elsewhere), "--security.admin-socket-mode", "0660") as server:
            server.wait_ready()
            assert not (server.runtime_folder / "admin.sock").exists()
            assert elsewhere.stat().st_mode & 0o777 == 0o660
            with AdminClient(f"unix:{elsewhere}") as admin:
                assert admin.info()["state"] == "ready"


# The start


def start(folder: Path, *flags: str) -> str:
    """What a server says that must not start."""
    with Server(folder, "16MiB", *flags) as server, pytest.raises(ChildError):
        server.wait_ready(20)
    return server.log.read_text()


def test_a_server_refuses_to_start_where_others_could_interfere() -> None:
    with runtime_folder(64 << 20) as folder:
        run, arena = folder / "run", folder / "arena"
        run.mkdir()
        run.chmod(0o777)
        assert f"chmod go-w {run}" in start(folder)
        run.chmod(0o700)
        (run / "grpc.sock").symlink_to(folder / "elsewhere")
        assert "not a socket of this server" in start(folder)
        (run / "grpc.sock").unlink()
        (run / "lock").unlink(missing_ok=True)
        (run / "lock").symlink_to(folder / "elsewhere")
        assert "not a regular file of this server" in start(folder)
        (run / "lock").unlink()
        arena.mkdir()
        arena.chmod(0o755)
        assert f"chmod 700 {arena}" in start(folder)
        arena.chmod(0o700)
        (arena / "arena").symlink_to(folder / "elsewhere")
        assert "not a regular file of this server" in start(folder)
        (arena / "arena").unlink()
        ca = Authority(folder, "ca")
        certificate, key = ca.issue("server")
        key.chmod(0o644)
        tls = ["--security.tls.certificate", str(certificate), "--security.tls.key", str(key), "--security.tls.client-ca", str(ca.path)]
        assert f"chmod o-rwx {key}" in start(folder, "--tcp-address", "localhost:0", *tls)
        assert not (folder / "elsewhere").exists()
