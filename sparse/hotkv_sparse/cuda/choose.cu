// Turns scores into selections without the host: plans a step, computes blocks' shares of the mass, chooses the best;
// as `hotkv_sparse.selection` does on a CPU.
//
// Counts and sizes stay on the device. Of equal weights the lower position wins. Sums go in a fixed order or in fixed
// point, so every run selects the same.
#include "common.cuh"

// Plans each sequence (see PLAN_WORDS), one thread each. Empty if it has 0 tokens or no state in `state_of`.
//
// `budget_tokens`: at most; 0: the share `budget_share` of the context.
// `epochs`: int [states], or null. A changed number means a hot set built anew: its first step selects the whole
//   budget, others the budget divided by `sets`.
// `begun`: int [states], number in `epochs` whose first step is planned already.
extern "C" __global__ void plan_step(
    const int* context_tokens, const int* state_of, int num_sequences, int block_tokens, int sink_tokens, int recent_tokens,
    int budget_tokens, double budget_share, int min_room, int max_blocks, const int* epochs, int* begun, int sets, int* plan) {
  const int sequence = blockIdx.x * blockDim.x + threadIdx.x;
  if (sequence >= num_sequences) return;
  const int state = state_of[sequence], tokens = state < 0 ? 0 : min(context_tokens[sequence], max_blocks * block_tokens);
  const int count = (tokens + block_tokens - 1) / block_tokens;
  const bool is_first = epochs && state >= 0 && begun[state] != epochs[state];
  if (is_first) begun[state] = epochs[state];
  const int first = min((sink_tokens + block_tokens - 1) / block_tokens, count);
  const int last = max(first, min(max(tokens - recent_tokens, 0) / block_tokens, tokens / block_tokens));
  const int allowed = budget_tokens ? budget_tokens : static_cast<int>(floor(budget_share * static_cast<double>(tokens)));
  const int budget = tokens <= allowed ? count : allowed / block_tokens, part = sets * block_tokens;
  const int selected = is_first ? budget : min((allowed + part - 1) / part, budget);
  int* row = plan + sequence * PLAN_WORDS;
  row[PLAN_FIRST] = first;
  row[PLAN_LAST] = last;
  row[PLAN_COUNT] = count;
  row[PLAN_ROOM] = min(max(selected - (count - (last - first)), 0), last - first);
  row[PLAN_MIN_ROOM] = min_room;
  row[PLAN_TOKENS] = tokens;
}

struct Mass {
  float peak, sum;  // sum * e^peak
};

__device__ __forceinline__ Mass added(Mass a, Mass b) {
  const float peak = fmaxf(a.peak, b.peak);
  return {peak, a.sum * expf(a.peak - peak) + b.sum * expf(b.peak - peak)};
}

// Sums the candidates' masses in `pieces` parts: `masses` [sequences, query heads, pieces]. grid (pieces, query heads,
// sequences), 256 threads.
extern "C" __global__ void __launch_bounds__(256) sum_masses(const float* scores, int max_blocks, const int* plan, Mass* masses) {
  __shared__ Mass of_warps[8];
  const int sequence = blockIdx.z, lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  const long long head = static_cast<long long>(sequence) * gridDim.y + blockIdx.y;
  const float* row = scores + head * max_blocks;
  Mass mass = {NO_SCORE, 0.0f};
  for (int block = first + blockIdx.x * blockDim.x + threadIdx.x; block < last; block += gridDim.x * blockDim.x)
    if (row[block] > NO_SCORE) mass = added(mass, {row[block], 1.0f});
  for (int step = WARP_LANES / 2; step > 0; step /= 2)
    mass = added(mass, {__shfl_xor_sync(ALL_LANES, mass.peak, step), __shfl_xor_sync(ALL_LANES, mass.sum, step)});
  if (lane == 0) of_warps[warp] = mass;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < blockDim.x / WARP_LANES; ++i) mass = added(mass, of_warps[i]);
  masses[head * gridDim.x + blockIdx.x] = mass;
}

