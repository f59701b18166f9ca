// Scores every candidate with a step's queries, as `hotkv_sparse.scores` does on a CPU. Sketches are read once for all
// query heads of a KV head.
//
// Token formats: tensor cores multiply codes and queries as bytes (m16n8k32), exact in int32; rows are 16 tokens,
// columns up to 8 query heads. Channels may have any order that both share: so codes are widened by table lookup
// (`__byte_perm`) in the cheapest order, which `prepare_queries` follows. A warp takes two runs at a time, each lane
// loads 4 tokens at a time, 16 bytes per load, and the next two runs before it scores the present two. `row` of the
// runs after these is on its way too. Products are summed upon MAGIC, so that their bits are a float without a
// conversion. Lanes add up their own tokens, and join once for each block. Summary formats: products by `__dp4a`, 8
// lanes per block.
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

// d = a b + c with one warp, as PTX's mma.m16n8k32 on signed bytes. Lane 4 g + t holds:
// - of a: bytes 4 t to 4 t + 3 of rows g (a0) and g + 8 (a1), and the bytes 16 further on (a2, a3);
// - of b: the same bytes of column g (b0, b1);
// - of c and d: columns 2 t and 2 t + 1 of rows g (c0, c1) and g + 8 (c2, c3).
__device__ __forceinline__ void multiply(int* d, const int* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
#else
  const int lane = threadIdx.x % WARP_LANES, row = lane & ~3, column = lane % 4 * 8;
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  for (int k = 0; k < 4; ++k) {
    const int low = __shfl_sync(ALL_LANES, (int)a0, row + k), low_next = __shfl_sync(ALL_LANES, (int)a2, row + k);
    const int high = __shfl_sync(ALL_LANES, (int)a1, row + k), high_next = __shfl_sync(ALL_LANES, (int)a3, row + k);
    for (int i = 0; i < 2; ++i) {
      const int b = __shfl_sync(ALL_LANES, (int)b0, column + 4 * i + k), next = __shfl_sync(ALL_LANES, (int)b1, column + 4 * i + k);
      d[i] = __dp4a(low_next, next, __dp4a(low, b, d[i]));
      d[2 + i] = __dp4a(high_next, next, __dp4a(high, b, d[2 + i]));
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

  __device__ __forceinline__ Words() {
    for (int i = 0; i < GROUPS * PER_GROUP; ++i) words[i] = make_uint4(0u, 0u, 0u, 0u);
    sigma = make_uint2(0u, 0u);
  }
};

// Where a lane reads in the runs of a KV head: from `low` the words of low lines, from `high` (3 bits) those of high
// lines, from `sigma`, in the pool's row 0. `has_last`: it has a line in the last group; if not, its query there is 0,
// so any codes do.
template <int BITS, int GROUPS>
struct Reader {
  const u8 *low, *high, *sigma;
  int row_bytes;
  bool has_last;

  __device__ __forceinline__ Reader(const u8* runs, long long bytes, int run_bytes, int lines, int lane) {
    const int quad = lane / 4 % 4 * 16, line = lane % 4;
    low = runs + (BITS == 3 ? 2 : 1) * line * LINE_BYTES + quad;
    high = runs + (2 * lines + line) * LINE_BYTES + quad;
    sigma = runs + run_bytes - 32 + quad / 2;
    row_bytes = static_cast<int>(bytes);
    has_last = 4 * (GROUPS - 1) + line < lines;
  }

  // `offset`: of the run.
  __device__ __forceinline__ void load(Words<BITS, GROUPS>& to, int row, int offset) const {
    constexpr int PER_GROUP = Words<BITS, GROUPS>::PER_GROUP, LOW = BITS == 3 ? 2 : 1;
    const u8 *lows = far_from(low, row, row_bytes) + offset, *highs = BITS == 3 ? far_from(high, row, row_bytes) + offset : nullptr;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j) {
      if (j + 1 == GROUPS && !has_last) continue;
#pragma unroll
      for (int i = 0; i < LOW; ++i)
        to.words[j * PER_GROUP + i] = *reinterpret_cast<const uint4*>(lows + (4 * LOW * j + i) * LINE_BYTES);
      if constexpr (BITS == 3) to.words[j * PER_GROUP + 2] = *reinterpret_cast<const uint4*>(highs + 4 * j * LINE_BYTES);
    }
    to.sigma = *reinterpret_cast<const uint2*>(far_from(sigma, row, row_bytes) + offset);
  }
};

// 1.5 * 2^23. A float whose bits are these plus n has the value MAGIC + n, for |n| up to 2^22; a product of bytes over
// 256 channels is smaller.
constexpr int MAGIC_BITS = 0x4b400000;
constexpr float MAGIC = 12582912.0f;
constexpr u32 SIGNS = 0x80008000u;  // of two halves

// Product of query and key, times sigma, by column and token of the lane; below NO_SCORE without a token. `is_missing`:
// the lane's run is not there.
template <int BITS, int GROUPS>
__device__ __forceinline__ void multiply_run(
    const Words<BITS, GROUPS>& run, bool is_missing, const u32* query, Levels levels, float (&out)[2][4]) {
  constexpr int REGISTERS = registers_of(BITS);
  const int magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
  int products[2][4];
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 even[REGISTERS], odd[REGISTERS];
      widen<BITS>(run.words + j * Words<BITS, GROUPS>::PER_GROUP, 2 * half, levels, even);
      widen<BITS>(run.words + j * Words<BITS, GROUPS>::PER_GROUP, 2 * half + 1, levels, odd);
#pragma unroll
      for (int m = 0; m < REGISTERS; m += 2)
        multiply(products[half], j + m ? products[half] : magic, even[m], odd[m], even[m + 1], odd[m + 1], query[j * REGISTERS + m],
            query[j * REGISTERS + m + 1]);
    }
  }
  const float sigma[4] = {half_value(run.sigma.x & 0xffffu), half_value(run.sigma.x >> 16), half_value(run.sigma.y & 0xffffu),
      half_value(run.sigma.y >> 16)};
  float shift[4];
