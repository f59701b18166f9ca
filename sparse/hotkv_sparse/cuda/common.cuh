// Shared by the kernels. Uses only NVRTC's built-ins, so 16-bit floats are read and written as bits.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARP_LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr float NO_SCORE = -1e30f;  // stands for a token that is not there; far below any score and free of NaN
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// As on the host.
constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8_E4M3 = 3, FLOAT8_E5M2 = 4;

// A row per sequence, int32 [PLAN_WORDS]. Of COUNT blocks, [0, FIRST) and [LAST, COUNT) are always kept. A selection
// has at most ROOM candidates, and at least MIN_ROOM if their number adapts to the mass. TOKENS: of the sequence.
constexpr int PLAN_FIRST = 0, PLAN_LAST = 1, PLAN_COUNT = 2, PLAN_ROOM = 3, PLAN_MIN_ROOM = 4, PLAN_TOKENS = 5, PLAN_WORDS = 8;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Of a finite half.
__device__ __forceinline__ float half_value(u32 bits) {
#ifdef CUDA_ON_CPU
  const float size = __uint_as_float((bits & 0x7fffu) << 13) * __uint_as_float(0x77800000u);  // 2^112 moves the exponent
  return __uint_as_float((bits & 0x8000u) << 16 | __float_as_uint(size));
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
#endif
}

// 2^x in one instruction, relative error about 2^-22.
__device__ __forceinline__ float quick_exp2(float x) {
#ifdef CUDA_ON_CPU
  return exp2f(x);
#else
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#endif
}

// Log of a normal number to base 2 in one instruction, absolute error about 2^-22.
__device__ __forceinline__ float quick_log2(float x) {
#ifdef CUDA_ON_CPU
  return log2f(x);
#else
  float value;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
#endif
}

// base + count * bytes in one instruction.
template <class T>
__device__ __forceinline__ T* far_from(T* base, int count, int bytes) {
#ifdef CUDA_ON_CPU
  return reinterpret_cast<T*>(reinterpret_cast<long long>(base) + static_cast<long long>(count) * bytes);
#else
  long long address;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(address) : "r"(count), "r"(bytes), "l"(reinterpret_cast<long long>(base)));
  return reinterpret_cast<T*>(address);
#endif
}

// Nearest half of a float of magnitude at most 65504, the even one of two.
__device__ __forceinline__ u32 half_bits(float value) {
  const u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  // Subnormal halves have steps of 2^-24.
  if (size < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u);
  return sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
}

__device__ __forceinline__ float load_float(const void* base, long long index, int kind) {
  if (kind == FLOAT32) return static_cast<const float*>(base)[index];
  if (kind >= FLOAT8_E4M3) {
    const u32 bits = static_cast<const u8*>(base)[index];
    if (kind == FLOAT8_E5M2) return half_value(bits << 8);
    // The exponent's bias is 8 less than that of a half.
    return 256.0f * half_value((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
  }
  const u32 bits = static_cast<const unsigned short*>(base)[index];
  return kind == BFLOAT16 ? __uint_as_float(bits << 16) : half_value(bits);
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int step = WARP_LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = WARP_LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  return value;
}

// Sum of the values of lower threads; `total`: of all. All threads must call it. `of_warps`: shared, one per warp.
__device__ __forceinline__ int sum_before(int value, int* of_warps, int& total) {
  const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
  int sum = value;
  for (int step = 1; step < WARP_LANES; step *= 2) {
    const int lower = __shfl_up_sync(ALL_LANES, sum, step);
    if (lane >= step) sum += lower;
  }
  __syncthreads();
  if (lane == WARP_LANES - 1) of_warps[warp] = sum;
  __syncthreads();
  int before = sum - value;
  total = 0;
  for (int other = 0; other < static_cast<int>(blockDim.x) / WARP_LANES; ++other) {
    if (other < warp) before += of_warps[other];
    total += of_warps[other];
  }
  return before;
}

// Rotates a row in shared memory, float [head_size], with one warp (`hotkv_sparse.rotation`); then every lane may read
// it. `factors`: [passes, head_size], signs / sqrt(channels of the pass).
__device__ __forceinline__ void rotate_row(float* row, const float* factors, int head_size, int lane) {
  int size = 1;
  while (2 * size <= head_size) size *= 2;
  for (int start = 0;; start = head_size - size, factors += head_size) {
    __syncwarp();
    for (int i = lane; i < size; i += WARP_LANES) row[start + i] *= factors[start + i];
    for (int half = 1; half < size; half *= 2) {
      __syncwarp();
      for (int i = lane; i < size / 2; i += WARP_LANES) {
        float* low = row + start + 2 * (i & ~(half - 1)) + (i & (half - 1));
        const float a = low[0], b = low[half];
        low[0] = a + b;
        low[half] = a - b;
      }
    }
    if (start == head_size - size) break;
  }
  __syncwarp();
}

// Where an engine row's blocks are: [num_sinks, freed) are *away*, only in host memory, others in the pages of `table`.
// `table` null: no engine, all count as away.
struct Engine {
  const int* table;
  int freed, num_sinks;

  __device__ __forceinline__ bool is_away(int block) const { return !table || (block >= num_sinks && block < freed); }
  // `slot_page`: of the block's hot slot.
  __device__ __forceinline__ int page_of(int block, int slot_page) const { return is_away(block) ? slot_page : table[block]; }
};

// Copies part `piece` of `pieces` of a range, one per thread block. Addresses may be in host memory.
__device__ __forceinline__ void copy_bytes(long long source, long long target, long long bytes, int piece, int pieces) {
  constexpr int IN_FLIGHT = 4;
  const bool is_aligned = ((source | target | bytes) & 15) == 0;
  const long long units = is_aligned ? bytes / 16 : bytes, stride = static_cast<long long>(pieces) * blockDim.x;
  long long at = piece * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (!is_aligned) {
    for (; at < units; at += stride) reinterpret_cast<u8*>(target)[at] = reinterpret_cast<const volatile u8*>(source)[at];
    return;
  }
  for (; at < units; at += IN_FLIGHT * stride) {
    uint4 words[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j)
      if (at + j * stride < units) words[j] = reinterpret_cast<const uint4*>(source)[at + j * stride];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j)
      if (at + j * stride < units) reinterpret_cast<uint4*>(target)[at + j * stride] = words[j];
  }
}
