"""A server with tenants, TLS and admins, and clients with and without credentials."""

import contextlib
import hashlib
import os
import queue
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, Credentials, LinkState, Role, Session, SessionConfig
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.errors import HotKVError, Reason
from hotkv_server.wire.errors import CODES
from tests.server.certificates import Authority
from tests.server.refusals import reason_of
from tests.server.support import block_ids, hashes
from tests.support.waiting import wait_for

OTHER_UID, OTHER_GID, STRANGER_UID = 4242, 4343, 5151
TOKEN, ADMIN_TOKEN = "a-token-of-gamma", "an-admin-token"
MINE = os.getuid()


@dataclass(frozen=True)
class Guarded:
    """Tenants:

    alpha, blind, tiny, hoarder: for the user that runs the tests. alpha may map the block table,
        blind may not; tiny may have one session.
    beta: for OTHER_UID or a certificate.
    gamma: for a token.
    by_group: for OTHER_GID.
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

    def credentials(
        self, name: str = "", token: str = "", ca: Authority | None = None
    ) -> Credentials:
        token_file = self.folder / f"token-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        token_file.write_text(token + "\n")
        pair = [str(self.folder / f"{name}.{kind}") if name else "" for kind in ("pem", "key")]
        return Credentials(
            str((ca or self.ca).path), *pair, token_file=str(token_file) if token else ""
        )

    def logged(self, *words: str) -> bool:
        """Waits for a line with all these words."""
        lines = self.server.log
        wait_for(
            lambda: any(
                all(word in line for word in words) for line in lines.read_text().splitlines()
            ),
            repr(words),
        )
        return True


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
        with pytest.MonkeyPatch.context() as patch:
            # So that gRPC logs failed handshakes.
            patch.setenv("GRPC_VERBOSITY", "INFO")
            flags = ("--config", str(folder / "hotkv.toml"))
            server = Server(folder, "64MiB", *flags)
        with server:
            server.wait_ready()
            (folder / "run").chmod(0o755)
            yield Guarded(server, folder, ca, foreign_ca)


@pytest.fixture
def engine(guarded: Guarded) -> Iterator[Callable[..., PagedEngine]]:
    with contextlib.ExitStack() as stack:

        def make(tenant: str, **settings: Any) -> PagedEngine:
            made = PagedEngine(
                guarded.target, **{"engine_id": os.urandom(4).hex(), "tenant": tenant, **settings}
            ).connect()
            stack.callback(made.close)
            return made

        yield make


Make = Callable[..., PagedEngine]


def store(engine: PagedEngine, count: int = 4) -> list[bytes]:
    blocks, name = hashes(count), os.urandom(8).hex()
    runs = [BlockRun(0, blocks, block_ids(count))]
    result = engine.session.store(name, name, runs, 10).result(60)
    assert (result.results[0] == 1).all()
    return blocks


def why_absent(
    target: str, tenant: str, credentials: Credentials | None = None, *, ticket: bytes | None = None
) -> str:
    """The reason why the server refuses this process a session. With a `ticket`, over gRPC: the
    lane needs none."""
    states: queue.Queue[tuple[LinkState, str]] = queue.Queue()
    engine = PagedEngine(target, tenant=tenant)
    more: dict[str, Any] = {"on_state": lambda *news: states.put(news), "connect_timeout_s": 3.0}
    if credentials is not None:
        more["credentials"] = credentials
    more["use_lane"] = ticket is None
    session = Session(SessionConfig(target, "refused", Role.SCHEDULER, engine.key_space, **more))
    if ticket is not None:
        session._life._ticket = lambda connection: (ticket, "")  # type: ignore[method-assign]
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
