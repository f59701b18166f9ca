"""Allocates device arrays and launches the kernels of this folder.

A launch is queued on a stream. NVRTC compiles a kernel at its first launch, CuPy caches it on
disk. `CupyDevice.compile` compiles all in advance: a CUDA graph can't be captured meanwhile.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hotkv_proto import extras
from hotkv_proto.errors import HotKVError, Reason

FOLDER = Path(__file__).parent
TOKEN_KERNELS = {(2, 1), (2, 2), (2, 3), (2, 4), (3, 1), (3, 2)}
"""(bits of a code, groups of four lines) for which `score_tokens` is compiled; lines follow from
the head size."""
SOURCES: dict[str, tuple[str, ...]] = {
    "build.cu": ("build_tokens",),
    "score.cu": (
        "prepare_queries",
        "score_parts",
        *(f"score_tokens<{bits}, {groups}>" for bits, groups in sorted(TOKEN_KERNELS)),
    ),
    "choose.cu": (
        "plan_step",
        "sum_masses",
        "weigh",
        "choose",
        "search_round",
        "count_chosen",
        "write_chosen",
    ),
    "hotset.cu": ("hot_grow", "hot_step", "hot_table", "pull_blocks", "pull_pages"),
    "attend.cu": ("attend",),
    "resident.cu": ("find_states", "locate_keys", "stage_pages"),
}
"""Kernels by source file."""
OPTIONS = ("--std=c++17",)

Scalar = np.int32 | np.int64 | np.uint32 | np.float32 | np.float64
Host = npt.NDArray[np.generic]


class Array(Protocol):
    """Device memory of CuPy or torch; in tests without a GPU an array of numpy."""

    @property
    def shape(self) -> Sequence[int]: ...


Argument = Array | Scalar | int | None
"""An int is an address, None the address 0."""


class Device(Protocol):
    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array: ...

    def write(self, target: Array, start: Sequence[int], values: Host) -> None:
        """target[start : start + values.shape] = values, after the work on the stream. Blocks
        until the caller may change `values`."""

    def read(self, source: Array) -> Host:
        """A copy, after the work on the stream."""

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Queues a kernel.

        grid: thread blocks along each axis; `threads`: of one.
        args: numbers must be numpy scalars of the types that the kernel declares.
        shared_bytes: dynamic, of a thread block.
        """


def source_of(kernel: str) -> str:
    return next(source for source, kernels in SOURCES.items() if kernel in kernels)


def source_text(source: str) -> str:
    """With the header in place of its `#include`: CuPy's cache goes by the source text, and
    would not notice a changed header."""
    header = (FOLDER / "common.cuh").read_text().replace("#pragma once\n", "")
    return (FOLDER / source).read_text().replace('#include "common.cuh"\n', header)


def address_of(argument: Argument) -> int:
    """0 for None."""
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    # In some versions of torch the array interface does not support bfloat16.
    if getattr(argument, "is_cuda", False):
        return int(argument.data_ptr())  # type: ignore[attr-defined]
    interface = getattr(argument, "__cuda_array_interface__", None)
    if interface is None:
        raise HotKVError(
            Reason.INVALID_FIELD,
            (
                f"{type(argument).__name__} is no device memory; pass a CUDA tensor, a CuPy "
                "array or an address"
            ),
        )
    return int(interface["data"][0])


class _Module(Protocol):
    def get_function(self, name: str) -> Callable[..., None]: ...


def cupy_module() -> ModuleType:
    """Raises an ImportError that names the package to install."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"sparse decode on CUDA needs CuPy: {extras.advice('cuda12')}, or of CUDA 13"
        ) from error
    module: ModuleType = cupy
    return module


@contextlib.contextmanager
def _signals_still_wake() -> Iterator[None]:
    """Undoes what NVRTC 12 and 13.0 do to SIGINT and SIGTERM: they restore handlers with C's
    `signal`, which sets SA_RESTART. A signal then does not wake a main thread that waits for a
    lock, as in an idle vLLM engine, and Python never runs the handler."""
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.siginterrupt(number, True)


class CupyDevice:
    """A CUDA device, through CuPy.

    number: CUDA's.
    stream: CUDA's handle (torch: `torch.cuda.current_stream().cuda_stream`).
    """

    def __init__(self, number: int = 0, stream: int = 0) -> None:
        self._cupy = cupy_module()
        self._number = number
        self._modules: dict[str, _Module] = {}
        self._kernels: dict[str, Callable[..., None]] = {}
        self.use_stream(stream)

    def __repr__(self) -> str:
        return f"CupyDevice({self._number}, {len(self._kernels)} kernels loaded)"

    def use_stream(self, stream: int) -> None:
        """For later calls."""
        self._stream = self._cupy.cuda.ExternalStream(stream, self._number)

    def compile(self) -> None:
        """Takes seconds if CuPy's cache is empty."""
        for kernels in SOURCES.values():
            for kernel in kernels:
                self._kernel(kernel)

    def zeros(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        with self._cupy.cuda.Device(self._number), self._stream:
            array: Array = self._cupy.zeros(tuple(shape), dtype)
        return array

    def write(self, target: Array, start: Sequence[int], values: Host) -> None:
        place = tuple(slice(at, at + size) for at, size in zip(start, values.shape, strict=True))
        # CuPy compiles its own kernels for some copies.
        with self._cupy.cuda.Device(self._number), self._stream, _signals_still_wake():
            self._cupy.asarray(target)[place] = self._cupy.asarray(values)
            self._stream.synchronize()

    def read(self, source: Array) -> Host:
        with self._cupy.cuda.Device(self._number), self._stream:
            values: Host = self._cupy.asnumpy(self._cupy.asarray(source))
            self._stream.synchronize()
        return values

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        values = [
            arg if isinstance(arg, np.generic) else np.uint64(address_of(arg)) for arg in args
        ]
        with self._cupy.cuda.Device(self._number), self._stream:
            self._kernel(kernel)(
                (*grid, 1, 1)[:3], (threads, 1, 1), tuple(values), shared_mem=shared_bytes
            )

    def _kernel(self, kernel: str) -> Callable[..., None]:
        if kernel not in self._kernels:
            source = source_of(kernel)
            with self._cupy.cuda.Device(self._number), _signals_still_wake():
                if source not in self._modules:
                    templates = [name for name in SOURCES[source] if "<" in name] or None
                    code = source_text(source)
                    self._modules[source] = self._cupy.RawModule(
                        code=code, options=OPTIONS, name_expressions=templates
                    )
                self._kernels[kernel] = self._modules[source].get_function(kernel)
        return self._kernels[kernel]
