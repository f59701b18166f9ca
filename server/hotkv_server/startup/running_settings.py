"""The settings that the server runs with, and where each comes from: the topic `config`.

Always true: digests of tokens are counted, never told.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from hotkv_proto.command_line import counted
from hotkv_server.node.capability import Figures, Filters, Topic
from hotkv_server.settings import Settings, sources

HIDDEN = "token_sha256"
LIVE = (
    "arena.bytes",
    "log_level",
    "drain_timeout_s",
    "security.tenants",
    "security.admin_token_sha256",
    "security.admin_certificate_names",
    "security.allowed_uids",
    "security.arena_writers",
    "security.audit",
    "security.tls.certificate",
    "security.tls.key",
    "security.tls.client_ca",
    "tiers.disk.write_gb_per_day",
)
"""Settings that can change without a restart."""


class RunningSettings:
    """values: by dotted name, such as `security.tls.key`. A list is one value.
    waiting: names that differ in the file, and need a restart.
    """

    def __init__(self, settings: Settings) -> None:
        self.values = flat(settings)
        self.waiting: tuple[str, ...] = ()
        self._origins = {name: settings.origin(name) for name in self.values}
        self._effective = {
            "arena.dir": settings.arena_dir,
            "security.admin_socket": settings.admin_socket,
            "copy.threads": settings.copy_.num_threads,
        }
        """Where the value says only that the server chooses."""

    def __repr__(self) -> str:
        return f"RunningSettings({len(self.values)} settings)"

    def use(self, settings: Settings, names: Iterable[str], waiting: Iterable[str]) -> None:
        """After a reload.

        names: whose values hold from now on.
        """
        wanted = flat(settings)
        for name in names:
            self.values[name] = wanted[name]
            self._origins[name] = settings.origin(name)
        self.waiting = tuple(waiting)

    def topic(self) -> Topic:
        return Topic(self._tell)

    def _tell(self, filters: Filters) -> Figures:
        rows = [
            {
                "name": name,
                "value": to_jsonable_python(_told(name, self._effective.get(name, value))),
                "origin": self._origins[name],
                "variable": sources.variable_of(name),
                "flag": sources.flag_of(name),
                "is_live": name in LIVE,
                "needs_restart": name in self.waiting,
            }
            for name, value in self.values.items()
        ]
        return {"settings": rows, "waiting": list(self.waiting)}


def _told(name: str, value: Any) -> Any:
    if name.endswith(HIDDEN):
        return [f"{counted(len(value), 'digest')}, not shown"] if value else []
    if isinstance(value, list | tuple):
        return [_told("", one) for one in value]
    if isinstance(value, Mapping):
        return {inner: _told(inner, one) for inner, one in value.items()}
    return value


def flat(settings: Settings) -> dict[str, Any]:
    def walk(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            whole = f"{prefix}{name}"
            found.update(walk(f"{whole}.", value) if isinstance(value, dict) else {whole: value})
        return found

    return walk("", settings.model_dump(by_alias=True))
