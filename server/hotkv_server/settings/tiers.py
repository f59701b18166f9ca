"""Settings of the tiers below host memory.

Always true: they contain no secrets; passwords and access keys are read from files when they are
needed. Errors don't quote the given values.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

# -------------------------------------------------------------------------------------- Compression

STAGING_BYTES = 64 << 20
"""Of a tier that compresses blocks."""
Compress: TypeAlias = Annotated[
    Literal["off", "auto"],
    Field(
        description=(
            "auto: bfloat16 blocks are stored in three quarters of their bytes, exactly; others as "
            "they are. In shared tiers, nodes with off miss them. Takes 64 MiB of memory."
        )
    ),
]


# ------------------------------------------------------------------------------------------- Valkey

UNIX = "unix:"
MAX_UNIX_PATH_BYTES = 107
"""Size of sun_path in struct sockaddr_un, without the final zero."""


class ValkeySettings(BaseModel, extra="forbid", hide_input_in_errors=True):
    """A Valkey or Redis server that keeps blocks, alone or for many nodes."""

    address: str = Field(
        description=(
            "unix:/path of its socket, or host:port; of a cluster, host:port of several of its "
            "servers, with commas in between."
        )
    )
    cluster: bool = Field(False, description="Whether the address is that of a cluster.")
    user: str = Field("", description="Its ACL user. Empty: the default user.")
    password_file: Path | None = Field(
        None,
        description=(
            "File with the password and nothing else. Others must not be able to read it. It is "
            "read at each connect."
        ),
    )
    database: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        0, description="Number of the database."
    )
    tls: bool = Field(False, description="Speak TLS, over TCP only.")
    server_name: str = Field(
        "", description="Name that its certificate must have. Empty: the host of address."
    )
    ca_file: Path | None = Field(
        None, description="Authority that signs its certificate. Default: those of the system."
    )
    cert_file: Path | None = Field(
        None, description="Certificate that hotkv shows, if the server asks for one."
    )
    key_file: Path | None = Field(
        None, description="Its private key. Others must not be able to read it."
    )
    compress: Compress = "off"
    connections: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="Connections to it, with a thread each."
    )
    ttl_s: Annotated[float, Field(ge=1, le=366 * 86400)] = Field(
        86400.0,
        description=(
            "Time to live of a first block of a sequence, in seconds. Later ones live shorter, "
            "down to half as long, so that the server evicts them first."
        ),
    )

    @field_validator("address")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        # The path of a Unix socket may contain commas.
        for one in [value] if value.startswith(UNIX) else value.split(","):
            cls._check_address(one.strip())
        return value

    @classmethod
    def _check_address(cls, value: str) -> None:
        if value.startswith(UNIX):
            path = value[len(UNIX) :]
            if not path.startswith("/"):
                raise ValueError("the path after unix: must be absolute, such as unix:/run/v.sock")
            if len(path.encode()) > MAX_UNIX_PATH_BYTES:
                raise ValueError(f"a socket's path has at most {MAX_UNIX_PATH_BYTES} bytes")
            return
        host, colon, port = value.rpartition(":")
        is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not colon or not host or "@" in host or "/" in host or is_bare_ipv6:
            raise ValueError(
                "must be unix:/path, host:port or [IPv6]:port; user and password have settings of "
                "their own"
            )
        if not port.isdecimal() or not port.isascii() or not 0 < int(port) < 1 << 16:
            raise ValueError("the port must be a number from 1 to 65535")

    @model_validator(mode="after")
    def _agrees(self) -> "ValkeySettings":
        if not self.cluster and not self.unix_path and "," in self.address:
            raise ValueError("address has several servers: that needs cluster = true")
        if self.cluster and (UNIX in self.address or self.database or self.server_name):
            raise ValueError("a cluster has no Unix socket, no database and no server_name")
        if self.user and self.password_file is None:
            raise ValueError("user needs password_file")
        if self.tls and self.unix_path:
            raise ValueError("tls needs host:port in address: a Unix socket has no TLS")
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file must be set together")
        if not self.tls and (self.ca_file or self.cert_file or self.server_name):
            raise ValueError("ca_file, cert_file, key_file and server_name need tls = true")
        return self

    @property
    def unix_path(self) -> str:
        """Empty for a server over TCP."""
        return self.address[len(UNIX) :] if self.address.startswith(UNIX) else ""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of the first server in `address`."""
        return self.hosts_and_ports[0]

    @property
    def hosts_and_ports(self) -> list[tuple[str, int]]:
        found = []
        for address in self.address.split(","):
            host, _, port = address.strip().rpartition(":")
            found.append((host.strip("[]"), int(port)))
        return found


