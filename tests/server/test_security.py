"""Tests access control on a real server with tenants, TLS and admins."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import ROOT, ChildError, Server, runtime_folder
from hotkv_client import (
    BlockRun,
    Credentials,
    GroupHashes,
    LoadRun,
    RequestReport,
    Role,
    Session,
    SessionConfig,
)
from hotkv_client.admin import AdminClient
from hotkv_client.hints import HintClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.targets import admin_target, descriptor_socket
from hotkv_client.tickets import fetch_ticket
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import link_messages as _link_messages
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from tests.server import guarded as support
from tests.server.certificates import Authority
from tests.server.commands import HOTKV
from tests.server.guarded import (
    ADMIN_TOKEN,
    MINE,
    OTHER_GID,
    OTHER_UID,
    STRANGER_UID,
    TOKEN,
    Guarded,
    Make,
    refused,
    sha256,
    store,
    why_absent,
)
from tests.server.support import block_ids, hashes

guarded, engine = support.guarded, support.engine


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
        command = [sys.executable, "-m", "tests.server.other_user", str(uid), groups]
        command += [guarded.target, tenant]
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
    assert stranger.startswith("NOT_ALLOWED")
    assert guarded.logged("refused", "NOT_ALLOWED", f"uid={STRANGER_UID}")
    lane, path = (guarded.server.runtime_folder / name for name in ("lane.sock", "grpc.sock"))
    lane.chmod(0o600)
    stranger = act(STRANGER_UID, "", "alpha")["why"]
    assert stranger.startswith("UNAUTHENTICATED") and "(no ticket: " in stranger
    assert guarded.logged("refused descriptor socket", f"uid={STRANGER_UID}")
    path.chmod(0o600)
    assert f"this user may not open {path}" in act(STRANGER_UID, "", "alpha")["why"]
    for one in (lane, path):
        one.chmod(0o666)
    assert guarded.logged("session admitted", "tenant='beta'", f"uid={OTHER_UID}")


def test_a_ticket_is_good_once(guarded: Guarded) -> None:
    path = descriptor_socket(guarded.target)
    assert path is not None
    for ticket in (b"", b"guess", bytes(16), b"x" * 10_000):
        assert why_absent(guarded.target, "alpha", ticket=ticket).startswith("UNAUTHENTICATED")
    assert guarded.logged("refused", "UNAUTHENTICATED: this server has tenants")
    assert guarded.logged("refused", "UNAUTHENTICATED: ticket was used before")
    first = fetch_ticket(path, 5)
    assert why_absent(guarded.target, "beta", ticket=first).startswith("NOT_ALLOWED")
    again = why_absent(guarded.target, "alpha", ticket=first)
    assert again.startswith("UNAUTHENTICATED") and "no ticket" not in again, "it was used"


def test_a_tenant_has_so_many_sessions(guarded: Guarded, engine: Make) -> None:
    engine("tiny")
    assert why_absent(guarded.target, "tiny").startswith("OVERLOADED")


# Tenants never see each other's blocks


def test_a_tenant_can_not_probe_another(guarded: Guarded, engine: Make) -> None:
    """The words are those for ids that do not exist."""
    one, other = (engine(tenant, engine_id="shared-name") for tenant in ("alpha", "blind"))
    blocks = store(one)
    asked, run = [GroupHashes(0, blocks)], [LoadRun(0, block_ids(1), block_ids(1))]
    one.session.acquire("lease", asked, 60).result(60)
    assert not other.session.lookup(asked).result(60)[0].any()
    assert not other.session.acquire("own", asked).result(60).pinned[0].any()
    theirs, unknown = (
        refused(lambda name=name: other.session.load("t", name, run, 5).result(60))  # type: ignore[misc]
        for name in ("lease", "never")
    )
    assert theirs[0] is unknown[0] is Reason.UNKNOWN_LEASE
    assert theirs[1].replace("lease'", "…") == unknown[1].replace("never'", "…")
    assert guarded.logged("refused", "engine=blind/shared-name", "FOREIGN_LEASE")
    assert not other.session._call(lambda: _wire.release("lease")).result(60)
    assert one.session.load("t", "lease", run, 5).result(60).num_bytes, "it still has its lease"
    assert not other.session._call(lambda: _wire.cancel("t")).result(60)

    mine, its = (e.session._connection for e in (one, other))
    assert mine is not None and its is not None
    with AdminClient(guarded.target) as admin:
        space = {s["engine_id"]: s["key_space_id"] for s in admin.sessions()}["alpha/shared-name"]
    with grpc.insecure_channel(guarded.target) as channel:

        def lookup(session_id: str = "", number: int = 0) -> Any:
            groups = [cache_pb2.GroupHashes(hashes=b"".join(blocks))]
            request = cache_pb2.LookupRequest(
                session_id=session_id, key_space_id=number, groups=groups
            )
            return cache_pb2_grpc.CacheServiceStub(channel).Lookup(request)

        there = refused(lambda: lookup(its.session_id, space))
        nowhere = refused(lambda: lookup(its.session_id, 3333))
        assert there[0] is nowhere[0] is Reason.UNKNOWN_KEY_SPACE
        assert there[1].replace(str(space), "…") == nowhere[1].replace("3333", "…")
        assert refused(lambda: lookup(number=space))[0] is Reason.UNAUTHENTICATED
        assert refused(lambda: lookup("guess"))[0] is Reason.UNKNOWN_SESSION
        assert all(lookup(mine.session_id).groups[0].flags)
    assert guarded.logged("refused", "UNKNOWN_KEY_SPACE")
    one.session.release("lease")


def test_eviction_notices_go_to_the_tenant_alone(guarded: Guarded, engine: Make) -> None:
    seen: dict[str, list[Any]] = {"alpha": [], "blind": []}
    one, other = (engine(tenant, model="same", on_evicted=seen[tenant].append) for tenant in seen)
    blocks = store(one)
    store(other)
    with AdminClient(guarded.target) as admin:
        mine = one.key_space.fingerprint.hex()
        spaces = {k["fingerprint"]: k["key_space_id"] for k in admin.key_spaces()}
        admin.evict(spaces[mine], hashes=b"".join(blocks))
    other.session.ping(5)
    one.session.ping(5)
    assert [h for e in seen["alpha"] for g in e.groups for h in g.hashes] and not seen["blind"]


@contextlib.contextmanager
def bare_session(guarded: Guarded, key_space: KeySpace) -> Iterator[str]:
    """A session without memory and block table."""
    config = SessionConfig(guarded.target, "bare", Role.TOOL, key_space, use_table=False)
    with contextlib.closing(Session(config)) as bare:
        bare.start()
        assert bare.wait_connected(10) and bare._connection is not None
        yield bare._connection.session_id


def linked(guarded: Guarded, session_id: str, fds: dict[str, int]) -> tuple[bytes, list[int]]:
    """A link request by hand. (Answer, descriptors)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(descriptor_socket(guarded.target)))
        packet = _link_messages.link_request(session_id, list(fds))
        socket.send_fds(peer, [packet], list(fds.values()))
        answer, received, _, _ = socket.recv_fds(peer, 65536, 4)
    return answer, received


