"""Tests device memory and marks of a session, on a simulated GPU."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv_client import After
from hotkv_client.wire import call_messages as _wire
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.messages.layout import read_device_mark, read_device_order
from hotkv_proto.order import NO_ORDER, DeviceMark, DeviceOrder, OrderKind
from hotkv_proto.v1 import cache_pb2, layout_pb2
from hotkv_server.device.devices import NO_DEVICES, Devices, uuid_text
from hotkv_server.device.runtime import DeviceError, Extent
from hotkv_server.memory import mapping
from hotkv_server.node.live_session import (
    SessionMemory,
    check_handles,
    open_session_memory,
)
from hotkv_server.node.order import SessionOrder
from tests.doubles.device import FakeRuntime
from tests.doubles.device_memory import FakeAllocation, FakeIpcEvent, uuid_of
from tests.server.nodes import memory_file

PAGE = 4096


@pytest.fixture
def devices(runtime: FakeRuntime) -> Devices:
    return Devices(runtime, runtime.devices())


@pytest.fixture
def memory(runtime: FakeRuntime) -> Iterator[FakeAllocation]:
    """At the end, the server must have closed it."""
    made = FakeAllocation(2 * PAGE)
    yield made
    assert not runtime.held()
    made.close()


def _cuda(handle_id: str, memory: FakeAllocation, base: int = 0) -> MemoryHandle:
    return MemoryHandle(handle_id, memory.num_bytes - base, base, memory.handle, memory.device_uuid)


def _layout(*handles: MemoryHandle) -> Layout:
    return Layout(0, 2, handles, (PageTensor(0, handles[0].handle_id, 0, PAGE, PAGE, 0),))


def _open(
    layout: Layout,
    devices: Devices,
    order: DeviceOrder = NO_ORDER,
    fds: dict[str, int] | None = None,
) -> SessionMemory:
    check_handles(layout, order, devices)
    return open_session_memory(layout, order, fds or {}, devices, lambda: None)


def _gate(order: SessionOrder, index: int, value: int = 0):  # type: ignore[no-untyped-def]
    return order.gate(DeviceMark(index, value), lambda: None)


# Memory


def test_allocation_opens_once_closes_with_last_user(
    runtime: FakeRuntime, devices: Devices, memory: FakeAllocation
) -> None:
    one = _open(_layout(_cuda("k", memory), _cuda("v", memory, PAGE)), devices)
    two = _open(_layout(_cuda("k", memory)), devices)
    assert runtime.held()["opened"] == devices.num_open == 1
    at = one.regions["k"].address
    assert one.regions["v"].address == at + PAGE and two.regions["k"].address == at
    assert one.regions["v"].device == 0
    one.close()
    assert devices.num_open == 1
    two.close()
    assert devices.num_open == 0


def test_refusals_name_the_device_and_those_there_are(devices: Devices) -> None:
    handle = MemoryHandle("k", PAGE, 0, bytes(64), bytes(15) + b"\x09")
    with pytest.raises(HotKVError) as refusal:
        check_handles(_layout(handle), NO_ORDER, devices)
    assert refusal.value.reason is Reason.INVALID_LAYOUT
    for uuid in (handle.device_uuid, uuid_of(0), uuid_of(1)):
        assert uuid_text(uuid) in refusal.value.message
    with pytest.raises(HotKVError, match="no CUDA copy engine: it runs without devices"):
        check_handles(_layout(handle), NO_ORDER, NO_DEVICES)


def test_memory_stated_beyond_its_allocation_is_refused(
    devices: Devices, memory: FakeAllocation
) -> None:
    """A copy there would break the server's CUDA context, or overwrite another engine's memory."""
    fits = _cuda("k", memory, PAGE)
    _open(_layout(fits), devices).close()
    for num_bytes, base in ((PAGE + 1, PAGE), (2 * PAGE, PAGE), (PAGE, 2 * PAGE)):
        larger = MemoryHandle("v", num_bytes, base, memory.handle, memory.device_uuid)
        said = r"^INVALID_LAYOUT: layout\.handles\[1\]\.byte_count: 'v' ends at byte "
        with pytest.raises(HotKVError, match=f"{said}{base + num_bytes}.*{2 * PAGE}"):
            _open(_layout(fits, larger), devices)
        assert devices.num_open == 0


def test_memory_of_another_device_is_refused(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, devices: Devices, memory: FakeAllocation
) -> None:
    """Its UUID is wrong, though CUDA could open it. Accepted if CUDA can't say on which device
    it is."""
    extent, layout = runtime.extent, _layout(_cuda("k", memory))
    where = [1]
    monkeypatch.setattr(
        runtime, "extent", lambda device, at: replace(extent(device, at), device=where[0])
    )
    said = r"layout\.handles\[0\]\.cuda_ipc\.device_uuid is that of device 0, and the memory is of"
    with pytest.raises(HotKVError, match=f"{said} device 1"):
        _open(layout, devices)
    assert devices.num_open == 0
    where[0] = -2
    _open(layout, devices).close()
    monkeypatch.undo()
    runtime.fail_call("extent")
    opened = _open(layout, devices)
    assert opened.regions["k"].num_bytes == 2 * PAGE
    opened.close()

    def lost(device: int, address: int) -> Extent:
        raise DeviceError("it is gone", is_lost=True)

    monkeypatch.setattr(runtime, "extent", lost)
    with pytest.raises(HotKVError, match="it is gone"):
        _open(layout, devices)
    assert not runtime.held()


def test_a_handle_of_another_tenants_memory_opens_nothing(
    devices: Devices, memory: FakeAllocation
) -> None:
    """By storing it, a tenant could read another's memory."""
    layout = _layout(_cuda("k", memory))

    def of(tenant: str) -> SessionMemory:
        return open_session_memory(layout, NO_ORDER, {}, devices, lambda: None, tenant)

    mine = of("one")
    with pytest.raises(HotKVError, match="'k' can't be opened: no such memory"):
        of("two")
    # One tenant's sessions share it. Another may open it once all have closed it.
    again = of("one")
    for one in (mine, again):
        one.close()
    of("two").close()
    assert not devices.num_open


