"""Engines and streams that do not keep to the protocol."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from hotkv_client import (
    EngineMemory,
    Role,
    Session,
    SessionConfig,
)
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import DeviceOrder
from hotkv_proto.v1 import sparse_pb2_grpc
from tests.server.support import FULL, NUM_BLOCKS, PAGE_BYTES


@contextlib.contextmanager
def marked_engine(target: str) -> Iterator[Session]:
    """Returns a session whose transfers may lie behind marks."""
    memory, flags = os.memfd_create("engine"), os.memfd_create("flags")
    os.posix_fallocate(memory, 0, NUM_BLOCKS * PAGE_BYTES)
    os.posix_fallocate(flags, 0, 4096)
    handles = (MemoryHandle("kv", NUM_BLOCKS * PAGE_BYTES), MemoryHandle("flags", 4096))
    layout = Layout(
        0, NUM_BLOCKS, handles, (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),), "x"
    )
    config = SessionConfig(
        target, os.urandom(4).hex(), Role.WORKER, KeySpace("m", "m", "bfloat16", (FULL,), 16)
    )
    order = DeviceOrder(flags_handle_id="flags", num_flags=8)
    session = Session(config, EngineMemory(layout, {"kv": memory, "flags": flags}, order))
    session.start()
    assert session.wait_connected(20)
    try:
        yield session
    finally:
        session.close()
        os.close(memory)
        os.close(flags)


def unary_stream_of(channel: grpc.Channel) -> Any:
    """Opens a stream of selections that asks for nothing."""

    def never() -> Iterator[Any]:
        yield from iter(threading.Event().wait, False)

    return sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(never())
