"""The made-up device runs late and out of order, refuses what CUDA refuses, and is lost when a real
one would be."""

from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_server.device.runtime import DeviceError, DeviceRuntime, Priority
from hotkv_server.testing.device import FakeRuntime, FakeStream
from hotkv_server.testing.device_memory import bytes_at, map_pages

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
