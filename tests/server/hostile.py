"""Engines and streams that break the protocol."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from hotkv_client import Session
from hotkv_proto.v1 import sparse_pb2_grpc
from tests.server.support import FULL, GroupsEngine


@contextlib.contextmanager
def marked_engine(target: str) -> Iterator[Session]:
    """An engine with eight flags, for which transfers can wait."""
    with contextlib.closing(GroupsEngine(target, (FULL,), "m", num_flags=8)) as engine:
        yield engine.session


def unary_stream_of(channel: grpc.Channel) -> Any:
    def never() -> Iterator[Any]:
        yield from iter(threading.Event().wait, False)

    return sparse_pb2_grpc.SparseServiceStub(channel).SelectBlocks(never())
