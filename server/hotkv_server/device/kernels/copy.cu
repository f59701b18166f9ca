// Executes many copies in one launch, for copies too short for the copy engines' queue.
//
// table: int64 [3, num_copies]: dst, src, bytes. Sizes and alignments are arbitrary. Either side may
// be device memory or registered host memory. No copy reads or writes bytes that another copy writes.
//
// A unit is a copy, or one of its `parts` shares. A warp processes a unit, then the unit `num_warps`
// further on, so any grid is correct. A grid of few blocks leaves the other multiprocessors free.
// Few warps fill PCIe because each has 16 bytes x 8 loads x 32 lanes = 4 KiB in flight (bytes in
// flight = bandwidth x latency, about 64 GB/s x 2 us = 128 KiB: 32 warps).

namespace {

constexpr unsigned WARP = 32;
constexpr unsigned IN_FLIGHT = 8;
constexpr unsigned long long STEP = WARP * IN_FLIGHT;

typedef unsigned long long Bytes;

// Copies vectors part * STEP.., (part + parts) * STEP.. of num_vectors. All loads of a step are
// issued before its first store.
template <typename Vector>
__device__ __forceinline__ void copy_vectors(Bytes dst, Bytes src, Bytes num_vectors, Bytes part, Bytes parts, unsigned lane) {
  Vector* to = reinterpret_cast<Vector*>(dst);
  const Vector* from = reinterpret_cast<const Vector*>(src);
  Vector held[IN_FLIGHT];
  for (Bytes base = part * STEP; base < num_vectors; base += parts * STEP) {
    const Bytes at = base + lane;
    if (base + STEP <= num_vectors) {
#pragma unroll
      for (unsigned i = 0; i < IN_FLIGHT; ++i) held[i] = __ldcs(from + at + i * WARP);
#pragma unroll
      for (unsigned i = 0; i < IN_FLIGHT; ++i) __stcs(to + at + i * WARP, held[i]);
    } else {
#pragma unroll
      for (unsigned i = 0; i < IN_FLIGHT; ++i)
        if (at + i * WARP < num_vectors) held[i] = __ldcs(from + at + i * WARP);
#pragma unroll
      for (unsigned i = 0; i < IN_FLIGHT; ++i)
        if (at + i * WARP < num_vectors) __stcs(to + at + i * WARP, held[i]);
    }
  }
}

// Copies the bytes before the first whole vector of dst and behind the last, fewer than 16 each. The
// lower half of the warp copies the bytes before, the upper half the bytes behind.
__device__ __forceinline__ void copy_ends(Bytes dst, Bytes src, Bytes head, Bytes tail_at, Bytes num_bytes, unsigned lane) {
  const Bytes at = lane < 16 ? lane : tail_at + lane - 16;
  if (at < (lane < 16 ? head : num_bytes)) reinterpret_cast<unsigned char*>(dst)[at] = reinterpret_cast<const unsigned char*>(src)[at];
}

template <typename Vector>
__device__ __forceinline__ void copy_as(Bytes dst, Bytes src, Bytes num_bytes, Bytes part, Bytes parts, unsigned lane) {
  const Bytes to_aligned = (0 - dst) & (sizeof(Vector) - 1);
  const Bytes head = to_aligned < num_bytes ? to_aligned : num_bytes;
  const Bytes num_vectors = (num_bytes - head) / sizeof(Vector);
  if (part == 0) copy_ends(dst, src, head, head + num_vectors * sizeof(Vector), num_bytes, lane);
  copy_vectors<Vector>(dst + head, src + head, num_vectors, part, parts, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512) copy_runs(const long long* table, long long num_copies, long long parts) {
  const unsigned lane = threadIdx.x % WARP;
  const Bytes warp = (static_cast<Bytes>(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
  const Bytes num_warps = static_cast<Bytes>(gridDim.x) * blockDim.x / WARP;
  for (Bytes unit = warp; unit < static_cast<Bytes>(num_copies * parts); unit += num_warps) {
    const Bytes copy = unit / parts, part = unit % parts;
    const Bytes dst = table[copy], src = table[num_copies + copy], num_bytes = table[2 * num_copies + copy];
    const Bytes apart = dst ^ src;
    if (apart % 16 == 0) copy_as<int4>(dst, src, num_bytes, part, parts, lane);
    else if (apart % 8 == 0) copy_as<unsigned long long>(dst, src, num_bytes, part, parts, lane);
    else if (apart % 4 == 0) copy_as<unsigned int>(dst, src, num_bytes, part, parts, lane);
    else copy_as<unsigned char>(dst, src, num_bytes, part, parts, lane);
  }
}