# ----------------------------------------------------------------------------------------------- S3

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]*(/[0-9A-Za-z_-][0-9A-Za-z._-]*)*")
_REGION = re.compile(r"[0-9A-Za-z-]{1,64}")


class S3Settings(BaseModel):
    """A bucket that keeps blocks, for one node or many."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    bucket: str = Field(description="Its name. The bucket must exist.")
    prefix: str = Field(
        "hotkv", description="Folder of hotkv's objects in it. Nodes that share have the same."
    )
    endpoint: str = Field(
        "",
        description="https://host or http://host:port of the store. Empty: AWS, in this region.",
    )
    region: str = Field("us-east-1", description="Region of the bucket.")
    credentials_file: Path | None = Field(
        None,
        description=(
            "File with the access key, as AWS has it: [default], aws_access_key_id, "
            "aws_secret_access_key, and aws_session_token if there is one. Others must not be able "
            "to read it. It is read anew when the store has refused it. Default: the machine's "
            "role or AWS_* variables."
        ),
    )
    ca_file: Path | None = Field(
        None, description="Authority that signs the store's certificate, besides the system's."
    )
    compress: Compress = "off"
    connections: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Calls to it at a time, with a thread each. Half of them may be writes."
    )
    node: str = Field(
        "",
        pattern=r"^[0-9a-z]{0,32}$",
        description="Name of this server in its objects' names. Empty: random at each start.",
    )

    @field_validator("bucket")
    @classmethod
    def _is_bucket(cls, value: str) -> str:
        if not _BUCKET.fullmatch(value):
            raise ValueError("a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-'")
        return value

    @field_validator("prefix")
    @classmethod
    def _is_folder(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value) or len(value) > 256:
            raise ValueError(
                "must be a folder such as hotkv or team/hotkv, of 0-9, A-Z, a-z, '.', '_' and '-'"
            )
        return value

    @field_validator("region")
    @classmethod
    def _is_region(cls, value: str) -> str:
        if not _REGION.fullmatch(value):
            raise ValueError("must be a region such as eu-central-1; many stores take any")
        return value

    @field_validator("endpoint")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        if not value:
            return value
        try:
            parts = urlsplit(value)
            _ = parts.port
        except ValueError:
            raise ValueError("the port must be a number from 0 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be https://host, https://host:port or http://host:port")
        if "@" in parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(
                "must have no user, path or query: bucket, prefix and credentials_file have "
                "settings of their own"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _agrees(self) -> "S3Settings":
        if self.ca_file is not None and not self.is_tls:
            raise ValueError("ca_file needs an https:// endpoint")
        return self

    @property
    def url(self) -> str:
        return self.endpoint or f"https://s3.{self.region}.amazonaws.com"

    @property
    def is_tls(self) -> bool:
        """With http:// everybody on the network path can read the blocks."""
        return self.url.startswith("https:")

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.url}/{self.bucket}/{self.prefix}"


# ----------------------------------------------------------------------------------------- Mooncake

PEER_TO_PEER = "P2PHANDSHAKE"


