"""Tests SIGHUP, the audit log, and the log in JSON."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import Credentials, GroupHashes, LinkState
from hotkv_client.admin import AdminClient
from hotkv_client.command import cli
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.targets import admin_target
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    sparse_pb2,
    sparse_pb2_grpc,
)
from tests.server.certificates import Authority
from tests.server.guarded import refused, store
from tests.support.waiting import wait_for

MINE = os.getuid()
FIRST, SECOND = "the-first-token", "the-second-token"
WITHOUT_ARENA_FLAG = """
import sys
at = sys.argv.index("--arena.bytes")
del sys.argv[at : at + 2]
from hotkv_server.cli import main
sys.exit(main())
"""
"""So that the file sets the size."""
SLOW_TO_OPEN = """
import asyncio, sys
from hotkv_server.node.sessions import Sessions
made = Sessions.__init__
def slowed(self, *parts):
    made(self, *parts)
    save = self._save_state
    async def slow():
        print("a session is being opened", file=sys.stderr, flush=True)
        await asyncio.sleep(3)
        await save()
    self._save_state = slow
Sessions.__init__ = slowed
from hotkv_server.cli import main
sys.exit(main())
"""
BLOCK_BYTES = 2 * 4096
"""Of a block of `PagedEngine`."""


class Reloading:
    """A server whose file tests change. Log and audit log are in JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "hotkv.toml"
        self.ca = Authority(folder, "clients")
        self.ca.issue("server")
        self.ca.issue("renewed")
        self.security: dict[str, Any] = {
            "admin_on_tcp": True,
            "admin_token_sha256": [digest(FIRST)],
            "audit_file": str(folder / "audit.jsonl"),
            "tenants": [tenant("alpha"), tenant("beta")],
            "tls": {"certificate": f"{folder}/server.pem", "key": f"{folder}/server.key"},
        }
        self.top: dict[str, Any] = {
            "tcp_address": "localhost:0",
            "log_format": "json",
            "tiers": {"disk": {"path": f"{folder}/tier", "bytes": "32MiB", "write_gb_per_day": 1}},
        }
        self.write()
        flags = ("--config", str(self.path))
        self.server = Server(folder, "16MiB", *flags)

    def write(self) -> None:
        self.path.write_text(file_of(**self.top, security=self.security))

    def logged(self, *words: str) -> int:
        lines = self.server.log.read_text().splitlines()
        return sum(all(word in line for word in words) for line in lines)

    def reload(self, *words: str) -> None:
        """Sends SIGHUP, and waits for a new line with all these words."""
        self.write()
        before = self.logged(*words)
        os.kill(self.server.pid, signal.SIGHUP)
        wait_for(lambda: self.logged(*words) > before)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "audit.jsonl").read_text().splitlines()]

    @property
    def tcp(self) -> str:
        port = re.search(r'"ready".* "tcp_port": (\d+)', self.server.log.read_text())
        assert port is not None
        return f"localhost:{port[1]}"

    def engine(self, tenant: str) -> PagedEngine:
        return PagedEngine(self.server.target, tenant=tenant).connect()

    def admin(self, token: str) -> AdminClient:
        (self.folder / token).write_text(token)
        credentials = Credentials(str(self.ca.path), token_file=str(self.folder / token))
        return AdminClient(self.tcp, 10, credentials)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def tenant(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "uids": [MINE], **more}