#pragma unroll
  for (int token = 0; token < 4; ++token) shift[token] = -MAGIC * sigma[token];  // exact
  if (is_missing || ((run.sigma.x | run.sigma.y) & SIGNS)) {
#pragma unroll
    for (int token = 0; token < 4; ++token)
      if (is_missing || sigma[token] < 0.0f) shift[token] = 2.0f * NO_SCORE;
  }
#pragma unroll
  for (int column = 0; column < 2; ++column)
#pragma unroll
    for (int token = 0; token < 4; ++token)
      out[column][token] = fmaf(__int_as_float(products[token / 2][token % 2 * 2 + column]), sigma[token], shift[token]);
}

__device__ __forceinline__ float largest_of(const float (&scores)[4]) {
  return fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
}

// Sum of 2^(factor * (score - top)).
__device__ __forceinline__ float sum_of(const float (&scores)[4], float top, float factor) {
  const float base = -top * factor;
  float sum = quick_exp2(fmaf(scores[0], factor, base));
#pragma unroll
  for (int token = 1; token < 4; ++token) sum += quick_exp2(fmaf(scores[token], factor, base));
  return sum;
}

// Largest of the lanes that share a block.
__device__ __forceinline__ float top_of_block(float value, bool is_single) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 4));
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 8));
  return is_single ? value : fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 16));
}

// What a warp scores: items `item`, `item` + `stride`, … of `num_items`. An item is one block, or two blocks of a single
// run. `factor`: by column, from a product to a score in base 2; `own_factor`, `shift`, `scores`: of the column whose
// score the lane has in the end, by `own`.
struct Items {
  int item, num_items, stride, first, last, runs, run_bytes, half;
  const int* row_of;
  float factor[2], own_factor, shift;
  bool own, writes;
  float* scores;
};

