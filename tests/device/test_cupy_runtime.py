"""Tests that `CupyRuntime` makes the right driver calls in the right context, against a fake
driver library."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotkv_proto import cuda_memory
from hotkv_server.device import driver as cu
from hotkv_server.device.cupy_runtime import CudaEvent, CudaStream, CupyRuntime
from hotkv_server.device.runtime import DeviceError, DeviceRuntime, Extent, Priority
from tests.device import fake_cuda
from tests.device.cuda_on_cpu import COMPILER, needs_compiler
from tests.device.fake_cuda import FakeDriver

pytestmark = needs_compiler

CONTEXTS = (140, 141)
HANDLE = bytes(range(1, 65))


class Machine:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int = 2) -> None:
        self.driver = FakeDriver(folder, batch)
        self.cupy = fake_cuda.fake_cupy()
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        self.sysfs = folder / "pci"
        (self.sysfs / "0000:a8:00.0").mkdir(parents=True)
        (self.sysfs / "0000:a8:00.0" / "numa_node").write_text("1\n")

    def runtime(self) -> CupyRuntime:
        runtime = CupyRuntime(library=self.driver.path, sysfs=self.sysfs)
        self.driver.calls()
        return runtime

    def calls(self) -> list[str]:
        """Without those that start a device."""
        return [
            call
            for call in self.driver.calls()
            if not call.startswith(("cuDeviceGet ", "cuDevicePrimaryCtxRetain "))
        ]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)


def test_devices(machine: Machine) -> None:
    """The first device's NUMA node is in /sys; only the driver knows the second's."""
    runtime: DeviceRuntime = machine.runtime()
    first, second = runtime.devices()
    assert (first.number, first.name, first.pci_bus_id) == (0, "Fake 0", "0000:a8:00.0")
    assert first.uuid == bytes(0 if i == 3 else 40 + i for i in range(16))
    assert (second.number, second.pci_bus_id) == (1, "0000:a9:00.0")
    assert (first.numa_node, second.numa_node) == (1, 3)
    for device in (-1, 2):
        with pytest.raises(DeviceError, match=f"device {device}: this process has 2"):
            runtime.new_stream(device, Priority.LOW)
    assert repr(runtime).startswith("CupyRuntime(devices=2, started=[], Driver(")


def test_devices_start_when_used_in_every_thread(machine: Machine) -> None:
    runtime = machine.runtime()
    assert machine.driver.calls() == []
    kinds = [(1, Priority.LOW), (0, Priority.HIGH), (1, Priority.HIGH)]
    stream, *_ = [runtime.new_stream(*kind) for kind in kinds]
    assert machine.driver.calls() == [
        "cuDeviceGet 0 1",
        "cuDevicePrimaryCtxRetain 0 41",
        "cuStreamCreateWithPriority 141 1 0",
        "cuDeviceGet 141 0",
        "cuDevicePrimaryCtxRetain 141 40",
        "cuStreamCreateWithPriority 140 1 -5",
        "cuStreamCreateWithPriority 141 1 -5",
    ]
    event = runtime.new_event(1)
    machine.driver.calls()
    calls = ((runtime.record, event, stream), (runtime.passed, event), (runtime.synchronize, event))
    for call, *args in calls:
        thread = threading.Thread(target=call, args=args)
        thread.start()
        thread.join()
    assert [call.split()[1] for call in machine.driver.calls()] == ["141"] * 3


def test_order(machine: Machine) -> None:
    runtime = machine.runtime()
    stream, event = runtime.new_stream(0, Priority.LOW), runtime.new_event(1)
    assert machine.calls()[-1] == "cuEventCreate 141 3"
    runtime.record(event, CudaStream(1, 77))
    runtime.synchronize(event)
    runtime.close_event(event)
    assert machine.calls() == [
        f"cuEventRecord 141 {event.handle} 77",
        f"cuEventSynchronize 141 {event.handle}",
        f"cuEventDestroy_v2 141 {event.handle}",
    ]
    # A handle cut to 32 bits must fail.
    assert stream.handle > 1 << 32 and event.handle > 1 << 32
    assert runtime.passed(event)
    machine.driver.fail("cuEventQuery", 600)
    assert not runtime.passed(event)
    machine.driver.fail("cuEventQuery", 700)
    words = r"cuEventQuery on device 1: CUDA_ERROR_ILLEGAL_ADDRESS \(700\): an illegal memory"
    with pytest.raises(DeviceError, match=words) as raised:
        runtime.passed(event)
    assert raised.value.is_lost


def test_memory_of_device_and_host(machine: Machine) -> None:
    runtime = machine.runtime()
    address = runtime.allocate(1, 1000)
    runtime.free(1, address)
    pinned = runtime.allocate_pinned(5000)
    runtime.free_pinned(pinned)
    runtime.register(1 << 46, 1 << 33)
    runtime.unregister(1 << 46)
    assert machine.calls() == [
        "cuMemAlloc_v2 141 1000",
        f"cuMemFree_v2 141 {address}",
        "cuMemHostAlloc 141 5000 3",
        f"cuMemFreeHost 141 {pinned}",
        f"cuMemHostRegister_v2 141 {1 << 46} {1 << 33} 3",
        f"cuMemHostUnregister 141 {1 << 46}",
    ], "host memory is registered through a device that is started already"


def test_between_processes(machine: Machine) -> None:
    runtime = machine.runtime()
    assert runtime.open_memory(1, HANDLE) == 0x7F0000000000
    assert runtime.extent(1, 0x7F0000000000) == Extent(0x7F0000000000 - 4096, 6 << 30, 1)
    runtime.close_memory(1, 0x7F0000000000)
    assert runtime.open_event(0, HANDLE) == CudaEvent(0, 0x30000000010)
    assert machine.calls() == [
        "cuIpcOpenMemHandle_v2 141 1 64 1",
        f"cuMemGetAddressRange_v2 141 {0x7F0000000000}",
        f"cuPointerGetAttribute 141 9 {0x7F0000000000}",
        f"cuIpcCloseMemHandle 141 {0x7F0000000000}",
        "cuIpcOpenEventHandle 140 1 64",
    ]
    with pytest.raises(
        DeviceError, match="memory: an interprocess handle has 64 bytes, this one 63"
    ):
        runtime.open_memory(0, HANDLE[:-1])


GIB = 1 << 30
AT = 0x400000000000


def of_backing(fd: int) -> int:
    """The fake driver's handle of an imported descriptor."""
    return 0x50000000000 + fd


