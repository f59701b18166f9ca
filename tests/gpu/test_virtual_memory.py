"""Tests on a real GPU that virtual memory of another process can be mapped by its descriptors, as
`docs/cuda.md` assumes. Needs only numpy, CuPy and pytest. Has run on no GPU yet."""

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_proto.cuda_memory import FABRIC, POSIX_DESCRIPTOR
from hotkv_server.device import driver as cu
from hotkv_server.device.cupy_runtime import CupyRuntime
from hotkv_server.device.runtime import DeviceError, Priority, Stream

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZES = (2 * MIB, 4 * MIB, 2 * MIB)
"""Multiples of every device's granularity."""
BEGIN, LENGTH = MIB + 512, 6 * MIB
"""Of the part that the engine shows; it touches all backings."""

ENGINE = """
import ctypes, json, socket, sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from hotkv_client.cuda_export import CudaExport, CudaExportError
from hotkv_proto.cuda_memory import *
name, handle_types, sizes, begin, length = json.loads(sys.argv[1])
peer, cuda = socket.socket(fileno=int(sys.argv[2])), ctypes.CDLL(name)
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert not status, (name, status)
context, start = c_void_p(), c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", byref(context), 0)
call("cuCtxSetCurrent", context)
def wake():
    at = start.value
    for size in sizes:
        backing = c_uint64()
        made = AllocationProperties(PINNED, handle_types, Location(ON_DEVICE, 0))
        call("cuMemCreate", byref(backing), c_size_t(size), byref(made), c_uint64(0))
        call("cuMemMap", c_uint64(at), c_size_t(size), c_size_t(0), backing, c_uint64(0))
        call("cuMemRelease", backing)
        at += size
    access = AccessDescription(Location(ON_DEVICE, 0), READ_AND_WRITE)
    call("cuMemSetAccess", start, c_size_t(sum(sizes)), byref(access), c_size_t(1))
nothing = c_uint64(0)
call("cuMemAddressReserve", byref(start), c_size_t(sum(sizes)), c_size_t(0), nothing, nothing)
wake()
export, plain = CudaExport("b", name), c_uint64()
call("cuMemAlloc_v2", byref(plain), c_size_t(4096))
assert export.is_virtual(start.value + begin) and not export.is_virtual(plain.value)
while order := peer.recv(100).decode().split():
    answer, fds = "done", []
    try:
        if order[0] == "export":
            handle = export.export("kv", start.value + begin, length, bytes(16))
            answer = [one.num_bytes for one in handle.backings], handle.base_offset_bytes
            fds = list(export.fds.values())
        elif order[0] == "fill":
            call("cuMemsetD8_v2", start, int(order[1]), c_size_t(sum(sizes)))
            call("cuCtxSynchronize")
        elif order[0] == "read":
            back = (ctypes.c_ubyte * length)()
            call("cuMemcpyDtoH_v2", back, c_uint64(start.value + begin), c_size_t(length))
            answer = [min(back), max(back)]
        elif order[0] == "sleep":
            export.close()
            at = start.value
            for size in sizes:
                call("cuMemUnmap", c_uint64(at), c_size_t(size))
                at += size
        elif order[0] == "wake":
            wake()
    except CudaExportError as error:
        answer = str(error)
    socket.send_fds(peer, [json.dumps(answer).encode()], fds)
"""


class Engine:
    """A child process with virtual memory."""

    def __init__(self, handle_types: int = POSIX_DESCRIPTOR) -> None:
        self._peer, theirs = socket.socketpair()
        with theirs:
            what = json.dumps((cu.LIBRARY, handle_types, SIZES, BEGIN, LENGTH))
            self._process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, what, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def ask(self, order: str) -> tuple[object, list[int]]:
        """The answer and its descriptors."""
        self._peer.send(order.encode())
        packet, fds, _, _ = socket.recv_fds(self._peer, 1 << 16, 16)
        return json.loads(packet), fds

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._peer.close()


