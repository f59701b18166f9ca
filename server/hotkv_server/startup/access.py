"""Access control, listeners' addresses and TLS files, made from the settings."""

import functools
import os
from collections.abc import Iterable

from hotkv_server.cache.values import TenantShare
from hotkv_server.memory.clerk import PatientReader
from hotkv_server.security.identity import AccessControl, Proofs, Tenant
from hotkv_server.security.page_access import PageAccess, read_token
from hotkv_server.security.path_checks import UnsafeError
from hotkv_server.settings import Settings
from hotkv_server.settings.security import SecuritySettings, TlsSettings
from hotkv_server.startup import StartError
from hotkv_server.wire.guard.tls import TlsFiles
from hotkv_server.wire.server import Endpoints

MALFORMED_PER_S = 50.0
"""Malformed messages, refused sessions and faults on fd.sock that are answered. Further ones wait,
a second at most; on fd.sock they are closed."""
TOKEN_WAIT_S = 1.0
"""For the token's file. Meanwhile the HTTP thread answers no other request, such as a health
probe."""


def tenant_shares(security: SecuritySettings) -> dict[str, TenantShare]:
    return {
        tenant.name: TenantShare(tenant.guaranteed_bytes, tenant.burst_bytes)
        for tenant in security.tenants
    }


def linking_users(security: SecuritySettings) -> frozenset[int]:
    """May use the descriptor socket even if no tenant lists them."""
    return frozenset({os.getuid(), 0, *security.allowed_uids})


def proofs(
    uids: Iterable[int], gids: Iterable[int], digests: Iterable[str], names: Iterable[str]
) -> Proofs:
    """`digests`: SHA-256 of tokens, hexadecimal."""
    return Proofs(
        frozenset(uids), frozenset(gids), frozenset(map(bytes.fromhex, digests)), frozenset(names)
    )


def make_access_control(security: SecuritySettings) -> AccessControl:
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


def make_page_access(settings: Settings, access: AccessControl) -> PageAccess:
    """Raises StartError if the page's token can't be read."""
    path = settings.http.token_file
    if path is None:
        return PageAccess(control=access)
    try:
        read_token(path)
    except (OSError, ValueError, UnsafeError) as error:
        raise StartError(f"http.token_file: {error}") from error
    reader = PatientReader("page-token", functools.partial(read_token, path), TOKEN_WAIT_S)
    return PageAccess(read=reader.read, control=access)


def tls_files(tls: TlsSettings) -> TlsFiles | None:
    if tls.certificate is None or tls.key is None:
        return None
    return TlsFiles(tls.certificate, tls.key, tls.client_ca)


def make_endpoints(settings: Settings) -> Endpoints:
    security = settings.security
    return Endpoints(
        settings.grpc_socket,
        int(security.socket_mode, 8),
        settings.admin_socket,
        int(security.admin_socket_mode, 8),
        settings.tcp_address,
        tls_files(security.tls),
        security.tcp_reflection,
        security.admin_on_tcp,
        MALFORMED_PER_S,
        security.audit,
        security.audit_file,
    )
