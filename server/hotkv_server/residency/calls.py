"""Answers the calls that open, extend and close residencies. Functions accept and return protobuf
messages.

Clients read a residency's blocks in the arena, which they map. So only a session that has received
the arena's descriptor may open or extend a residency.
"""

import asyncio

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.v1 import residency_pb2
from hotkv_server.node.capability import BlocksBelow
from hotkv_server.node.node import Node
from hotkv_server.node.session import LiveSession
from hotkv_server.residency.drive import Extended, ResidencyDesk


def residency_id(text: str) -> str:
    """Returns the id of a residency unchanged. Raises INVALID_FIELD if it has characters that can't
    be printed, because operators see the id, and TOO_LARGE if it is too long."""
    return fields.name("residency_id", text)


def _check_reads(session: LiveSession) -> None:
    """Raises NOT_ALLOWED unless the session has received the arena's descriptor."""
    if not session.has_arena:
        raise HotKVError(
            Reason.NOT_ALLOWED,
            "residency_id: this session was not given the arena, without which a residency is of "
            "no use: it has no link, or its tenant may not map it",
        )


async def open_residency(
    desk: ResidencyDesk, session: LiveSession, request: residency_pb2.OpenResidencyRequest
) -> residency_pb2.OpenResidencyResponse:
    """Opens a residency: reserves room in the arena for a request's blocks."""
    _check_reads(session)
    fields.check_lists("groups", request.groups)
    num_blocks = {session.group_index(g.group_index): g.block_count for g in request.groups}
    if len(num_blocks) < len(request.groups):
        raise HotKVError(Reason.INVALID_FIELD, "groups lists a group twice; list each once")
    opened = await desk.open(session, residency_id(request.residency_id), num_blocks)
    return residency_pb2.OpenResidencyResponse(
        residency_id=opened.residency_id,
        word_index=opened.word_index,
        word_value=opened.word_value,
        generation=opened.generation,
    )


def extend_residency(
    node: Node,
    desk: ResidencyDesk,
    session: LiveSession,
    request: residency_pb2.ExtendResidencyRequest,
) -> "residency_pb2.ExtendResidencyResponse | asyncio.Task[residency_pb2.ExtendResidencyResponse]":
    """Pins blocks for a residency and returns their offsets in the arena.

    Returns a task if blocks must first be compared with their check values, or if a tier that
    nodes share must first confirm that the key space was not flushed. If no tier confirms it in
    time, the task pins nothing and its answer has no offsets.
    """
    _check_reads(session)
    group_index = session.group_index(request.group_index)
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    key_space_id, tiers = session.record.key_space_id, node.tiers

    def extend() -> "Extended | asyncio.Task[Extended]":
        return desk.extend(
            session,
            residency_id(request.residency_id),
            group_index,
            request.first_position,
            hashes,
        )

    async def later(tiers: BlocksBelow) -> residency_pb2.ExtendResidencyResponse:
        if not await tiers.epochs.wait_to_serve(key_space_id):
            absent = np.full(len(hashes), -1, np.int64)
            return _answer((absent, absent))
        extended = extend()
        return _answer(await extended if isinstance(extended, asyncio.Task) else extended)

    if tiers is not None and not tiers.epochs.may_serve(key_space_id):
        return asyncio.create_task(later(tiers))
    extended = extend()
    if isinstance(extended, asyncio.Task):
        return asyncio.create_task(_later(extended))
    return _answer(extended)


async def _later(extended: "asyncio.Task[Extended]") -> residency_pb2.ExtendResidencyResponse:
    return _answer(await extended)


def _answer(extended: Extended) -> residency_pb2.ExtendResidencyResponse:
    offsets, representations = (found.astype("<i8").tobytes() for found in extended)
    return residency_pb2.ExtendResidencyResponse(
        offsets=offsets, representation_offsets=representations
    )


async def close_residency(
    desk: ResidencyDesk, session: LiveSession, request: residency_pb2.CloseResidencyRequest
) -> residency_pb2.CloseResidencyResponse:
    """Closes a residency: unpins its blocks and releases its room."""
    return residency_pb2.CloseResidencyResponse(
        closed=await desk.close(session, residency_id(request.residency_id))
    )
