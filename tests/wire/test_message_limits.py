"""Tests the count of a message's objects before it is parsed."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings

from hotkv_proto.v1 import cache_pb2, session_pb2
from hotkv_proto.versions import MAX_PARTS
from hotkv_server.wire.guard import interceptor
from tests.server.refusals import fill

KIND = session_pb2.ConnectRequest.DESCRIPTOR


def objects(message: Message) -> int:
    """Counts messages and list entries one by one."""
    count = 0
    for _, value in message.ListFields():
        many: list[Any] = (
            [value] if isinstance(value, Message | str | bytes | int | float) else list(value)
        )
        count += len(many) + sum(objects(item) for item in many if isinstance(item, Message))
    return count


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_parsing_never_exceeds_the_counted_objects(data: bytes, seed: int) -> None:
    message = session_pb2.ConnectRequest()
    fill(message, np.random.default_rng(seed), 0)
    for candidate in (data, message.SerializeToString(), message.SerializeToString() + data):
        try:
            parsed = session_pb2.ConnectRequest.FromString(candidate)
        except DecodeError:
            continue
        assert interceptor.count(KIND, candidate) >= objects(parsed)


def test_large_calls_are_light_and_bombs_are_not() -> None:
    hashes = bytes(32 << 17)
    store = session_pb2.ConnectRequest()
    store.store.runs.add(hashes=hashes, block_ids=bytes(4 << 17), token_ids=bytes(4 << 20))
    assert interceptor.is_light(KIND, store.SerializeToString())
    bomb = session_pb2.ConnectRequest()
    bomb.report_use.requests.extend([session_pb2.RequestReport()] * (MAX_PARTS + 1))
    assert not interceptor.is_light(KIND, bomb.SerializeToString())
    deep = session_pb2.ConnectRequest()
    run = deep.store.runs.add()
    run.extra_keys.extend(
        [cache_pb2.BlockExtraKeys(keys=[cache_pb2.ExtraKey(text="a")] * 2)] * (MAX_PARTS // 3)
    )
    assert not interceptor.is_light(KIND, deep.SerializeToString())
    packed = session_pb2.ConnectRequest()
    packed.open_session.key_space.groups.add(shard_byte_counts=[1] * (MAX_PARTS + 1))
    assert not interceptor.is_light(KIND, packed.SerializeToString())


def test_truncated_bomb_is_no_message() -> None:
    bomb = session_pb2.ConnectRequest()
    bomb.report_use.requests.extend([session_pb2.RequestReport()] * MAX_PARTS)
    with pytest.raises(DecodeError):
        interceptor.is_light(KIND, bomb.SerializeToString() + b"\x82")


@pytest.mark.parametrize("request_id", [1, 300, (1 << 63) - 1, -7])
def test_message_of_too_many_parts_keeps_number(request_id: int) -> None:
    bomb = session_pb2.ConnectRequest(request_id=request_id)
    bomb.report_use.requests.extend([session_pb2.RequestReport()] * (MAX_PARTS + 1))
    parse = interceptor.lenient(session_pb2.ConnectRequest.FromString)
    assert parse(bomb.SerializeToString()).request_id == request_id
    bomb.ClearField("request_id")
    for data in (bomb.SerializeToString(), b"\x60\x01" * MAX_PARTS + b"\x08"):
        assert parse(data).request_id == -1


def test_a_number_that_is_cut_off_is_unknown() -> None:
    assert interceptor.request_id(KIND, b"\x08\xff") == -1
    assert interceptor.request_id(KIND, b"") == -1
