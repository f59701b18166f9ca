"""The server's state, and randomly filled messages."""

import os
import queue
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.wire.call_errors import as_error
from hotkv_proto.errors import HotKVError
from hotkv_proto.v1 import (
    session_pb2,
    session_pb2_grpc,
)

Make = Callable[..., PagedEngine]
INT32 = np.int32


VOLATILE = ("uptime_s", "age_s", "idle_s", "counters")


def state(server: Server) -> dict[str, Any]:
    """What a refused call must not change."""
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
        for tier in answer["tiers"]:
            tier.pop("reserve_byte_count")
        return answer


def reason_of(error: grpc.RpcError) -> int:
    return int(as_error(error).reason)


def refused(future: Any) -> HotKVError:
    with pytest.raises(HotKVError) as caught:
        future.result(60)
    return caught.value


def fill(message: Any, random: np.random.Generator, level: int) -> None:
    """Fills a random choice of fields, in nested messages too, also with the limits of each
    type."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.3:
            continue
        if field.message_type is None:
            _fill_plain(message, field, random)
            continue
        value = getattr(message, field.name)
        if not hasattr(value, "add"):
            if level < 5:
                fill(value, random, level + 1)
        elif level < 4:
            for _ in range(int(random.integers(0, 4))):
                fill(value.add(), random, level + 1)


def _fill_plain(message: Any, field: Any, random: np.random.Generator) -> None:
    options: list[Any] = [0, 1, -1, 2**31 - 1, -(2**31), int(random.integers(0, 100))]
    if field.type == field.TYPE_BYTES:
        options = [b"", bytes(32), os.urandom(32), random.bytes(random.integers(200)), bytes(64)]
    elif field.type == field.TYPE_STRING:
        options = ["", "kv", "mine", "\u00fc" * 50]
    elif field.enum_type is not None:
        options = [*range(9)]
    elif field.type == field.TYPE_INT64:
        options += [2**63 - 1, -(2**63)]
    elif field.type == field.TYPE_BOOL:
        options = [False, True]
    choice = options[int(random.integers(0, len(options)))]
    if isinstance(getattr(message, field.name), int | float | str | bytes | bool):
        setattr(message, field.name, choice)
    else:
        getattr(message, field.name).extend([choice] * int(random.integers(0, 3)))


def open_with(
    server: Server, opening: session_pb2.ConnectRequest
) -> tuple[grpc.StatusCode, int, str]:
    requests: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
    requests.put(opening)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
        next(session_pb2_grpc.SessionServiceStub(channel).Connect(iter(requests.get, None)))
    return caught.value.code(), reason_of(caught.value), caught.value.details()
