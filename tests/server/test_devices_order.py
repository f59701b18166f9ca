"""Marks and engine memory on a made-up device: what a session opens, asks and closes."""

import asyncio
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import NO_ORDER, DeviceMark, DeviceOrder, OrderKind
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import LRU
from hotkv_server.cache.values import CoreConfig
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.device.devices import NO_DEVICES, Devices, uuid_text
from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory import mapping
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.node.node import Node
from hotkv_server.node.order import SessionOrder
from hotkv_server.node.session import SessionMemory, check_handles, open_session_memory
from hotkv_server.testing.device import FakeRuntime
from hotkv_server.testing.device_memory import FakeAllocation, FakeIpcEvent, uuid_of
from tests.support.waiting import wait_for

PAGE = 4096


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(3, num_devices=2)
    yield made
    made.close()


def _devices(runtime: FakeRuntime) -> Devices:
    return Devices(runtime, runtime.devices())


def _cuda(handle_id: str, memory: FakeAllocation, base: int = 0) -> MemoryHandle:
    return MemoryHandle(handle_id, memory.num_bytes - base, base, memory.handle, memory.device_uuid)


def _layout(*handles: MemoryHandle) -> Layout:
    return Layout(0, 2, handles, (PageTensor(0, handles[0].handle_id, 0, PAGE, PAGE, 0),))


def _file(num_bytes: int) -> int:
    fd = os.memfd_create("engine")
    os.posix_fallocate(fd, 0, num_bytes)
    return fd


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


def test_an_allocation_is_open_once_and_closed_with_its_last_user(runtime: FakeRuntime) -> None:
    devices, memory = _devices(runtime), FakeAllocation(4 * PAGE)
    one = _open(_layout(_cuda("k", memory), _cuda("v", memory, 2 * PAGE)), devices)
    two = _open(_layout(_cuda("k", memory)), devices)
    assert runtime.held()["opened"] == devices.num_open == 1
    assert (
        one.regions["v"].address
        == one.regions["k"].address + 2 * PAGE
        == two.regions["k"].address + 2 * PAGE
    )
    assert one.regions["v"].device == 0
    one.close()
    assert devices.num_open == 1
    two.close()
    assert devices.num_open == 0 and "opened" not in runtime.held()
    memory.close()


def test_files_and_devices_in_one_layout(runtime: FakeRuntime) -> None:
    devices, first, second = (
        _devices(runtime),
        FakeAllocation(2 * PAGE, 0),
        FakeAllocation(2 * PAGE, 1),
    )
    handles = (_cuda("a", first), _cuda("b", second), MemoryHandle("c", 2 * PAGE))
    memory = _open(_layout(*handles), devices, fds={"c": _file(2 * PAGE)})
    assert [memory.regions[name].device for name in "abc"] == [0, 1, -1]
    memory.close()
    assert not runtime.held()
    first.close()
    second.close()


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_registration_that_fails_half_way_leaves_nothing_open(
    runtime: FakeRuntime, failing: int
) -> None:
    devices = _devices(runtime)
    allocations = [FakeAllocation(2 * PAGE, i % 2) for i in range(3)]
    handles = [_cuda(str(i), memory) for i, memory in enumerate(allocations)]
    handles.insert(1, MemoryHandle("file", 2 * PAGE))
    fd = _file(2 * PAGE)
    runtime.fail_call("open_memory", failing)
    with pytest.raises(HotKVError, match="told to fail") as refusal:
        _open(_layout(*handles), devices, fds={"file": fd})
    assert refusal.value.reason is Reason.INVALID_LAYOUT
    assert devices.num_open == 0 and not runtime.held()
    with pytest.raises(OSError):
        os.fstat(fd)
    for memory in allocations:
        memory.close()


def test_an_engine_that_is_gone_is_refused(runtime: FakeRuntime) -> None:
    memory = FakeAllocation(2 * PAGE)
    layout = _layout(_cuda("k", memory))
    memory.close()
    with pytest.raises(HotKVError, match="invalid resource handle"):
        _open(layout, _devices(runtime))
    assert not runtime.held()


