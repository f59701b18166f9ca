"""What the settings say about access, as the parts that hold it want it; the daemon puts these
together."""

from collections.abc import Iterable

from hotkv_server.core.values import TenantShare
from hotkv_server.memory.arena import FILES, LOCK_FILE
from hotkv_server.rpc.server import Endpoints
from hotkv_server.rpc.tls import TlsFiles
from hotkv_server.security.identity import AccessControl, Proofs, Tenant
from hotkv_server.security.path_checks import (
    check_arena_dir,
    check_files,
    check_private_key,
    check_runtime_dir,
    check_sockets,
)
from hotkv_server.settings import SecuritySettings, Settings


def check_places(settings: Settings) -> None:
    """Nobody else can have put something where arena, sockets and keys are. Raises UnsafeError,
    OSError."""
    security = settings.security
    check_runtime_dir(settings.admin_socket.parent)
    check_sockets([settings.grpc_socket, settings.descriptor_socket, settings.admin_socket])
    check_arena_dir(settings.arena_dir, is_private=bool(security.tenants))
    check_files(settings.arena_dir / name for name in (*FILES, LOCK_FILE))
    if security.tls.key is not None:
        check_private_key(security.tls.key)


def tenant_shares(security: SecuritySettings) -> dict[str, TenantShare]:
    """What each tenant may have of the arena."""
    return {
        tenant.name: TenantShare(tenant.guaranteed_bytes, tenant.burst_bytes)
        for tenant in security.tenants
    }


def proofs(
    uids: Iterable[int], gids: Iterable[int], digests: Iterable[str], names: Iterable[str]
) -> Proofs:
    """`digests`: SHA-256 of tokens, hexadecimal."""
    return Proofs(
        frozenset(uids), frozenset(gids), frozenset(map(bytes.fromhex, digests)), frozenset(names)
    )


def make_access_control(security: SecuritySettings) -> AccessControl:
    """Who may act for which tenant, and who are admins over TCP."""
    tenants = {
        t.name: Tenant(
            t.name,
            proofs(t.uids, t.gids, t.token_sha256, t.certificate_names),
            t.table == "mapped",
            t.max_sessions,
        )
        for t in security.tenants
    }
    return AccessControl(
        tenants, proofs((), (), security.admin_token_sha256, security.admin_certificate_names)
    )


def make_endpoints(settings: Settings) -> Endpoints:
    """Where gRPC listens."""
    security, tls = settings.security, settings.security.tls
    files = (
        TlsFiles(tls.certificate, tls.key, tls.client_ca)
        if tls.certificate is not None and tls.key is not None
        else None
    )
    return Endpoints(
        settings.grpc_socket,
        int(security.socket_mode, 8),
        settings.admin_socket,
        int(security.admin_socket_mode, 8),
        settings.tcp_address,
        files,
        security.tcp_reflection,
        security.admin_on_tcp,
        security.malformed_per_s,
    )
