// Builds representations of whole blocks from keys in the engine's pages (hotkv_sparse.representations): what a prefill step adds, at
// its end.
//
// One thread block makes one run of 16 tokens of one KV head, a warp a token. Keys of any float and any strides are read once; a run's
// bytes are written once, 64 bytes of a line side by side.
#include "common.cuh"

constexpr int RUN_TOKENS = 16;
constexpr int MAX_CHANNELS = 256;

// The codes of a run, a byte a channel, and the row of each token while it is rotated.
struct Run {
  float rows[RUN_TOKENS][MAX_CHANNELS];
  u32 codes[RUN_TOKENS][MAX_CHANNELS / 4];
};

// Fills a token's codes and returns its sigma. `levels` float [codes], `thresholds` float [codes - 1] in units of the rms.
__device__ float encode(const float* row, u8* codes, const float* levels, const float* thresholds, int bits, float unit, int head_size,
    int channels, int lane) {
  float energy = 0.0f;
  for (int i = lane; i < head_size; i += WARP_LANES) energy += row[i] * row[i];
  energy = warp_sum(energy);
  const float rms = sqrtf(energy / static_cast<float>(head_size));
  float product = 0.0f;
  for (int i = lane; i < channels; i += WARP_LANES) {
    int code = 0;
    if (i < head_size) {
      for (int level = 0; level < (1 << bits) - 1; ++level) code += row[i] > __fmul_rn(thresholds[level], rms);
      product += row[i] * levels[code];
    }
    codes[i] = static_cast<u8>(code);
  }
  product = warp_sum(product);
  return product > 0.0f ? fminf(energy / product * unit, 65504.0f) : 0.0f;
}

// A word of a line: four bytes of which each holds the `width`-bit codes, from bit `from` of a code on, of every fourth channel from
// `codes` on.
__device__ __forceinline__ u32 line_word(const u32* codes, int width, int from) {
  const u32 mask = 0x01010101u * ((1u << width) - 1u);
  u32 word = 0;
  for (int plane = 0; plane < 8 / width; ++plane) word |= (codes[plane] >> from & mask) << (plane * width);
  return word;
}

// grid (blocks, KV heads, runs of a block), 512 threads. Keys: of `kind`, strides in elements, of the page of `pages[i]`, or, with
// `addresses`, of the page at `addresses[i]`, which may be host memory that the device reads (0: left out). Written: row
// `rows[i]` of the pool, nothing if it is below 0. `num_tokens`: valid tokens of each block (null: all). `mu` [KV heads, head_size]
// or null. `levels` holds the levels, then the thresholds. Bytes are those of the CPU's build but for float rounding: a channel that
// lies between two levels, sigma's last bit.
extern "C" __global__ void __launch_bounds__(512) build_tokens(
    const void* keys, int kind, long long page_stride, long long token_stride, long long head_stride, const int* pages,
    const long long* addresses, const int* rows, const int* num_tokens, const float* mu, const float* factors, const float* levels, int bits, float unit, int block_tokens,
    int head_size,
    int channels, u8* pool, long long row_bytes, int head_bytes) {
  __shared__ Run run;
  const int lane = threadIdx.x % WARP_LANES, token = threadIdx.x / WARP_LANES, head = blockIdx.y;
  const int row = rows[blockIdx.x];
  if (row < 0 || (addresses && !addresses[blockIdx.x])) return;
  if (addresses) keys = reinterpret_cast<const void*>(addresses[blockIdx.x]);
  const int position = blockIdx.z * RUN_TOKENS + token;
  const bool is_there = position < (num_tokens ? num_tokens[blockIdx.x] : block_tokens);
  const long long at = (addresses ? 0 : pages[blockIdx.x] * page_stride) + position * token_stride + head * head_stride;
  for (int i = lane; i < head_size; i += WARP_LANES)
    run.rows[token][i] = is_there ? load_float(keys, at + i, kind) - (mu ? mu[head * head_size + i] : 0.0f) : 0.0f;
  rotate_row(run.rows[token], factors, head_size, lane);
  u8* codes = reinterpret_cast<u8*>(run.codes[token]);
  const float sigma = encode(run.rows[token], codes, levels, levels + (1 << bits), bits, unit, head_size, channels, lane);
  const int run_bytes = 2 * channels * bits + 2 * RUN_TOKENS;
  u8* out = pool + row * row_bytes + static_cast<long long>(head) * head_bytes + blockIdx.z * run_bytes;
  if (lane == 0) reinterpret_cast<unsigned short*>(out + run_bytes - 2 * RUN_TOKENS)[token] = half_bits(is_there ? sigma : -1.0f);
  __syncthreads();
  const int low_words = channels / 16 * RUN_TOKENS, high_words = bits == 3 ? channels / 32 * RUN_TOKENS : 0;
  for (int word = threadIdx.x; word < low_words + high_words; word += blockDim.x) {
    const bool is_low = word < low_words;
    const int line = (is_low ? word : word - low_words) / RUN_TOKENS, planes = is_low ? 4 : 8;
    const u32* from = run.codes[word % RUN_TOKENS] + line * planes;
    reinterpret_cast<u32*>(out)[word] = is_low ? line_word(from, 2, 0) : line_word(from, 1, 2);
  }
}
