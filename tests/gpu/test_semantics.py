"""Checks on a real GPU what the server relies on and NVIDIA's documentation leaves open
(docs/cuda.md); each test says what to do if it fails. All passed on an H100 and an H200."""

import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hotkv_client.connection import DEVICE_GRACE_S
from hotkv_server.device.cupy_runtime import CupyRuntime
from hotkv_server.device.runtime import DeviceError, Priority, Stream

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SIZE = 8 * MIB
LOOK_S = 2.0
"""How long a test watches that an event does not pass."""

ENGINE = """
import sys
import cupy
from cupy.cuda import runtime as r
size = int(sys.argv[1])
r.setDevice(0)
at, stream = r.malloc(size), cupy.cuda.Stream(non_blocking=True)
event = r.eventCreateWithFlags(r.eventInterprocess | r.eventDisableTiming)
spin = cupy.RawKernel('extern "C" __global__ void spin(unsigned long long ns) {'
    ' unsigned long long a, b;'
    ' asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a));'
    ' do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)); while (b - a < ns); }', "spin")
r.memsetAsync(at, 7, size, stream.ptr)
with stream:
    spin((1,), (1,), (cupy.uint64(1),))
stream.synchronize()
print(r.ipcGetMemHandle(at).hex(), r.ipcGetEventHandle(event).hex(), flush=True)
for line in sys.stdin:
    order, value = line.split()
    if order == "spin":
        # Fills every multiprocessor.
        with stream:
            spin((1024,), (1024,), (cupy.uint64(int(value) * 1000000),))
        r.eventRecord(event, stream.ptr)
    elif order == "destroy":
        r.eventDestroy(event)
    elif order == "free":
        r.free(at)
    print("done", flush=True)
"""

SERVER = """
import mmap, sys
import numpy as np
from hotkv_server.device.cupy_runtime import CupyRuntime
from hotkv_server.device.runtime import Priority
runtime, size = CupyRuntime(), int(sys.argv[2])
at = runtime.open_memory(0, bytes.fromhex(sys.argv[1]))
stream = runtime.new_stream(0, Priority.HIGH)
host = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8)
host[size:] = 255
runtime.register(host.ctypes.data, 2 * size)
# Up to four copies are with the device at a time, each of `size` bytes. So some are in progress
# when this process is killed.
events = [runtime.new_event(0) for _ in range(4)]
number = 0
while True:
    event = events[number % 4]
    runtime.synchronize(event)
    runtime.copy(stream, at, host.ctypes.data + number % 2 * size, size)
    runtime.record(event, stream)
    number += 1
    if number == 16:
        print("copying", flush=True)
"""

HOSTILE = """
import random
from hotkv_server.device.cupy_runtime import CupyRuntime
from hotkv_server.device.runtime import DeviceError, Priority
runtime, stream = CupyRuntime(), None
good, noise = bytes.fromhex(__import__("sys").argv[1]), random.Random(1)
stream = runtime.new_stream(0, Priority.LOW)
for number in range(300):
    handle = bytearray(noise.randbytes(64) if number % 2 else good)
    if number % 2 == 0:
        handle[noise.randrange(64)] ^= 1 << noise.randrange(8)
    for call in (runtime.open_memory, runtime.open_event):
        try:
            call(0, bytes(handle))
        except DeviceError as error:
            assert not error.is_lost, (number, error)
event = runtime.new_event(0)
runtime.record(event, stream)
runtime.synchronize(event)
print("lives")
"""


@pytest.fixture(scope="module")
def runtime() -> CupyRuntime:
    try:
        return CupyRuntime()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def stream(runtime: CupyRuntime) -> Stream:
    return runtime.new_stream(0, Priority.LOW)


