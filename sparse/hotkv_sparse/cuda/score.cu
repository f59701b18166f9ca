// Scores every candidate with a step's queries, as `hotkv_sparse.scores` does on a CPU. Sketches are read once for all
// query heads of a KV head.
//
// Token formats: tensor cores multiply codes and queries as bytes (m16n8k32), exact in int32; rows are 16 tokens,
// columns up to 8 query heads. Channels may have any order that both share: so codes are widened by table lookup
// (`__byte_perm`) in the cheapest order, which `prepare_queries` follows. A warp takes two runs at a time, each lane
// loads 4 tokens at a time, 16 bytes per load, and the next two runs before it scores the present two. Summary formats:
// products by `__dp4a`, 8 lanes per block.
//
// Lane 4 g + c of a warp reads from run g / 4 the four tokens with number g % 4, and line 4 j + c of each group j of
// four lines.
#include "common.cuh"

constexpr int COLUMNS = 8;
constexpr int LINE_BYTES = 64;

// Registers of a token's widened codes, four channels each, from one word (2 bits) or three (3 bits).
__host__ __device__ constexpr int registers_of(int bits) { return bits == 2 ? 4 : 8; }

// Place of a channel's byte in a tile (prepared queries of up to 8 heads, a column each), in the order of `widen`; for
// column 0, 16 bytes higher per column.
__device__ int place_of(int bits, int channel) {
  const int line_channels = bits == 2 ? 16 : 32, line = channel / line_channels, byte = channel % 4;
  const int plane = channel / 4 % 4, second = bits == 3 ? channel / 16 % 2 * 4 : 0;
  const int reg = second + 2 * (plane % 2) + byte / 2;
  const int word = (line / 4 * registers_of(bits) + reg) * WARP_LANES + line % 4;
  return 4 * word + byte % 2 * 2 + plane / 2;
}

// Quantises a head's query to bytes. grid (query heads, sequences), 32 threads.
//
// `query`: floats of type `kind`; strides count elements.
// `codes`: output. `bits` > 0: [sequences, KV heads, tiles, tile_bytes], rotated, as `score_tokens` reads it; the
//   caller has zeroed unused bytes. `bits` 0: [sequences, query heads, parts, channels]; with `parts_kind` 0 parts are
//   the positive and the negative channels, with 1 there is one.
// `words`: float [sequences, query heads, 2], output: factor from a product of bytes to nats; shift added to each
//   score.
extern "C" __global__ void __launch_bounds__(32) prepare_queries(
    const void* query, int kind, long long sequence_stride, long long head_stride, const float* mu, const float* factors, int bits,
    int parts_kind,
    int head_size, int channels, int group, int tiles, int tile_bytes, float scale, float unit_scale, float bias, signed char* codes,
    float* words) {
  __shared__ float row[256];
  const int lane = threadIdx.x, head = blockIdx.x, num_heads = gridDim.x, kv_head = head / group;
  const long long at = blockIdx.y * sequence_stride + head * head_stride;
  float shift = 0.0f, peak = 1e-20f;
  for (int i = lane; i < head_size; i += WARP_LANES) {
    row[i] = load_float(query, at + i, kind);
    if (mu) shift += row[i] * mu[kv_head * head_size + i];
  }
  shift = warp_sum(shift) * scale;
  if (bits) rotate_row(row, factors, head_size, lane);
  for (int i = lane; i < head_size; i += WARP_LANES) peak = fmaxf(peak, fabsf(row[i]));
  peak = warp_max(peak);
  const float unit = 127.0f / peak;
  const long long sequence_head = static_cast<long long>(blockIdx.y) * num_heads + head;
  const int place = head % group, num_parts = parts_kind == 1 ? 1 : 2;
  signed char* tile = codes + ((static_cast<long long>(blockIdx.y) * (num_heads / group) + kv_head) * tiles + place / COLUMNS) * tile_bytes;
  signed char* parts = codes + sequence_head * num_parts * channels;
  for (int i = lane; i < head_size; i += WARP_LANES) {
    const int step = __float2int_rn(row[i] * unit);
    if (bits) {
      tile[place_of(bits, i) + place % COLUMNS * 16] = static_cast<signed char>(step);
      continue;
    }
    parts[i] = static_cast<signed char>(parts_kind == 0 ? max(step, 0) : step);
    if (parts_kind == 0) parts[channels + i] = static_cast<signed char>(min(step, 0));
  }
  if (lane == 0) {
    words[2 * sequence_head] = peak * unit_scale;
    words[2 * sequence_head + 1] = shift - bias;
  }
}