def toml(value: Any) -> str:
    """A dict is an inline table."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def file_of(**settings: Any) -> str:
    return "\n".join(f"{key} = {toml(value)}" for key, value in settings.items())


@contextlib.contextmanager
def configured(
    text: str, code: str = "", arena: str = "16MiB"
) -> Iterator[tuple[Path, Server, Callable[..., None]]]:
    """(File, server, function that waits for words in the log). `code` runs the server in place
    of the usual command."""
    with runtime_folder(64 << 20) as folder:
        config = folder / "hotkv.toml"
        config.write_text(text)
        flags = ("--config", str(config))
        command = (sys.executable, "-c", code, "run") if code else ()
        with Server(folder, arena, *flags, command=command) as server:
            server.wait_ready()
            yield config, server, lambda words: wait_for(lambda: words in server.log.read_text())


@pytest.fixture(scope="module")
def running() -> Iterator[Reloading]:
    with runtime_folder(128 << 20) as folder:
        made = Reloading(folder)
        with made.server:
            made.server.wait_ready()
            yield made


def test_tenants_come_and_go_and_others_go_on(running: Reloading) -> None:
    """A tenant that may no longer map the block table loses its session too."""
    seer = tenant("seer", table="mapped")
    running.security["tenants"] = [tenant("alpha"), tenant("beta"), seer]
    running.reload("settings reloaded", "security.tenants")
    engines = alpha, *others = [running.engine(name) for name in ("alpha", "beta", "seer")]
    number = running.logged("session ended by the new settings")
    running.security["tenants"] = [tenant("alpha"), tenant("gamma"), tenant("seer")]
    running.reload("settings reloaded", "security.tenants")
    wait_for(lambda: all(one.session.state is not LinkState.CONNECTED for one in others))
    assert running.logged("session ended by the new settings") == number + 2
    engines.append(running.engine("gamma"))
    for engine in (alpha, engines[-1]):
        store(engine)
    for engine in engines:
        engine.close()


def test_a_lowered_bound_evicts_what_is_beyond_it(running: Reloading) -> None:
    running.security["tenants"] = [tenant("alpha"), tenant("delta")]
    running.reload("settings reloaded")
    with contextlib.closing(PagedEngine(running.server.target, tenant="delta")) as engine:
        store(engine.connect(), 40)
        with AdminClient(running.server.target) as admin:

            def held() -> int:
                spaces = [s for s in admin.key_spaces() if s["key_space"]["tenant"] == "delta"]
                return sum(int(s["block_count"]) for s in spaces)

            assert held() == 40
            running.security["tenants"][1] = tenant("delta", burst_bytes=10 * BLOCK_BYTES)
            running.reload("settings reloaded")
            # Blocks go only after their write to the disk, which pins them.
            wait_for(lambda: held() == 10)


def test_wrong_settings_change_nothing_and_are_named(running: Reloading) -> None:
    before = running.path.read_text()
    for text, said in (
        ("log_level = 'loud'\n", "log_level"),
        ("this is no TOML", "hotkv.toml"),
        (before.replace("security = {", "security = {no_such_thing = 1, "), "no_such_thing"),
        (before.replace("server.key", "gone.key"), "gone.key"),
        (before.replace("audit.jsonl", "none/audit.jsonl"), "security.audit_file"),
    ):
        running.path.write_text(text)
        number = running.logged("not reloaded", said)
        os.kill(running.server.pid, signal.SIGHUP)
        wait_for(lambda: running.logged("not reloaded", said) > number)  # noqa: B023
    running.write()
    assert running.server.cli("ping").strip() == "serving"


def test_what_needs_a_restart_is_named(running: Reloading) -> None:
    running.top["client_memory_bytes"] = "100MiB"
    running.reload("need a restart", "client_memory_bytes")
    # The log must also name the earlier setting.
    running.top["tiers"]["valkey"] = {"address": "localhost:1"}
    running.reload("need a restart", "client_memory_bytes", "tiers.valkey")
    del running.top["client_memory_bytes"], running.top["tiers"]["valkey"]
    running.reload("settings reloaded", "nothing")


def test_other_changes_apply_though_tenants_need_restart(running: Reloading) -> None:
    kept, running.security["tenants"] = running.security["tenants"], []
    running.security["tcp_insecure"] = True
    running.top["drain_timeout_s"] = 3
    number = running.logged("settings reloaded", '"changed": "drain_timeout_s"')
    running.reload("need a restart", "security.tenants")
    assert running.logged("settings reloaded", '"changed": "drain_timeout_s"') == number + 1
    nobody = PagedEngine(running.server.target, tenant="nobody")
    with contextlib.closing(nobody), pytest.raises(TimeoutError):
        nobody.connect(0.5)
    running.security["tenants"] = kept
    tls = running.security.pop("tls")
    running.top["drain_timeout_s"] = 4
    running.reload("need a restart", "security.tls.certificate", "security.tls.key")
    assert running.logged("settings reloaded", '"changed": "drain_timeout_s"') == number + 2
    del running.security["tcp_insecure"], running.top["drain_timeout_s"]
    running.security["tls"] = {**tls, "client_ca": str(running.ca.path)}
    running.reload("need a restart", "security.tls.client_ca")
    running.security["tls"] = tls
    running.reload("settings reloaded", "nothing")


def test_failed_reload_changes_nothing_notifies_systemd(tmp_path: Path) -> None:
    """The guarantee fits only into the new arena, which needs a restart."""

    def text(arena: str, guarantee: str, timeout_s: int) -> str:
        shared = {"tenants": [tenant("alpha", guaranteed_bytes=guarantee)]}
        return file_of(drain_timeout_s=timeout_s, arena={"bytes": arena}, security=shared)

    with (
        notified(tmp_path / "notify") as told,
        configured(text("16MiB", "1MiB", 1), WITHOUT_ARENA_FLAG, "") as (config, server, says),
    ):
        config.write_text(text("64MiB", "32MiB", 2))
        os.kill(server.pid, signal.SIGHUP)
        says("settings not reloaded, the old ones stay: INVALID_FIELD")
        wait_for(lambda: told()[-2:] == ["RELOADING=1", "READY=1"])
        os.kill(server.pid, signal.SIGTERM)
        says("draining timeout_s=1.0")


@contextlib.contextmanager
def notified(path: Path) -> Iterator[Callable[[], list[str]]]:
    """Listens in place of systemd. Yields a function that returns the states so far."""
    words: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear, pytest.MonkeyPatch.context() as m:
        ear.bind(str(path))
        ear.setblocking(False)
        m.setenv("NOTIFY_SOCKET", str(path))

        def told() -> list[str]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    said = ear.recv(4096).decode().splitlines()
                    words.extend(w for w in said if w in ("RELOADING=1", "READY=1"))
            return words

        yield told


def test_streams_have_request_ids(running: Reloading) -> None:
    metadata = (("x-request-id", "stream-4711"),)
    opening = session_pb2.OpenSession(protocol_version=1, ticket=b"stale")
    connect = iter([session_pb2.ConnectRequest(open_session=opening)])
    select = iter([sparse_pb2.SelectBlocksRequest(session_id="none")])
    with grpc.insecure_channel(running.server.target) as channel:
        for call in (
            session_pb2_grpc.SessionServiceStub(channel).Connect(connect, metadata=metadata),
            sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(select, metadata=metadata),
        ):
            with contextlib.suppress(grpc.RpcError):
                list(call)
    for reason in ("UNAUTHENTICATED", "UNKNOWN_SESSION"):
        assert running.logged("refused", "stream-4711", reason) == 1


@pytest.mark.long
def test_opening_session_ends_with_its_tenant() -> None:
    """The opening takes three seconds, in which the tenant goes."""

    def text(*names: str) -> str:
        return file_of(security={"tenants": [tenant(name) for name in names]})

    with configured(text("alpha", "beta"), SLOW_TO_OPEN) as (config, server, says):
        beta = PagedEngine(server.target, tenant="beta")
        beta.session.start()
        says("is being opened")
        config.write_text(text("alpha"))
        os.kill(server.pid, signal.SIGHUP)
        says("for which this peer may not act")
        assert not beta.session.wait_connected(0)
        assert server.cli("sessions").count("beta") == 0
        lines = server.log.read_text().splitlines()
        assert not any("admitted" in line and "'beta'" in line for line in lines)
        beta.close()


def test_a_budget_and_the_log_level_change(running: Reloading) -> None:
    def budget() -> int:
        with AdminClient(running.server.target) as admin:
            (disk,) = [t for t in admin.tiers() if t["name"] == "disk"]
            return int(disk["activity"]["budget_byte_count"])

    assert budget() == 1_000_000_000
    running.top["tiers"]["disk"]["write_gb_per_day"] = 2
    running.reload("settings reloaded", "tiers.disk.write_gb_per_day")
    assert budget() == 2_000_000_000
    running.top.update(log_level="warning", client_memory_bytes="100MiB")
    number = running.logged("settings reloaded")
    running.reload("need a restart", "client_memory_bytes")
    assert running.logged("settings reloaded") == number, "below the level"
    del running.top["log_level"], running.top["client_memory_bytes"]
    running.reload("settings reloaded", "log_level")


def test_hung_certificate_disk_delays_no_handshake(
    running: Reloading,
) -> None:
    """Reading the FIFO hangs until the test writes it."""
    path = Path(running.security["tls"]["certificate"])
    certificate, port = path.read_bytes(), int(running.tcp.partition(":")[2])
    path.unlink()
    os.mkfifo(path)
    with (
        socket.create_connection(("localhost", port)),
        path.open("wb") as late,  # Waits until the server has opened the FIFO.
    ):
        path.unlink()
        path.write_bytes(certificate)
        with running.admin(FIRST) as admin:
            assert admin.info()["pid"] == running.server.pid
        late.write(certificate)
    assert running.logged("the old ones stay", "the disk hangs") == 1


def test_admins_tokens_and_certificates_are_replaced(running: Reloading) -> None:
    with running.admin(FIRST) as admin:
        assert admin.info()["pid"] == running.server.pid
    running.security["admin_token_sha256"] = [digest(SECOND)]
    running.security["tls"] = {
        "certificate": f"{running.folder}/renewed.pem",
        "key": f"{running.folder}/renewed.key",
    }
    running.reload("settings reloaded", "security.tls.key")
    with running.admin(SECOND) as admin:
        assert admin.info()["pid"] == running.server.pid
    with running.admin(FIRST) as admin:
        assert refused(admin.info)[0] is Reason.NOT_ALLOWED
    assert running.logged("certificates reloaded", "renewed.pem")


def test_calls_that_change_something_are_audited(running: Reloading) -> None:
    """No line has hashes or tokens."""
    running.security["audit"] = "changes"
    running.reload("settings reloaded")
    before, target = len(running.audited()), running.server.target
    for command in (["evict", "--all"], ["status"]):
        assert cli.main(["--target", target, *command]) == 0
    PagedEngine(target, tenant="alpha").connect().close()
    with AdminClient(target) as admin:
        space = admin.key_spaces()[0]["key_space_id"]
    request = admin_pb2.EvictRequest(key_space_id=space, hashes=b"\xab" * 32)
    with grpc.insecure_channel(admin_target(target)) as channel:
        for request_id in ("ticket-4711", "no {such} id"):
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            stub.Evict(request, metadata=(("x-request-id", request_id),))
    with running.admin("a-wrong-token") as stranger, pytest.raises(HotKVError):
        stranger.drain()
    # The call is answered before it is logged.
    wait_for(lambda: len(running.audited()) == before + 4)
    mine, named, unnamed, refusal = lines = running.audited()[before:]
    evict, drain = (f"hotkv.v1.AdminService/{name}" for name in ("Evict", "Drain"))
    outcomes = [*[(evict, "ok")] * 3, (drain, "permission_denied")]
    assert [(line["method"], line["outcome"]) for line in lines] == outcomes
    assert f"uid={MINE}" in mine["who"] and f"pid={os.getpid()}" in mine["who"]
    assert mine["arguments"] == {"all": True} and mine["request_id"]
    assert named["request_id"] == "ticket-4711" and "{" not in unnamed["request_id"]
    assert named["arguments"]["hashes"] == "32 bytes" and "abab" not in json.dumps(named)
    assert named["who"] == "unix socket, no ticket"
    assert "with a token" in refusal["who"] and "a-wrong-token" not in json.dumps(refusal)
    assert (running.folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_calls_are_audited_in_a_rotatable_file(running: Reloading) -> None:
    target = running.server.target
    running.security["audit"] = "all"
    running.reload("settings reloaded", "security.audit")
    (running.folder / "audit.jsonl").rename(running.folder / "audit.jsonl.1")
    running.server.cli("sessions")
    wait_for(lambda: (running.folder / "audit.jsonl").exists() and running.audited())
    (line,) = running.audited()
    assert (line["method"][-4:], line["arguments"]) == ("Tell", {"topic": "sessions"})
    running.security["audit"] = "off"
    running.reload("settings reloaded", "security.audit")
    before = len(running.audited())
    assert cli.main(["--target", target, "evict", "--all"]) == 0
    assert len(running.audited()) == before


def test_each_line_of_the_log_is_json(running: Reloading) -> None:
    for line in running.server.log.read_text().splitlines():
        fields = json.loads(line)
        assert {"time", "level", "logger", "message"} <= fields.keys()
        assert fields["time"].endswith("Z") and "\n" not in line


# Moments

CHANGED_AT_THE_START = """
import os, pathlib, signal, sys
from hotkv_server import daemon
load_kernels = daemon.load_kernels
def changed(settings):
    path = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
    path.write_text("drain_timeout_s = 7")
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
    load_kernels(settings)
