"""Device orders and marks survive the wire, and odd ones are refused by name."""

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_client import (
    After,
    BlockResult,
    BlockRun,
    EngineMemory,
    GroupHashes,
    LoadRun,
    Session,
    SessionLostError,
)
from hotkv_client.testing import PagedEngine
from hotkv_client.types import TransferStatus
from hotkv_client.wire import requests as _wire
from hotkv_proto.layout import MemoryHandle
from hotkv_proto.messages.layout import read_device_mark, read_device_order
from hotkv_proto.order import (
    NO_ORDER,
    DeviceMark,
    DeviceOrder,
    OrderKind,
)
from hotkv_proto.v1 import cache_pb2, layout_pb2
from tests.support.waiting import wait_for

Make = Callable[..., PagedEngine]
EVENTS = DeviceOrder(bytes(16), (bytes(64), b"x" * 64))
WORDS = DeviceOrder(flags_handle_id="words", num_flags=4)


@given(
    st.builds(
        DeviceOrder,
        st.binary(max_size=20),
        st.lists(st.binary(max_size=70), max_size=4).map(tuple),
        st.text(max_size=20),
        st.integers(-(1 << 31), (1 << 31) - 1),
    )
)
def test_an_order_comes_out_as_it_went_in(order: DeviceOrder) -> None:
    engine = PagedEngine("unix:/nowhere")
    request = _wire.register_memory(engine.layout, order)
    assert (
        read_device_order(
            type(request).FromString(request.SerializeToString()).register_memory.order
        )
        == order
    )


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_a_mark_comes_out_as_it_went_in(index: int, value: int) -> None:
    after = After(OrderKind.FLAGS, DeviceMark(index, value))
    assert read_device_mark(_wire.load("t", "l", [], 1.0, after).load) == after.mark
    assert read_device_mark(cache_pb2.StoreRequest(after=layout_pb2.DeviceMark())) == DeviceMark(
        0, 0
    )
    assert read_device_mark(cache_pb2.StoreRequest()) is None


def registered(
    engine: PagedEngine,
    order: DeviceOrder,
    *handles: MemoryHandle,
    fds: dict[str, int] | None = None,
) -> Session:
    """Returns a connected session over the engine's memory with this order."""
    layout = replace(engine.layout, handles=(*engine.layout.handles, *handles))
    config = replace(
        engine.session.config,
        engine_id=os.urandom(8).hex(),
        on_state=lambda state, why: said.append(why),
    )
    said: list[str] = []
    session = Session(config, EngineMemory(layout, {"kv": engine.fd, **(fds or {})}, order))
    session.start()
    for _ in range(200):
        if session.wait_connected(0.1):
            return session
        if said:
            session.close()
            raise AssertionError(said[0])
    raise AssertionError("no answer")


def test_an_odd_order_is_refused_by_name(engine: Make) -> None:
    """`test_devices_order` has the others."""
    with pytest.raises(AssertionError, match=r"order\.flag_count"):
        registered(engine(), DeviceOrder(num_flags=3))


@pytest.fixture
def words_engine(engine: Make) -> Any:
    """(engine, its session with words, the words)."""
    one = engine(model=os.urandom(8).hex())
    fd = os.memfd_create("words")
    os.posix_fallocate(fd, 0, 4096)
    words = mmap.mmap(fd, 4096)
    session = registered(one, WORDS, MemoryHandle("words", 64), fds={"words": fd})
    yield one, session, words
    session.close()
    os.close(fd)


def blocks(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def ids(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count, dtype=np.int32)


def after(index: int, value: int, kind: OrderKind = OrderKind.FLAGS) -> After:
    return After(kind, DeviceMark(index, value))


def test_transfers_wait_for_their_word(words_engine: Any) -> None:
    one, session, words = words_engine
    assert session.order_kind is OrderKind.FLAGS and session.order_message == ""
    one.kv[:, :2] = 1
    names = blocks(2)
    store = session.store("s", "s", [BlockRun(0, names, ids(2))], 20, after=after(1, 7))
    assert not session.lookup([GroupHashes(0, names)]).result(60)[0].any()
    one.kv[:, :2] = 2
    words[4:8] = struct.pack("<I", 7)
    assert store.result(60).status is TransferStatus.DONE
    session.acquire("l", [GroupHashes(0, names)]).result(60)
    load = session.load("l", "l", [LoadRun(0, ids(2), ids(2, 9))], 20, after(1, 8))
    session.ping(10)
    assert (one.kv[:, 9:11] != 2).all()
    words[4:8] = struct.pack("<I", 9)
    assert load.result(60).status is TransferStatus.DONE and (one.kv[:, 9:11] == 2).all()


def test_a_store_behind_a_word_can_be_revoked(words_engine: Any) -> None:
    _, session, words = words_engine
    names = blocks(1)
    store = session.store("s", "s", [BlockRun(0, names, ids(1))], 20, after=after(0, 1))
    session.cancel("s")
    assert store.result(0).status is TransferStatus.CANCELLED
    words[0:4] = struct.pack("<I", 1)
    session.ping(10)
    results: list[int] = []

    def is_stored() -> bool:
        """Not in flight: the server may still be dropping what was revoked."""
        name = f"t{len(results)}"
        runs = [BlockRun(0, names, ids(1))]
        again = session.store(name, name, runs, 20, after=after(0, 1)).result(60)
        assert again.status is TransferStatus.DONE
        results.append(int(again.results[0][0]))
        return results[-1] != BlockResult.IN_FLIGHT

    wait_for(is_stored)
    assert results[-1] == BlockResult.STORED


def test_a_cancelled_load_behind_a_word_ends(words_engine: Any) -> None:
    _, session, _words = words_engine
    names = blocks(1)
    session.store("s", "s", [BlockRun(0, names, ids(1))], 20).result(60)
    session.acquire("l", [GroupHashes(0, names)]).result(60)
    load = session.load("l", "l", [LoadRun(0, ids(1), ids(1, 5))], 20, after(2, 1))
    session.cancel("l")
    assert load.result(60).status is TransferStatus.CANCELLED


def test_a_mark_of_another_kind_is_not_sent(words_engine: Any, engine: Make) -> None:
    _, session, _ = words_engine
    for kind in (OrderKind.EVENTS, OrderKind.HOST):
        with pytest.raises(SessionLostError):
            session.store(
                "s", "s", [BlockRun(0, blocks(1), ids(1))], 5, after=after(0, 0, kind)
            ).result(60)
    plain = engine().session
    assert plain.order_kind is OrderKind.HOST and DeviceOrder() == NO_ORDER
    with pytest.raises(SessionLostError):
        plain.load("l", "l", [LoadRun(0, ids(1), ids(1))], 5, after(0, 0)).result(60)