// c += a b with one warp, as PTX's mma.m16n8k32 on signed bytes. Lane 4 g + t holds:
// - of a: bytes 4 t to 4 t + 3 of rows g (a0) and g + 8 (a1), and the bytes 16 further on (a2, a3);
// - of b: the same bytes of column g (b0, b1);
// - of c: columns 2 t and 2 t + 1 of rows g (c0, c1) and g + 8 (c2, c3).
__device__ __forceinline__ void multiply(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  const int lane = threadIdx.x % WARP_LANES, row = lane & ~3, column = lane % 4 * 8;
  for (int k = 0; k < 4; ++k) {
    const int low = __shfl_sync(ALL_LANES, (int)a0, row + k), low_next = __shfl_sync(ALL_LANES, (int)a2, row + k);
    const int high = __shfl_sync(ALL_LANES, (int)a1, row + k), high_next = __shfl_sync(ALL_LANES, (int)a3, row + k);
    for (int i = 0; i < 2; ++i) {
      const int b = __shfl_sync(ALL_LANES, (int)b0, column + 4 * i + k), next = __shfl_sync(ALL_LANES, (int)b1, column + 4 * i + k);
      c[i] = __dp4a(low_next, next, __dp4a(low, b, c[i]));
      c[2 + i] = __dp4a(high_next, next, __dp4a(high, b, c[2 + i]));
    }
  }
#endif
}

struct Levels {
  u32 low, high;  // the level of each code, a signed byte each
};

// Levels of the codes (0 to 7) in the nibbles: the lower four to `first`, the upper four to `second`.
__device__ __forceinline__ void look_up(u32 nibbles, Levels levels, u32& first, u32& second) {
  first = __byte_perm(levels.low, levels.high, nibbles);
  second = __byte_perm(levels.low, levels.high, nibbles >> 16);
}

__device__ __forceinline__ u32 part(const uint4& four, int token) { return token == 0 ? four.x : token == 1 ? four.y : token == 2
    ? four.z : four.w; }

// Widens a token's codes to levels, a signed byte per channel, for this lane's line of a group of four. `words`: one
// per token with 2-bit codes; two low words and a high one with 3-bit codes.
template <int BITS>
__device__ __forceinline__ void widen(const uint4* words, int token, Levels levels, u32 (&out)[registers_of(BITS)]) {
#pragma unroll
  for (int second = 0; second < (BITS == 3 ? 2 : 1); ++second) {
    const u32 low = part(words[second], token), high = BITS == 3 ? part(words[2], token) >> (4 * second) : 0u;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      u32 nibbles = low >> (2 * s) & 0x33333333u;
      if constexpr (BITS == 3) nibbles |= (high >> s & 0x01010101u) << 2 | (high >> s & 0x04040404u) << 4;
      look_up(nibbles, levels, out[4 * second + 2 * s], out[4 * second + 2 * s + 1]);
    }
  }
}

// A lane's part of a run: words of lines, and sigmas of its 4 tokens.
template <int BITS, int GROUPS>
struct Words {
  static constexpr int PER_GROUP = BITS == 3 ? 3 : 1;
  uint4 words[GROUPS * PER_GROUP];
  uint2 sigma;

