"""CUDA on the CPU finds faults that CUDA would only sometimes punish. That it computes as CUDA does
is seen by the tests of the kernels, which compare results with references."""

import numpy as np
import pytest

from tests.device import cuda_on_cpu

pytestmark = cuda_on_cpu.needs_compiler

SUM = """
extern "C" __global__ void __launch_bounds__(256)
    sum(const float* in, float* out, int n, float scale) {
  extern __shared__ float part[];
  __shared__ int seen;
  if (threadIdx.x == 0) seen = 0;
  float x = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    x += __ldg(in + i);
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  atomicAdd(&seen, 1);
  BARRIER
  if (threadIdx.x == 0) {
    float all = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) all += part[w];
    out[blockIdx.x] = seen == blockDim.x ? all * scale : -1.0f;
  }
}
"""


def test_a_missing_barrier_shows_under_some_seed() -> None:
    module = cuda_on_cpu.compile(SUM, {"BARRIER": ""})
    values, out = np.ones(512, np.float32), np.zeros((20, 1), np.float32)
    for seed in range(20):
        module.launch("sum", 1, 256, (values, out[seed], 512, 1.0), shared_bytes=32, seed=seed)
    assert (out != 512).any()


def test_shared_memory_is_poisoned_and_bounded() -> None:
    source = """
    template <int N> __device__ __forceinline__ int look() {
      __shared__ int old[N]; int is = old[N - 1]; old[N - 1] = 5; return is;
    }
    extern "C" __global__ void read(int* out) { out[blockIdx.x] = look<3>() + look<4>(); }
    extern "C" __global__ void overrun() { extern __shared__ char s[]; s[threadIdx.x] = 0; }
    """
    module = cuda_on_cpu.compile(source)
    out = np.zeros(2, np.int32)
    module.launch("read", 2, 1, (out,))
    assert out.tolist() == [-2, -2]
    module.launch("overrun", 1, 64, (), shared_bytes=64)
    with pytest.raises(cuda_on_cpu.LaunchError, match="behind dynamic shared memory, at byte 63"):
        module.launch("overrun", 1, 64, (), shared_bytes=63)


def test_divergence_is_an_error_and_the_next_launch_is_well() -> None:
    source = """
    extern "C" __global__ void half(int* out, int lanes) {
      if (threadIdx.x % 32 < lanes) return;
      out[threadIdx.x] = __shfl_sync(0xffffffffu, (int)threadIdx.x, 31);
    }
    extern "C" __global__ void stuck() { if (threadIdx.x) __syncthreads(); else __syncwarp(); }
    """
    module = cuda_on_cpu.compile(source)
    out = np.zeros(64, np.int32)
    for seed in range(3):
        with pytest.raises(cuda_on_cpu.LaunchError, match="a lane that has ended"):
            module.launch("half", 1, 64, (out, 3), seed=seed)
        module.launch("half", 1, 64, (out, 0), seed=seed)
    assert out.tolist() == [31] * 32 + [63] * 32
    with pytest.raises(
        cuda_on_cpu.LaunchError, match="deadlock: 31 threads at __syncthreads, 1 at warp"
    ):
        module.launch("stuck", 1, 32, ())


def test_templates_are_launched_by_instance_and_arguments_are_checked() -> None:
    source = (
        "template <typename T, int N> __global__ void fill(T* out, T x) { out[threadIdx.x] "
        "= x * (T)N; }"
    )
    module = cuda_on_cpu.compile(source, names=("fill<float, 3>",))
    out = np.zeros(4, np.float32)
    module.launch("fill<float, 3>", 1, 4, (out, 1.5))
    assert out.tolist() == [4.5] * 4
    with pytest.raises(TypeError, match="argument 1 has 8 bytes, the parameter 4"):
        module.launch("fill<float, 3>", 1, 4, (out, np.float64(1)))
    with pytest.raises(ValueError, match="no kernel 'fill'"):
        module.launch("fill", 1, 4, (out, 1.0))
