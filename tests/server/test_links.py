"""Links on the descriptor socket: refusals, the page that is read, and stores of a session without
a fence."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np

from demo.processes import Server
from hotkv_client import BlockRun, Role, Session, SessionConfig
from hotkv_client.link import descriptor_socket
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import requests as _wire
from hotkv_proto.blocks import NO_OPTIONS, BlockResult
from hotkv_proto.errors import Reason
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS
from hotkv_proto.order import NO_ORDER
from hotkv_proto.v1 import (
    session_pb2,
)
from tests.server.refusals import state, stored

__all__ = ["stored"]

Make = Callable[..., PagedEngine]


def test_the_descriptor_socket_refuses(
    server: Server, stored: tuple[PagedEngine, list[bytes]]
) -> None:
    before = state(server)
    path = str(Path(server.target.removeprefix("unix:")).parent / "fd.sock")
    packets = [
        b"",
        b"\xff" * 100,
        os.urandom(65536),
        _wire.link_request("guess", []),
        _wire.link_request("guess", ["kv"]),
    ]
    for packet in packets:
        for fds in ([], [0], [0] * 60):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(5)
                peer.connect(path)
                if fds:
                    socket.send_fds(peer, [packet or b"\0"], fds)
                else:
                    peer.send(packet)
                if packet:
                    answer, received, _, _ = socket.recv_fds(peer, 65536, 4)
                    assert not received
                    assert session_pb2.LinkResponse.FromString(answer).HasField("error")
    assert state(server) == before


def memory_file(num_bytes: int) -> int:
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, num_bytes)
    return fd


def linked(
    server: Server, session_id: str, fds: dict[str, int]
) -> tuple[socket.socket, session_pb2.LinkResponse]:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(5)
    peer.connect(str(descriptor_socket(server.target)))
    socket.send_fds(peer, [_wire.link_request(session_id, list(fds))], list(fds.values()))
    answer, received, _, _ = socket.recv_fds(peer, 65536, 4)
    for fd in received:
        os.close(fd)
    return peer, session_pb2.LinkResponse.FromString(answer)


def test_the_page_of_the_link_that_holds_is_read(server: Server, engine: Make) -> None:
    """What came with a link that was refused is forgotten: the page of the link that holds is the
    one that is read."""
    one = engine()
    bare = Session(
        SessionConfig(server.target, "bare", Role.WORKER, one.key_space, use_table=False)
    )
    bare.start()
    assert bare.wait_connected(10) and bare._connection is not None
    session_id = bare._connection.session_id

    def store(fence_index: int) -> int:
        name, runs = os.urandom(4).hex(), [BlockRun(0, [os.urandom(32)], np.zeros(1, np.int32))]
        call = bare._call(
            lambda: _wire.store(name, name, runs, 5.0, NO_OPTIONS, fence_index, 32),
            transfer_id=name,
        )
        return int(call.result(60).results[0][0])

    files = [
        memory_file(8),
        memory_file(8),
        memory_file(one.kv.nbytes),
        memory_file(4 * FENCE_WORDS),
        memory_file(4 * FENCE_WORDS),
    ]
    little_kv, little_fence, kv, fence, other_fence = files
    links = [linked(server, session_id, {"kv": little_kv, FENCE_HANDLE: little_fence})]
    assert links[0][1].error.reason == Reason.INVALID_LAYOUT
    links.append(linked(server, session_id, {"kv": kv, FENCE_HANDLE: fence}))
    assert links[1][1].linked, links[1][1]
    links.append(linked(server, session_id, {FENCE_HANDLE: other_fence}))
    assert links[2][1].error.reason == Reason.DUPLICATE_ID
    bare._call(lambda: _wire.register_memory(one.layout, NO_ORDER)).result(60)
    os.pwrite(fence, (1).to_bytes(4, "little"), 4 * 7)
    os.pwrite(other_fence, (1).to_bytes(4, "little"), 4 * 8)
    assert [store(index) for index in (6, 7, 8)] == [
        BlockResult.STORED,
        BlockResult.ABORTED,
        BlockResult.STORED,
    ]
    bare.close()
    for peer, _ in links:
        peer.close()
    for fd in files:
        os.close(fd)
