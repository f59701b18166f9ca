"""Runs CUDA kernels on the CPU, compiled as C++ with `cuda_on_cpu.h`, which lists the differences
from CUDA.

Kernels are found by `__global__ void`; instances of templates must be named. A kernel's pointer
takes an array or an address; a numpy scalar must have its parameter's size. A module runs one
launch at a time.
"""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="kernels run on the CPU where g++ is installed"
)

Argument = np.ndarray | np.generic | int | float
Size = int | Sequence[int]

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
CACHE = Path(__file__).with_name("__pycache__")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
FLAGS += ["-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-Wall", "-Wno-unused-function", "-Wno-sign-compare"]
_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
KERNEL = re.compile(
    rf'(template\s*<[^;{{]*?>\s*)?(?:extern\s+"C"\s+)?__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\('
)
_ALIGNED = r"(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)?"
DYNAMIC_SHARED = re.compile(
    rf"extern\s+__shared__\s+{_ALIGNED}([\w:]+(?:\s+[\w:]+)*?)\s+(\w+)\s*\[\s*\]\s*;"
)
INTEGERS = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


class LaunchError(Exception):
    """The launch is undefined in CUDA, or would never end."""


@dataclass(frozen=True)
class Module:
    library: ctypes.CDLL
    names: tuple[str, ...]
    lock: threading.Lock

    def launch(
        self,
        name: str,
        grid: Size,
        block: Size,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        """Runs a kernel to its end. Raises LaunchError.

        grid, block: number of blocks, and of threads per block.
        shared_bytes: dynamic shared memory per block.
        seed: 0: threads and blocks in order; otherwise in a random order.
        """
        grid3, block3 = _three(grid), _three(block)
        if name not in self.names:
            raise ValueError(f"no kernel {name!r}; instances of templates are named to compile()")
        if min(grid3) < 1 or min(block3) < 1 or int(np.prod(block3)) > 1024:
            raise ValueError(f"grid {grid3}, block {block3}: from 1, at most 1024 threads a block")
        if not 0 <= shared_bytes <= 227 << 10:
            raise ValueError(f"shared_bytes {shared_bytes}: a block has at most 227 KiB")
        index = self.names.index(name)
        pairs = zip(self._kinds(index), args, strict=True)
        values = [_value(f"{name}: argument {i}", kind, arg) for i, (kind, arg) in enumerate(pairs)]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        function = getattr(self.library, f"cuda_on_cpu_launch_{index}")
        function.restype = ctypes.c_char_p
        uint3 = ctypes.c_uint * 3
        sizes = ctypes.c_size_t(shared_bytes), ctypes.c_uint(seed & 0xFFFFFFFF)
        with self.lock:
            error = function(uint3(*grid3), uint3(*block3), pointers, *sizes)
        if error is not None:
            raise LaunchError(f"{name}: {error.decode()}")

    def _kinds(self, index: int) -> list[str]:
        buffer = ctypes.create_string_buffer(4096)
        getattr(self.library, f"cuda_on_cpu_describe_{index}")(buffer)
        return buffer.value.decode().split()


def compile(source: Path | str, names: Sequence[str] = ()) -> Module:
    """source: a .cu file, whose folder is searched for includes, or text.
    names: instances of templates, such as `score<2, 64>`.
    """
    folder = source.parent if isinstance(source, Path) else None
    text = source.read_text() if isinstance(source, Path) else source
    return _compile(text, folder, tuple(names))


@functools.cache
def _compile(text: str, folder: Path | None, names: tuple[str, ...]) -> Module:
    """CACHE keeps libraries for later processes."""
    all_names = (*(match[2] for match in KERNEL.finditer(text) if not match[1]), *names)
    entries = map(_entry, range(len(all_names)), all_names)
    files = {"cuda_fp16.h": "", "cuda_bf16.h": ""}
    for header in sorted(folder.glob("*.cuh")) if folder else ():
        files[header.name] = _on_cpu(header.read_text())
    files["kernels.cpp"] = "\n".join([f'#include "{HEADER}"', "#line 1", _on_cpu(text), *entries])
    key = repr((HEADER.read_text(), FLAGS, files)).encode()
    library = CACHE / f"cuda_on_cpu.{hashlib.sha256(key).hexdigest()}.so"
    if not library.exists():
        _build(files, library)
    return Module(ctypes.CDLL(str(library)), all_names, threading.Lock())


def _build(files: dict[str, str], library: Path) -> None:
    assert COMPILER is not None
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        command = [COMPILER, *FLAGS, "-I.", "kernels.cpp", "-o", "kernels.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"g++ refused:\n{done.stderr}")
        (Path(folder) / "kernels.so").replace(library)


def _on_cpu(text: str) -> str:
    text = DYNAMIC_SHARED.sub(
        r"[[maybe_unused]] static \1* const \2 = (\1*)cuda_on_cpu::dynamic_shared;", text
    )
    return re.sub(r'extern\s+"C"\s+(?=__global__)', "", text)


def _entry(index: int, name: str) -> str:
    exported = 'extern "C" __attribute__((visibility("default")))'
    parameters = (
        "const unsigned* grid, const unsigned* block, void** args, size_t shared, unsigned seed"
    )
    return (
        f"{exported} const char* cuda_on_cpu_launch_{index}({parameters}) "
        f"{{ return cuda_on_cpu::launch(&{name}, grid, block, args, shared, seed); }}\n"
        f"{exported} void cuda_on_cpu_describe_{index}(char* out) {{ "
        f"cuda_on_cpu::describe(&{name}, out); }}"
    )


def _three(size: Size) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


def _value(
    what: str, kind: str, arg: Argument
) -> "ctypes._SimpleCData[Any] | ctypes.Array[ctypes.c_char]":
    letter, size = kind[0], int(kind[1:])
    if letter == "p" and isinstance(arg, (np.ndarray, int, np.integer)):
        return ctypes.c_uint64(arg.ctypes.data if isinstance(arg, np.ndarray) else int(arg))
    if letter != "p" and isinstance(arg, np.generic) and arg.dtype.itemsize != size:
        raise TypeError(f"{what} has {arg.dtype.itemsize} bytes, the parameter {size}")
    if letter == "i" and isinstance(arg, (int, np.integer, np.bool_)):
        return INTEGERS[size](int(arg))
    if letter == "f" and isinstance(arg, (int, float, np.floating)):
        return (ctypes.c_float if size == 4 else ctypes.c_double)(float(arg))
    if letter == "s" and isinstance(arg, np.generic):
        return ctypes.create_string_buffer(arg.tobytes(), size)
    raise TypeError(f"{what} is {type(arg).__name__}; the parameter's kind is {kind!r}")
