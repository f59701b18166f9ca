// Builds the sketches of whole blocks from keys in the engine's pages, as `hotkv_sparse.sketches` does on a CPU, at the
// end of a prefill step.
//
// A thread block makes one run of one KV head, a warp one token. Keys have any float type and strides and are read
// once; a run is written once, the 64 bytes of a line side by side.
#include "common.cuh"

constexpr int RUN_TOKENS = 16;
constexpr int MAX_CHANNELS = 256;

// Scratch of a run: keys while they are rotated, then codes, a byte per channel.
struct Run {
  float rows[RUN_TOKENS][MAX_CHANNELS];
  u32 codes[RUN_TOKENS][MAX_CHANNELS / 4];
};

// Writes the codes of a token's rotated key `row`; its sigma. `levels`: float [codes]. `thresholds`: float [codes - 1],
// between them, in units of the token's rms.
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

// Four bytes of a line. Byte b packs, of channels b, b + 4, b + 8 … from `codes` on, the `width` bits from bit `from`
// on.
__device__ __forceinline__ u32 line_word(const u32* codes, int width, int from) {
  const u32 mask = 0x01010101u * ((1u << width) - 1u);
  u32 word = 0;
  for (int plane = 0; plane < 8 / width; ++plane) word |= (codes[plane] >> from & mask) << (plane * width);
  return word;
}

// Builds sketches in a token format. grid (blocks, KV heads, runs of a block), 512 threads.
//
// `keys`, `kind`: the engine's cache; strides count elements.
// `key_scales`: of head h at h * `scale_stride`; null: 1.
// `pages`: of each block; not used with `addresses`.
// `addresses`: of each block's page, perhaps host memory that the device can read; 0 skips the block. Null: use
//   `pages`.
// `rows`: of `pool`; negative skips the block.
// `num_tokens`: valid ones of each block; null: all.
// `mu`: [KV heads, head_size], or null.
// `levels`: of codes, then the thresholds between them.
//
// Bytes are a CPU's but for float rounding: the code of a channel halfway between two levels, and a sigma's last bit.
extern "C" __global__ void __launch_bounds__(512) build_tokens(
    const void* keys, int kind, long long page_stride, long long token_stride, long long head_stride,
    const float* key_scales, int scale_stride, const int* pages, const long long* addresses, const int* rows, const int* num_tokens, const float* mu, const float* factors, const float* levels, int bits, float unit, int block_tokens,
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
  const float key_scale = key_scales ? key_scales[head * scale_stride] : 1.0f;
  for (int i = lane; i < head_size; i += WARP_LANES)
    run.rows[token][i] = is_there ? key_scale * load_float(keys, at + i, kind) - (mu ? mu[head * head_size + i] : 0.0f) : 0.0f;
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
