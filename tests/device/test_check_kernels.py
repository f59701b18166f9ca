"""Tests the tool `check_kernels`: good kernels compile, warnings and errors are refused,
registers and stack are read from machine code."""

from pathlib import Path

import pytest

from tools import check_kernels

COMPILER = check_kernels.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="neither NVRTC nor nvcc here")


def compiled(folder: Path, text: str) -> list[check_kernels.Usage]:
    assert COMPILER is not None
    source = folder / "kernel.cu"
    source.write_text(text)
    return check_kernels.usages(COMPILER.compile(source, 80, check_kernels.instances_of(source)))


def test_registers_and_stack(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void plain(int* out) { out[threadIdx.x] = 1; }
    extern "C" __global__ void indexed(int* out, int n) {
      int kept[64];
      for (int i = 0; i < 64; ++i) kept[i] = out[i] * i;
      for (int i = 0; i < n; ++i) out[i] = kept[(out[i] ^ i) & 63];
    }
    """
    indexed, plain = compiled(tmp_path, text)
    assert (plain.kernel, indexed.kernel) == ("plain", "indexed")
    assert 2 <= plain.registers < 32 and plain.stack_bytes == 0
    assert indexed.stack_bytes == 256


@pytest.mark.parametrize(
    "text", ["__global__ void k(int* o) { int unused; }", "__global__ void k(int* o) { o[0] = 1 }"]
)
def test_warnings_and_errors_refuse(tmp_path: Path, text: str) -> None:
    with pytest.raises(check_kernels.CompileError, match=r"kernel\.cu\(1\)"):
        compiled(tmp_path, text)


def test_loops_of_tensor_products(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void loop(int* out, int n) {
      int a = out[threadIdx.x], d[4] = {};
    #pragma unroll 1
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < 3; ++j)
          asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, "
              "{%4, %4, %4, %4}, {%4, %4}, {%0, %1, %2, %3};"
              : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a));
      }
      out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
    }
    """
    assert COMPILER is not None
    source = tmp_path / "kernel.cu"
    source.write_text(text)
    (loop,) = check_kernels.tensor_loops(COMPILER.compile(source, 90, ()))
    assert (loop.kernel, loop.products) == ("loop", 3) and 3 < loop.instructions < 30