// Weight of candidate b: the mean over the heads h of exp(S_hb - Z_h), with scores S and log of the total mass Z. grid
// (any, sequences), 256 threads, 4 * num_heads bytes of dynamic shared memory.
//
// `always_log_mass`: float [sequences, query heads].
// `weights`: float [sequences, max_blocks], output, at candidates.
// `always_mass`: float [sequences], output: the always kept blocks' share of the mass.
extern "C" __global__ void __launch_bounds__(256) weigh(
    const float* scores, int num_heads, int max_blocks, const int* plan, const Mass* masses, int num_pieces,
    const float* always_log_mass, float* weights,
    float* always_mass) {
  extern __shared__ float totals[];
  const int sequence = blockIdx.y;
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  const long long first_head = static_cast<long long>(sequence) * num_heads;
  for (int head = threadIdx.x; head < num_heads; head += blockDim.x) {
    Mass mass = {fmaxf(always_log_mass[first_head + head], NO_SCORE), always_log_mass[first_head + head] > NO_SCORE ? 1.0f : 0.0f};
    for (int i = 0; i < num_pieces; ++i) mass = added(mass, masses[(first_head + head) * num_pieces + i]);
    totals[head] = mass.peak + logf(fmaxf(mass.sum, 1e-30f));
  }
  __syncthreads();
  for (int block = first + blockIdx.x * blockDim.x + threadIdx.x; block < last; block += gridDim.x * blockDim.x) {
    float sum = 0.0f;
    for (int head = 0; head < num_heads; ++head) sum += expf(scores[(first_head + head) * max_blocks + block] - totals[head]);
    weights[static_cast<long long>(sequence) * max_blocks + block] = sum / static_cast<float>(num_heads);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    float sum = 0.0f;
    for (int head = 0; head < num_heads; ++head) sum += expf(always_log_mass[first_head + head] - totals[head]);
    always_mass[sequence] = sum / static_cast<float>(num_heads);
  }
}

constexpr int BINS = 2048;
constexpr int CHOOSE_THREADS = 1024;
constexpr double MASS_UNIT = 1099511627776.0;  // 2^40: masses are summed as integers, in any order

// Candidates of a sequence.
struct Candidates {
  const float* weights;
  int first, count;

  // Bits of the weight, which have its order; 0 unless it is above 0.
  __device__ __forceinline__ int key(int i) const {
    const float weight = weights[first + i];
    return weight > 0.0f ? __float_as_int(weight) : 0;
  }

  __device__ __forceinline__ u64 mass(int i) const { return static_cast<u64>(fmax(static_cast<double>(weights[first + i]),
      0.0) * MASS_UNIT); }
};

struct Bins {
  u64 masses[BINS];
  int counts[BINS];
  u64 mass_above;
  int count_above, bin;
};

// Chosen are all candidates with a key (weight as an integer) above `key`, and the lowest `equals` of those with this
// key.
struct Bound {
  int key, equals;
};

// Finds the bin, from the highest down, in which `count` candidates (`by_mass`: `mass`) are reached: `bins.bin`. One
// warp.
__device__ void find_bin(Bins& bins, int num_bins, bool by_mass, int count, u64 mass) {
  const int lane = threadIdx.x, per_lane = num_bins / WARP_LANES;
  // Each lane adds consecutive bins; lane 0 has the highest.
  const int top = num_bins - 1 - lane * per_lane;
  u64 masses = 0;
  int counts = 0;
  for (int i = 0; i < per_lane; ++i) {
    masses += bins.masses[top - i];
    counts += bins.counts[top - i];
  }
  u64 mass_before = bins.mass_above;
  int count_before = bins.count_above;
  for (int from = 0; from < WARP_LANES; ++from) {
    const u64 more = __shfl_sync(ALL_LANES, masses, from);
    const int more_count = __shfl_sync(ALL_LANES, counts, from);
    if (from < lane) {
      mass_before += more;
      count_before += more_count;
    }
  }
  const bool is_before = by_mass ? mass_before < mass : count_before < count;
  const bool is_here = is_before && (by_mass ? mass_before + masses >= mass : count_before + counts >= count);
  const u32 votes = __ballot_sync(ALL_LANES, is_here);
  __syncwarp();
  if (votes && lane == __ffs((int)votes) - 1) {
    int bin = top;
    while (by_mass ? mass_before + bins.masses[bin] < mass : count_before + bins.counts[bin] < count) {
      mass_before += bins.masses[bin];
      count_before += bins.counts[bin];
      --bin;
    }
    bins.bin = bin;
    bins.mass_above = mass_before;
    bins.count_above = count_before;
  }
  // Not reached: all candidates are chosen.
  if (!votes && lane == 0) bins.bin = -1;
}

