"""Compiles every CUDA kernel for every GPU generation that the compiler here supports, warnings as
errors, and prints registers and stack.

NVRTC (dev extra or CUDA toolkit), which also compiles at run time, has no headers: what passes
needs only built-in ones. Else nvcc; without either, a message. Registers and stack come from the
machine code.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("proto", "sparse", "client", "server", "connector_vllm")
ARCHITECTURES = (70, 80, 90, 100)
"""Compute capabilities of Volta, Ampere, Hopper and Blackwell."""
OPTIONS = ("-std=c++17",)

_OLD_DEVICE = "nvrtc: warning: Architectures prior to"
"""A warning about old GPUs, not the source: ignored."""


@dataclass(frozen=True)
class Usage:
    """stack_bytes: per thread, for spilled registers and arrays with indices unknown at compile
    time."""

    kernel: str
    registers: int
    stack_bytes: int


@dataclass(frozen=True)
class Loop:
    """A loop with products on tensor cores."""

    kernel: str
    instructions: int
    products: int


class CompileError(Exception):
    """The message has the compiler's output."""


class Nvrtc:
    """The library, called by its C interface."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(known)
        self.architectures = tuple(arch for arch in ARCHITECTURES if arch in known)

    def compile(self, source: Path, architecture: int, instances: tuple[str, ...]) -> bytes:
        """Raises CompileError on an error or a warning."""
        program = ctypes.c_void_p()
        create = self._library.nvrtcCreateProgram
        self._checked(
            create(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
        )
        try:
            for instance in instances:
                self._checked(self._library.nvrtcAddNameExpression(program, instance.encode()))
            options = [*OPTIONS, f"-arch=sm_{architecture}", f"-I{source.parent}"]
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), words)
            log = (
                self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                .rstrip(b"\0\n")
                .decode(errors="replace")
            )
            if status != 0 or "warning" in log.replace(_OLD_DEVICE, ""):
                raise CompileError(log or self._library.nvrtcGetErrorString(status).decode())
            return self._text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _checked(self, status: int) -> None:
        if status != 0:
            raise CompileError(self._library.nvrtcGetErrorString(status).decode())

    def _text(self, program: ctypes.c_void_p, size_call: str, call: str) -> bytes:
        size = ctypes.c_size_t()
        self._checked(getattr(self._library, size_call)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._checked(getattr(self._library, call)(program, buffer))
        return buffer.raw


class Nvcc:
    """Compiles only instances that the source itself names."""

    def __init__(self, path: str) -> None:
        self._path = path
        text = subprocess.run(
            [path, "--list-gpu-code"], capture_output=True, text=True, check=True
        ).stdout
        known = {int(word) for word in re.findall(r"sm_(\d+)\b", text)}
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True
        ).stdout
        self.name = f"nvcc {(re.search(r'release ([0-9.]+)', version) or ['', '?'])[1]}"
        self.architectures = tuple(arch for arch in ARCHITECTURES if arch in known)

    def compile(self, source: Path, architecture: int, instances: tuple[str, ...]) -> bytes:
        """Raises CompileError on an error or a warning."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernel.cubin"
            command = [
                self._path,
                "-std=c++17",
                "-cubin",
                f"-arch=sm_{architecture}",
                "-Werror",
                "all-warnings",
                str(source),
                "-o",
                str(output),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise CompileError(done.stderr + done.stdout)
            return output.read_bytes()


def find_compiler() -> Nvrtc | Nvcc | None:
    """NVRTC of a wheel, else of the system, else nvcc."""
    for path in (*_wheels(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return Nvrtc(path)
        except OSError:
            continue
    nvcc = shutil.which("nvcc")
    return None if nvcc is None else Nvcc(nvcc)


def _wheels() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else (spec.submodule_search_locations or ()):
        for library in sorted(Path(folder).rglob("libnvrtc.so.1[0-9]")):
            # NVRTC opens it by name without a path, which needs it loaded already.
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=os.RTLD_GLOBAL | os.RTLD_LAZY)
            yield str(library)


def instances_of(source: Path) -> tuple[str, ...]:
    """Lines such as `// instance: score<2, 64>` name them."""
    return tuple(re.findall(r"^// instance: (.+?)\s*$", source.read_text(), re.MULTILINE))


_REGISTERS, _STACK_BYTES = 0x2F, 0x12
"""In .nv.info: each has a symbol's number (the kernel) and a value."""
_SYMBOL_BYTES = 24


def usages(cubin: bytes) -> list[Usage]:
    """Of each kernel in a cubin, an ELF file; format by `cuobjdump --dump-elf`."""
    sections = _sections(cubin)
    registers, stacks = (
        _attribute(cubin, sections, attribute) for attribute in (_REGISTERS, _STACK_BYTES)
    )
    kernels = sorted(name.removeprefix(".text.") for name in sections if name.startswith(".text."))
    return [Usage(kernel, registers.get(kernel, 0), stacks.get(kernel, 0)) for kernel in kernels]


_INSTRUCTION_BYTES, _BRANCH, _PRODUCT = 16, 0x947, 0x237
"""An instruction's low 12 bits are its operation: BRA, IMMA."""


def tensor_loops(cubin: bytes) -> list[Loop]:
    """Of sm_90 and newer; instructions as `nvdisasm` shows them. Counts a loop's rare parts too."""
    found = []
    for section, (start, size) in _sections(cubin).items():
        if not section.startswith(".text."):
            continue
        codes = [
            _number(cubin, at, _INSTRUCTION_BYTES)
            for at in range(start, start + size, _INSTRUCTION_BYTES)
        ]
        for at, code in enumerate(codes):
            if code & 0xFFF != _BRANCH:
                continue
            # In words of 4 bytes, from the next instruction on: 48 bits, and 8 lower ones.
            offset = (code >> 34 & (1 << 48) - 1) << 8 | (code >> 16 & 0xFF)
            target = at + 1 + (offset - (offset >> 55 << 56)) // (_INSTRUCTION_BYTES // 4)
            body = codes[target : at + 1]
            products = sum(one & 0xFFF == _PRODUCT for one in body)
            if products:
                found.append(Loop(section.removeprefix(".text."), len(body), products))
    return found


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Start and size of each section, by name."""
    start, size, count, names_at = (
        _number(elf, 40, 8),
        _number(elf, 58, 2),
        _number(elf, 60, 2),
        _number(elf, 62, 2),
    )
    names = _number(elf, start + names_at * size + 24, 8)
    headers = [start + i * size for i in range(count)]
    return {
        _name(elf, names + _number(elf, at, 4)): (
            _number(elf, at + 24, 8),
            _number(elf, at + 32, 8),
        )
        for at in headers
    }


def _attribute(elf: bytes, sections: dict[str, tuple[int, int]], attribute: int) -> dict[str, int]:
    at, size = sections[".nv.info"]
    symbols, names = sections[".symtab"][0], sections[".strtab"][0]
    end, found = at + size, {}
    while at < end:
        is_sized = elf[at] == 4
        if is_sized and elf[at + 1] == attribute:
            symbol = symbols + _number(elf, at + 4, 4) * _SYMBOL_BYTES
            found[_name(elf, names + _number(elf, symbol, 4))] = _number(elf, at + 8, 4)
        at += 4 + (_number(elf, at + 2, 2) if is_sized else 0)
    return found


def _name(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode()


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")


def check(compiler: Nvrtc | Nvcc, source: Path) -> list[str] | None:
    """A line per kernel. None, with a message, if the compiler refuses the source."""
    found: dict[str, list[str]] = {}
    for architecture in compiler.architectures:
        try:
            for usage in usages(compiler.compile(source, architecture, instances_of(source))):
                stack = f" and {usage.stack_bytes} bytes of stack" if usage.stack_bytes else ""
                found.setdefault(usage.kernel, []).append(
                    f"{usage.registers}{stack} (sm_{architecture})"
                )
        except CompileError as error:
            print(
                f"{source.relative_to(ROOT)}: {compiler.name} refuses it for "
                f"sm_{architecture}\n{error}"
            )
            return None
    return [f"{kernel}: registers {', '.join(each)}" for kernel, each in found.items()]


def main() -> int:
    sources = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.cu"))
    compiler = find_compiler()
    if compiler is None:
        where = (
            ""
            if platform.machine() == "x86_64"
            else f" (none is installed by itself on {platform.machine()})"
        )
        print(f"kernels: neither NVRTC nor nvcc here, {len(sources)} sources not compiled{where}")
        return 0
    failed = False
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, texts in zip(sources, pool.map(partial(check, compiler), sources), strict=True):
            failed |= texts is None
            for text in texts or ():
                print(f"{source.relative_to(ROOT)}: {text}")
    print(
        f"kernels: {len(sources)} sources, {compiler.name}, "
        f"sm_{', sm_'.join(map(str, compiler.architectures))}; g++ {_gpp()}"
    )
    return int(failed)


def _gpp() -> str:
    return (
        "runs them on the CPU in the tests"
        if shutil.which("g++")
        else "is missing: tests that run them on the CPU skip"
    )


if __name__ == "__main__":
    sys.exit(main())
