"""A fake CUDA driver library (`fake_driver.cpp`) and a fake CuPy, which record the calls of
`CupyRuntime`."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

from tests.device.cuda_on_cpu import COMPILER

SOURCE = Path(__file__).with_name("fake_driver.cpp")


class FakeDriver:
    """batch: version of cuMemcpyBatchAsync: 0 none, 1 CUDA 12.8, 2 CUDA 13."""

    def __init__(self, folder: Path, batch: int = 2) -> None:
        self.path = str(folder / "libcuda.so.1")
        Path(self.path).write_bytes(_built(batch))
        self._library = ctypes.CDLL(self.path)
        self._library.fake_calls.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """Since the last call: function, the thread's current context, arguments."""
        return self._library.fake_calls().decode().splitlines()

    def fail(self, name: str, status: int) -> None:
        self._library.fake_fail(name.encode(), status)

    def set_attribute(self, attribute: int, value: int) -> None:
        self._library.fake_attribute(attribute, value)

    def set_devices(self, count: int) -> None:
        self._library.fake_devices(count)


def build(library: Path, *flags: str) -> None:
    assert COMPILER is not None
    fixed = ["-std=c++17", "-O1", "-fPIC", "-shared", "-w"]
    command = [COMPILER, *fixed, *flags, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)


@functools.cache
def _built(batch: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake.so"
        build(library, f"-DBATCH={batch}")
        return library.read_bytes()


class CompileException(Exception): ...


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaErrorFake: {status}")
        self.status = status


def fake_cupy() -> ModuleType:
    """The parts of CuPy 13 and 14 that `CupyRuntime` uses. `log` records calls; each exception
    in `errors` makes a compilation fail."""
    log: list[tuple[object, ...]] = []
    errors: list[Exception] = []
    at = [0]

    def set_device(device: int) -> None:
        at[0] = device
        log.append(("setDevice", device))

    class RawModule:
        def __init__(
            self, code: str | None = None, *, options: tuple[str, ...] = (), backend: str = "nvrtc"
        ) -> None:
            assert code is not None and "copy_runs" in code
            log.append(("RawModule", at[0], options, backend))

        def get_function(self, name: str) -> SimpleNamespace:
            if errors:
                raise errors.pop(0)
            log.append(("get_function", name))
            return SimpleNamespace(kernel=SimpleNamespace(ptr=0x50000000000 + at[0]))

    module = ModuleType("cupy")
    runtime = SimpleNamespace(setDevice=set_device, CUDARuntimeError=CUDARuntimeError)
    vars(module).update(
        cuda=SimpleNamespace(
            runtime=runtime, compiler=SimpleNamespace(CompileException=CompileException)
        ),
        RawModule=RawModule,
        log=log,
        errors=errors,
    )
    return module