class MooncakeSettings(BaseModel, extra="forbid"):
    """A Mooncake Store that keeps blocks for many nodes. Separate clients (`mooncake_client`)
    provide its memory. hotkv's child processes provide no memory, so killing them loses no
    blocks."""

    master: str = Field(description="host:port of its master.")
    metadata_server: str = Field(
        PEER_TO_PEER, description="URL of its metadata server, or P2PHANDSHAKE for none."
    )
    local_hostname: str = Field(
        description="Name or address under which its other clients reach this node."
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How bytes are moved.")
    devices: str = Field("", description="RDMA devices, with commas in between.")
    compress: Compress = "off"
    children: Annotated[int, Field(ge=1, le=16)] = Field(
        2, description="Child processes, with a thread each."
    )


# -------------------------------------------------------------------------- The disk, and all tiers

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
MAX_DISK_BYTES = 16 * TIB
"""Records of the block table have 32 bits for an offset, in units of 4096 bytes."""
MIN_SLAB_BYTES, MAX_SLAB_BYTES = 4 * MIB, 256 * MIB
MIN_SLABS = 512
"""Least slabs of a disk tier; fewer if it is too small for so many."""


class DiskSettings(BaseModel, extra="forbid"):
    """A tier on a local disk."""

    path: Path | None = Field(
        None,
        description=(
            "Folder of the tier on a local disk, of this server alone. None: no such tier."
        ),
    )
    bytes: Annotated[ByteSize, Field(ge=16 * MIB, le=MAX_DISK_BYTES)] = Field(
        ByteSize(100 * GIB),
        description="Size of the slab file in that folder, such as 200GiB; at most 16TiB.",
    )
    write_gb_per_day: Annotated[float | None, Field(gt=0, le=1e9)] = Field(
        None,
        description=(
            "Most that is written there in any 24 hours, in GB: disks wear. What is left decides "
            "which share of new chains is written; one that comes again is. None: no limit."
        ),
    )
    compress: Compress = "off"
    threads: Annotated[int, Field(ge=1, le=64)] = Field(
        20, description="Threads that read and write; at most three quarters of them write."
    )


class TierSettings(BaseModel, extra="forbid", hide_input_in_errors=True):
    """The tiers below host memory, and how long a hit waits for them."""

    disk: DiskSettings = Field(default_factory=lambda: DiskSettings())  # type: ignore[call-arg]
    valkey: ValkeySettings | None = Field(
        None,
        description="A Valkey or Redis server that nodes share. None: no such tier.",
    )
    mooncake: MooncakeSettings | None = Field(
        None,
        description="A Mooncake Store that nodes share. None: no such tier.",
    )
    s3: S3Settings | None = Field(
        None,
        description="A bucket of S3 or of a store like it, that nodes share. None: no such tier.",
    )
    lookup_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = Field(
        200,
        description=(
            "Longest time that a request waits for a tier to say what it has, and again for blocks "
            "to come up, in milliseconds. What comes later is there for the next request. Above "
            "200, raise hotkv.lookup_timeout_s of the engines too."
        ),
    )

    @classmethod
    def shared_names(cls) -> list[str]:
        """The fields with the default None."""
        return [name for name, info in cls.model_fields.items() if info.default is None]

    @property
    def write_bytes_per_day(self) -> int | None:
        """None: no limit."""
        gb_per_day = self.disk.write_gb_per_day
        return None if gb_per_day is None else int(gb_per_day * 1e9)

    @property
    def slab_bytes(self) -> int:
        """Of a new disk tier."""
        slab_bytes = MIN_SLAB_BYTES
        while slab_bytes < MAX_SLAB_BYTES and 2 * slab_bytes * MIN_SLABS <= self.disk.bytes:
            slab_bytes *= 2
        return slab_bytes

    @property
    def capacity(self) -> int:
        """Most blocks of the disk tier: one per 16 KiB of its size, at least 4096."""
        return max(1 << 12, self.disk.bytes // (16 << 10))
