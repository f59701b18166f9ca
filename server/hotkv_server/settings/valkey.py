"""Settings of the tier in Valkey: where the server is, who hotkv is there, and how long it waits.

Always true: no secret stands in them. The password is read from a file at each connect, and errors
do not repeat what was given.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, field_validator, model_validator

from hotkv_server.settings.compression import Compress

UNIX = "unix:"
MAX_UNIX_PATH_BYTES = 107
"""Of sun_path in struct sockaddr_un, without its final zero."""


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
    connect_timeout_s: Annotated[float, Field(gt=0, le=60)] = Field(
        1.0, description="Longest wait for a connection that can be used, in seconds."
    )
    timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(
        5.0,
        description="Longest time for a batch of blocks, in seconds, until it connects anew.",
    )

    @field_validator("address")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        # A socket's path may have commas.
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
        """Path of the server's Unix socket; empty if it is reached over TCP."""
        return self.address[len(UNIX) :] if self.address.startswith(UNIX) else ""

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Of a server that is reached over TCP."""
        return self.hosts_and_ports[0]

    @property
    def hosts_and_ports(self) -> list[tuple[str, int]]:
        """Of servers that are reached over TCP."""
        found = []
        for address in self.address.split(","):
            host, _, port = address.strip().rpartition(":")
            found.append((host.strip("[]"), int(port)))
        return found
