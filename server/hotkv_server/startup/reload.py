"""Reads the settings again while the server runs, at SIGHUP.

Always true: unusable settings change nothing; all checks come before the first change. Settings
that need a restart are logged and keep their values. A session ends if it may no longer act for
its tenant, or no longer map the block table. The event loop never waits for files, whose disk
may hang: a `Clerk` thread reads them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from hotkv_proto.errors import HotKVError, Reason
from hotkv_server import logs, systemd
from hotkv_server.memory.clerk import Clerk
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl
from hotkv_server.security.path_checks import UnsafeError
from hotkv_server.settings import Settings
from hotkv_server.startup import StartError
from hotkv_server.startup.access import (
    linking_users,
    make_access_control,
    tenant_shares,
    tls_files,
)
from hotkv_server.startup.listeners import Listeners
from hotkv_server.startup.preflight import check_settings
from hotkv_server.startup.running_settings import LIVE, RunningSettings, flat
from hotkv_server.wire.server import RpcServer

log = logging.getLogger(__name__)

EXPECTED = (ValueError, OSError, UnsafeError, StartError, HotKVError)
"""The settings can't be used. Any other exception is a defect, logged with its traceback."""
_ABSENT = object()


class Reloader:
    """`load`: reads the settings again, on a thread. Raises ValueError if they are wrong."""

    def __init__(
        self,
        load: Callable[[], Settings],
        settings: Settings,
        running: RunningSettings,
        node: Node,
        listeners: Listeners,
    ) -> None:
        self._load = load
        self._running = running
        self._node = node
        self._listeners = listeners
        self._clerk = Clerk("settings")
        self._reloading: asyncio.Task[None] | None = None
        self._is_asked = False
        self.drain_timeout_s = settings.drain_timeout_s
        """After SIGTERM or SIGINT."""

    def __repr__(self) -> str:
        return f"Reloader({self._running!r})"

    def is_alive(self) -> bool:
        return self._clerk.is_alive()

    def begin(self) -> None:
        """If a reload is running, another follows. Does not block. On the event loop."""
        self._is_asked = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._run(), name="reload")

    async def _run(self) -> None:
        while self._is_asked:
            self._is_asked = False
            now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            systemd.notify("RELOADING=1", f"MONOTONIC_USEC={now_us}")
            await self._reload()
            systemd.notify("READY=1")

    async def _reload(self) -> None:
        try:
            self._use(await asyncio.wrap_future(self._clerk.do(self._read)))
        except Exception as error:
            if not isinstance(error, EXPECTED):
                log.exception("reading the settings failed")
            for line in (str(error) or type(error).__name__).splitlines():
                log.error("settings not reloaded, the old ones stay: %s", line)

    def _read(self) -> Settings:
        """Blocks. Raises ValueError or StartError if the server could not start with the
        settings."""
        settings = self._load()
        if problems := check_settings(settings):
            raise StartError("\n".join(problems))
        return settings

    def _use(self, settings: Settings) -> None:
        """Raises HotKVError, before the first change."""
        wanted, running = flat(settings), self._running.values
        changed = differing(running, wanted)
        live = [
            name
            for name in changed
            if name in LIVE and name in wanted and self._can(name, settings)
        ]
        if "security.tenants" in live:
            self._node.core.space.tenants.check_shares(tenant_shares(settings.security))
        if "arena.bytes" in live:
            self._node.arena_size.check(settings.arena.bytes)
        self._apply(settings, live, make_access_control(settings.security))
        waiting = [name for name in changed if name not in live]
        self._running.use(settings, live, waiting)
        log.info("settings reloaded changed=%s", ",".join(live) or "nothing")
        if waiting:
            log.warning("these settings need a restart: %s", ", ".join(waiting))

    def _can(self, name: str, settings: Settings) -> bool:
        """False for an arena larger than it can grow, the first and the last tenant, TLS on or
        off, and whether TLS asks clients for certificates."""
        if name == "security.tenants":
            return bool(settings.security.tenants) == bool(self._running.values[name])
        if name == "arena.bytes":
            return settings.arena.bytes <= self._node.arena_size.most_bytes
        if name.startswith("security.tls."):
            files, certificates = tls_files(settings.security.tls), self._rpc.certificates
            return files is not None and certificates is not None and certificates.fits(files)
        return name in self._running.values

    @property
    def _rpc(self) -> RpcServer:
        return self._listeners.rpc

    def _apply(self, settings: Settings, live: list[str], new: AccessControl) -> None:
        """Never raises: all checks have passed.

        live: changed settings that need no restart.
        """
        security, node = settings.security, self._node
        logs.set_level(settings.log_level)
        self.drain_timeout_s = settings.drain_timeout_s
        if not node.core.draining:
            node.drain_timeout_s = settings.drain_timeout_s
        access = self._listeners.access
        access.admins = new.admins
        self._listeners.descriptors.allowed_uids = linking_users(security)
        self._listeners.descriptors.arena_writers = frozenset(security.arena_writers)
        self._rpc.audit.covers = security.audit
        files = tls_files(security.tls)
        if any(name.startswith("security.tls.") for name in live):
            assert files is not None and self._rpc.certificates is not None, "see _can"
            self._rpc.certificates.follow(files)
        if "security.tenants" in live:
            access.tenants = new.tenants
            node.removals.share_out(tenant_shares(security))
            self._end_sessions()
        if "arena.bytes" in live:
            node.arena_size.begin(settings.arena.bytes)
        if "tiers.disk.write_gb_per_day" in live and node.tiers is not None:
            node.tiers.set_write_budget(settings.tiers.write_bytes_per_day)

    def _end_sessions(self) -> None:
        for session in list(self._node.sessions):
            if session.peer is None:
                continue
            try:
                tenant = self._listeners.access.admit(session.peer, session.key_space.tenant)
                if session.maps_table and tenant is not None and not tenant.sees_table:
                    raise HotKVError(
                        Reason.NOT_ALLOWED,
                        "its tenant may no longer map the block table; open another session",
                    )
            except HotKVError as error:
                log.warning("session ended by the new settings %s: %s", session.name, error.message)
                session.end(error)


def differing(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """A setting on one side only, such as of an added or removed tier, counts as different."""
    names = {**running, **wanted}
    return [name for name in names if running.get(name, _ABSENT) != wanted.get(name, _ABSENT)]