  __device__ __forceinline__ void load(const u8* run, int run_bytes, int lines, int lane) {
    const int quad = lane / 4 % 4;
    if (!run) {
      for (int i = 0; i < GROUPS * PER_GROUP; ++i) words[i] = make_uint4(0u, 0u, 0u, 0u);
      sigma = make_uint2(0xbc00bc00u, 0xbc00bc00u);  // -1, twice: no token
      return;
    }
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      const int line = 4 * j + lane % 4;
#pragma unroll
      for (int i = 0; i < PER_GROUP; ++i) {
        const int place = BITS == 3 ? (i < 2 ? 2 * line + i : 2 * lines + line) : line;
        words[j * PER_GROUP + i] = line < lines
            ? reinterpret_cast<const uint4*>(run + place * LINE_BYTES)[quad] : make_uint4(0u, 0u, 0u, 0u);
      }
    }
    sigma = reinterpret_cast<const uint2*>(run + run_bytes - 32)[quad];
  }
};

// Masses of a block for a lane's two columns: sum * 2^peak; peak NO_SCORE: no token yet.
struct Masses {
  float peak[2], sum[2];

  __device__ __forceinline__ void add(int column, float other_peak, float other_sum) {
    const float top = fmaxf(peak[column], other_peak);
    sum[column] = sum[column] * quick_exp2(peak[column] - top) + other_sum * quick_exp2(other_peak - top);
    peak[column] = top;
  }
};

// Adds the tokens of a warp's two runs. `is_first`: replaces earlier masses. `are_one`: both runs are of one block.
// `factor`: by column, from product * sigma to a score in base 2.
template <int BITS, int GROUPS>
__device__ __forceinline__ void add_tokens(
    Masses& masses, const Words<BITS, GROUPS>& run, const u32* query, Levels levels, const float (&factor)[2], bool is_first, bool are_one) {
  constexpr int REGISTERS = registers_of(BITS);
  int products[2][4] = {};
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 even[REGISTERS], odd[REGISTERS];
      widen<BITS>(run.words + j * Words<BITS, GROUPS>::PER_GROUP, 2 * half, levels, even);
      widen<BITS>(run.words + j * Words<BITS, GROUPS>::PER_GROUP, 2 * half + 1, levels, odd);
#pragma unroll
      for (int m = 0; m < REGISTERS; m += 2)
        multiply(products[half], even[m], odd[m], even[m + 1], odd[m + 1], query[j * REGISTERS + m], query[j * REGISTERS + m + 1]);
    }
  }
  const float sigma[4] = {half_value(run.sigma.x & 0xffffu), half_value(run.sigma.x >> 16), half_value(run.sigma.y & 0xffffu),
      half_value(run.sigma.y >> 16)};
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    float scores[4], top = NO_SCORE, sum = 0.0f;
#pragma unroll
    for (int token = 0; token < 4; ++token) {
      const float product = static_cast<float>(products[token / 2][token % 2 * 2 + column]) * sigma[token];
      scores[token] = sigma[token] >= 0.0f ? product * factor[column] : NO_SCORE;
      top = fmaxf(top, scores[token]);
    }
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 4));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 8));
    if (are_one) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 16));
    // Without a token this sum is meaningless, as the peak NO_SCORE shows.
#pragma unroll
    for (int token = 0; token < 4; ++token) sum += quick_exp2(scores[token] - top);
    sum += __shfl_xor_sync(ALL_LANES, sum, 4);
    sum += __shfl_xor_sync(ALL_LANES, sum, 8);
    if (are_one) sum += __shfl_xor_sync(ALL_LANES, sum, 16);
    if (is_first) {
      masses.peak[column] = top;
      masses.sum[column] = sum;
    } else {
      masses.add(column, top, sum);
    }
  }
}