class Engine:
    """A child process with device memory full of 7s, and an event that was never recorded."""

    def __init__(self, num_bytes: int = SIZE) -> None:
        arguments = [sys.executable, "-c", ENGINE, str(num_bytes)]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.memory, self.event = (
            bytes.fromhex(word) for word in self.process.stdout.readline().split()
        )

    def ask(self, order: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def engine(runtime: CupyRuntime) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.kill()


def works(runtime: CupyRuntime, stream: Stream) -> bool:
    """The device can still allocate, copy and record events."""
    event, pinned, memory = (
        runtime.new_event(0),
        runtime.allocate_pinned(4096),
        runtime.allocate(0, 4096),
    )
    runtime.copy(stream, memory, pinned, 4096)
    runtime.record(event, stream)
    runtime.synchronize(event)
    runtime.free(0, memory)
    runtime.free_pinned(pinned)
    return runtime.passed(event)


@pytest.mark.parametrize("num_bytes", [64 << 10, SIZE])
def test_opened_memory_tells_its_size(runtime: CupyRuntime, num_bytes: int) -> None:
    """A small allocation may be part of a larger one. If this fails, the server logs `size of
    engine memory not known` and trusts clients' sizes."""
    engine = Engine(num_bytes)
    address = runtime.open_memory(0, engine.memory)
    extent = runtime.extent(0, address)
    assert extent.device == 0 and extent.start <= address
    assert num_bytes <= extent.start + extent.num_bytes - address <= max(num_bytes, 2 * MIB)
    runtime.close_memory(0, address)
    engine.kill()


def test_handles_that_are_none_end_as_errors(engine: Engine) -> None:
    """Any client may send such handles. If this fails, any client can end the server; the next
    one keeps the cache."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, engine.memory.hex()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


@pytest.mark.parametrize("end", ["killed", "destroyed"])
def test_gone_engines_event_does_not_pass(
    runtime: CupyRuntime, stream: Stream, engine: Engine, end: str
) -> None:
    """Else bytes are copied that the engine's kernels have not written. If this fails, never set
    `hotkv.device_order` to `events`; `auto` tries `flags` first."""
    event = runtime.open_event(0, engine.event)
    engine.ask("spin 20000")
    assert not runtime.passed(event)
    if end == "killed":
        engine.kill()
    else:
        engine.ask("destroy 0")
    deadline_s = time.monotonic() + LOOK_S
    try:
        while time.monotonic() < deadline_s:
            assert not runtime.passed(event), "use device_order = flags"
    except DeviceError as error:
        assert not error.is_lost, error
    engine.kill()
    runtime.close_event(event)
    assert works(runtime, stream)


def test_memory_freed_during_a_copy_loses_nothing(
    runtime: CupyRuntime, stream: Stream, engine: Engine
) -> None:
    """NVIDIA calls this undefined: any bytes, but the device must stay usable. If this fails, an
    engine can make the GPU unusable for the server."""
    address, event = runtime.open_memory(0, engine.memory), runtime.new_event(0)
    host = runtime.allocate_pinned(SIZE)
    for number in range(200):
        runtime.copy(stream, host, address, SIZE)
        if number == 20:
            engine.ask("free 0")
    runtime.record(event, stream)
    runtime.synchronize(event)
    engine.kill()
    runtime.close_memory(0, address)
    runtime.free_pinned(host)
    assert works(runtime, stream)


def test_a_dead_servers_copies_end_within_the_grace(runtime: CupyRuntime, stream: Stream) -> None:
    """After DEVICE_GRACE_S the client lets its engine reuse the blocks of failed loads. If this
    fails, raise it in `hotkv_client.connection`, and don't start the next server earlier."""
    import cupy

    size = 32 * MIB
    r = cupy.cuda.runtime
    r.setDevice(0)
    for _ in range(3):
        memory = r.malloc(size)
        arguments = [sys.executable, "-c", SERVER, r.ipcGetMemHandle(memory).hex(), str(size)]
        server = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and server.stdout.readline() == "copying\n"
        server.kill()
        assert server.stdout.read() == "", "the pipe closes like the link"
        time.sleep(DEVICE_GRACE_S)
        r.memset(memory, 7, size)
        r.deviceSynchronize()
        time.sleep(LOOK_S / 2)
        back = np.zeros(size, np.uint8)
        r.memcpy(back.ctypes.data, memory, size, r.memcpyDeviceToHost)
        assert (back == 7).all(), "the dead server's copies wrote on"
        server.wait()
        r.free(memory)