daemon.load_kernels = changed
from hotkv_server.cli import main
sys.exit(main())
"""


def test_reload_during_start_happens_after_it() -> None:
    """The file changes after the server has read it."""
    with configured("drain_timeout_s = 6", CHANGED_AT_THE_START) as (_, server, says):
        says("reloaded changed=drain_timeout_s")
        assert server.log.read_text().count("settings reloaded") == 1


def test_reloads_in_sequence_and_in_drains_work() -> None:
    with configured("drain_timeout_s = 6") as (config, server, says):
        engine = PagedEngine(server.target).connect()
        for _ in range(20):
            os.kill(server.pid, signal.SIGHUP)
        config.unlink()
        os.kill(server.pid, signal.SIGHUP)
        says("there is no file")
        held, blocks = engine.session, store(engine)
        assert held.acquire("held", [GroupHashes(0, blocks)], 600).result(60).pinned[0].all()
        os.kill(server.pid, signal.SIGTERM)
        says("draining timeout_s=6.0")
        config.write_text("drain_timeout_s = 1")
        os.kill(server.pid, signal.SIGHUP)
        says("reloaded changed=drain_timeout_s")
        held.release("held")
        engine.close()
        says("hotkv_server.daemon stopped")
        assert "Traceback" not in server.log.read_text()


def test_hung_settings_disk_delays_no_call() -> None:
    """Reading the FIFO hangs until the test writes it, as on a network disk."""
    with configured("drain_timeout_s = 6") as (config, server, says):
        config.unlink()
        os.mkfifo(config)
        os.kill(server.pid, signal.SIGHUP)
        with config.open("w") as late:  # Waits until the server has opened the FIFO.
            assert server.cli("ping").strip() == "serving"
            late.write("drain_timeout_s = 7")
        says("reloaded changed=drain_timeout_s")
