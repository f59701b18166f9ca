"""Reads the connector's settings from vLLM's `kv_connector_extra_config`.

A setting is a key `hotkv.<name>`, or a field of an object under the key `hotkv`, which vLLM
makes from arguments with dots (`--kv-transfer-config.kv_connector_extra_config.hotkv.load
always`). Other keys are ignored. A wrong setting stops the engine's start; an absent server
never does.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlsplit

from hotkv_client.targets import Credentials
from hotkv_vllm.companion import NOT_INSTALLED, SETTINGS, CompanionSettings, part

NESTED = "hotkv"
PREFIX = NESTED + "."
TRACING = PREFIX + "tracing"
ALLOW_UNTESTED = PREFIX + "allow_untested_vllm"
DEFAULT_TARGET = "unix:/run/hotkv/grpc.sock"
TARGET_ENV = "HOTKV_TARGET"
LEASE_TTL_S = 30.0
"""Of a read lease, which must outlast the wait for admission and the load."""
DEVICE_ORDERS = ("auto", "events", "flags", "host")
LOADS = ("auto", "always")

GONE: Mapping[str, str] = {
    "callback_timing_file": "the log says at shutdown what callbacks took",
    "flush_timeout_s": "a step waits 0.1 s for a store of blocks that it overwrites",
    "lease_ttl_s": "a read lease lives 30 s",
    "max_load_retries": "a request gets no further hits after a failed load",
    "sparse_recall_steps": "one step in 256 measures what sparse decode leaves out",
}
"""Settings that there were, and what holds without them."""


class ConfigError(ValueError):
    """A wrong setting, or one that can't work in this engine."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The connector's settings. `tools/connector_settings.py` makes docs/connector.md of them.

    target: `unix:/path/grpc.sock` or `host:port`.
    tenant: engines of different tenants share no blocks; a server with tenants demands a proof.
    tls_ca: file with the authorities that sign the server's certificate.
    tls_certificate, tls_key: files with this engine's certificate and its key.
    tls_server_name: name that the server's certificate must have.
    token_file: file with the tenant's token (over TCP).
    weights_identity: a name in place of the computed identity of the weights; equal names promise
        equal weights.
    lookup_timeout_s: after this wait for a lookup or lease a request counts as a miss; more than
        the server's `tiers.lookup_wait_ms`.
    load: `auto` loads a hit unless computing is faster, by this engine's measurements; blocks in a
        slower tier stay there. `always` loads every block that the server has.
    load_timeout_s: a load that takes longer is cancelled, and its request computes.
    store_timeout_s: the server gives up a store that takes longer.
    device_order: how the server learns which work the engine's device has finished (CUDA). `auto`:
        the engine offers events and flags, and the server picks; `events`: interprocess events
        (containers need hostIPC); `flags`: words in a shared page; `host`: the worker waits for the
        device.
    reset_timeout_s: how long vLLM's reset of external caches waits for the server, and how long an
        idle engine then takes steps to finish the reset.
    startup_wait_s: how long the engine's start waits for the server. One that has answered gets up
        to 10 s to map the engine's memory.
    max_inflight_store_mib: most MiB stored at a time. Further stores wait, and are dropped when
        their request ends.
    allow_untested_vllm: use hotkv even if this vLLM changed an API that hotkv uses.
    use_table: look blocks up in the mapped block table if the server offers it, else by calls.
    state_interval_tokens: which recurrent states (Mamba and the like) are stored. 0: every state
        that vLLM hands over, by default a prompt's last and those at the ends of shared prefixes
        (vLLM's `prefix_cache_retention_interval` adds others). Otherwise those at the end of a
        prompt and at multiples of this number, rounded up to a length at which a hit can end.
    tracing: where spans go: the URL of an OTLP/HTTP receiver, or `env` for the variables
        OTEL_EXPORTER_OTLP_*, as vLLM's own.
    tracing_sample_ratio: share of requests without a trace context that begin a trace, 0 to 1;
        others are traced if their client traces them.
    companion: not a setting of its own: what the companion has read; None without one.
    """

    target: str = DEFAULT_TARGET
    tenant: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    token_file: str = ""
    weights_identity: str = ""
    lookup_timeout_s: float = 0.25
    load: str = "auto"
    load_timeout_s: float = 10.0
    store_timeout_s: float = 5.0
    reset_timeout_s: float = 5.0
    device_order: str = "auto"
    startup_wait_s: float = 1.0
    max_inflight_store_mib: int = 1024
    allow_untested_vllm: bool = False
    use_table: bool = True
    state_interval_tokens: int = 0
    tracing: str = ""
    tracing_sample_ratio: float = 0.0
    companion: CompanionSettings | None = None

    @staticmethod
    def from_extra_config(extra: Mapping[str, Any]) -> "ConnectorConfig":
        """Missing settings get their defaults. Raises ConfigError."""
        known = {f.name: f for f in fields(ConnectorConfig) if f.name != "companion"}
        for_companion: dict[str, Any] = {}
        values: dict[str, Any] = {"target": os.environ.get(TARGET_ENV) or DEFAULT_TARGET}
        for key, value in flat(extra).items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name in GONE:
                raise ConfigError(
                    f"{key} = {value!r}: it is no setting any more: {GONE[name]}; remove it"
                )
            if name in SETTINGS:
                for_companion[name] = value
                continue
            if name not in known:
                every = sorted([*known, *SETTINGS])
                allowed = ", ".join(PREFIX + other for other in every)
                raise ConfigError(
                    f"{key} = {value!r}: there is no such setting; allowed are {allowed}"
                )
            read = _READERS_OF.get(name) or READERS[str(known[name].type)]
            values[name] = read(key, value)
        _check_target(values["target"])
        _check_choice("device_order", values, DEVICE_ORDERS)
        _check_choice("load", values, LOADS)
        pair = [values.get("tls_certificate"), values.get("tls_key")]
        if any(pair) and not all(pair):
            raise ConfigError(
                f"{PREFIX}tls_certificate = {pair[0]!r} and {PREFIX}tls_key = {pair[1]!r}: "
                "set both or neither"
            )
        config = ConnectorConfig(**values)
        if not for_companion:
            return config
        found = part("settings")
        if found is None:
            key, value = next(iter(for_companion.items()))
            raise ConfigError(f"{PREFIX}{key} = {value!r}: {NOT_INSTALLED}")
        return replace(config, companion=found.read(for_companion, config))

    @property
    def credentials(self) -> Credentials:
        """For a server over TCP."""
        return Credentials(
            self.tls_ca, self.tls_certificate, self.tls_key, self.tls_server_name, self.token_file
        )


def flat(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy in which the fields of an object `hotkv` are keys `hotkv.<name>`.

    Raises ConfigError if `hotkv` is not an object, or a setting occurs in both forms.
    """
    if NESTED not in extra:
        return extra
    nested = extra[NESTED]
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{NESTED} = {nested!r}: allowed is an object of settings")
    named = {PREFIX + str(name): value for name, value in nested.items()}
    others = {key: value for key, value in extra.items() if key != NESTED}
    if twice := sorted(named.keys() & others.keys()):
        raise ConfigError(f"{twice[0]} is set twice: by itself and as a field of {NESTED!r}")
    return others | named


def _read_str(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} = {value!r}: allowed is a string")
    return value


def _read_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r}: allowed are true and false")
    return value