# Order


@pytest.mark.parametrize(
    ("failing", "words", "kind", "said"),
    [
        ({}, "k", OrderKind.EVENTS, ("words lie on a device",)),
        ({"open_event": 1}, "", OrderKind.HOST, ("told to fail", "hostIPC")),
        ({"open_event": 2}, "", OrderKind.HOST, ("told to fail", "hostIPC")),
        ({"open_event": 1}, "k", OrderKind.HOST, ("events", "words")),
    ],
)
def test_working_order_is_taken_else_engine_waits(
    runtime: FakeRuntime,
    devices: Devices,
    memory: FakeAllocation,
    failing: dict[str, int],
    words: str,
    kind: OrderKind,
    said: tuple[str, ...],
) -> None:
    for call, number in failing.items():
        runtime.fail_call(call, number)
    events = tuple(FakeIpcEvent().handle for _ in range(2))
    offer = DeviceOrder(memory.device_uuid, events, words, 4 if words else 0)
    opened = _open(_layout(_cuda("k", memory)), devices, offer)
    assert opened.order.kind is kind and all(word in opened.order.message for word in said)
    if kind is OrderKind.HOST:
        with pytest.raises(HotKVError, match=r"^INVALID_FIELD: after: "):
            _gate(opened.order, 0)
    opened.close()


def test_words_in_a_file_need_no_device() -> None:
    mapping.install_guard()
    fd = memory_file(2 * PAGE)
    mine = os.dup(fd)
    handles = (MemoryHandle("k", PAGE, PAGE), MemoryHandle("more", PAGE))
    fds, order = {"k": fd, "more": memory_file(PAGE)}, DeviceOrder(b"", (), "k", 2)
    opened = _open(_layout(*handles), NO_DEVICES, order, fds)
    gate = _gate(opened.order, 1, 1)
    assert opened.order.kind is OrderKind.FLAGS and not gate.passed()
    os.pwrite(mine, (1).to_bytes(4, "little"), PAGE + 4)
    assert gate.passed()
    assert opened.is_whole()
    os.truncate(mine, 0)
    assert not opened.is_whole()
    with pytest.raises(DeviceError, match="truncated"):
        gate.passed()
    opened.close()
    with pytest.raises(DeviceError, match="closed"):
        gate.passed()


