"""Calls of sparse decode: message in, message out."""

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import PREFIX_CLOSED
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.v1 import sparse_pb2
from hotkv_server.cache import inspect
from hotkv_server.node.session import LiveSession
from hotkv_server.sparse import messages
from hotkv_server.sparse.drive import SparseDecode


def _sequence_id(text: str) -> str:
    return fields.identifier("sequence_id", text)


def create_sequence(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.CreateSequenceRequest
) -> sparse_pb2.CreateSequenceResponse:
    """Creates a sequence of sparse decode."""
    if not 0 <= request.group_index < len(session.key_space.groups):
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"group_index is {request.group_index}; this key space has "
            f"{len(session.key_space.groups)} groups",
        )
    spec = None
    if request.HasField("select"):
        kind = session.key_space.groups[request.group_index].kind
        if kind not in PREFIX_CLOSED:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"group_index is {request.group_index}, a group of {kind.name}, which does not "
                "attend to its whole context; select from a group of FULL_ATTENTION or MLA",
            )
        spec = messages.select_spec(request.select, session, request.group_index)
        record = sparse.core.key_spaces[session.record.key_space_id]
        if (
            spec.representation_group < MAX_GROUPS
            or record.block_group(spec.representation_group) != request.group_index
        ):
            raise HotKVError(
                Reason.INVALID_FIELD,
                "select.representation_group_index is "
                f"{request.select.representation_group_index}; name a representation of group "
                f"{request.group_index} that the session declares",
            )
        spec.check_slots(record.representation(spec.representation_group).shard_bytes)
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    sequence = sparse.create(
        session, _sequence_id(request.sequence_id), request.group_index, hashes, spec
    )
    return sparse_pb2.CreateSequenceResponse(
        lease_id=sequence.lease_id, covered_block_count=len(sequence.slots)
    )


def append_blocks(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.AppendBlocksRequest
) -> sparse_pb2.AppendBlocksResponse:
    """Adds blocks to a sequence."""
    hashes = read_hashes("hashes", request.hashes, session.key_space.hash_bytes)
    sequence = sparse.append(
        session, _sequence_id(request.sequence_id), request.first_position, hashes
    )
    return sparse_pb2.AppendBlocksResponse(
        block_count=len(sequence.hashes),
        lease_id=sequence.lease_id,
        covered_block_count=len(sequence.slots),
    )


async def delete_sequence(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.DeleteSequenceRequest
) -> sparse_pb2.DeleteSequenceResponse:
    """Ends a sequence; answers when no selection for it runs any more."""
    return sparse_pb2.DeleteSequenceResponse(
        deleted=await sparse.delete(session, _sequence_id(request.sequence_id))
    )


def report_sparse(
    sparse: SparseDecode, session: LiveSession, request: sparse_pb2.ReportSparse
) -> None:
    """Notes an engine's report of its sparse decode."""
    used = messages.used(request.sequences, inspect.limits(sparse.core).max_blocks_per_call)
    sparse.report(session, used, messages.layer_growth(request.layers))