def test_only_allowed_clients_map_table_none_arena(guarded: Guarded, engine: Make) -> None:
    """Nobody gets offsets in the arena either."""
    one, other = engine("alpha"), engine("blind")
    blocks, own = store(one), store(other)
    assert one.session.arena() is None
    acquire = one.session.acquire("l", [GroupHashes(0, blocks)], wants_offsets=True)
    reason, message = refused(lambda: acquire.result(60))
    assert reason is Reason.NOT_ALLOWED and "wants_offsets" in message
    assert one.session.probe(0, blocks) is not None
    assert other.session.probe(0, blocks) is None
    assert other.session.lookup([GroupHashes(0, own)]).result(60)[0].all(), "it looks up by calls"
    for session, has_table in ((one, True), (other, False)):
        with bare_session(guarded, session.key_space) as session_id:
            answer, fds = linked(guarded, session_id, {})
        sizes = _link_messages.link_sizes(answer)
        assert (bool(sizes.arena_bytes), bool(sizes.table_bytes)) == (False, has_table)
        assert len(fds) == has_table and not sizes.num_words
        for fd in fds:
            with pytest.raises(OSError):
                os.write(fd, b"x")
            os.close(fd)


@pytest.mark.skipif(MINE != 0, reason="only root may become another user")
def test_a_link_needs_the_same_proof(guarded: Guarded, engine: Make) -> None:
    """The stranger has the session's id."""
    one = engine("alpha")
    assert one.session._connection is not None
    code = (
        "import os, socket, sys; os.setgroups([]); os.setgid(4242); os.setuid(4242)\n"
        "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); peer.connect(sys.argv[1]); "
        "peer.send(bytes.fromhex(sys.argv[2]))\n"
        "answer, fds, _, _ = socket.recv_fds(peer, 65536, 4); print(answer.hex(), len(fds))"
    )
    packet = _link_messages.link_request(one.session._connection.session_id, []).hex()
    command = [sys.executable, "-c", code, str(descriptor_socket(guarded.target)), packet]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer, num_fds = done.stdout.split()
    error = session_pb2.LinkResponse.FromString(bytes.fromhex(answer)).error
    assert error.reason == Reason.NOT_ALLOWED and num_fds == "0"
    assert guarded.logged("refused descriptor socket", f"uid={OTHER_UID}", "NOT_ALLOWED")


