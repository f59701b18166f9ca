"""Settings of the server: a TOML file, `HOTKV_` environment variables and flags, in rising
precedence.

Every setting has a unit and a default here; `deploy/hotkv.toml` shows them all. An error names the
field, its value and what is allowed.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ByteSize,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

MIB = 1 << 20


class ArenaSettings(BaseModel, extra="forbid"):
    """The host memory that holds the blocks."""

    bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(1 << 30), description="Size of the arena, such as 64GiB."
    )
    dir: Path | None = Field(
        None,
        description=(
            "Directory of the arena, on tmpfs or hugetlbfs. Default: a directory under "
            "/dev/shm named after runtime_dir."
        ),
    )
    slab_bytes: Annotated[ByteSize, Field(ge=64 << 10)] = Field(
        ByteSize(4 * MIB), description="Size of one slab; a multiple of 4KiB."
    )
    max_blocks: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        0,
        description=(
            "Most entries of the index, blocks and representations; 0 for one per 16 KiB of arena."
        ),
    )
    prefault: bool = Field(
        True,
        description=(
            "Bring all memory in at start, as huge pages if the kernel gives them; "
            "false: as it is used."
        ),
    )
    keep: bool = Field(
        True,
        description=(
            "Leave the arena behind at a clean stop, so that the next server goes on with it."
        ),
    )
    pin: Literal["auto", "required", "off"] = Field(
        "auto",
        description=(
            "Pin the arena for GPUs: auto (as far as it is granted; the rest is copied "
            "slowly), required, or off."
        ),
    )
    pin_piece_bytes: Annotated[ByteSize, Field(ge=2 * MIB)] = Field(
        ByteSize(1 << 30), description="How much is pinned in one call; a multiple of 2MiB."
    )
    numa: Annotated[str, Field(pattern=r"^(auto|interleave|none|[0-9]{1,3})$")] = Field(
        "auto",
        description=(
            "NUMA nodes of the arena: auto (those of the GPUs), interleave (all in "
            "turns), none (as it comes), or a node's number."
        ),
    )

    @field_validator("pin_piece_bytes")
    @classmethod
    def _whole_huge_pages(cls, value: ByteSize) -> ByteSize:
        if value % (2 * MIB):
            raise ValueError("must be a multiple of 2MiB")
        return value

    @field_validator("slab_bytes")
    @classmethod
    def _whole_pages(cls, value: ByteSize) -> ByteSize:
        if value % 4096:
            raise ValueError("must be a multiple of 4KiB")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "ArenaSettings":
        if self.slab_bytes > self.bytes:
            raise ValueError("slab_bytes must not be larger than bytes")
        return self

    @property
    def capacity(self) -> int:
        """Most entries of the index."""
        return self.max_blocks or max(1 << 16, self.bytes // (16 << 10))


class IntegritySettings(BaseModel, extra="forbid"):
    """Check values: how the server knows a block's bytes again."""

    check: Literal["sampled", "full", "off"] = Field(
        "sampled",
        description=(
            "What a check value covers: one line of 64 bytes in each 4 KiB, all bytes, or nothing."
        ),
    )
    start_check_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        0.3,
        description=(
            "Longest time that a start compares blocks with their check values, in "
            "seconds; the rest when it is first loaded."
        ),
    )
    scrub_bytes_per_s: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(256 * MIB),
        description=(
            "Slots that are compared with their check values in the background, in bytes "
            "a second; 0 for none."
        ),
    )

    @property
    def stride(self) -> int:
        """Lines of which one is covered; 0 for no check values."""
        return {"sampled": 64, "full": 1, "off": 0}[self.check]


class LeaseSettings(BaseModel, extra="forbid"):
    """Leases."""

    ttl_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30.0, description="Lifetime of a lease that asks for none, in seconds."
    )
    unadmitted_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.25,
        description=(
            "Most of the arena that requests which are not yet admitted may pin, as a share."
        ),
    )
    held_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.25,
        description=(
            "Most of the arena that requests may ask to keep (retention with pin), as a share."
        ),
    )


