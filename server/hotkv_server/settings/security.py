"""Settings of access: tenants, TLS, modes of sockets, admins."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator

EIB = 1 << 60
Uid = Annotated[int, Field(ge=0, le=(1 << 32) - 2)]
TokenDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""In hexadecimal: `printf %s "$token" | sha256sum`."""


class TenantSettings(BaseModel, extra="forbid"):
    """A tenant: its ids, tokens and certificate names (one is enough as proof), and its share."""

    name: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9._-]*$")] = Field(
        description="Name that engines give in hotkv.tenant. Empty: engines that name none."
    )
    uids: list[Uid] = Field([], description="User ids of its processes on this node.")
    gids: list[Uid] = Field(
        [], description="Group ids of its processes on this node, supplementary groups too."
    )
    token_sha256: list[TokenDigest] = Field(
        [], description="SHA-256 of its tokens for TCP, hexadecimal."
    )
    certificate_names: list[str] = Field(
        [], description="Names in its client certificates for TCP: common name or alternative name."
    )
    guaranteed_bytes: Annotated[ByteSize, Field(ge=0, le=EIB)] = Field(
        ByteSize(0), description="Bytes that blocks of other tenants never take from it."
    )
    burst_bytes: Annotated[ByteSize, Field(ge=0, le=EIB)] = Field(
        ByteSize(0), description="Most bytes that it may have. 0: no bound."
    )
    table: Literal["mapped", "rpc"] = Field(
        "rpc",
        description=(
            "mapped: it may map the block table, which shows the hashes of all tenants. rpc: it "
            "looks blocks up by calls."
        ),
    )
    max_sessions: Annotated[int, Field(ge=0)] = Field(
        0, description="Most sessions at a time. 0: no bound of its own."
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
    """TLS on TCP. The PEM files are read again when they change."""

    certificate: Path | None = Field(
        None, description="The server's certificate, with intermediate certificates."
    )
    key: Path | None = Field(
        None, description="Its private key. Others must not be able to read it."
    )
    client_ca: Path | None = Field(
        None,
        description="Authority that signs client certificates. If set, every client must have one.",
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
    """Access: sockets, tenants, TLS, admins."""

    socket_mode: str = Field("0660", description="Mode of the Unix sockets of engines, octal.")
    admin_socket: Path | None = Field(
        None, description="Path of the admin socket. Default: admin.sock in runtime_dir."
    )
    admin_socket_mode: str = Field("0600", description="Mode of the admin socket, octal.")
    allowed_uids: list[Uid] = Field(
        [],
        description="User ids that may share memory with the server, besides its own and root's.",
    )
    arena_writers: list[Uid] = Field(
        [],
        description=(
            "User ids that get the arena writable, if they may map it at all. Most GPUs read host "
            "memory only through such a mapping; a fault of such a process can spoil any block."
        ),
    )
    tenants: list[TenantSettings] = Field(
        [],
        description="Tenants. If there are any, every session must prove that it acts for one.",
    )
    tls: TlsSettings = Field(default_factory=lambda: TlsSettings())  # type: ignore[call-arg]
    tcp_insecure: bool = Field(
        False,
        description=(
            "Serve TCP without TLS. Anybody on the network can then read and change the calls."
        ),
    )
    tcp_reflection: bool = Field(
        False, description="Serve gRPC reflection over TCP too, which describes the services."
    )
    admin_on_tcp: bool = Field(
        False, description="Serve the admin API and events over TCP too, to the admins below."
    )
    admin_token_sha256: list[TokenDigest] = Field(
        [], description="SHA-256 of admins' tokens for TCP, hexadecimal."
    )
    admin_certificate_names: list[str] = Field(
        [], description="Names in admins' client certificates for TCP."
    )
    audit: Literal["off", "changes", "all"] = Field(
        "changes",
        description=(
            "Which calls of operators are written down, with who made them: those that change what "
            "the server holds or whether it serves, or all."
        ),
    )
    audit_file: Path | None = Field(
        None,
        description="File of JSON lines for these, no symbolic link. Default: the server's log.",
    )

    @field_validator("socket_mode", "admin_socket_mode")
    @classmethod
    def _octal(cls, value: str) -> str:
        if not re.fullmatch("[0-7]{3,4}", value) or int(value, 8) > 0o777:
            raise ValueError("must be an octal mode such as 0660")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> "SecuritySettings":
        # There may be tens of thousands of tenants.
        counts = Counter(tenant.name for tenant in self.tenants)
        twice = sorted(name for name, count in counts.items() if count > 1)
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
