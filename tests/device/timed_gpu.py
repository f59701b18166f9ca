"""Runs servers and their real CUDA code on `timed_gpu.c`, a driver without a GPU whose copies take
time: `python -m tests.device.timed_gpu CONTROL run FLAGS...`.

Always true: engines' memory and events are those of `tests.doubles.device_memory`. No test
needs NVRTC: the driver's only kernel is the copy kernel.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hotkv_client import cuda_export
from hotkv_server.device import driver
from hotkv_server.device import start as device_start
from hotkv_server.device.cupy_runtime import CupyRuntime
from tests.doubles import with_constants
from tests.doubles.off_loop import while_serving

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_c_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")

SOURCE = Path(__file__).with_suffix(".c")
CACHE = Path(__file__).with_name("__pycache__")
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread")
MAX_CALLS, MAX_DEVICES, NAME_BYTES = 64, 16, 40
WAYS = ("load", "store", "inside")
HELD = ("backings", "reserved", "mapped")
ENGINE_CALLS = frozenset(cuda_export.CALLS) | {"cuMemCreate"}
"""Those of engines; the others are the server's."""
CONTROL = np.dtype(
    [
        ("num_devices", np.int64),
        ("bytes_per_s", np.float64),
        ("call_ns", np.int64),
        ("copy_ns", np.int64),
        ("register_ns", np.int64),
        ("moved_bytes", np.int64),
        ("first_ns", np.int64, len(WAYS)),
        ("last_ns", np.int64, len(WAYS)),
        ("held", np.int64, len(HELD)),
        (
            "calls",
            [
                ("name", f"S{NAME_BYTES}"),
                *((name, np.int64) for name in ("num_calls", "skip", "fail", "status", "is_held")),
            ],
            MAX_CALLS,
        ),
        *((name, np.int64, MAX_DEVICES) for name in ("places", "lost", "is_hung", "num_hung")),
    ]
)
"""`Control` of `timed_gpu.c`."""


@functools.cache
def library() -> Path:
    """Compiles the driver, or takes it from the cache."""
    key = hashlib.sha256(repr((SOURCE.read_text(), COMPILER, FLAGS)).encode()).hexdigest()
    found = CACHE / f"timed_gpu.{key}.so"
    if not found.exists():
        assert COMPILER is not None
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "timed_gpu.so"
            subprocess.run([COMPILER, *FLAGS, str(SOURCE), "-o", str(made)], check=True)
            made.replace(found)
    return found


class TimedGpus:
    """The devices of one server.

    bytes_per_s: in each direction.
    register_s: time of each registration, which locks the driver.
    moved_bytes: longer copies only take their time.
    call_s, copy_s: processor time of submitting, for a call and each copy of a batch.
    places: the machine's number of each device, by which engines name it.
    """

    def __init__(
        self,
        folder: Path,
        num_devices: int = 1,
        *,
        bytes_per_s: float = 53e9,
        register_s: float = 0.0,
        moved_bytes: int = 1 << 40,
        call_s: float = 1.5e-6,
        copy_s: float = 0.5e-6,
        places: Sequence[int] = range(MAX_DEVICES),
    ) -> None:
        self.path = folder / "timed-gpus"
        self._control = np.memmap(self.path, CONTROL, "w+", shape=(1,))[0]
        for name, value in {
            "num_devices": num_devices,
            "bytes_per_s": bytes_per_s,
            "call_ns": call_s * 1e9,
            "copy_ns": copy_s * 1e9,
            "register_ns": register_s * 1e9,
            "moved_bytes": moved_bytes,
        }.items():
            self._control[name] = value
        self._control["places"][: len(places)] = places
        self._names = sorted({*driver._CALLS, *driver._OPTIONAL_CALLS, *ENGINE_CALLS})
        for row, name in zip(self._control["calls"], self._names, strict=False):
            row["name"] = name.encode()

    def command(self, module: str = __name__) -> list[str]:
        """The caller appends the server's flags. `module`: runs `main`."""
        library()
        return [sys.executable, "-m", module, str(self.path), "run", "--copy.cuda", "on"]

    def num_calls(self, name: str) -> int:
        return int(self._row(name)["num_calls"])

    def fail(self, name: str, status: int, *, skip: int = 0, times: int = 1) -> None:
        """After `skip` calls, the next `times` calls return `status`."""
        row = self._row(name)
        row["status"], row["skip"] = status, skip
        row["fail"] = times

    @contextlib.contextmanager
    def held(self, *names: str) -> Iterator[None]:
        """These calls hang in the block."""
        for name in names:
            self._row(name)["is_held"] = 1
        try:
            yield
        finally:
            for name in names:
                self._row(name)["is_held"] = 0

    def virtual_memory(self) -> dict[str, int]:
        """Backings, and reserved and mapped ranges, that are left."""
        counts = dict(zip(HELD, self._control["held"].tolist(), strict=True))
        return {what: count for what, count in counts.items() if count}

    def lose(self, device: int, status: int = 700) -> None:
        """Until the server's end. `device`: the server's number."""
        self._control["lost"][device] = status

    @contextlib.contextmanager
    def hung(self, device: int) -> Iterator[None]:
        """All work and calls of the server's device hang in the block."""
        self._control["is_hung"][device] = 1
        try:
            yield
        finally:
            self._control["is_hung"][device] = 0

    def num_hung(self, device: int) -> int:
        """Calls and pieces of work that `hung` has held so far."""
        return int(self._control["num_hung"][device])

    def forget_times(self) -> None:
        self._control["first_ns"] = self._control["last_ns"] = 0

    def times_ns(self, way: str) -> tuple[int, int]:
        """When the first copy since `forget_times` was submitted and the last has ended, on the
        monotonic clock; 0 before."""
        at = WAYS.index(way)
        return int(self._control["first_ns"][at]), int(self._control["last_ns"][at])

    def _row(self, name: str) -> np.void:
        return self._control["calls"][self._names.index(name)]


def _cupy() -> ModuleType:
    """What `CupyRuntime` uses of CuPy."""

    class RawModule:
        def __init__(self, **options: object) -> None: ...

        def get_function(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(kernel=SimpleNamespace(ptr=1))

    class CUDARuntimeError(RuntimeError):
        status = 0

    class CompileException(Exception): ...

    module = ModuleType("cupy")
    vars(module).update(
        RawModule=RawModule,
        cuda=SimpleNamespace(
            runtime=SimpleNamespace(
                setDevice=lambda device: None, CUDARuntimeError=CUDARuntimeError
            ),
            compiler=SimpleNamespace(CompileException=CompileException),
        ),
    )
    return module


def runtime(control: Path) -> CupyRuntime:
    """For this process; only one."""
    sys.modules["cupy"] = _cupy()
    if ctypes.CDLL(str(library())).timed_open(os.fsencode(control)) != 0:
        raise OSError(f"timed_gpu: {control} can't be mapped")
    return CupyRuntime(library=str(library()))


def main() -> int:
    device_start.new_runtime = lambda: while_serving(runtime(Path(sys.argv[1])))
    return with_constants.run(sys.argv[2:])


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