// Scores candidates in a token format. grid (any, KV heads * tiles, sequences), 128 threads.
//
// `pool`: address and row_bytes are multiples of 16.
// `rows`: int32 [states, max_blocks], of `pool`.
// `lines`: of a run: of 16 channels with 2 bits, of 32 with 3 bits (two low lines and a high one).
// `scores`: float [sequences, query heads, max_blocks], output, at candidates only.
template <int BITS, int GROUPS>
__global__ void __launch_bounds__(128) score_tokens(
    const u8* pool, long long row_bytes, int head_bytes, int runs, int lines, const int* rows, const int* state_of, int max_blocks,
    const int* plan, const u32* queries,
    const float* words, int group, int tiles, u32 low_levels, u32 high_levels, float* scores) {
  constexpr int REGISTERS = GROUPS * registers_of(BITS);
  const int lane = threadIdx.x % WARP_LANES, warps = blockDim.x / WARP_LANES, sequence = blockIdx.z, kv_head = blockIdx.y / tiles,
      tile = blockIdx.y % tiles;
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  // An item is one block, or two blocks of a single run; it takes `parts` steps of two runs.
  const int per_item = runs == 1 ? 2 : 1, parts = runs == 1 ? 1 : (runs + 1) / 2, num_items = (last - first + per_item - 1) / per_item;
  const int stride = gridDim.x * warps, half = lane / 16, run_bytes = head_bytes / runs, num_heads = gridDim.y / tiles * group;
  int item = blockIdx.x * warps + threadIdx.x / WARP_LANES;
  if (item >= num_items) return;

  u32 query[REGISTERS];
  const u32* prepared = queries + ((static_cast<long long>(sequence) * gridDim.y + blockIdx.y) * REGISTERS) * WARP_LANES;
#pragma unroll
  for (int i = 0; i < REGISTERS; ++i) query[i] = prepared[i * WARP_LANES + lane];
  float factor[2] = {0.0f, 0.0f}, shift[2] = {0.0f, 0.0f};
  int heads[2];
  for (int column = 0; column < 2; ++column) {
    const int place = tile * COLUMNS + 2 * (lane % 4) + column;
    heads[column] = place < group ? kv_head * group + place : -1;
    if (place < group) {
      const float* of_head = words + 2 * (static_cast<long long>(sequence) * num_heads + heads[column]);
      factor[column] = of_head[0] * LOG2_E;
      shift[column] = of_head[1];
    }
  }
  const Levels levels = {low_levels, high_levels};
  const int* row_of = rows + static_cast<long long>(state_of[sequence]) * max_blocks;
  const auto place_of_run = [&](int of_item, int of_part) -> const u8* {
    const int block = first + (per_item == 2 ? 2 * of_item + half : of_item), run = per_item == 2 ? 0 : 2 * of_part + half;
    if (of_item >= num_items || block >= last || run >= runs) return nullptr;
    return pool + row_of[block] * row_bytes + static_cast<long long>(kv_head) * head_bytes + run * run_bytes;
  };

  Words<BITS, GROUPS> here, next;
  Masses masses;
  here.load(place_of_run(item, 0), run_bytes, lines, lane);
  for (int step = 0; item < num_items;) {
    const bool is_end = step + 1 == parts;
    const int next_item = is_end ? item + stride : item, next_step = is_end ? 0 : step + 1;
    next.load(place_of_run(next_item, next_step), run_bytes, lines, lane);
    add_tokens<BITS, GROUPS>(masses, here, query, levels, factor, step == 0, per_item == 1);
    if (is_end) {
      const int block = first + (per_item == 2 ? 2 * item + half : item);
      if (lane / 4 % 4 == 0 && (per_item == 2 || half == 0) && block < last)
        for (int column = 0; column < 2; ++column)
          if (heads[column] >= 0)
            scores[(static_cast<long long>(sequence) * num_heads + heads[column]) * max_blocks + block] =
                masses.peak[column] > NO_SCORE ? (masses.peak[column] + __log2f(masses.sum[column])) * LN_2 + shift[column] : -infinity();
    }
    here = next;
    item = next_item;
    step = next_step;
  }
}

