"""Answers the calls that open, extend and close residencies. Only a session that was given the
arena may open or extend one: its client reads the blocks there."""

import numpy as np

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.v1 import residency_pb2
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_sparse.server.residency.drive import ResidencyDesk


def residency_id(text: str) -> str:
    """Raises INVALID_FIELD for unprintable characters (operators see the id), TOO_LARGE if it is
    too long."""
    return fields.name("residency_id", text)


def _check_reads(session: LiveSession) -> None:
    if not session.has_arena:
        raise HotKVError(
            Reason.NOT_ALLOWED,
            "residency_id: this session was not given the arena, without which a residency is of "
            "no use: it has no link, or its tenant may not map it",
        )


async def open_residency(
    desk: ResidencyDesk, session: LiveSession, request: residency_pb2.OpenResidencyRequest
) -> residency_pb2.OpenResidencyResponse:
    _check_reads(session)
    fields.check_lists("groups", request.groups)
    num_blocks = {session.group_index(g.group_index): g.block_count for g in request.groups}
    if len(num_blocks) < len(request.groups):
        raise invalid("groups lists a group twice; list each once")
    opened = await desk.open(session, residency_id(request.residency_id), num_blocks)
    return residency_pb2.OpenResidencyResponse(
        residency_id=opened.residency_id,
        word_index=opened.word_index,
        word_value=opened.word_value,
        start_number=opened.start_number,
    )


async def extend_residency(
    node: Node,
    desk: ResidencyDesk,
    session: LiveSession,
    request: residency_pb2.ExtendResidencyRequest,
) -> residency_pb2.ExtendResidencyResponse:
    """Waits for checksums, and for a shared tier to confirm that the key space was not flushed.
    If none does so in time, all offsets are -1."""
    _check_reads(session)
    group_index = session.group_index(request.group_index)
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    tiers = node.tiers
    if tiers is None or await tiers.generations.wait_to_serve(session.record.key_space_id):
        name = residency_id(request.residency_id)
        found = await desk.extend(session, name, group_index, request.first_position, hashes)
    else:
        found = (np.full(len(hashes), -1, np.int64),) * 2
    offsets, sketches = (each.astype("<i8").tobytes() for each in found)
    return residency_pb2.ExtendResidencyResponse(offsets=offsets, sketch_offsets=sketches)


async def close_residency(
    desk: ResidencyDesk, session: LiveSession, request: residency_pb2.CloseResidencyRequest
) -> residency_pb2.CloseResidencyResponse:
    return residency_pb2.CloseResidencyResponse(
        closed=await desk.close(session, residency_id(request.residency_id))
    )