class CopySettings(BaseModel, extra="forbid"):
    """Copies between engines and the arena."""

    threads: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="Copy threads; 0 for half the processors, 1 to 8."
    )
    cuda: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "Serve engines on GPUs: auto (where there is an NVIDIA device), on (refuse "
            "to start where it can't be), or off."
        ),
    )
    method: Literal["auto", "memcpy", "batch", "kernel", "staged"] = Field(
        "auto",
        description=(
            "How copies are given to a GPU: auto (what a measurement at start finds "
            "best), memcpy, batch, kernel or staged."
        ),
    )
    piece_bytes: Annotated[ByteSize, Field(ge=MIB)] = Field(
        ByteSize(32 * MIB),
        description=(
            "Pieces into which copies of GPUs are cut; between them other transfers take "
            "their turns."
        ),
    )
    depth: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="Pieces that a GPU has been given at a time, in each direction."
    )
    staging_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(128 * MIB),
        description="Memory of each GPU that the server uses for staging; 0 for none.",
    )

    @model_validator(mode="after")
    def _stages(self) -> "CopySettings":
        if self.method == "staged" and not self.staging_bytes:
            raise ValueError("method staged needs staging_bytes")
        if 0 < self.staging_bytes < 2 * self.depth * 4096:
            raise ValueError(
                f"staging_bytes must be 0 or at least {2 * self.depth * 4096} with this depth"
            )
        return self

    @property
    def num_threads(self) -> int:
        """Copy threads."""
        return self.threads or min(8, max(1, len(os.sched_getaffinity(0)) // 2))


class HttpSettings(BaseModel, extra="forbid"):
    """Metrics and probes over HTTP: /metrics, /livez, /readyz."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=-1, le=65535)] = Field(
        9433, description="Port; 0 for any free one, -1 for none."
    )


TOPIC_FIELDS = {"host": "", "model": "", "tenant": "", "key_space": 0}


class EventSettings(BaseModel, extra="forbid"):
    """KV events for routers, in vLLM's format over ZMQ. Needs the extra `events`."""

    endpoint: str = Field(
        "",
        description=(
            "ZMQ address to publish on, such as tcp://*:5557; empty for none. Without * "
            "it is connected to."
        ),
    )
    replay_endpoint: str = Field(
        "",
        description=(
            "ZMQ address that replays what a reader has missed, such as tcp://*:5558; "
            "empty for none."
        ),
    )
    topic: str = Field(
        "kv@{host}@{model}",
        description="Topic; {host}, {model}, {tenant} and {key_space} stand for their values.",
    )
    buffer_steps: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        10_000, description="Most messages kept for replay, per topic."
    )
    buffer_bytes: Annotated[ByteSize, Field(ge=MIB)] = Field(
        ByteSize(64 * MIB),
        description=(
            "Most bytes that wait to be sent, and most that are kept for replay, of all "
            "topics together."
        ),
    )
    int_hashes: bool = Field(
        True,
        description=(
            "Hashes as 64-bit numbers, as VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1 has it "
            "in engines; false for whole ones."
        ),
    )

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value and not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        return value

    @field_validator("topic")
    @classmethod
    def _has_known_fields(cls, value: str) -> str:
        try:
            value.format(**TOPIC_FIELDS)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(
                f"may name {', '.join('{' + name + '}' for name in TOPIC_FIELDS)} in braces, "
                "and "
                "nothing else"
            ) from error
        return value

    @model_validator(mode="after")
    def _replays_something(self) -> "EventSettings":
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("replay_endpoint needs endpoint")
        return self


Uid = Annotated[int, Field(ge=0, le=(1 << 32) - 2)]
TokenDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of a token, in hexadecimal: `printf %s "$token" | sha256sum`."""


class TenantSettings(BaseModel, extra="forbid"):
    """A tenant: what it is known by, of which any one is enough, and what it may have."""

    name: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = Field(
        description="As engines name it in hotkv.tenant; empty for engines that name none."
    )
    uids: list[Uid] = Field([], description="User ids of its processes on this node.")
    gids: list[Uid] = Field(
        [], description="Group ids of its processes on this node, supplementary ones too."
    )
    token_sha256: list[TokenDigest] = Field(
        [], description="SHA-256 of its tokens for TCP, hexadecimal."
    )
    certificate_names: list[str] = Field(
        [], description="Names in its client certificates for TCP: common name or alternative name."
    )
    guaranteed_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0), description="Memory that other tenants' blocks never take from it."
    )
    burst_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(0), description="Most memory that it may have; 0 for no bound."
    )
    table: Literal["mapped", "rpc"] = Field(
        "rpc",
        description=(
            "mapped: it may map the block table, which shows hashes of all tenants' "
            "blocks; rpc: it looks up by calls."
        ),
    )
    max_sessions: Annotated[int, Field(ge=0)] = Field(
        0, description="Most sessions at a time; 0 for no bound of its own."
    )

    @model_validator(mode="after")
    def _can_be_known(self) -> "TenantSettings":
        if not (self.uids or self.gids or self.token_sha256 or self.certificate_names):
            raise ValueError(
                "must list at least one of uids, gids, token_sha256, certificate_names"
            )
        if self.burst_bytes and self.burst_bytes < self.guaranteed_bytes:
            raise ValueError("burst_bytes must not be smaller than guaranteed_bytes")
        return self


class TlsSettings(BaseModel, extra="forbid"):
    """TLS on TCP, with PEM files that are read again when they change."""

    certificate: Path | None = Field(
        None, description="The server's certificate, with intermediate ones."
    )
    key: Path | None = Field(None, description="Its private key; not readable by others.")
    client_ca: Path | None = Field(
        None, description="Who signs client certificates, which are then demanded of every client."
    )

    @model_validator(mode="after")
    def _is_whole(self) -> "TlsSettings":
        if (self.certificate is None) != (self.key is None) or (
            self.client_ca is not None and self.key is None
        ):
            raise ValueError(
                "certificate and key must be set together, and client_ca only with them"
            )
        return self


class SecuritySettings(BaseModel, extra="forbid"):
    """Who may do what."""

    socket_mode: str = Field(
        "0660", description="Mode of the Unix sockets grpc.sock and fd.sock, octal."
    )
    admin_socket: Path | None = Field(
        None, description="Path of the admin socket. Default: admin.sock in runtime_dir."
    )
    admin_socket_mode: str = Field("0600", description="Mode of the admin socket, octal.")
    allowed_uids: list[int] = Field(
        [],
        description="User ids besides the server's own and root's that may share memory with it.",
    )
    tenants: list[TenantSettings] = Field(
        [], description="Tenants. With any, every session must prove that it acts for one of them."
    )
    tls: TlsSettings = Field(default_factory=lambda: TlsSettings())  # type: ignore[call-arg]
    tcp_insecure: bool = Field(
        False,
        description=(
            "Serve TCP without TLS: whoever reaches the network reads and changes what "
            "goes over it."
        ),
    )
    tcp_reflection: bool = Field(False, description="Describe the services over TCP, too.")
    admin_on_tcp: bool = Field(
        False, description="Serve the admin API and events over TCP, too, to the admins below."
    )
    admin_token_sha256: list[TokenDigest] = Field(
        [], description="SHA-256 of admins' tokens for TCP, hexadecimal."
    )
    admin_certificate_names: list[str] = Field(
        [], description="Names in admins' client certificates for TCP."
    )
    malformed_per_s: Annotated[float, Field(ge=1, le=1e9)] = Field(
        50.0,
        description=(
            "Messages that make no sense, and refused sessions, answered a second at "
            "most; the rest wait, a second at most."
        ),
    )

    @field_validator("socket_mode", "admin_socket_mode")
    @classmethod
    def _octal(cls, value: str) -> str:
        if not re.fullmatch("[0-7]{3,4}", value) or int(value, 8) > 0o777:
            raise ValueError("must be an octal mode such as 0660")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> "SecuritySettings":
        names = [tenant.name for tenant in self.tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tenants: {twice[0]!r} is there twice")
        if self.admin_on_tcp and not (self.admin_token_sha256 or self.admin_certificate_names):
            raise ValueError("admin_on_tcp needs admin_token_sha256 or admin_certificate_names")
        named = any(t.certificate_names for t in self.tenants) or bool(self.admin_certificate_names)
        if named and self.tls.client_ca is None:
            raise ValueError(
                "certificate_names need tls.client_ca: without it no client shows a certificate"
            )
        return self


class Settings(BaseSettings):
    """All settings of `hotkv-server`."""

    model_config = SettingsConfigDict(
        env_prefix="HOTKV_", env_nested_delimiter="__", extra="forbid", cli_kebab_case=True
    )

    runtime_dir: Path = Field(
        Path("/run/hotkv"),
        description="Directory of the sockets grpc.sock, fd.sock, admin.sock and of the lock.",
    )
    tcp_address: str = Field(
        "", description="host:port to serve gRPC on besides the Unix socket; empty for none."
    )
    policy: Literal["hotness", "lru", "arc", "s3fifo"] = Field(
        "hotness", description="Which blocks are evicted first."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        10.0, description="Longest wait for work in flight at SIGTERM, in seconds."
    )
    client_memory_bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(96 * MIB),
        description="Most memory besides the arena that clients can make the server keep: lists "
        "of their leases, transfers that wait, "
        "sequences of sparse decode. Nobody takes more of it than is left for others.",
    )
    arena: ArenaSettings = Field(default_factory=lambda: ArenaSettings())  # type: ignore[call-arg]
    integrity: IntegritySettings = Field(default_factory=lambda: IntegritySettings())  # type: ignore[call-arg]
    leases: LeaseSettings = Field(default_factory=lambda: LeaseSettings())  # type: ignore[call-arg]
    # An alias has no prefix in the environment by itself.
    copy_: CopySettings = Field(
        default_factory=lambda: CopySettings(),  # type: ignore[call-arg]
        validation_alias=AliasChoices("copy", "hotkv_copy"),
        alias="copy",
    )
    http: HttpSettings = Field(default_factory=lambda: HttpSettings())  # type: ignore[call-arg]
    events: EventSettings = Field(default_factory=lambda: EventSettings())  # type: ignore[call-arg]
    security: SecuritySettings = Field(default_factory=lambda: SecuritySettings())  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _tcp_is_meant(self) -> "Settings":
        security = self.security
        if not self.tcp_address or security.tcp_insecure:
            return self
        if security.tls.key is None:
            raise ValueError(
                "tcp_address needs security.tls.certificate and key, or "
                "security.tcp_insecure = "
                "true if that is meant"
            )
        if security.tls.client_ca is None and not security.tenants:
            raise ValueError(
                "tcp_address lets everybody in: set security.tls.client_ca, or security.tenants "
                "with token_sha256, or "
                "security.tcp_insecure = true if that is meant"
            )
        return self

    @model_validator(mode="after")
    def _has_room(self) -> "Settings":
        promised = sum(tenant.guaranteed_bytes for tenant in self.security.tenants)
        in_slabs = self.arena.bytes // self.arena.slab_bytes * self.arena.slab_bytes
        if promised > in_slabs:
            raise ValueError(
                f"security.tenants: guaranteed_bytes come to {promised}, more than the "
                f"{in_slabs} of arena.bytes in whole slabs"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    @property
    def arena_dir(self) -> Path:
        """Directory of arena and table."""
        if self.arena.dir is not None:
            return self.arena.dir
        tag = hashlib.sha256(str(self.runtime_dir.absolute()).encode()).hexdigest()[:8]
        return Path("/dev/shm") / f"hotkv-{tag}"

    @property
    def grpc_socket(self) -> Path:
        return self.runtime_dir / "grpc.sock"

    @property
    def descriptor_socket(self) -> Path:
        return self.runtime_dir / "fd.sock"

    @property
    def admin_socket(self) -> Path:
        return self.security.admin_socket or self.runtime_dir / "admin.sock"


def load_settings(config: Path | None, flags: Sequence[str], program: str) -> Settings:
    """Settings from all sources. Raises ValueError with one line a mistake; exits after printing
    help for `--help`."""
    if config is not None and not config.is_file():
        raise ValueError(f"--config: there is no file {config}")
    model = type(
        "Settings",
        (Settings,),
        {
            "__doc__": Settings.__doc__,
            "model_config": {**Settings.model_config, "toml_file": config},
        },
    )
    try:
        cli: CliSettingsSource[list[str]] = CliSettingsSource(
            model, cli_prog_name=program, cli_parse_args=list(flags), cli_kebab_case=True
        )
        loaded = model(_cli_settings_source=cli)
        assert isinstance(loaded, Settings)
        return loaded
    except ValidationError as error:
        raise ValueError(
            "\n".join(_line(item["loc"], item.get("input"), item["msg"]) for item in error.errors())
        ) from error


def _line(location: tuple[int | str, ...], value: object, message: str) -> str:
    name = ".".join(str(part) for part in location) or "settings"
    shown = "" if isinstance(value, dict | BaseModel) else f" is {value!r}"
    return f"{name}{shown}: {message.removeprefix('Value error, ')}"


def print_error(message: str) -> None:
    """One mistake a line, on standard error."""
    for line in message.splitlines():
        print(f"hotkv-server: {line}", file=sys.stderr)