#ifndef CUDA_ON_CPU
#define INSTANCE(BITS, GROUPS)                                                                                      \
  template __global__ void score_tokens<BITS, GROUPS>(const u8*, long long, int, int, int, const int*, const int*,   \
                                                      int, const int*, const u32*, const float*, int, int, u32, u32, float*);
INSTANCE(2, 1)
INSTANCE(2, 2)
INSTANCE(2, 3)
INSTANCE(2, 4)
INSTANCE(3, 1)
INSTANCE(3, 2)
#endif

// Scores candidates in a summary format. grid (any, KV heads, sequences), 128 threads. A sketch has parts, bytes value
// + 128 [parts, channels] (at most 256 channels, a multiple of 16), then a float scale each. `codes` and `words`:
// outputs of `prepare_queries`.
extern "C" __global__ void __launch_bounds__(128) score_parts(
    const u8* pool, long long row_bytes, int head_bytes, int num_parts, int channels, const int* rows, const int* state_of,
    int max_blocks, const int* plan, const signed char* codes, const float* words, int group, float* scores) {
  constexpr int LANES = 8, MAX_UNITS = 2, MAX_PARTS = 2;
  const int lane = threadIdx.x % LANES, sequence = blockIdx.z, kv_head = blockIdx.y, num_heads = gridDim.y * group;
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  const int per_grid = blockDim.x / LANES, stride = gridDim.x * per_grid, units = channels / 16;
  // No lane leaves early: all take part in the shuffles.
  for (int base = first + blockIdx.x * per_grid; base < last; base += stride) {
    const int block = base + threadIdx.x / LANES;
    uint4 values[MAX_PARTS][MAX_UNITS] = {};
    float scales[MAX_PARTS] = {-1.0f, 0.0f};
    if (block < last) {
      const long long row = rows[static_cast<long long>(state_of[sequence]) * max_blocks + block];
      const u8* from = pool + row * row_bytes + static_cast<long long>(kv_head) * head_bytes;
#pragma unroll
      for (int i = 0; i < MAX_PARTS; ++i) {
        if (i >= num_parts) break;
        // At a multiple of 4 bytes.
        scales[i] = reinterpret_cast<const float*>(from + num_parts * channels)[i];
#pragma unroll
        for (int u = 0; u < MAX_UNITS; ++u)
          if (lane + LANES * u < units) {
            const u32* word = reinterpret_cast<const u32*>(from + i * channels) + 4 * (lane + LANES * u);
            values[i][u] = make_uint4(word[0] ^ 0x80808080u, word[1] ^ 0x80808080u, word[2] ^ 0x80808080u, word[3] ^ 0x80808080u);
          }
      }
    }
    for (int place = 0; place < group; ++place) {
      const long long head = static_cast<long long>(sequence) * num_heads + kv_head * group + place;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < MAX_PARTS; ++i) {
        if (i >= num_parts) break;
        int product = 0;
#pragma unroll
        for (int u = 0; u < MAX_UNITS; ++u)
          if (lane + LANES * u < units) {
            const uint4 q = reinterpret_cast<const uint4*>(codes + (head * num_parts + i) * channels)[lane + LANES * u];
            product = __dp4a((int)values[i][u].x, (int)q.x, product);
            product = __dp4a((int)values[i][u].y, (int)q.y, product);
            product = __dp4a((int)values[i][u].z, (int)q.z, product);
            product = __dp4a((int)values[i][u].w, (int)q.w, product);
          }
        for (int step = LANES / 2; step > 0; step /= 2) product += __shfl_xor_sync(ALL_LANES, product, step);
        total += static_cast<float>(product) * scales[i];
      }
      if (lane == 0 && block < last) scores[head * max_blocks + block] = scales[0] < 0.0f
          ? -infinity() : total * words[2 * head] + words[2 * head + 1];
    }
  }
}