def test_refusals_name_the_device_and_those_there_are(runtime: FakeRuntime) -> None:
    handle = MemoryHandle("k", PAGE, 0, bytes(64), bytes(15) + b"\x09")
    with pytest.raises(HotKVError) as refusal:
        check_handles(_layout(handle), NO_ORDER, _devices(runtime))
    assert refusal.value.reason is Reason.INVALID_LAYOUT
    for word in (
        uuid_text(handle.device_uuid),
        uuid_text(uuid_of(0)),
        uuid_text(uuid_of(1)),
        "Fake GPU 1",
        "handles[0]",
    ):
        assert word in refusal.value.message
    with pytest.raises(HotKVError, match="no CUDA copy engine: it runs without devices"):
        check_handles(_layout(handle), NO_ORDER, NO_DEVICES)


def test_memory_that_is_stated_larger_than_its_allocation_is_refused(runtime: FakeRuntime) -> None:
    """Copies beyond it would cost the server the device, or touch what another engine owns."""
    devices, memory = _devices(runtime), FakeAllocation(4 * PAGE)
    fits = MemoryHandle("k", 3 * PAGE, PAGE, memory.handle, memory.device_uuid)
    _open(_layout(fits), devices).close()
    for num_bytes, base in ((3 * PAGE + 1, PAGE), (4 * PAGE, PAGE), (PAGE, 4 * PAGE)):
        larger = MemoryHandle("v", num_bytes, base, memory.handle, memory.device_uuid)
        with pytest.raises(
            HotKVError,
            match=(
                r"^INVALID_LAYOUT: layout\.handles\[1\]\.byte_count: 'v' ends at byte "
                rf"{base + num_bytes}"
            ),
        ) as refusal:
            _open(_layout(fits, larger), devices)
        assert (
            refusal.value.reason is Reason.INVALID_LAYOUT and str(4 * PAGE) in refusal.value.message
        )
        assert devices.num_open == 0 and not runtime.held()
    memory.close()


def test_memory_of_another_device_than_its_uuid_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime
) -> None:
    """CUDA opens it, where devices reach each other."""
    devices, memory, extent = _devices(runtime), FakeAllocation(2 * PAGE), runtime.extent
    monkeypatch.setattr(
        runtime, "extent", lambda device, address: replace(extent(device, address), device=1)
    )
    with pytest.raises(
        HotKVError,
        match=(
            r"layout\.handles\[0\]\.cuda_ipc\.device_uuid is that of device 0, and the memory "
            r"is of device 1"
        ),
    ):
        _open(_layout(_cuda("k", memory)), devices)
    assert devices.num_open == 0 and not runtime.held()
    monkeypatch.setattr(
        runtime, "extent", lambda device, address: replace(extent(device, address), device=-2)
    )
    _open(_layout(_cuda("k", memory)), devices).close()
    memory.close()


def test_memory_whose_size_cuda_does_not_tell_is_taken_as_stated(runtime: FakeRuntime) -> None:
    devices, memory = _devices(runtime), FakeAllocation(2 * PAGE)
    runtime.fail_call("extent")
    opened = _open(_layout(_cuda("k", memory)), devices)
    assert opened.regions["k"].num_bytes == 2 * PAGE
    opened.close()
    assert not runtime.held()
    memory.close()


def test_a_handle_of_another_tenants_memory_opens_nothing(runtime: FakeRuntime) -> None:
    """Who has come by the 64 bytes of a handle would read its memory: stores copy from it."""
    devices, memory = _devices(runtime), FakeAllocation(2 * PAGE)
    layout = _layout(_cuda("k", memory))
    mine = open_session_memory(layout, NO_ORDER, {}, devices, lambda: None, "one")
    with pytest.raises(HotKVError, match="'k' can't be opened: no such memory"):
        open_session_memory(layout, NO_ORDER, {}, devices, lambda: None, "two")
    # Sessions of its own tenant share it, and once nobody has it open any more it is anybody's.
    again = open_session_memory(layout, NO_ORDER, {}, devices, lambda: None, "one")
    for one in (mine, again):
        one.close()
    open_session_memory(layout, NO_ORDER, {}, devices, lambda: None, "two").close()
    assert not runtime.held() and not devices.num_open
    memory.close()


