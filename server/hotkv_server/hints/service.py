"""Serves HintService: hints that belong to no request, and outcomes.

Always true: a peer proves that it may act for a tenant, by the rules for an engine's session.
Another tenant's data looks as if it did not exist.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.messages.hints import read_envelope
from hotkv_proto.v1 import hints_pb2, hints_pb2_grpc
from hotkv_server.hints.book.outcomes import HintOutcome
from hotkv_server.hints.drive import HintDesk
from hotkv_server.hints.figures import DEFAULT_PAGE, MAX_PAGE
from hotkv_server.hints.work import Origin
from hotkv_server.node.node import Node
from hotkv_server.security.identity import AccessControl, Peer
from hotkv_server.wire.errors import answer

Asking = hints_pb2.SendHintsRequest | hints_pb2.GetHintOutcomesRequest
Identify = Callable[[Any, Any], Peer]
"""(request, context) → the call's proven identity. Raises HotKVError."""


class HintService(hints_pb2_grpc.HintServiceServicer):
    def __init__(
        self, node: Node, desk: HintDesk, access: AccessControl, identify: Identify
    ) -> None:
        self._node = node
        self._desk = desk
        self._access = access
        self._identify = identify

    def _admit(self, request: Asking, context: Any) -> str:
        """The tenant. Raises UNAUTHENTICATED if the peer proves no identity, NOT_ALLOWED if it
        may not act for the tenant."""
        tenant = fields.name("tenant", request.tenant)
        self._access.admit(self._identify(request, context), tenant)
        return tenant

    async def SendHints(
        self, request: hints_pb2.SendHintsRequest, context: Any
    ) -> hints_pb2.SendHintsResponse:
        async def call() -> hints_pb2.SendHintsResponse:
            tenant = self._admit(request, context)
            hints = read_envelope(request.kv_hints)
            found = await self._desk.act(self._origin(tenant, request), hints)
            return hints_pb2.SendHintsResponse(outcomes=outcomes(found, tenant, time.monotonic()))

        return await answer(self._node, context, call)

    def _origin(self, tenant: str, request: hints_pb2.SendHintsRequest) -> Origin:
        if not request.hashes:
            return Origin(tenant)
        number, core = request.key_space_id, self._node.core
        if number not in core.key_spaces or core.key_space(number).tenant != tenant:
            raise HotKVError(
                Reason.UNKNOWN_KEY_SPACE,
                f"key_space_id is {number}; this tenant has no such key space here",
            )
        hashes = read_hashes("hashes", request.hashes, core.key_space(number).hash_bytes)
        check_most(core.config.max_blocks_per_call, len(hashes), "hashes has {} hashes")
        return Origin(tenant, number, hashes)

    async def GetHintOutcomes(
        self, request: hints_pb2.GetHintOutcomesRequest, context: Any
    ) -> hints_pb2.GetHintOutcomesResponse:
        async def call() -> hints_pb2.GetHintOutcomesResponse:
            tenant = self._admit(request, context)
            known = self._desk.book.known(tenant)
            if known is None:
                return hints_pb2.GetHintOutcomesResponse(next_cursor=max(0, request.cursor))
            # The monotonic clock, where sequence numbers begin, restarts with the machine: an
            # old cursor may be too high.
            cursor = request.cursor if request.cursor <= known.last_sequence else 0
            found = known.since(cursor, request.message_id, page_size(request.page_size))
            return hints_pb2.GetHintOutcomesResponse(
                outcomes=outcomes(found, tenant, time.monotonic()),
                next_cursor=found[-1].sequence if found else cursor,
            )

        return await answer(self._node, context, call)


def page_size(asked: int) -> int:
    """`asked`: 0: the default. Raises INVALID_FIELD if out of range."""
    if not 0 <= asked <= MAX_PAGE:
        raise invalid(f"page_size is {asked}; allowed are 0 to {MAX_PAGE}")
    return asked or DEFAULT_PAGE


def outcomes(
    found: Sequence[HintOutcome], tenant: str, now_s: float
) -> list[hints_pb2.HintOutcome]:
    return [
        hints_pb2.HintOutcome(
            message_id=one.message_id,
            action_id=one.action_id,
            action_type=one.kind,
            session_id=one.session_id,
            status=hints_pb2.HintStatus.Value(f"HINT_STATUS_{one.status.name}"),
            reason=one.reason,
            block_count=one.num_blocks,
            done_block_count=one.num_done,
            reused_block_count=one.reused_blocks,
            saved_s=one.saved_s,
            age_s=max(0.0, now_s - one.came_s),
            sequence=one.sequence,
            tenant=tenant,
        )
        for one in found
    ]
