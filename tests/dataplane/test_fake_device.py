"""The made-up device runs late and out of order, refuses what CUDA refuses, and is lost when a real
one would be."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_server.device.runtime import DeviceError, DeviceRuntime, Priority
from hotkv_server.testing.device import FakeRuntime, FakeStream
from hotkv_server.testing.device_memory import (
    FakeAllocation,
    FakeIpcEvent,
    bytes_at,
    map_pages,
    uuid_of,
)

KIB = 1024


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    runtime = FakeRuntime(1, num_devices=2, threaded=False)
    as_protocol: DeviceRuntime = runtime
    assert len(as_protocol.devices()) == 2
    yield runtime
    runtime.close()


def stream_of(runtime: FakeRuntime, device: int = 0) -> FakeStream:
    return runtime.new_stream(device, Priority.HIGH)


def run_all(runtime: FakeRuntime) -> None:
    while runtime.run(100):
        pass


def filled(address: int, num_bytes: int, value: int) -> None:
    bytes_at(address, num_bytes)[:] = value


def test_bytes_are_read_and_written_when_the_turn_comes(runtime: FakeRuntime) -> None:
    stream, device, pinned = (
        stream_of(runtime),
        runtime.allocate(0, 4 * KIB),
        runtime.allocate_pinned(4 * KIB),
    )
    event = runtime.new_event(0)
    assert runtime.passed(event)
    filled(pinned, 4 * KIB, 1)
    runtime.copy(stream, device, pinned, 4 * KIB)
    runtime.record(event, stream)
    filled(pinned, 4 * KIB, 2)
    assert not runtime.passed(event) and (runtime.peek(device, 4 * KIB) == 0).all()
    run_all(runtime)
    assert runtime.passed(event) and (runtime.peek(device, 4 * KIB) == 2).all(), (
        "the source changed before the copy's turn"
    )


def test_streams_overtake_each_other() -> None:
    orders = set()
    for seed in range(20):
        runtime = FakeRuntime(seed, threaded=False)
        first, second = stream_of(runtime), stream_of(runtime)
        events = [runtime.new_event(0) for _ in range(3)]
        runtime.record(events[0], first)
        runtime.record(events[1], second)
        runtime.record(events[2], first)
        order: list[int] = []
        while runtime.run(1):
            order += [
                number
                for number, each in enumerate(events)
                if runtime.passed(each) and number not in order
            ]
            assert not runtime.passed(events[2]) or runtime.passed(events[0])
        orders.add(tuple(order))
        runtime.close()
    assert orders == {(0, 1, 2), (1, 0, 2), (0, 2, 1)}


def test_a_kernel_reads_its_table_late(runtime: FakeRuntime) -> None:
    stream, device = stream_of(runtime), runtime.allocate(0, 4 * KIB)
    pinned, table = runtime.allocate_pinned(4 * KIB), runtime.allocate_pinned(4 * KIB)
    rows = bytes_at(table, 24).view(np.int64)
    rows[:] = device, pinned, 64
    filled(pinned, 4 * KIB, 3)
    runtime.copy_kernel(stream, table, 1, 64)
    rows[:] = device + 1024, pinned, 64
    run_all(runtime)
    assert (runtime.peek(device, 64) == 0).all() and (runtime.peek(device + 1024, 64) == 3).all()


def refused(call: object, *args: object, text: str = "invalid") -> None:
    with pytest.raises(DeviceError, match=text) as raised:
        call(*args)  # type: ignore[operator]
    assert not raised.value.is_lost


def test_copies_that_cuda_refuses_are_refused(runtime: FakeRuntime) -> None:
    stream, device, other = (
        stream_of(runtime),
        runtime.allocate(0, 8 * KIB),
        runtime.allocate(1, 8 * KIB),
    )
    host = map_pages(32 * KIB)
    runtime.register(host, 8 * KIB)
    runtime.register(host + 8 * KIB, 8 * KIB, read_only=True)
    refused(runtime.copy, stream, device + 1, host, 8 * KIB, text="leaves its allocation")
    refused(runtime.copy, stream, device, host + 4 * KIB, 8 * KIB, text="crosses registrations")
    refused(runtime.copy, stream, device, host + 12 * KIB, 8 * KIB, text="crosses registrations")
    refused(runtime.copy, stream, other, host, KIB, text="device 1")
    refused(runtime.copy, stream, host + 8 * KIB, device, KIB, text="read-only")
    one = np.array([KIB], np.int64)
    refused(
        runtime.copy_batch,
        stream,
        one * 0 + device,
        one * 0 + host + 20 * KIB,
        one,
        text="not registered",
    )
    runtime.copy(stream, device, host + 8 * KIB, 8 * KIB)
    run_all(runtime)
    runtime.unregister(host)
    refused(runtime.unregister, host)
    refused(runtime.register, host + 1, 4 * KIB, text="whole pages")
    refused(runtime.register, host + 4 * KIB, 8 * KIB, text="already mapped")
    refused(runtime.free, 0, device + 256)
    runtime.free(0, device)
    refused(runtime.copy, stream, device, host, KIB, text="freed")
    refused(runtime.free, 0, device)
    refused(runtime.new_stream, 2, Priority.LOW, text="ordinal")


def lost(runtime: FakeRuntime, device: int = 0) -> bool:
    run_all(runtime)
    with pytest.raises(DeviceError) as raised:
        runtime.new_event(device)
    assert (runtime.new_event(1 - device)).device == 1 - device, "the other device is lost too"
    return raised.value.is_lost


@pytest.mark.parametrize("how", ["leaves", "freed", "not registered", "read-only", "table"])
def test_kernels_that_leave_their_memory_lose_the_device(runtime: FakeRuntime, how: str) -> None:
    stream, device = stream_of(runtime), runtime.allocate(0, 8 * KIB)
    table, pinned, host = (
        runtime.allocate_pinned(4 * KIB),
        runtime.allocate_pinned(4 * KIB),
        map_pages(8 * KIB),
    )
    runtime.register(host, 4 * KIB, read_only=True)
    bytes_at(table, 24).view(np.int64)[:] = {
        "leaves": (device + 8 * KIB - 32, pinned, 64),
        "freed": (device, pinned, 64),
        "not registered": (device, host + 4 * KIB, 64),
        "read-only": (host, device, 64),
        "table": (device, pinned, 64),
    }[how]
    if how == "freed":
        runtime.free(0, device)
    runtime.copy_kernel(stream, table, 1, 64)
    if how == "table":
        runtime.free_pinned(table)
    assert lost(runtime)


def test_with_the_device_goes_all_that_its_streams_were_given(runtime: FakeRuntime) -> None:
    stream, device, pinned = (
        stream_of(runtime),
        runtime.allocate(0, 4 * KIB),
        runtime.allocate_pinned(4 * KIB),
    )
    event = runtime.new_event(0)
    filled(pinned, 4 * KIB, 1)
    runtime.copy(stream, device, pinned, 4 * KIB)
    runtime.record(event, stream)
    runtime.lose(0)
    for call in (runtime.passed, runtime.synchronize):
        with pytest.raises(DeviceError) as raised:
            call(event)
        assert raised.value.is_lost
    run_all(runtime)
    assert (runtime.peek(device, 4 * KIB) == 0).all()


def test_events_of_another_process_pass_when_its_device_has_come_to_them(
    runtime: FakeRuntime,
) -> None:
    theirs = FakeIpcEvent()
    opened, stream = runtime.open_event(0, theirs.handle), stream_of(runtime)
    assert runtime.passed(opened)
    theirs.record()
    assert not runtime.passed(opened)
    theirs.reach()
    assert runtime.passed(opened)
    theirs.record()
    assert not runtime.passed(opened), "the event was recorded again"
    refused(runtime.record, opened, stream)
    runtime.close_event(opened)
    refused(runtime.close_event, opened)
    theirs.close()


def test_handles_are_checked(runtime: FakeRuntime) -> None:
    memory, event = FakeAllocation(4 * KIB), FakeIpcEvent()
    assert (
        len(memory.handle) == 64 and memory.device_uuid == uuid_of(0) == runtime.devices()[0].uuid
    )
    for handle in (bytes(64), memory.handle[:-1] + b"x", memory.handle[:40], event.handle):
        refused(runtime.open_memory, 0, handle, text="handle")
    refused(runtime.open_event, 0, memory.handle, text="handle")
    refused(runtime.open_memory, 1, memory.handle, text="device 0")
    memory.close()
    refused(runtime.open_memory, 0, memory.handle, text="handle")
    event.close()


def num_mapped() -> int:
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:hotkv-device ")


def test_a_dead_engines_memory_stays_until_it_is_closed_as_often_as_it_was_opened(
    runtime: FakeRuntime,
) -> None:
    code = (
        "import sys, time\n"
        "from hotkv_server.testing.device_memory import FakeAllocation\n"
        "memory = FakeAllocation(4096)\n"
        "memory.array()[:] = 42\n"
        "print(memory.handle.hex(), flush=True)\n"
        "time.sleep(60)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    handle = bytes.fromhex(engine.stdout.readline())
    before = num_mapped()
    address = runtime.open_memory(0, handle)
    assert runtime.open_memory(0, handle) == address
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    assert (
        (runtime.peek(address, 4096) == 42).all()
        and num_mapped() == before + 1
        and runtime.held() == {"opened": 1}
    )
    runtime.close_memory(0, address)
    assert num_mapped() == before + 1
    runtime.close_memory(0, address)
    assert num_mapped() == before and not runtime.held()
    refused(runtime.close_memory, 0, address)
    refused(runtime.open_memory, 0, handle, text="handle")
    engine.stdout.close()


def test_freeing_waits_for_the_device() -> None:
    runtime = FakeRuntime(1, threaded=False)
    stream, device, pinned = (
        stream_of(runtime),
        runtime.allocate(0, 4 * KIB),
        runtime.allocate_pinned(4 * KIB),
    )
    runtime.copy(stream, device, pinned, 4 * KIB)
    freeing = threading.Thread(target=runtime.free, args=(0, device))
    freeing.start()
    freeing.join(0.2)
    assert freeing.is_alive()
    run_all(runtime)
    freeing.join(60)
    assert not freeing.is_alive() and runtime.held() == {"pinned": 1}
    runtime.close()