@pytest.fixture(scope="module")
def runtime() -> CupyRuntime:
    try:
        return CupyRuntime()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def stream(runtime: CupyRuntime) -> Stream:
    return runtime.new_stream(0, Priority.LOW)


@pytest.fixture
def engine(runtime: CupyRuntime) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.kill()


def mapped(runtime: CupyRuntime, engine: Engine) -> int:
    """Address of the whole range."""
    answer, fds = engine.ask("export")
    assert answer == [list(SIZES), BEGIN], "each mapping is a backing, with all of its bytes"
    try:
        return runtime.map_range(0, list(zip(fds, SIZES, strict=True)))
    finally:
        for fd in fds:
            os.close(fd)


def copied(runtime: CupyRuntime, stream: Stream, dst: int, src: int, num_bytes: int) -> None:
    event = runtime.new_event(0)
    one = [np.array([number]) for number in (dst, src, num_bytes)]
    runtime.copy_batch(stream, *one)
    runtime.record(event, stream)
    runtime.synchronize(event)


def test_bytes_cross_from_one_backing_to_the_next(
    runtime: CupyRuntime, stream: Stream, engine: Engine
) -> None:
    host = runtime.allocate_pinned(LENGTH)
    view = np.ctypeslib.as_array((ctypes.c_ubyte * LENGTH).from_address(host))
    for value in (3, 4):
        engine.ask(f"fill {value}")
        at = mapped(runtime, engine)
        assert [
            runtime.extent(0, at + sum(SIZES[:index])).device for index in range(len(SIZES))
        ] == [0] * len(SIZES), "else the server trusts the layout's device"
        copied(runtime, stream, host, at + BEGIN, LENGTH)
        assert (view == value).all()
        view[:] = value + 10
        copied(runtime, stream, at + BEGIN, host, LENGTH)
        assert engine.ask("read")[0] == [value + 10] * 2
        runtime.unmap_range(0, at, SIZES)
        engine.ask("sleep")
        engine.ask("wake")
    runtime.free_pinned(host)


@pytest.mark.parametrize("end", ["sleep", "kill"])
def test_memory_is_free_when_the_server_unmaps(
    runtime: CupyRuntime, engine: Engine, end: str
) -> None:
    """Until then it stays: what is mapped can still be copied."""
    import cupy

    at = mapped(runtime, engine)
    if end == "kill":
        engine.kill()
    else:
        engine.ask("sleep")
    cupy.cuda.runtime.setDevice(0)
    before = cupy.cuda.runtime.memGetInfo()[0]
    runtime.unmap_range(0, at, SIZES)
    assert cupy.cuda.runtime.memGetInfo()[0] - before >= sum(SIZES)


def test_what_is_no_memory_of_cuda_loses_nothing(
    runtime: CupyRuntime, stream: Stream, engine: Engine
) -> None:
    """Any client may send it."""
    _, fds = engine.ask("export")
    spare = [os.memfd_create("none"), os.open("/dev/null", os.O_RDWR), os.pipe()[0]]
    for backings in (
        *([(fd, SIZES[0])] for fd in spare),
        [(fds[0], 64 * SIZES[0])],
        [(fds[0], 4096)],
        [(fds[0], SIZES[0]), (spare[0], SIZES[1])],
        [(fds[0], SIZES[0]), (1 << 20, SIZES[1])],
    ):
        with pytest.raises(DeviceError) as raised:
            runtime.map_range(0, backings)
        assert not raised.value.is_lost, backings
    for fd in (*fds, *spare):
        os.close(fd)
    at = mapped(runtime, engine)
    copied(runtime, stream, at + SIZES[0], at, 4096)
    runtime.unmap_range(0, at, SIZES)


@pytest.mark.parametrize("handle_types", [0, FABRIC])
def test_memory_made_for_no_descriptor_is_refused(runtime: CupyRuntime, handle_types: int) -> None:
    engine = Engine(handle_types)
    try:
        answer, fds = engine.ask("export")
    except (OSError, ValueError):
        pytest.skip("this device makes no such memory")
    finally:
        engine.kill()
    assert "requestedHandleTypes" in str(answer) and not fds