def test_memory_that_is_none_is_refused(guarded: Guarded, engine: Make) -> None:
    pipe, (one, other) = os.pipe(), socket.socketpair()
    device, disk = os.open("/dev/zero", os.O_RDWR), os.open("/usr/bin/env", os.O_RDONLY)
    with bare_session(guarded, engine("alpha").key_space) as session_id:
        for fd in (*pipe, one.fileno(), device, disk):
            answer, fds = linked(guarded, session_id, {"../../etc/passwd": fd})
            error = session_pb2.LinkResponse.FromString(answer).error
            assert (error.reason, fds) == (Reason.INVALID_LAYOUT, []), error
    for fd in (*pipe, device, disk):
        os.close(fd)
    one.close()
    other.close()


# Admins


def test_the_admin_api_is_on_its_own_socket(guarded: Guarded) -> None:
    path = Path(admin_target(guarded.target).removeprefix("unix:"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert Path(guarded.target.removeprefix("unix:")).stat().st_mode & 0o777 == 0o666
    told, explained = admin_pb2.TellRequest(topic="blocks"), admin_pb2.ExplainRequest()
    opening, events = iter([session_pb2.ConnectRequest()]), events_pb2.SubscribeRequest()
    with (
        grpc.insecure_channel(guarded.target) as users,
        grpc.insecure_channel(admin_target(guarded.target)) as admins,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(users)
        for call, request in (
            (stub.Tell, told),
            (stub.Explain, explained),
            (stub.WatchRequests, admin_pb2.WatchRequestsRequest()),
            (events_pb2_grpc.EventServiceStub(users).Subscribe, events),
            (session_pb2_grpc.SessionServiceStub(admins).Connect, opening),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(request, timeout=5))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert guarded.server.cli("status")


def test_admins_over_tcp_prove_it(guarded: Guarded) -> None:
    for proof in (guarded.credentials("operator"), guarded.credentials("nobody", ADMIN_TOKEN)):
        with AdminClient(guarded.tcp, credentials=proof) as admin:
            assert admin.info()["state"] == "ready"
            next(admin.events(seconds=5))
            next(admin.watch_requests(seconds=5))
    for name, token in (("nobody", ""), ("beta", ""), ("nobody", TOKEN)):
        with AdminClient(guarded.tcp, credentials=guarded.credentials(name, token)) as admin:
            assert refused(admin.info)[0] is Reason.NOT_ALLOWED
            for stream in (admin.events(seconds=5), admin.watch_requests(seconds=5)):
                assert refused(lambda stream=stream: next(stream))[0] is Reason.NOT_ALLOWED
    assert guarded.logged("refused", "NOT_ALLOWED: this token or certificate is no admin's")


def test_a_failed_handshake_is_one_error_in_json(guarded: Guarded) -> None:
    """gRPC must not print beside it."""
    command = [*HOTKV, "status", "--json", "--target", guarded.tcp]
    command += ["--tls-ca", str(guarded.foreign_ca.path)]
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 1 and "TLS" in json.loads(done.stderr)["error"]["message"]


# Floods


def test_flood_of_stores_leaves_others_able(guarded: Guarded, engine: Make) -> None:
    one, neighbour = engine("alpha", num_blocks=512, page_bytes=65536), engine("blind")
    run = BlockRun(0, hashes(400), block_ids(400))
    futures = [one.session.store(f"f{i}", f"f{i}", [run], 60) for i in range(3000)]
    neighbour.session.ping(20)
    reasons = {getattr(future.exception(60), "reason", None) for future in futures}
    assert reasons <= {None, Reason.OVERLOADED}
    store(one)
    store(neighbour)


# Memory that goes away


def test_a_fault_elsewhere_still_ends_the_server() -> None:
    with runtime_folder(64 << 20) as folder:
        for cause in ("signal", "arena"):
            with Server(folder, "16MiB") as server:
                server.wait_ready()
                one = PagedEngine(server.target).connect()
                if cause == "signal":
                    # SIGBUS must not hit a thread that acquires the GIL (see `memory.mapping`),
                    # so the server must be idle.
                    time.sleep(1.0)
                    os.kill(server.pid, signal.SIGBUS)
                else:
                    os.truncate(folder / "arena" / "arena", 0)
                    one.session.store("s", "s", [BlockRun(0, hashes(1), block_ids(1))], 5)
                assert server._child.process.wait(60) == -signal.SIGBUS
                one.close()


# The start


def test_server_refuses_to_start_where_others_interfere() -> None:
    with runtime_folder(64 << 20) as folder:
        run, arena = folder / "run", folder / "arena"
        run.mkdir()
        arena.mkdir()

        def said() -> str:
            with Server(folder, "16MiB") as server, pytest.raises(ChildError):
                server.wait_ready(20)
            return server.log.read_text()

        run.chmod(0o777)
        assert f"chmod go-w {run}" in said()
        run.chmod(0o700)
        arena.chmod(0o755)
        assert f"chmod 700 {arena}" in said()
        arena.chmod(0o700)
        for name in ("run/grpc.sock", "run/lock", "arena/arena"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(folder / "elsewhere")
            assert "of this server" in said()
            (folder / name).unlink()
        assert not (folder / "elsewhere").exists()


# TCP


def over_tcp(guarded: Guarded, tenant: str, credentials: Credentials) -> None:
    """There is no block table, which only this machine's clients map."""
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
    ("tenant", "name", "token", "words"),
    [
        ("gamma", "nobody", "wrong", "NOT_ALLOWED"),
        ("gamma", "nobody", TOKEN[:-1], "NOT_ALLOWED"),
        ("gamma", "beta", "", "NOT_ALLOWED"),
        ("alpha", "beta", "", "NOT_ALLOWED"),
        ("beta", "nobody", TOKEN, "NOT_ALLOWED"),
        # TLS refuses no certificate, a foreign one, and an expired one.
        ("gamma", "", TOKEN, "TLS certificates"),
        ("gamma", "intruder", TOKEN, "TLS certificates"),
        ("gamma", "expired", TOKEN, "TLS certificates"),
    ],
)
def test_a_wrong_proof_over_tcp_is_refused(
    guarded: Guarded, tenant: str, name: str, token: str, words: str
) -> None:
    assert words in why_absent(guarded.tcp, tenant, guarded.credentials(name, token))
    logged = (f"tenant={tenant!r}", words) if words == "NOT_ALLOWED" else ("Handshake failed",)
    assert guarded.logged(*logged)


def test_client_refuses_an_unknown_server(guarded: Guarded) -> None:
    proof = guarded.credentials("beta", ca=guarded.foreign_ca)
    assert "TLS certificates" in why_absent(guarded.tcp, "beta", proof)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_tcp_shows_no_more_than_it_must(guarded: Guarded) -> None:
    proof = guarded.credentials("operator")
    files = (proof.tls_ca, proof.tls_key, proof.tls_certificate)
    secrets = grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in files))
    with grpc.secure_channel(guarded.tcp, secrets) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        with pytest.raises(grpc.RpcError) as caught:
            next(reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    host, port = guarded.tcp.split(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(proof.tls_ca)
    context.load_cert_chain(proof.tls_certificate, proof.tls_key)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    for version, outcome in (
        (ssl.TLSVersion.TLSv1_1, pytest.raises((ssl.SSLError, OSError))),
        (ssl.TLSVersion.TLSv1_2, contextlib.nullcontext()),
    ):
        context.maximum_version = version
        with socket.create_connection((host, int(port)), 5) as plain, outcome:
            context.wrap_socket(plain, server_hostname="localhost").close()


@pytest.mark.long
def test_certificates_are_taken_up_when_they_change(guarded: Guarded) -> None:
    """They are used from the next connection on. Invalid files are logged once."""
    files = [guarded.folder / name for name in ("server.pem", "server.key", "clients.pem")]
    kept = [file.read_bytes() for file in files]
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
        for file, content in zip(files, kept, strict=True):
            file.write_bytes(content)
    over_tcp(guarded, "beta", guarded.credentials("beta"))


# TCP without TLS


def test_token_proves_a_tenant_without_tls() -> None:
    """As if a proxy terminated TLS."""
    tenants = json.dumps([{"name": "gamma", "token_sha256": [sha256(TOKEN)]}])
    with runtime_folder(64 << 20) as folder:
        (folder / "token").write_text(TOKEN)
        elsewhere = folder / "operators" / "admin.sock"
        flags = ["--tcp-address", "localhost:0", "--security.tcp-insecure", "true"]
        flags += ["--security.tenants", tenants, "--security.admin-socket", str(elsewhere)]
        with Server(folder, "16MiB", *flags, "--security.admin-socket-mode", "0660") as server:
            server.wait_ready()
            plain = Guarded(server, folder, None, None)  # type: ignore[arg-type]
            over_tcp(plain, "gamma", Credentials(token_file=str(folder / "token")))
            assert why_absent(plain.tcp, "gamma", Credentials()).startswith("UNAUTHENTICATED")
            assert why_absent(plain.target, "gamma").startswith("NOT_ALLOWED")
            with AdminClient(plain.tcp) as admin, pytest.raises(HotKVError, match="UNIMPLEMENTED"):
                admin.info()
            assert not (server.runtime_folder / "admin.sock").exists()
            assert elsewhere.stat().st_mode & 0o777 == 0o660
            with AdminClient(f"unix:{elsewhere}") as admin:
                assert admin.info()["state"] == "ready"


# Hints


def envelope(message_id: str, session_id: str = "chat") -> dict[str, object]:
    payload = {"session_id": session_id}
    action = {"action_id": "a", "action_type": "demote", "payload": payload}
    return {"message_id": message_id, "actions": [action]}


def test_a_tenants_hints_reach_its_own_sessions_alone(guarded: Guarded, engine: Make) -> None:
    one = engine("alpha")
    blocks = store(one)
    tokens = len(blocks) * one.key_space.hash_block_tokens
    one.session.report_requests([RequestReport(blocks, tokens, 0, 0, 0.0, session_id="chat")])
    one.session.ping(10)
    with HintClient(guarded.target, "blind") as other, HintClient(guarded.target, "alpha") as mine:
        (foreign,) = other.send(envelope("f"))
        (unknown,) = other.send(envelope("u", "nobody"))
        assert foreign["status"] == "missing" and foreign["reason"] == unknown["reason"]
        (done,) = mine.send(envelope("m"))
        assert done["status"] == "accepted" and done["done_block_count"] == len(blocks)
        for client, messages in ((mine, {"m"}), (other, {"f", "u"})):
            assert {row["message_id"] for row in client.outcomes()[0]} == messages


def test_hints_need_a_proof_of_the_tenant(guarded: Guarded) -> None:
    token = guarded.credentials("nobody", TOKEN)
    with HintClient(guarded.tcp, "gamma", credentials=token) as client:
        assert client.send(envelope("t"))[0]["status"] == "missing"
    for target, tenant, proof in (
        (guarded.target, "beta", None),
        (guarded.target, "there is no such", None),
        (guarded.tcp, "alpha", token),
    ):
        credentials = {} if proof is None else {"credentials": proof}
        with HintClient(target, tenant, **credentials) as client:
            sent = refused(lambda client=client: client.send({"actions": []}))
            assert sent[0] in (Reason.NOT_ALLOWED, Reason.UNAUTHENTICATED)
            assert refused(client.outcomes)[0] is sent[0]
