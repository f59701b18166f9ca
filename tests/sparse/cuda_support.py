"""Runs the CUDA kernels of sparse decode without a GPU: `CpuDevice` is a `Device` over numpy
arrays and `tests.device.cuda_on_cpu`."""

import functools
import mmap
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse.cuda.device import FOLDER, SOURCES, Argument, Host, source_of
from hotkv_sparse.cuda.hotsets import CudaHotSets
from hotkv_sparse.cuda.mapped_arena import REGISTER_FLAGS
from hotkv_sparse.hotset import SlotState
from tests.device import cuda_on_cpu

needs_compiler = cuda_on_cpu.needs_compiler


@functools.cache
def module(source: str) -> cuda_on_cpu.Module:
    return cuda_on_cpu.compile(
        FOLDER / source, names=[name for name in SOURCES[source] if "<" in name]
    )


class CpuDevice:
    """seed: order of a kernel's threads, another for each launch; 0: by number."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
        """The address is a multiple of 32."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 32
        return memory[start : start + size].view(dtype).reshape(tuple(shape))

    def write(self, target: np.ndarray, start: Sequence[int], values: Host) -> None:
        sizes = zip(start, values.shape, strict=True)
        target[tuple(slice(at, at + size) for at, size in sizes)] = values

    def read(self, source: np.ndarray) -> Host:
        return source.copy()

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        self.seed += self.seed > 0
        values = [np.uint64(0) if arg is None else arg for arg in args]
        source = module(source_of(kernel))
        source.launch(kernel, tuple(grid), threads, values, shared_bytes, self.seed)


class CpuTensors(CpuDevice):
    """With torch tensors as memory, as on a real device."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        import torch

        return torch.from_numpy(super().zeros(shape, dtype))

    def write(self, target: Any, start: Sequence[int], values: Host) -> None:
        super().write(target.numpy(), start, values)

    def read(self, source: Any) -> Host:
        return source.numpy().copy()

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        plain = [arg.data_ptr() if hasattr(arg, "data_ptr") else arg for arg in args]
        super().launch(kernel, grid, threads, plain, shared_bytes)


PAGE = mmap.PAGESIZE


class CUDARuntimeError(RuntimeError): ...


class Cuda:
    """The module `cupy`, recording calls. Registering twice, or unregistering what is not, raises.

    attributes: those that are 1; others are 0.
    beyond: bytes that can be registered.
    flags: what each `hostRegister` must have.
    """

    def __init__(
        self, *attributes: int, beyond: int = 1 << 60, flags: int = REGISTER_FLAGS
    ) -> None:
        self.attributes, self.beyond, self.flags = set(attributes), beyond, flags
        self.calls: list[tuple[Any, ...]] = []
        self.registered: dict[int, int] = {}
        self.current: int | None = None
        self.module: Any = ModuleType("cupy")
        self.module.cuda = SimpleNamespace(Device=self._device, runtime=self)
        self.CUDARuntimeError = CUDARuntimeError

    def _device(self, number: int) -> "Cuda._Device":
        return Cuda._Device(self, number)

    class _Device:
        def __init__(self, cuda: "Cuda", number: int) -> None:
            self.cuda, self.number = cuda, number

        def __enter__(self) -> "Cuda._Device":
            self.cuda.current = self.number
            return self

        def __exit__(self, *_: object) -> None:
            self.cuda.current = None

        def synchronize(self) -> None:
            self.cuda.calls.append(("synchronize", self.number))

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return int(attribute in self.attributes)

    def hostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        assert address % PAGE == num_bytes % PAGE == 0 and num_bytes > 0
        assert flags == self.flags and self.current == 1
        for at, size in self.registered.items():
            if address < at + size and at < address + num_bytes:
                raise CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        if sum(self.registered.values()) + num_bytes > self.beyond:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.registered[address] = num_bytes
        self.calls.append(("register", address, num_bytes))

    def hostUnregister(self, address: int) -> None:
        assert self.current == 1
        if self.registered.pop(address, None) is None:
            raise CUDARuntimeError("cudaErrorHostMemoryNotRegistered")
        self.calls.append(("unregister", address))


def place(
    hot: CudaHotSets, blocks: npt.NDArray[np.int32], capacity_blocks: int, num_known: int
) -> None:
    """Writes sequence 0's hot set between two steps.

    blocks: in the slots 0, 1, …, most recently used first.
    num_known: blocks of the context; `grow` gives slots to later ones.
    """
    device, shape, count = hot._device, hot._workspace.shape, len(blocks)
    state = np.zeros((1, shape.num_slots), np.int8)
    block_of = np.full((1, shape.num_slots), -1, np.int32)
    used_at = np.zeros((1, shape.num_slots), np.int32)
    slot_of = np.full((1, shape.max_blocks), -1, np.int32)
    state[0, :count], block_of[0, :count] = int(SlotState.MAPPED), blocks
    used_at[0, :count] = np.arange(count, 0, -1)
    slot_of[0, blocks] = np.arange(count)
    device.write(hot.state, (0, 0), state)
    device.write(hot.block_of, (0, 0), block_of)
    device.write(hot.used_at, (0, 0), used_at)
    device.write(hot.slot_of, (0, 0), slot_of)
    for target, value in (
        (hot.capacities, capacity_blocks),
        (hot.clocks, count),
        (hot.known, num_known),
    ):
        device.write(target, (0,), np.array([value], np.int32))