def test_a_stream_that_breaks_while_memory_is_opened_leaves_nothing_open(tmp_path: Path) -> None:
    begun, go_on, closed = threading.Event(), threading.Event(), list[int]()

    class Slow(FakeRuntime):
        def open_memory(self, device: int, handle: bytes) -> int:
            begun.set()
            assert go_on.wait(60)
            return super().open_memory(device, handle)

        def close_memory(self, device: int, address: int) -> None:
            super().close_memory(device, address)
            closed.append(address)

    async def scenario() -> None:
        memory, copies, runtime = (
            NodeMemory.open(tmp_path / "arena", 1 << 20, 1 << 16, 64, 1, prefault=False),
            HostCopyEngine(1),
            Slow(),
        )
        devices = Devices(runtime, runtime.devices())
        node = Node(
            CacheCore(CoreConfig(1 << 20, 1 << 16, 64), memory.table, LRU(64)),
            memory,
            copies,
            devices=devices,
        )
        space = KeySpace("m", "w", "bf16", (GroupSpec(GroupKind.FULL_ATTENTION, 16, (PAGE,)),), 16)
        session, allocation = (
            await node.sessions.open("e", "worker", space, "test"),
            FakeAllocation(2 * PAGE),
        )
        session.close_link = lambda: None
        registering = asyncio.create_task(
            node.sessions.register_memory(session, _layout(_cuda("k", allocation)))
        )
        while not begun.is_set():
            await asyncio.sleep(0.001)
        registering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await registering
        await node.sessions.close(session)
        go_on.set()
        while not closed:
            await asyncio.sleep(0.001)
        assert devices.num_open == 0 and not runtime.held()
        await node.close()
        copies.close()
        allocation.close()
        runtime.close()
        memory.remove()

    asyncio.run(scenario())


# Order


def test_events(runtime: FakeRuntime) -> None:
    devices, memory, events = (
        _devices(runtime),
        FakeAllocation(2 * PAGE),
        [FakeIpcEvent(), FakeIpcEvent()],
    )
    offer = DeviceOrder(memory.device_uuid, tuple(event.handle for event in events))
    opened = _open(_layout(_cuda("k", memory)), devices, offer)
    assert (opened.order.kind, opened.order.message) == (OrderKind.EVENTS, "")
    events[0].record()
    gates = [_gate(opened.order, index) for index in range(2)]
    assert (
        not gates[0].passed() and gates[1].passed()
    )  # One that was never recorded counts as passed.
    events[0].reach()
    assert gates[0].passed()
    opened.close()
    with pytest.raises(DeviceError, match="closed"):
        gates[0].passed()
    assert not runtime.held()


def test_events_are_taken_where_words_do_not_work(runtime: FakeRuntime) -> None:
    devices, memory = _devices(runtime), FakeAllocation(2 * PAGE)
    runtime.fail_call("allocate_pinned")
    opened = _open(
        _layout(_cuda("k", memory)),
        devices,
        DeviceOrder(memory.device_uuid, (FakeIpcEvent().handle,), "k", 4),
    )
    assert opened.order.kind is OrderKind.EVENTS and "told to fail" in opened.order.message
    opened.close()
    assert not runtime.held()


@pytest.mark.parametrize("failing", [1, 2])
def test_events_of_which_one_does_not_open_are_none(runtime: FakeRuntime, failing: int) -> None:
    devices, memory, events = (
        _devices(runtime),
        FakeAllocation(2 * PAGE),
        [FakeIpcEvent(), FakeIpcEvent()],
    )
    runtime.fail_call("open_event", failing)
    opened = _open(
        _layout(_cuda("k", memory)),
        devices,
        DeviceOrder(memory.device_uuid, tuple(event.handle for event in events)),
    )
    assert (
        opened.order.kind is OrderKind.HOST
        and "told to fail" in opened.order.message
        and "hostIPC" in opened.order.message
    )
    opened.close()
    assert not runtime.held()


def test_words_are_taken_first(runtime: FakeRuntime) -> None:
    devices, memory, events = (
        _devices(runtime),
        FakeAllocation(2 * PAGE),
        [FakeIpcEvent(), FakeIpcEvent()],
    )
    offer = DeviceOrder(memory.device_uuid, tuple(event.handle for event in events), "k", 4)
    opened = _open(_layout(_cuda("k", memory)), devices, offer)
    assert (opened.order.kind, opened.order.message) == (OrderKind.FLAGS, "")
    gate, another = _gate(opened.order, 3, 7), _gate(opened.order, 2, 5)
    assert not gate.passed()
    memory.words()[3] = 6
    memory.words()[2] = 5
    # All words are read at once: whoever sees the one sees the other.
    wait_for(another.passed)
    assert not gate.passed() and not gate.passed()
    memory.words()[3] = 7
    wait_for(gate.passed)
    opened.close()
    assert not runtime.held()