// `RUNS`: of a block, 1 or 2; 0: more.
template <int RUNS, int BITS, int GROUPS>
__device__ __forceinline__ void score_items(const Items& of, const Reader<BITS, GROUPS>& reader, const u32* query, Levels levels) {
  constexpr bool IS_SINGLE = RUNS == 1, HAS_PARTS = RUNS == 0;
  const int parts = (of.runs + 1) / 2;
  const auto block_of = [&](int item) { return of.first + (IS_SINGLE ? 2 * item + of.half : item); };
  // Behind the last candidate it is read again.
  const auto row_of = [&](int item) { return *far_from(of.row_of, min(block_of(item), of.last - 1), sizeof(int)); };

  // Loads run ahead of scores by one step of two runs.
  int loading = of.item, loading_part = 0, row = row_of(loading), later_row = row_of(loading + of.stride);
  const auto load_next = [&](Words<BITS, GROUPS>& to) {
    reader.load(to, row, HAS_PARTS ? min(2 * loading_part + of.half, of.runs - 1) * of.run_bytes : 0);
    if (HAS_PARTS && ++loading_part < parts) return;
    loading += of.stride;
    loading_part = 0;
    row = later_row;
    later_row = row_of(loading + of.stride);
  };
  int item = of.item, part = 0;
  // A lane's mass in a block of more runs is sum * 2^(factor * peak); peak NO_SCORE: no token yet.
  float peak[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0.0f, 0.0f};
  // False after the last item.
  const auto score = [&](const Words<BITS, GROUPS>& run) {
    float scores[2][4], top[2];
    multiply_run(run, HAS_PARTS && 2 * part + of.half >= of.runs, query, levels, scores);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      top[column] = largest_of(scores[column]);
      if (!HAS_PARTS) {
        top[column] = top_of_block(top[column], IS_SINGLE);
        sum[column] = sum_of(scores[column], top[column], of.factor[column]);
      } else {
        top[column] = fmaxf(top[column], peak[column]);
        sum[column] = sum[column] * quick_exp2((peak[column] - top[column]) * of.factor[column]) +
                      sum_of(scores[column], top[column], of.factor[column]);
        peak[column] = top[column];
      }
    }
    if (HAS_PARTS) {
      if (++part < parts) return true;
      part = 0;
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        top[column] = top_of_block(peak[column], false);
        sum[column] *= quick_exp2((peak[column] - top[column]) * of.factor[column]);
        peak[column] = NO_SCORE;
      }
    }
    // Each lane gives one column away and keeps the other.
    float own_sum = (of.own ? sum[1] : sum[0]) + __shfl_xor_sync(ALL_LANES, of.own ? sum[0] : sum[1], 4);
    own_sum += __shfl_xor_sync(ALL_LANES, own_sum, 8);
    if (!IS_SINGLE) own_sum += __shfl_xor_sync(ALL_LANES, own_sum, 16);
    const float own_top = of.own ? top[1] : top[0];
    const float score = own_top > NO_SCORE ? fmaf(fmaf(own_top, of.own_factor, quick_log2(own_sum)), LN_2, of.shift) : -infinity();
    const int block = block_of(item);
    if (of.writes && block < of.last) *far_from(of.scores, block, sizeof(float)) = score;
    if (HAS_PARTS) sum[0] = sum[1] = 0.0f;
    item += of.stride;
    return item < of.num_items;
  };
  Words<BITS, GROUPS> even, odd;
  load_next(even);
  for (;;) {
    load_next(odd);
    if (!score(even)) return;
    load_next(even);
    if (!score(odd)) return;
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
  const bool is_single = runs == 1;
  const int num_heads = gridDim.y / tiles * group, run_bytes = head_bytes / runs;
  Items of = {};
  of.item = blockIdx.x * warps + threadIdx.x / WARP_LANES;
  of.num_items = is_single ? (last - first + 1) / 2 : last - first;
  if (of.item >= of.num_items) return;
  of.stride = gridDim.x * warps;
  of.first = first;
  of.last = last;
  of.runs = runs;
  of.run_bytes = run_bytes;
  of.half = lane / 16;
  of.row_of = rows + static_cast<long long>(state_of[sequence]) * max_blocks;
  const int place = tile * COLUMNS + 2 * (lane % 4);
  const long long first_head = static_cast<long long>(sequence) * num_heads + kv_head * group;
#pragma unroll
  for (int column = 0; column < 2; ++column)
    if (place + column < group) of.factor[column] = words[2 * (first_head + place + column)] * LOG2_E;
  of.own = lane / 4 % 2;
  if (const int own_place = place + of.own; own_place < group) {
    of.own_factor = of.own ? of.factor[1] : of.factor[0];
    of.shift = words[2 * (first_head + own_place) + 1];
    of.writes = lane / 8 % 2 == 0 && (is_single || of.half == 0);
    of.scores = scores + (first_head + own_place) * max_blocks;
  }
  u32 query[REGISTERS];
  const u32* prepared = queries + ((static_cast<long long>(sequence) * gridDim.y + blockIdx.y) * REGISTERS) * WARP_LANES;
#pragma unroll
  for (int i = 0; i < REGISTERS; ++i) query[i] = prepared[i * WARP_LANES + lane];
  const Levels levels = {low_levels, high_levels};
  // The second half of a warp reads the second of two runs.
  const int head_start = kv_head * head_bytes + (runs == 2 ? of.half * run_bytes : 0);
  const Reader<BITS, GROUPS> reader(pool + head_start, row_bytes, run_bytes, lines, lane);
  if (runs == 1) {
    score_items<1>(of, reader, query, levels);
  } else if (runs == 2) {
    score_items<2>(of, reader, query, levels);
  } else {
    score_items<0>(of, reader, query, levels);
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
