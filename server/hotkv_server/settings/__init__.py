"""Settings of the server. They come from a TOML file, from `HOTKV_` environment variables and from
flags; variables override the file, and flags override variables.

Each setting has a unit and a default here; `deploy/hotkv.toml` shows all. An error names the
field, its value and the allowed values.
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    ByteSize,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from hotkv_proto.lane import SOCKET_NAME as LANE_SOCKET
from hotkv_server.security.path_checks import UnsafeError, check_writers
from hotkv_server.settings import sources
from hotkv_server.settings.outlets import EventSettings, HttpSettings, TracingSettings
from hotkv_server.settings.security import SecuritySettings, TenantSettings
from hotkv_server.settings.storage import (
    ArenaSettings,
    CopySettings,
    IntegritySettings,
    LeaseSettings,
    ResidencySettings,
)
from hotkv_server.settings.tiers import TierSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MIB = 1 << 20
MAX_CONFIG_BYTES = 16 * MIB
"""A file may list the tokens of tens of thousands of tenants."""


class Settings(BaseSettings):
    """All settings of `hotkv-server`."""

    model_config = SettingsConfigDict(
        env_prefix="HOTKV_", env_nested_delimiter="__", extra="forbid", cli_kebab_case=True
    )
    from_file: ClassVar[Mapping[str, Any]] = {}
    """Content of the TOML file; set by `load_settings`."""
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    """By dotted name, of settings that are not defaults; set by `load_settings`."""

    runtime_dir: Path = Field(
        Path("/run/hotkv"),
        description="Directory of the sockets and of the lock.",
    )
    tcp_address: str = Field(
        "", description="host:port to serve gRPC on besides the Unix sockets. Empty: none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="How log lines look: text, or one JSON object each."
    )
    drain_timeout_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        10.0, description="Longest wait for running transfers at SIGTERM, in seconds."
    )
    client_memory_bytes: Annotated[ByteSize, Field(ge=16 * MIB)] = Field(
        ByteSize(96 * MIB),
        description=(
            "Most memory besides the arena that clients can make the server keep: leases, waiting "
            "transfers, sequences of sparse decode. No client may take more than it leaves to the "
            "others."
        ),
    )
    arena: ArenaSettings = Field(default_factory=lambda: ArenaSettings())  # type: ignore[call-arg]
    integrity: IntegritySettings = Field(default_factory=lambda: IntegritySettings())  # type: ignore[call-arg]
    leases: LeaseSettings = Field(default_factory=lambda: LeaseSettings())  # type: ignore[call-arg]
    residency: ResidencySettings = Field(default_factory=lambda: ResidencySettings())  # type: ignore[call-arg]
    # An alias gets no prefix in the environment, so the second choice contains the prefix.
    copy_: CopySettings = Field(
        default_factory=lambda: CopySettings(),  # type: ignore[call-arg]
        validation_alias=AliasChoices("copy", "hotkv_copy"),
        alias="copy",
    )
    tiers: TierSettings = Field(default_factory=lambda: TierSettings())  # type: ignore[call-arg]
    http: HttpSettings = Field(default_factory=lambda: HttpSettings())  # type: ignore[call-arg]
    events: EventSettings = Field(default_factory=lambda: EventSettings())  # type: ignore[call-arg]
    tracing: TracingSettings = Field(default_factory=lambda: TracingSettings())  # type: ignore[call-arg]
    security: SecuritySettings = Field(default_factory=lambda: SecuritySettings())  # type: ignore[call-arg]

    @model_validator(mode="before")
    @classmethod
    def _has_no_empty_paths(cls, values: Any) -> Any:
        return sources.without_empty_paths(cls, values)

    @model_validator(mode="after")
    def _tcp_is_meant(self) -> "Settings":
        security = self.security
        if security.admin_on_tcp and not self.tcp_address:
            raise ValueError("security.admin_on_tcp needs tcp_address")
        if not self.tcp_address or security.tcp_insecure:
            return self
        if security.tls.key is None:
            raise ValueError(
                "tcp_address needs security.tls.certificate and key, or security.tcp_insecure = "
                "true if that is meant"
            )
        if security.tls.client_ca is None and not security.tenants:
            raise ValueError(
                "tcp_address lets everybody in: set security.tls.client_ca, or security.tenants "
                "with token_sha256, or security.tcp_insecure = true if that is meant"
            )
        return self

    @model_validator(mode="after")
    def _can_answer(self) -> "Settings":
        if self.events.answers and self.http.port < 0:
            raise ValueError("events.answers needs http: set http.port to 0 or more")
        return self

    @model_validator(mode="after")
    def _has_pool(self) -> "Settings":
        names = TierSettings.shared_names()
        has_shared = any(getattr(self.tiers, name) is not None for name in names)
        if self.events.identity == "pool" and not has_shared:
            *others, last = (f"tiers.{name}" for name in names)
            raise ValueError(
                "events.identity pool tells only of a store that nodes share: set "
                f"{', '.join(others)} or {last}"
            )
        return self

    @model_validator(mode="after")
    def _has_room(self) -> "Settings":
        promised = sum(tenant.guaranteed_bytes for tenant in self.security.tenants)
        in_slabs = self.arena.bytes // self.arena.slab_size * self.arena.slab_size
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
        assert issubclass(settings_cls, Settings)
        return (
            init_settings,
            env_settings,
            InitSettingsSource(settings_cls, dict(settings_cls.from_file)),
        )

    def origin(self, name: str) -> str:
        """Where the setting `name`, dotted, comes from: `default`, `file`, `environment` or
        `flag`."""
        return self._origins.get(name, "default")

    @property
    def arena_dir(self) -> Path:
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
    def engine_sockets(self) -> tuple[Path, Path, Path]:
        return self.grpc_socket, self.runtime_dir / LANE_SOCKET, self.descriptor_socket

    @property
    def admin_socket(self) -> Path:
        return self.security.admin_socket or self.runtime_dir / "admin.sock"


def load_settings(config: Path | None, flags: Sequence[str], program: str) -> Settings:
    """Raises ValueError with a line for each mistake.

    config: the TOML file, if any.
    program: its name in the flags' help.
    """
    if wrong := sources.wrong_variables(Settings, os.environ):
        raise ValueError("\n".join(wrong))
    in_file = _read(config) if config is not None else {}
    model = type(
        "Settings",
        (Settings,),
        {
            "__doc__": Settings.__doc__,
            "__annotations__": {"from_file": ClassVar[Mapping[str, Any]]},
            "from_file": in_file,
        },
    )
    try:
        cli: CliSettingsSource[list[str]] = CliSettingsSource(
            model,
            cli_prog_name=program,
            cli_parse_args=list(flags),
            cli_kebab_case=True,
            cli_exit_on_error=False,
        )
        loaded = model(_cli_settings_source=cli)
        assert isinstance(loaded, Settings)
        if wrong := list(sources.wrong_texts(loaded.model_dump(by_alias=True))):
            raise ValueError("\n".join(wrong))
        loaded._origins = sources.origins(
            file=in_file, environment=EnvSettingsSource(model)(), flag=cli()
        )
        return loaded
    except RecursionError as error:
        raise ValueError("a flag or variable is nested too deeply") from error
    except SettingsError as error:
        raise ValueError(sources.wrong_flags(Settings, str(error))) from error
    except ValidationError as error:
        raise ValueError("\n".join(map(_line, error.errors()))) from error


def _read(config: Path) -> dict[str, Any]:
    """Raises ValueError, which names the file."""
    try:
        check_writers(config)
        with config.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES} bytes")
        return tomllib.loads(text.decode())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"--config: there is no file {config}") from error
    except UnsafeError as error:
        raise ValueError(f"--config: {error}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"--config: {config}: {error}") from error


def _line(error: ErrorDetails) -> str:
    """A sentence about a mistake. Does not quote what may be secret: values of unknown settings,
    of a store's settings, of tokens, and URLs with a user."""
    location, value = error["loc"], error.get("input")
    name = ".".join(str(part) for part in location) or "settings"
    if error["type"] == "extra_forbidden" and (gone := sources.is_gone(name)):
        return gone
    if error["type"] == "extra_forbidden":
        known = [known for known, _ in sources.leaves(Settings)]
        hint = sources.meant(name, known) or "; --help-settings lists them"
        if location[:2] == ("security", "tenants"):
            hint = f"; a tenant has {', '.join(TenantSettings.model_fields)}"
        return f"{name} is no setting{hint}"
    is_store = location[:1] == ("tiers",) and location[1:2] != ("disk",)
    has_user = "://" in str(value) and "@" in str(value)
    is_hidden = is_store or has_user or "token" in name or isinstance(value, dict | BaseModel)
    shown = "" if is_hidden else f" is {value!r}"
    return f"{name}{shown}: {error['msg'].removeprefix('Value error, ')}"
