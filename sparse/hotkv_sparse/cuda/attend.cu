// Reference attention over hot slots, with which tests compare an engine's kernel; also the exact log mass of the
// always kept blocks.
//
// Simple rather than fast: a thread block per query head and sequence, a warp per block of tokens, sums in float32.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int MAX_PER_LANE = 8;  // channels of a lane: head sizes up to 256
constexpr signed char MAPPED = 1;

// Keys or values in the engine's cache. `kind`: type of float; strides count elements; `scale`: of the values.
struct Pages {
  const void* data;
  int kind;
  float scale;
  long long page_stride, token_stride, head_stride;
};

// Running softmax of a warp; a token's weight is e^(score - peak).
struct Sums {
  float peak, sum, values[MAX_PER_LANE];
};

__device__ __forceinline__ void rescale(Sums& sums, float peak) {
  const float factor = expf(sums.peak - peak);
  sums.sum *= factor;
  for (int i = 0; i < MAX_PER_LANE; ++i) sums.values[i] *= factor;
  sums.peak = peak;
}

// Adds the first `tokens` tokens of a page; without data in `values`, only their mass.
__device__ void add_page(Sums& sums, const float (&query)[MAX_PER_LANE], const Pages& keys, const Pages& values, int page, int kv_head,
    int tokens, int head_size) {
  const int lane = threadIdx.x % WARP_LANES;
  for (int token = 0; token < tokens; ++token) {
    const long long at = page * keys.page_stride + token * keys.token_stride + kv_head * keys.head_stride;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
      if (lane + WARP_LANES * i < head_size) score += query[i] * load_float(keys.data, at + lane + WARP_LANES * i, keys.kind);
    score = keys.scale * warp_sum(score);
    if (score > sums.peak) rescale(sums, score);
    float weight = expf(score - sums.peak);
    sums.sum += weight;
    if (!values.data) continue;
    weight *= values.scale;
    const long long of_values = page * values.page_stride + token * values.token_stride + kv_head * values.head_stride;
#pragma unroll
    for (int i = 0; i < MAX_PER_LANE; ++i)
      if (lane + WARP_LANES * i < head_size) sums.values[i] += weight * load_float(values.data, of_values + lane + WARP_LANES * i,
          values.kind);
  }
}

// Attends with one query head of one row. grid (query heads, rows), 256 threads.
//
// `is_always`: to the always kept blocks in the engine's pages; without an engine, only to those that `slot_of` maps.
//   False: to the ATTENDED slots in `slots` (output of hot_table).
// `pages`: of each slot.
// `key_scales`, `value_scales`: of KV head h at h * `scale_stride`; null: 1.
// `sinks`: learned sinks of the softmax, floats of type `sinks_kind` [query heads], or null; they count as mass.
// `log_mass`: float [sequences, query heads], output, or null.
// `out`: float [sequences, query heads, head_size], output, or null.
extern "C" __global__ void __launch_bounds__(256) attend(
    const void* query, int query_kind, long long sequence_stride, long long head_stride, const void* key_data, const void* value_data,
    int kind, const float* key_scales, const float* value_scales, int scale_stride, const void* sinks, int sinks_kind,
    long long page_stride, long long token_stride, long long kv_head_stride, int group, int head_size, int block_tokens, float scale,
    const int* plan, const int* state_of,
    int is_always, const signed char* state, const int* block_of, const int* slots, const int* pages, const int* counts, int count_words,
    int attended_word,
    int num_slots, const int* slot_of, int max_blocks, const int* engine_table, long long engine_stride, const int* freed, int num_sinks,
    float* log_mass, float* out) {
  __shared__ Sums of_warps[WARPS][WARP_LANES];
  const int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES, head = blockIdx.x, sequence = blockIdx.y,
      kv_head = head / group;
  const int* row = plan + sequence * PLAN_WORDS;
  const int first = row[PLAN_FIRST], last = row[PLAN_LAST], num_blocks = row[PLAN_COUNT], tokens = row[PLAN_TOKENS];
  const int of_state = max(state_of[sequence], 0);
  const long long at_slots = static_cast<long long>(of_state) * num_slots, at_blocks = static_cast<long long>(of_state) * max_blocks;
  const long long at_row = static_cast<long long>(sequence) * num_slots;
  const Engine engine = {engine_table ? engine_table + sequence * engine_stride : nullptr, engine_table ? freed[of_state] : 0, num_sinks};
  const float key_scale = key_scales ? key_scales[kv_head * scale_stride] : 1.0f;
  const float value_scale = value_scales ? value_scales[kv_head * scale_stride] : 1.0f;
  const Pages keys = {key_data, kind, key_scale, page_stride, token_stride, kv_head_stride};
  const Pages values = {value_data, kind, value_scale, page_stride, token_stride, kv_head_stride};
  float own[MAX_PER_LANE];
#pragma unroll
  for (int i = 0; i < MAX_PER_LANE; ++i)
    own[i] = lane + WARP_LANES * i < head_size
                 ? scale * load_float(query, sequence * sequence_stride + head * head_stride + lane + WARP_LANES * i, query_kind)
                 : 0.0f;
  Sums sums = {NO_SCORE, 0.0f, {}};
  const int number = is_always ? first + num_blocks - last : counts[sequence * count_words + attended_word];
  for (int i = warp; i < number; i += WARPS) {
    const int always = i < first ? i : last + i - first;
    const bool is_here = is_always && !engine.is_away(always);
    const int slot = is_here ? 0 : is_always ? slot_of[at_blocks + always] : slots[at_row + i];
    if (slot < 0 || (!is_here && state[at_slots + slot] != MAPPED)) continue;
    const int block = is_always ? always : block_of[at_slots + slot];
    add_page(sums, own, keys, values, engine.page_of(block, pages[at_slots + slot]), kv_head, min(block_tokens, tokens - block * block_tokens), head_size);
  }
  of_warps[warp][lane] = sums;
  __syncthreads();
  if (warp != 0) return;
  for (int other = 1; other < WARPS; ++other) {
    Sums& more = of_warps[other][lane];
    const float peak = fmaxf(sums.peak, more.peak);
    rescale(sums, peak);
    rescale(more, peak);
    sums.sum += more.sum;
    for (int i = 0; i < MAX_PER_LANE; ++i) sums.values[i] += more.values[i];
  }
  if (sinks) {
    const float sink = load_float(sinks, head, sinks_kind);
    rescale(sums, fmaxf(sums.peak, sink));
    sums.sum += expf(sink - sums.peak);
  }
  const long long at = static_cast<long long>(sequence) * gridDim.x + head;
  if (log_mass && lane == 0) log_mass[at] = sums.sum > 0.0f ? sums.peak + logf(sums.sum) : -infinity();
  for (int i = 0; out && i < MAX_PER_LANE; ++i)
    if (lane + WARP_LANES * i < head_size) out[at * head_size + lane + WARP_LANES * i] = sums.sum > 0.0f ? sums.values[i] / sums.sum : 0.0f;
}