@pytest.mark.parametrize(
    ("order", "word"),
    [
        (DeviceOrder(b"short"), "order.device_uuid"),
        (DeviceOrder(b"", (bytes(64),)), "order.device_uuid"),
        (DeviceOrder(bytes(16), (bytes(63),)), r"order.event_handles\[0\]"),
        (DeviceOrder(bytes(16), (bytes(64),) * 1025), "order.event_handles has 1025"),
        (DeviceOrder(b"", (), "nothing", 1), "order.flags_handle_id"),
        (DeviceOrder(b"", (), "k", 0), "order.flag_count"),
        (DeviceOrder(b"", (), "k", -1), "order.flag_count"),
        (DeviceOrder(b"", (), "k", 1025), "order.flag_count"),
        (DeviceOrder(b"", (), "", 3), "order.flag_count"),
        (DeviceOrder(b"", (), "odd", 1), "order.flags_handle_id"),
        (DeviceOrder(b"", (), "k", 17), "order.flags_handle_id"),
    ],
)
def test_offers_that_contradict_themselves(order: DeviceOrder, word: str) -> None:
    layout = _layout(MemoryHandle("k", 64), MemoryHandle("odd", 64, 2))
    with pytest.raises(HotKVError, match=word) as refusal:
        check_handles(layout, order, NO_DEVICES)
    assert refusal.value.reason is Reason.INVALID_FIELD


def test_marks_that_the_session_has_not() -> None:
    layout, fds = _layout(MemoryHandle("k", 2 * PAGE)), {"k": memory_file(2 * PAGE)}
    opened = _open(layout, NO_DEVICES, DeviceOrder(b"", (), "k", 2), fds)
    for mark, word in (
        (DeviceMark(2), "after.index is 2"),
        (DeviceMark(-1), "after.index is -1"),
        (DeviceMark(0, 1 << 32), "after.value"),
        (DeviceMark(0, -1), "after.value"),
    ):
        with pytest.raises(HotKVError, match=word) as refusal:
            opened.order.gate(mark, lambda: None)
        assert refusal.value.reason is Reason.INVALID_FIELD
    opened.close()


@given(
    st.integers(0, (1 << 32) - 1),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30),
)
@settings(max_examples=25, deadline=None)
def test_a_gate_opens_once_its_word_has_reached_the_value(
    start: int, steps: list[tuple[int, bool]]
) -> None:
    """Words wrap around.

    steps: (word, what); True counts it up, False makes a gate for its next value.
    """
    mapping.install_guard()
    fd = memory_file(PAGE)
    page = np.frombuffer(mmap.mmap(fd, PAGE), np.uint32)
    page[:4] = start
    opened = _open(
        _layout(MemoryHandle("k", PAGE)), NO_DEVICES, DeviceOrder(b"", (), "k", 4), {"k": fd}
    )
    counts, gates = [start] * 4, []
    for index, reaches in steps:
        if reaches:
            page[index] = (int(page[index]) + 1) % (1 << 32)
        else:
            counts[index] = (counts[index] + 1) % (1 << 32)
            gates.append((index, counts[index], _gate(opened.order, index, counts[index])))
        for at, value, gate in gates:
            # As the CUDA driver does.
            assert gate.passed() == (ctypes.c_int32(int(page[at]) - value).value >= 0)
    opened.close()


# The wire

INT32S, INT64S = (st.integers(-(1 << bits), (1 << bits) - 1) for bits in (31, 63))


@given(
    st.builds(
        DeviceOrder,
        st.binary(max_size=20),
        st.lists(st.binary(max_size=70), max_size=4).map(tuple),
        st.text(max_size=20),
        INT32S,
    )
)
def test_an_order_comes_out_as_it_went_in(order: DeviceOrder) -> None:
    request = _wire.register_memory(_layout(MemoryHandle("k", 2 * PAGE)), order)
    read = type(request).FromString(request.SerializeToString())
    assert read_device_order(read.register_memory.order) == order


@given(INT32S, INT64S)
def test_a_mark_comes_out_as_it_went_in(index: int, value: int) -> None:
    after = After(OrderKind.FLAGS, DeviceMark(index, value))
    assert read_device_mark(_wire.load("t", "l", [], 1.0, after).load) == after.mark
    at_zero = cache_pb2.StoreRequest(after=layout_pb2.DeviceMark())
    assert read_device_mark(at_zero) == DeviceMark(0, 0)
    assert read_device_mark(cache_pb2.StoreRequest()) is None