def _read_int(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ConfigError(f"{key} = {value!r}: allowed is a whole number from 0, of 64 bits")
    return value


def _read_float(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 86400:
        raise ConfigError(f"{key} = {value!r}: allowed is a number of seconds from 0 to 86400")
    return float(value)


def _read_ratio(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{key} = {value!r}: allowed is a number from 0 to 1")
    return float(value)


def _read_collector(key: str, value: Any) -> str:
    is_url = isinstance(value, str) and value.startswith(("http://", "https://"))
    if not is_url and value not in ("", "env"):
        raise ConfigError(f"{key} = {value!r}: allowed are http://…, https://…, env and empty")
    try:
        has_user = "@" in urlsplit(value).netloc
    except ValueError as error:
        raise ConfigError(f"{key} is not a URL: {error}") from None
    if has_user:
        raise ConfigError(
            f"{key} has a user or a password, and logs name it: put them into the variable "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    return str(value)


READERS: dict[str, Callable[[str, Any], Any]] = {
    t.__name__: read
    for t, read in ((str, _read_str), (bool, _read_bool), (int, _read_int), (float, _read_float))
}
READERS |= {str(t): READERS[t.__name__] for t in (str, bool, int, float)}
_READERS_OF: dict[str, Callable[[str, Any], Any]] = {
    "tracing": _read_collector,
    "tracing_sample_ratio": _read_ratio,
}


def _check_choice(name: str, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if name in values and values[name] not in allowed:
        raise ConfigError(f"{PREFIX}{name} = {values[name]!r}: allowed are {', '.join(allowed)}")


def _check_target(target: str) -> None:
    path = target.removeprefix("unix:")
    host, _, port = target.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    fine = (
        path.startswith("/")
        if target.startswith("unix:")
        else bool(host) and "/" not in host and is_port
    )
    if not fine:
        raise ConfigError(
            f"{PREFIX}target = {target!r}: allowed are unix:/absolute/path and host:port"
        )
