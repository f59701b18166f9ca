"""CUDA on the CPU computes as CUDA does, and finds faults that CUDA would only sometimes punish."""

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


@pytest.mark.parametrize("seed", range(4))
def test_a_block_sums_with_shuffles_and_shared_memory(seed: int) -> None:
    module = cuda_on_cpu.compile(SUM, {"BARRIER": "__syncthreads();"})
    values = np.arange(1000, dtype=np.float32)
    out = np.zeros(3, np.float32)
    module.launch(
        "sum", 3, 256, (values, out, np.int32(1000), np.float32(2)), shared_bytes=32, seed=seed
    )
    assert out.sum() == values.sum() * 2


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


def test_warps_work_apart_with_masks() -> None:
    source = """
    extern "C" __global__ void votes(unsigned* out) {
      unsigned lane = threadIdx.x % 32, mine = lane < 16 ? 0xffffu : 0xffff0000u;
      unsigned odd = __ballot_sync(mine, lane & 1);
      __syncwarp();
      out[threadIdx.x] = __reduce_add_sync(mine, lane) + __match_any_sync(0xffffffffu, lane % 4)
          + (odd == (0xaaaaaaaau & mine) ? 0 : 1);
    }
    extern "C" __global__ void moves(int* out) {
      int lane = threadIdx.x % 32;
      int up = __shfl_up_sync(0xffffffffu, lane, 1, 8);
      int down = __shfl_down_sync(0xffffffffu, lane, 2, 16);
      int to = __shfl_sync(0xffffffffu, lane, 3, 4);
      out[threadIdx.x] = up * 10000 + down * 100 + to;
    }
    """
    module = cuda_on_cpu.compile(source)
    lane = np.arange(64) % 32
    out = np.zeros(64, np.uint32)
    moves = np.zeros(64, np.int32)
    for seed in range(3):
        module.launch("votes", 1, 64, (out,), seed=seed)
        module.launch("moves", 1, 64, (moves,), seed=seed)
    assert (out == np.where(lane < 16, 120, 376) + (0x11111111 << (lane % 4))).all()
    up, down = np.where(lane % 8 == 0, lane, lane - 1), np.where(lane % 16 >= 14, lane, lane + 2)
    assert (moves == up * 10000 + down * 100 + lane // 4 * 4 + 3).all()


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


def test_half_conversions_are_numpys() -> None:
    source = """
    extern "C" __global__ void there(const float* in, unsigned short* out) {
      int i = blockIdx.x * 256 + threadIdx.x;
      out[i] = __half_as_ushort(__float2half_rn(in[i]));
    }
    extern "C" __global__ void back(const unsigned short* in, float* out) {
      int i = blockIdx.x * 256 + threadIdx.x;
      out[i] = __half2float(__ushort_as_half(in[i]));
    }
    """
    module = cuda_on_cpu.compile(source)
    halves = np.arange(65536, dtype=np.uint16)
    floats = np.zeros(65536, np.float32)
    module.launch("back", 256, 256, (halves, floats))
    np.testing.assert_array_equal(floats, halves.view(np.float16).astype(np.float32))
    numbers = np.random.default_rng(1).integers(0, 1 << 32, 65536, dtype=np.uint32).view(np.float32)
    numbers[:65536:2] = np.random.default_rng(2).normal(size=32768) * np.exp2(
        np.random.default_rng(3).uniform(-26, 17, 32768)
    )
    out = np.zeros(65536, np.uint16)
    module.launch("there", 256, 256, (numbers, out))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out.view(np.float16), numbers.astype(np.float16))


def test_integer_intrinsics() -> None:
    source = """
    extern "C" __global__ void all(const int* a, const int* b, int* out) {
      int x = a[threadIdx.x], y = b[threadIdx.x], *o = out + threadIdx.x * 6;
      o[0] = __dp4a(x, y, 5); o[1] = __popc(x); o[2] = __clz(x);
      o[3] = __byte_perm(x, y, 0x6240); o[4] = __funnelshift_r(x, y, 12); o[5] = min(x, y);
    }
    """
    a, b = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, (2, 64)).astype(np.int32)
    a[0] = 0
    out = np.zeros((64, 6), np.int32)
    cuda_on_cpu.compile(source).launch("all", 1, 64, (a, b, out))
    bytes_a, bytes_b = a.view(np.uint8).reshape(-1, 4), b.view(np.uint8).reshape(-1, 4)
    assert (
        out[:, 0] == (bytes_a.view(np.int8).astype(np.int32) * bytes_b.view(np.int8)).sum(1) + 5
    ).all()
    assert out[:, 1].tolist() == [int(x).bit_count() for x in a.view(np.uint32)]
    assert out[:, 2].tolist() == [32 - int(x).bit_length() for x in a.view(np.uint32)]
    picked = (
        np.stack([bytes_a[:, 0], bytes_b[:, 0], bytes_a[:, 2], bytes_b[:, 2]], 1)
        .copy()
        .view(np.uint32)[:, 0]
    )
    assert (out[:, 3].view(np.uint32) == picked).all()
    both = a.view(np.uint32).astype(np.uint64) | b.view(np.uint32).astype(np.uint64) << np.uint64(
        32
    )
    assert (out[:, 4].view(np.uint32) == (both >> np.uint64(12)).astype(np.uint32)).all()
    assert (out[:, 5] == np.minimum(a, b)).all()