def test_a_range_of_virtual_memory(machine: Machine) -> None:
    runtime = machine.runtime()
    assert runtime.map_range(1, [(7, 2 * GIB), (9, 3 * GIB)]) == AT
    runtime.unmap_range(1, AT, [2 * GIB, 3 * GIB])
    assert machine.calls() == [
        f"cuMemAddressReserve 141 {5 * GIB} 0 0 0",
        "cuMemImportFromShareableHandle 141 7 1",
        f"cuMemMap 141 {AT} {2 * GIB} 0 {of_backing(7)} 0",
        f"cuMemRelease 141 {of_backing(7)}",
        "cuMemImportFromShareableHandle 141 9 1",
        f"cuMemMap 141 {AT + 2 * GIB} {3 * GIB} 0 {of_backing(9)} 0",
        f"cuMemRelease 141 {of_backing(9)}",
        f"cuMemSetAccess 141 {AT} {5 * GIB} 1 41 3 1",
        f"cuMemUnmap 141 {AT} {2 * GIB}",
        f"cuMemUnmap 141 {AT + 2 * GIB} {3 * GIB}",
        f"cuMemAddressFree 141 {AT} {5 * GIB}",
    ]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemImportFromShareableHandle", []),
        ("cuMemMap", [f"cuMemRelease 140 {of_backing(7)}"]),
        ("cuMemSetAccess", [f"cuMemUnmap 140 {AT} {GIB}"]),
    ],
)
def test_a_range_that_fails_leaves_nothing(
    machine: Machine, failing: str, undone: list[str]
) -> None:
    runtime = machine.runtime()
    machine.driver.fail(failing, 2)
    with pytest.raises(DeviceError, match=f"{failing} on device 0.*OUT_OF_MEMORY"):
        runtime.map_range(0, [(7, GIB)])
    calls = machine.calls()
    at = next(i for i, call in enumerate(calls) if call.startswith(failing))
    assert calls[at + 1 :] == [*undone, f"cuMemAddressFree 140 {AT} {GIB}"]
    machine.driver.fail(failing, 0)
    machine.driver.fail("cuMemUnmap", 2)
    with pytest.raises(DeviceError, match="cuMemUnmap"):
        runtime.unmap_range(0, AT, [GIB, GIB])
    assert len(machine.calls()) == 3, "each mapping and the addresses are tried"


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_batches_of_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    machine = Machine(tmp_path, monkeypatch, batch)
    runtime = machine.runtime()
    stream = runtime.new_stream(1, Priority.LOW)
    machine.calls()
    sizes = np.array([5, 7, 9, 4096])
    src = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)
    dst = np.zeros_like(src)
    at, to = (each.ctypes.data + np.arange(4) * 4096 for each in (src, dst))
    runtime.copy_batch(stream, to, at, sizes)
    for i, size in enumerate(sizes):
        assert (dst[i, :size] == src[i, :size]).all() and not dst[i, size:].any()
    whole = f"4 1,0,0,0,0,1 0 1 {stream.handle}"
    expected = [f"cuMemcpyBatchAsync{'_v2' if batch == 2 else ''} 141 {whole}"]
    if not batch:
        copies = [f"{to[i]} {at[i]} {sizes[i]}" for i in range(4)]
        expected = [f"cuMemcpyAsync 141 {copy} {stream.handle}" for copy in copies]
    assert machine.calls() == expected
    runtime.copy_batch(stream, to[:0], at[:0], sizes[:0])
    runtime.copy(stream, int(to[1]), int(at[1]), 0)
    assert machine.calls() == []
    runtime.copy(stream, int(to[1]), int(at[1]), 11)
    assert (dst[1, :11] == src[1, :11]).all()
    if batch == 1:
        machine.driver.fail("cuMemcpyBatchAsync", 1)
        words = r"cuMemcpyBatchAsync on device 1 at copy 1 of 2: unknown \(1\)"
        with pytest.raises(DeviceError, match=words) as raised:
            runtime.copy_batch(stream, to[2:], at[2:], sizes[2:])
        assert not raised.value.is_lost


