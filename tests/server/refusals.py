"""Helpers for tests of refusals: state that must not change, reasons, messages filled at random."""

import os
import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import BlockRun
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError
from hotkv_proto.v1 import (
    session_pb2,
    session_pb2_grpc,
)

Make = Callable[..., PagedEngine]
INT32 = np.int32


VOLATILE = ("uptime_s", "age_s", "idle_s", "counters")


def state(server: Server) -> dict[str, Any]:
    """Returns everything that a refused call must leave as it was."""
    with AdminClient(server.target) as admin:
        answer = {
            "tiers": admin.tiers(),
            "sessions": admin.sessions(),
            "blocks": admin.blocks(page_size=1000)["blocks"],
        }
        for row in [*answer["sessions"], *answer["blocks"]]:
            for name in VOLATILE:
                row.pop(name, None)
        answer["leases"] = admin.info()["counters"]["leases"]
        return answer


def reason_of(error: grpc.RpcError) -> int:
    return int(_answers.as_error(error).reason)


def refused(future: Any) -> HotKVError:
    with pytest.raises(HotKVError) as caught:
        future.result(60)
    return caught.value


@pytest.fixture
def stored(engine: Make) -> Iterator[tuple[PagedEngine, list[bytes]]]:
    """Yields an engine with four stored blocks."""
    one = engine()
    blocks = [os.urandom(32) for _ in range(4)]
    one.session.store("s", "s", [BlockRun(0, blocks, np.arange(4, dtype=INT32))], 10).result(60)
    yield one, blocks


def fill(message: Any, random: np.random.Generator, level: int) -> None:
    """Puts random values in random fields, edges of the types among them."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.3:
            continue
        repeated = (
            not isinstance(getattr(message, field.name), int | float | str | bytes | bool)
            and field.message_type is None
        )
        if field.message_type is not None:
            value = getattr(message, field.name)
            if hasattr(value, "add"):
                for _ in range(int(random.integers(0, 4)) if level < 4 else 0):
                    fill(value.add(), random, level + 1)
            elif level < 5:
                fill(value, random, level + 1)
            continue
        options: dict[str, list[Any]] = {
            "int": [0, 1, -1, 2**31 - 1, -(2**31), int(random.integers(0, 100))],
            "bytes": [
                b"",
                bytes(32),
                os.urandom(32),
                os.urandom(int(random.integers(0, 200))),
                bytes(64),
            ],
            "str": ["", "kv", "mine", "\u00fc" * 50],
        }
        kind = (
            "bytes"
            if field.type == field.TYPE_BYTES
            else "str"
            if field.type == field.TYPE_STRING
            else "int"
        )
        choice = options[kind][int(random.integers(0, len(options[kind])))]
        if field.enum_type is not None:
            choice = int(random.integers(0, 9))
        if kind == "int" and field.type == field.TYPE_INT64 and random.random() < 0.2:
            choice = [2**63 - 1, -(2**63)][int(random.integers(0, 2))]
        if field.type == field.TYPE_BOOL:
            choice = bool(random.integers(0, 2))
        if repeated:
            getattr(message, field.name).extend([choice] * int(random.integers(0, 3)))
        else:
            setattr(message, field.name, choice)


def open_with(
    server: Server, opening: session_pb2.ConnectRequest
) -> tuple[grpc.StatusCode, int, str]:
    requests: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
    requests.put(opening)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        next(session_pb2_grpc.SessionServiceStub(channel).Connect(iter(requests.get, None)))
    return caught.value.code(), reason_of(caught.value), caught.value.details()


def opening(engine: PagedEngine, **changes: Any) -> session_pb2.ConnectRequest:
    request = _wire.open_session(engine.session.config)
    for path, value in changes.items():
        target: Any = request.open_session
        *parents, name = path.split("__")
        for parent in parents:
            target = target[int(parent)] if parent.isdecimal() else getattr(target, parent)
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return request