def test_sessions_that_come_and_go_share_streams(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream lives as long as the process: an engine that connects for ever must not use up the
    device."""
    devices, memory, made, new_stream = (
        _devices(runtime),
        FakeAllocation(2 * PAGE),
        list[int](),
        runtime.new_stream,
    )
    monkeypatch.setattr(
        runtime,
        "new_stream",
        lambda device, priority: made.append(device) or new_stream(device, priority),
    )
    for num_open in (1, 2, 1, 2):
        opened = [
            _open(_layout(_cuda("k", memory)), devices, DeviceOrder(memory.device_uuid, (), "k", 4))
            for _ in range(num_open)
        ]
        gates = [_gate(one.order, 0, 1) for one in opened]
        assert not any(gate.passed() for gate in gates)
        for one in opened:
            one.close()
    assert made == [0, 0] and not runtime.held()
    memory.close()


def test_the_engine_waits_where_nothing_works(runtime: FakeRuntime) -> None:
    devices, memory = _devices(runtime), FakeAllocation(2 * PAGE)
    runtime.fail_call("open_event")
    runtime.fail_call("allocate_pinned")
    offer = DeviceOrder(memory.device_uuid, (FakeIpcEvent().handle,), "k", 4)
    opened = _open(_layout(_cuda("k", memory)), devices, offer)
    assert (
        opened.order.kind is OrderKind.HOST
        and "events" in opened.order.message
        and "words" in opened.order.message
    )
    with pytest.raises(HotKVError, match=r"^INVALID_FIELD: after: "):
        _gate(opened.order, 0)
    opened.close()
    assert not runtime.held()


def test_words_in_a_file_need_no_device() -> None:
    mapping.install_guard()
    fd = _file(2 * PAGE)
    mine = os.dup(fd)
    opened = _open(
        _layout(MemoryHandle("k", PAGE, PAGE)), NO_DEVICES, DeviceOrder(b"", (), "k", 2), {"k": fd}
    )
    gate = _gate(opened.order, 1, 1)
    assert opened.order.kind is OrderKind.FLAGS and not gate.passed()
    os.pwrite(mine, (1).to_bytes(4, "little"), PAGE + 4)
    assert gate.passed()
    os.truncate(mine, 0)
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


@pytest.mark.parametrize(
    ("mark", "word"),
    [
        (DeviceMark(2), "after.index is 2"),
        (DeviceMark(-1), "after.index is -1"),
        (DeviceMark(0, 1 << 32), "after.value"),
        (DeviceMark(0, -1), "after.value"),
    ],
)
def test_marks_that_the_session_has_not(mark: DeviceMark, word: str) -> None:
    opened = _open(
        _layout(MemoryHandle("k", 2 * PAGE)),
        NO_DEVICES,
        DeviceOrder(b"", (), "k", 2),
        {"k": _file(2 * PAGE)},
    )
    with pytest.raises(HotKVError, match=word) as refusal:
        opened.order.gate(mark, lambda: None)
    assert refusal.value.reason is Reason.INVALID_FIELD
    opened.close()


def _is_at(word: int, value: int) -> bool:
    """Returns the driver's comparison: `(int32_t)(*addr - value) >= 0`."""
    return ctypes.c_int32(word - value).value >= 0


@given(
    start=st.integers(0, (1 << 32) - 1),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_device_word_is_never_ahead_of_the_device_and_catches_up(
    start: int, steps: list[tuple[int, bool]], seed: int
) -> None:
    """Words count up and wrap; marks are asked for in any order, with the reading of words as late
    as it likes."""
    runtime = FakeRuntime(seed, threaded=False)
    memory = FakeAllocation(2 * PAGE)
    memory.words()[:4] = start
    opened = _open(
        _layout(_cuda("k", memory)), _devices(runtime), DeviceOrder(memory.device_uuid, (), "k", 4)
    )
    counts, gates = [start] * 4, []
    for index, reaches in steps:
        if reaches:
            memory.words()[index] = (int(memory.words()[index]) + 1) % (1 << 32)
        else:
            counts[index] = (counts[index] + 1) % (1 << 32)
            gates.append((index, counts[index], _gate(opened.order, index, counts[index])))
        for at, value, gate in gates:
            assert not gate.passed() or _is_at(int(memory.words()[at]), value)
        runtime.run(seed % 3)
    for _ in range(8):
        for _, _, gate in gates:
            gate.passed()
        runtime.run(100)
    for at, value, gate in gates:
        assert gate.passed() == _is_at(int(memory.words()[at]), value)
    opened.close()
    assert not runtime.held()
    memory.close()
    runtime.close()
