"""Builds and reads the packets of the descriptor socket."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotkv_proto.messages.errors import read_error_detail
from hotkv_proto.v1 import session_pb2


def link_request(session_id: str, handle_ids: Sequence[str]) -> bytes:
    """First packet of a link; the descriptors of `handle_ids` go with it."""
    return session_pb2.LinkRequest(session_id=session_id, handle_ids=handle_ids).SerializeToString()


def backings_request(session_id: str, backing_ids: Sequence[str]) -> bytes:
    """The descriptors of `backing_ids` go with it."""
    return session_pb2.LinkRequest(
        session_id=session_id, backing_ids=backing_ids
    ).SerializeToString()


def ticket_request() -> bytes:
    return session_pb2.LinkRequest(wants_ticket=True).SerializeToString()


def _response(packet: bytes) -> session_pb2.LinkResponse:
    response = session_pb2.LinkResponse.FromString(packet)
    if response.HasField("error"):
        raise read_error_detail(response.error)
    return response


@dataclass(frozen=True, slots=True)
class LinkSizes:
    """Of the files whose descriptors the server sent.

    arena_bytes, table_bytes: 0 if the session may not map the file.
    words_offset_bytes: in the arena's file.
    num_words: 64 bits each.
    """

    arena_bytes: int
    table_bytes: int
    words_offset_bytes: int
    num_words: int


def link_sizes(packet: bytes) -> LinkSizes:
    """Raises HotKVError if the server refused."""
    response = _response(packet)
    return LinkSizes(
        response.arena_byte_count,
        response.table_byte_count,
        response.word_byte_offset,
        response.word_count,
    )


def check_link(packet: bytes) -> None:
    """Raises HotKVError if the server refused."""
    _response(packet)


def ticket(packet: bytes) -> bytes:
    """Raises HotKVError if the server refused."""
    return _response(packet).ticket