def test_the_copy_kernel_is_compiled_once_a_device(machine: Machine) -> None:
    runtime = machine.runtime()
    streams = [runtime.new_stream(device, Priority.LOW) for device in (0, 1)]
    machine.calls()
    runtime.copy_kernel(streams[0], 1 << 46, 0, 0)
    assert machine.cupy.log == []
    for stream in (*streams, *streams):
        runtime.copy_kernel(stream, 1 << 46, 100_000, 4096)
    runtime.copy_kernel(streams[0], 1 << 46, 10, 100 << 20)
    options, compiled = ("-std=c++17",), ("get_function", "copy_runs")
    once = [[("setDevice", n), ("RawModule", n, options, "nvrtc"), compiled] for n in (0, 1)]
    assert machine.cupy.log == once[0] + once[1]

    def launched(n: int, what: str) -> str:
        where = f"{CONTEXTS[n]} {0x50000000000 + n} 8,1,1 512,1,1 0 {streams[n].handle}"
        return f"cuLaunchKernel {where} {1 << 46},{what} 1"

    expected = [launched(n, "100000,1") for n in (0, 1, 0, 1)]
    assert machine.calls() == [*expected, launched(0, "10,103")]


def test_a_kernel_that_does_not_compile_or_load(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    runtime, errors = machine.runtime(), machine.cupy.errors
    stream = runtime.new_stream(0, Priority.LOW)
    for error, text, is_lost in (
        (RuntimeError("no libnvrtc"), "no libnvrtc; CuPy needs NVRTC: pip install", False),
        (fake_cuda.CompileException("line 3"), "line 3", False),
        (fake_cuda.CUDARuntimeError(700), "cudaErrorFake: 700", True),
    ):
        errors.append(error)
        with pytest.raises(DeviceError, match=f"copy.cu .*device 0: {text}") as raised:
            runtime.copy_kernel(stream, 1 << 46, 1, 1)
        assert raised.value.is_lost == is_lost
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    errors.append(PermissionError("no home"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    runtime.copy_kernel(stream, 1 << 46, 1, 1)
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1", "without a home the kernel is kept in memory"


@pytest.mark.parametrize("is_lost", [False, True])
def test_only_errors_that_stay_mean_a_lost_device(machine: Machine, is_lost: bool) -> None:
    runtime = machine.runtime()
    for status in (214, 719, 709) if is_lost else (2, 1, 400, 712, 999):
        machine.driver.fail("cuMemAlloc_v2", status)
        words = rf"cuMemAlloc_v2 on device 0: .*\({status}\)"
        with pytest.raises(DeviceError, match=words) as raised:
            runtime.allocate(0, 1)
        assert raised.value.is_lost == is_lost


def test_what_is_missing_is_named(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, library: str = "") -> None:
        with pytest.raises(DeviceError, match=words):
            CupyRuntime(library=library) if library else machine.runtime()

    refused("no NVIDIA driver: .*give the container its GPUs", str(tmp_path / "none.so"))
    old, code = tmp_path / "old.so", Path(machine.driver.path).read_bytes()
    for name in (b"cuIpcOpenEventHandle", b"cuStreamWriteValue32_v2"):
        code = code.replace(name, name[:-1] + b"_")
    old.write_bytes(code)
    refused("the NVIDIA driver lacks cuIpcOpenEventHandle; install one of CUDA 12", str(old))
    machine.driver.set_devices(0)
    refused("shows no device; CUDA_VISIBLE_DEVICES")
    machine.driver.set_devices(2)
    machine.driver.set_attribute(cu.ATTRIBUTE_HOST_POINTER_IS_DEVICES, 0)
    refused(r"device 0 \(Fake 0\) sees registered memory at other addresses")
    machine.driver.set_attribute(cu.ATTRIBUTE_HOST_POINTER_IS_DEVICES, 1)
    machine.driver.fail("cuInit", 100)
    refused("cuInit on starting CUDA")
    machine.driver.fail("cuInit", 0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    refused(r"CuPy does not load: .*pip install .*cupy-cuda12x")
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cupy.py").write_text("raise ValueError('numpy.dtype size changed')")
    refused("CuPy does not load: numpy.dtype size changed: ")


def test_types_and_numbers_are_those_of_nvidias_header(tmp_path: Path) -> None:
    """The compiler checks them, where NVIDIA's headers are."""
    headers = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    if not headers:
        pytest.skip("no cuda.h here")
    header = headers[-1]
    fake_cuda.build(tmp_path / "checked.so", f'-DCUDA_HEADER="{header}"')
    numbers = {
        "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": (
            cu.ATTRIBUTE_HOST_POINTER_IS_DEVICES
        ),
        "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID": cu.ATTRIBUTE_HOST_NUMA_NODE,
        "CU_STREAM_NON_BLOCKING": cu.STREAM_NON_BLOCKING,
        "CU_EVENT_BLOCKING_SYNC": cu.EVENT_BLOCKING_SYNC,
        "CU_EVENT_DISABLE_TIMING": cu.EVENT_DISABLE_TIMING,
        "CU_MEMHOSTALLOC_PORTABLE": cu.HOST_PORTABLE,
        "CU_MEMHOSTALLOC_DEVICEMAP": cu.HOST_MAPPED,
        "CU_MEMHOSTREGISTER_PORTABLE": cu.HOST_PORTABLE,
        "CU_MEMHOSTREGISTER_DEVICEMAP": cu.HOST_MAPPED,
        "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": cu.IPC_LAZY_PEER_ACCESS,
        "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL": cu.POINTER_DEVICE,
        "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": cu.SOURCE_IN_STREAM_ORDER,
        "CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE": cu.PREFER_OVERLAP_WITH_COMPUTE,
        "CUDA_ERROR_NOT_READY": cu.NOT_READY,
        "CU_IPC_HANDLE_SIZE": cu.HANDLE_BYTES,
        "sizeof(CUmemcpyAttributes)": 24,
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": cuda_memory.POSIX_DESCRIPTOR,
        "CU_MEM_HANDLE_TYPE_FABRIC": cuda_memory.FABRIC,
        "CU_MEM_LOCATION_TYPE_DEVICE": cuda_memory.ON_DEVICE,
        "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": cuda_memory.READ_AND_WRITE,
        "CU_MEM_ALLOCATION_TYPE_PINNED": cuda_memory.PINNED,
        "sizeof(CUmemAccessDesc)": ctypes.sizeof(cuda_memory.AccessDescription),
        "sizeof(CUmemAllocationProp)": ctypes.sizeof(cuda_memory.AllocationProperties),
        "offsetof(CUmemAllocationProp, requestedHandleTypes)": (
            cuda_memory.AllocationProperties.handle_types.offset
        ),
        "offsetof(CUmemAllocationProp, location)": cuda_memory.AllocationProperties.location.offset,
    }
    lines = ["#include <cstddef>", f'#include "{header}"']
    for name, number in numbers.items():
        lines.append(f'static_assert((long long)({name}) == {number}, "{name}");')
    source = tmp_path / "numbers.cpp"
    source.write_text("\n".join(lines))
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
