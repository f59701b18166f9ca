"""Builds the access-control objects (peers, tenants, endpoints, TLS files) from the settings."""

from collections.abc import Iterable

from hotkv_server.core.values import TenantShare
from hotkv_server.rpc.server import Endpoints
from hotkv_server.rpc.tls import TlsFiles
from hotkv_server.security.identity import AccessControl, Proofs, Tenant
from hotkv_server.settings import Settings
from hotkv_server.settings.security import SecuritySettings


def tenant_shares(security: SecuritySettings) -> dict[str, TenantShare]:
    """The share of the arena of each tenant."""
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
    """Decides who may act for which tenant, and who is an admin over TCP."""
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
    """The addresses, modes and files of gRPC's listeners."""
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