// Bound of the `count` > 0 best candidates; `by_mass`: of the fewest whose masses reach `mass`. Key -1: all are chosen.
// Examines keys of 31 bits in rounds of 11, 10 and 10.
__device__ Bound find_bound(Bins& bins, const Candidates& of, bool by_mass, int count, u64 mass) {
  int prefix = 0;
  if (threadIdx.x == 0) {
    bins.mass_above = 0;
    bins.count_above = 0;
  }
  for (int shift = 20; shift >= 0; shift -= 10) {
    const int num_bins = shift == 20 ? 2048 : 1024;
    for (int i = threadIdx.x; i < num_bins; i += blockDim.x) {
      bins.masses[i] = 0;
      bins.counts[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < of.count; i += blockDim.x) {
      const int key = of.key(i);
      if (shift < 20 && key >> (shift + 10) != prefix) continue;
      atomicAdd(&bins.counts[key >> shift & (num_bins - 1)], 1);
      if (by_mass) atomicAdd(&bins.masses[key >> shift & (num_bins - 1)], of.mass(i));
    }
    __syncthreads();
    if (threadIdx.x < WARP_LANES) find_bin(bins, num_bins, by_mass, count, mass);
    __syncthreads();
    if (bins.bin < 0) return {-1, 0};
    prefix = prefix << (shift == 20 ? 11 : 10) | bins.bin;
  }
  const int equals = bins.counts[bins.bin];
  if (!by_mass) return {prefix, count - bins.count_above};
  const double each = static_cast<double>(bins.masses[bins.bin]) / equals;
  return {prefix, min(equals, static_cast<int>(ceil(static_cast<double>(mass - bins.mass_above) / each)))};
}

// Chooses the best ROOM candidates; with `adaptive_p` > 0 only as many as their masses and `always_mass` need to reach
// it, but at least MIN_ROOM. grid (sequences), 1024 threads.
//
// `blocks`: int32 [sequences, max_selected], output: always kept blocks and chosen candidates, ascending.
// `chosen`: float, same shape, output: their weights; inf for always kept blocks.
// `numbers`: int32 [sequences], output: of selected blocks.
// `mass`: float [sequences], output: their share of the mass.
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS) choose(
    const float* weights, int max_blocks, const int* plan, const float* always_mass, float adaptive_p, int max_selected, int* blocks,
    float* chosen, int* numbers, float* mass) {
  __shared__ Bins bins;
  __shared__ int above_of[CHOOSE_THREADS / WARP_LANES], equals_of[CHOOSE_THREADS / WARP_LANES];
  __shared__ u64 total;
  const int sequence = blockIdx.x, lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
  const int* row = plan + sequence * PLAN_WORDS;
  const int first = row[PLAN_FIRST], last = row[PLAN_LAST], num_blocks = row[PLAN_COUNT], num_behind = num_blocks - last;
  const long long at = static_cast<long long>(sequence) * max_blocks;
  const Candidates of = {weights + at, first, last - first};
  int room = max(min(row[PLAN_ROOM], max_selected - first - num_behind), 0);
  if (threadIdx.x == 0) total = 0;
  Bound bound = {-1, 0};
  if (adaptive_p > 0.0f && room > 0) {
    const double missing = static_cast<double>(adaptive_p) - static_cast<double>(always_mass[sequence]);
    int enough = 0;
    if (missing > 0.0) {
      bound = find_bound(bins, of, true, 0, static_cast<u64>(ceil(missing * MASS_UNIT)));
      enough = bound.key < 0 ? of.count : bins.count_above + bound.equals;
    }
    room = min(room, max(enough, row[PLAN_MIN_ROOM]));
    __syncthreads();
  }
  bound = room < of.count && room > 0 ? find_bound(bins, of, false, room, 0) : Bound{-1, 0};
  __syncthreads();
  int* out = blocks + static_cast<long long>(sequence) * max_selected;
  float* out_weights = chosen + static_cast<long long>(sequence) * max_selected;
  int num_above = 0, num_equal = 0;  // of the candidates before this tile
  u64 sum = 0;
  for (int base = 0; base < of.count && room > 0; base += blockDim.x) {
    const int i = base + threadIdx.x, key = i < of.count ? of.key(i) : -2;
    const u32 above = __ballot_sync(ALL_LANES, key > bound.key), equal = __ballot_sync(ALL_LANES, key == bound.key);
    if (lane == 0) {
      above_of[warp] = __popc(above);
      equals_of[warp] = __popc(equal);
    }
    __syncthreads();
    int above_before = num_above, equal_before = num_equal;
    for (int other = 0; other < CHOOSE_THREADS / WARP_LANES; ++other) {
      if (other < warp) {
        above_before += above_of[other];
        equal_before += equals_of[other];
      }
      num_above += above_of[other];
      num_equal += equals_of[other];
    }
    const u32 lower = (1u << lane) - 1u;
    above_before += __popc(above & lower);
    equal_before += __popc(equal & lower);
    if (key > bound.key || (key == bound.key && equal_before < bound.equals)) {
      const int place = first + above_before + min(equal_before, bound.equals);
      out[place] = first + i;
      out_weights[place] = of.weights[first + i];
      sum += of.mass(i);
    }
    __syncthreads();
  }
  if (sum) atomicAdd(&total, sum);
  for (int i = threadIdx.x; i < first; i += blockDim.x) {
    out[i] = i;
    out_weights[i] = infinity();
  }
  for (int i = threadIdx.x; i < num_behind; i += blockDim.x) {
    out[first + room + i] = last + i;
    out_weights[first + room + i] = infinity();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    numbers[sequence] = first + room + num_behind;
    mass[sequence] = fminf(always_mass[sequence] + static_cast<float>(static_cast<double>(total) / MASS_UNIT), 1.0f);
  }
}
