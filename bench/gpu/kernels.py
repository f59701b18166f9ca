"""Where benchmarks run sparse decode's CUDA kernels: the first GPU, or the CPU
(`tests.device.cuda_on_cpu`), each for arrays (CuPy, numpy) and for torch's tensors. The CPU does
work at once: its times mean nothing."""

import gc
import sys
from collections.abc import Callable
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotkv_sparse.cuda.device import Array, CupyDevice, Device, address_of

U8 = npt.NDArray[np.uint8]


class CudaArrays:
    """Makes a new stream the current one."""

    is_made_up = False
    xp: Any
    """The module of arrays: CuPy, numpy or torch."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        device = CupyDevice(0, self.stream.ptr)
        device.compile()
        self.device: Device = device

    def address(self, array: Array) -> int:
        return address_of(array)

    def milliseconds(self, run: Callable[[], None]) -> float:
        """Time of the work that `run` queues."""
        start, end = (self.xp.cuda.Event() for _ in range(2))
        start.record(self.stream)
        run()
        end.record(self.stream)
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(start, end))

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Calls replay a CUDA graph of the work that `run` queues."""
        self.stream.begin_capture()
        run()
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)

    def pinned(self, num_bytes: int) -> U8:
        return np.frombuffer(self.xp.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    def copy_in(self, target: Any, source: U8) -> None:
        """Copies by CUDA's plain call."""
        target.data.copy_from_host_async(source.ctypes.data, source.nbytes, self.stream)

    def copy(self, target: Any, source: Any) -> None:
        """Copies within the device."""
        target.data.copy_from_device_async(source.data, source.nbytes, self.stream)


class _Host:
    """The CPU in place of a GPU. Ends the program without g++."""

    is_made_up = True

    def __init__(self) -> None:
        from tests.device.cuda_on_cpu import COMPILER

        if COMPILER is None:
            raise SystemExit("kernels run on the CPU where g++ is installed")
        sys.modules.setdefault("cupy", _made_up_cupy())

    def milliseconds(self, run: Callable[[], None]) -> float:
        start_s = perf_counter()
        run()
        return 1e3 * (perf_counter() - start_s)

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class HostArrays(_Host):
    """As `CudaArrays`, with numpy."""

    def __init__(self) -> None:
        from tests.sparse.cuda_support import CpuDevice

        super().__init__()
        self.xp: Any = np
        self.device: Device = CpuDevice(1)  # type: ignore[assignment]

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def pinned(self, num_bytes: int) -> U8:
        return np.zeros(num_bytes, np.uint8)

    def copy_in(self, target: Any, source: U8) -> None:
        np.copyto(target.view(np.uint8), source)

    def copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source)


def array_kernels(made_up: bool) -> "CudaArrays | HostArrays":
    """Ends the program without CuPy or, if `made_up`, g++."""
    if made_up:
        return HostArrays()
    try:
        return CudaArrays()
    except ImportError:
        raise SystemExit(
            "this benchmark needs CuPy and a GPU; pip install cupy-cuda12x or cupy-cuda13x, or "
            "--made-up runs the same without, for its bytes and not for its times"
        ) from None


class CudaTensors:
    """As `CudaArrays`, with torch, as engines use it."""

    is_made_up = False

    def __init__(self) -> None:
        import torch

        from hotkv_sparse.vllm.cuda.torch_device import TorchDevice

        self.xp, self.place = torch, torch.device("cuda", 0)
        device = TorchDevice(self.place)
        device.compile()
        self.device: Device = device

    def address(self, array: Array) -> int:
        return address_of(array)

    def milliseconds(self, run: Callable[[], None]) -> float:
        start, end = (self.xp.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        # torch captures only what has run once on a separate stream.
        stream = self.xp.cuda.Stream(self.place)
        stream.wait_stream(self.xp.cuda.current_stream(self.place))
        with self.xp.cuda.stream(stream):
            run()
        self.xp.cuda.current_stream(self.place).wait_stream(stream)
        graph = self.xp.cuda.CUDAGraph()
        with self.xp.cuda.graph(graph):
            run()
        return lambda: graph.replay()

    def clear(self) -> None:
        """Frees what torch has cached."""
        gc.collect()
        self.xp.cuda.synchronize()
        self.xp.cuda.empty_cache()


class HostTensors(_Host):
    """As `CudaTensors`, on the CPU."""

    def __init__(self) -> None:
        import torch

        from tests.sparse.cuda_support import CpuTensors

        super().__init__()
        self.xp, self.place = torch, torch.device("cpu")
        self.device: Device = CpuTensors(1)

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    def clear(self) -> None:
        pass


def tensor_kernels(made_up: bool) -> "CudaTensors | HostTensors":
    """Ends the program without a GPU or, if `made_up`, g++."""
    import torch

    if made_up:
        return HostTensors()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --made-up runs the same without one, for its bytes")
    return CudaTensors()


def _made_up_cupy() -> ModuleType:
    """What `MappedArena` uses of CuPy, for a device that can read in every way."""

    class Device:
        def __init__(self, number: int) -> None:
            pass

        def __enter__(self) -> "Device":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def synchronize(self) -> None:
            pass

    runtime = SimpleNamespace(
        deviceGetAttribute=lambda attribute, device: 1,
        hostRegister=lambda address, num_bytes, flags: None,
        hostUnregister=lambda address: None,
        CUDARuntimeError=RuntimeError,
    )
    module: Any = ModuleType("cupy")
    module.cuda = SimpleNamespace(Device=Device, runtime=runtime)
    return module  # type: ignore[no-any-return]
