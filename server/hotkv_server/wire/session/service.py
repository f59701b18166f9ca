"""SessionService: opens sessions, one for each stream.

Always true: however the stream ends, its session is settled and closed. A session acts for one
tenant. If there are tenants, its peer has proven that it may, and its engine id is made the
tenant's own, so that no other tenant can name its leases.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import hotkv_proto
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace, signed_salt
from hotkv_proto.messages import fields
from hotkv_proto.messages.layout import read_key_space, read_representations
from hotkv_proto.v1 import session_pb2, session_pb2_grpc
from hotkv_proto.versions import (
    NEWEST_VERSION,
    OLDEST_VERSION,
    Feature,
    Role,
    agreed_features,
    agreed_version,
)
from hotkv_server.node.session import LiveSession
from hotkv_server.security.identity import Peer, Tenant
from hotkv_server.wire.edge import Edge
from hotkv_server.wire.errors import abort, as_refusal
from hotkv_server.wire.session.stream import SessionStream

log = logging.getLogger(__name__)

FIRST_MESSAGE_TIMEOUT_S = 10.0


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See session.proto."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._node = edge.node

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[session_pb2.ConnectRequest], context: Any
    ) -> None:
        who = f"peer={context.peer()}"
        try:
            with self._edge.guests.stay():
                first = await _first(request_iterator)
            who = (
                f"{who} engine={first.open_session.engine_id[:64]!r} "
                f"tenant={first.open_session.key_space.tenant[:64]!r}"
            )
            peer = self._edge.identify(first.open_session, context)
            who = f"{who} {peer}"
            session = await self._open(first.open_session, peer)
        except Exception as error:  # noqa: BLE001 The edge of the stream: every failure is an answer.
            await self._edge.pace.turn()
            await abort(context, as_refusal(self._node, error, who))
        stream = SessionStream(self._node, session, context, self._edge.pace)
        why: HotKVError | None = None
        try:
            why = await stream.run(request_iterator, self._opened(first, session))
        finally:
            # Shielded, so that a broken stream cannot cut the settling short.
            await asyncio.shield(self._node.sessions.close(session))
        if why is not None:
            # Last, because it waits for the client to read.
            log.warning("session ended number=%d: %s", session.record.number, why.message)
            await abort(context, as_refusal(self._node, why, session.name))

    async def _open(self, opening: session_pb2.OpenSession, peer: Peer) -> LiveSession:
        _version(opening)
        try:
            role = Role(opening.role).name.lower()
        except ValueError:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"role is {opening.role}; allowed are 1 (scheduler), 2 (worker) and 3 (tool)",
            ) from None
        fields.name("engine_id", opening.engine_id)
        fields.name("client_name", opening.client_name)
        key_space, representations = (
            read_key_space(opening.key_space),
            read_representations(opening.representations),
        )
        tenant = self._edge.access.admit(peer, key_space.tenant)
        self._check_sessions(tenant)
        engine_id = (
            opening.engine_id
            if tenant is None or not opening.engine_id
            else f"{tenant.name}/{opening.engine_id}"
        )
        session = await self._node.sessions.open(
            engine_id, role, key_space, opening.client_name, representations,
            hears_evictions=not opening.without_eviction_notices,
        )  # fmt: skip
        if tenant is not None:
            session.peer, session.maps_arena = peer, False
            try:
                # Other settings may have come meanwhile; from here on they end the session.
                tenant = self._edge.access.admit(peer, key_space.tenant)
            except HotKVError:
                await self._node.sessions.close(session)
                raise
        features = agreed_features(opening.features)
        session.knows_words = Feature.RESIDENCY in features
        session.knows_tiers = Feature.TIERS in features
        if tenant is not None:
            session.maps_table = tenant.sees_table
            log.info(
                "session admitted number=%d tenant=%r %s", session.record.number, tenant.name, peer
            )
        return session

    def _check_sessions(self, tenant: Tenant | None) -> None:
        if tenant is None or not tenant.max_sessions:
            return
        num_open = sum(session.key_space.tenant == tenant.name for session in self._node.sessions)
        if num_open >= tenant.max_sessions:
            raise HotKVError(
                Reason.OVERLOADED,
                (
                    f"{num_open} sessions of this tenant are open, which is all it may have; close "
                    "some first"
                ),
            )

    def _opened(
        self, first: session_pb2.ConnectRequest, session: LiveSession
    ) -> session_pb2.ConnectResponse:
        opening = first.open_session
        features = agreed_features(opening.features)
        if self._node.tiers is None:
            features -= {Feature.TIERS}
        return session_pb2.ConnectResponse(
            request_id=first.request_id,
            session_opened=session_pb2.SessionOpened(
                protocol_version=_version(opening),
                session_id=session.secret_id,
                key_space_id=session.record.key_space_id,
                epoch=self._node.epoch,
                has_descriptor_socket=self._edge.has_descriptor_socket,
                server_name=f"hotkv-server {hotkv_proto.__version__}",
                wants_token_ids=any(one.wants_token_ids for one in self._node.capabilities),
                features=[session_pb2.Feature.ValueType(int(f)) for f in sorted(features)],
                salts=_salts(opening, session.key_space),
            ),
        )


def _version(opening: session_pb2.OpenSession) -> int:
    """The protocol version of a session. Raises VERSION_MISMATCH."""
    oldest = opening.protocol_version
    newest = opening.newest_protocol_version or oldest
    version = agreed_version(oldest, newest)
    if version is None:
        raise HotKVError(
            Reason.VERSION_MISMATCH,
            f"protocol_version is {oldest}, newest_protocol_version {newest}; this server "
            f"{hotkv_proto.__version__} speaks {OLDEST_VERSION} to {NEWEST_VERSION}: upgrade the "
            "older side",
        )
    return version


def _salts(opening: session_pb2.OpenSession, space: KeySpace) -> list[int]:
    """Salts of the block table, as signed numbers, by group index as the session names it."""
    salts = [
        *map(space.group_salt, range(len(space.groups))),
        *map(space.representation_salt, read_representations(opening.representations)),
    ]
    return [signed_salt(salt) for salt in salts]


async def _first(requests: AsyncIterator[session_pb2.ConnectRequest]) -> session_pb2.ConnectRequest:
    """The message that opens the session, without a proof that it may. Raises INVALID_FIELD."""
    try:
        first = await asyncio.wait_for(anext(requests), FIRST_MESSAGE_TIMEOUT_S)
    except (StopAsyncIteration, asyncio.TimeoutError):
        first = session_pb2.ConnectRequest()
    if first.WhichOneof("body") != "open_session":
        raise HotKVError(
            Reason.INVALID_FIELD, "open_session is missing; send it as the first message"
        )
    return first
