// Turns the scores of blocks (estimated logs of their attention mass) into selections, without the host: computes the
// plan of a step (which blocks are candidates, and how many to choose), the blocks' shares of the attention mass, and
// the best blocks. `hotkv_sparse.selection` does the same on a CPU.
//
// Counts and sizes stay on the device. Of blocks with equal weights, the block with the lower position is preferred.
// Sums are computed in float32 in a fixed order, or in fixed point, so a selection is the same in every run.
#include "common.cuh"

// Computes the plan (see PLAN_WORDS) of each sequence from its number of tokens. One thread serves one sequence. The
// plan is empty if the sequence has 0 tokens or no state in `state_of`.
//
// `budget_tokens`: the most tokens to attend to; 0: the share `budget_share` of the context.
// `epochs`: int [states], or null. A change of a state's number means that its hot set (the blocks to attend to) is
//   built anew. The first step after a change selects the whole budget, other steps the budget divided by `sets`.
// `begun`: int [states]: the number in `epochs` for which this first step has already been planned.
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

// Sums the attention masses of the candidates. The candidates are divided into `pieces` parts; `masses` [sequences,
// query heads, pieces] gets the sum over each part. grid (pieces, query heads, sequences), 256 threads.
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

// Computes the weight of each candidate block b: w_b = mean over the heads h of exp(S_hb - Z_h), with the scores S and
// the log of the total mass Z. grid (any, sequences), 256 threads, 4 * num_heads bytes of dynamic shared memory.
//
// `always_log_mass`: float [sequences, query heads], log of the attention mass of the always kept blocks.
// `weights`: float [sequences, max_blocks], output: the weights of the candidates.
// `always_mass`: float [sequences], output: the share of the attention mass that the always kept blocks have.
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

// The candidates of a sequence, as `choose` reads them.
struct Candidates {
  const float* weights;
  int first, count;

  // Returns the bits of the weight as an integer, which has the same order as the weight. A weight that is not above 0
  // counts as 0.
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

// Separates the chosen candidates from the others. A candidate's key is its weight as an integer. All candidates with a
// key above `key` are chosen, and of those with exactly this key the `equals` candidates with the lowest positions.
struct Bound {
  int key, equals;
};

// Searches the bins from the highest downwards for the bin in which the wanted number of candidates (or, if `by_mass`,
// the wanted mass) is reached. Writes its index to `bins.bin`. Run by one warp.
__device__ void find_bin(Bins& bins, int num_bins, bool by_mass, int count, u64 mass) {
  const int lane = threadIdx.x, per_lane = num_bins / WARP_LANES;
  // Each lane adds up consecutive bins. Lane 0 has the highest bins.
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
  // All bins together do not reach the wanted number or mass, so all candidates are chosen.
  if (!votes && lane == 0) bins.bin = -1;
}

// Returns the bound that separates the `count` > 0 best candidates from the others; if `by_mass`, the fewest candidates
// whose masses together reach `mass`. The result's key is -1 if all candidates are chosen. Keys have 31 bits, which are
// examined in three rounds of 11, 10 and 10 bits.
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

// Chooses the best ROOM candidates of each sequence. With `adaptive_p` > 0, chooses only as many as are needed for
// their masses and `always_mass` to reach `adaptive_p`, but at least MIN_ROOM and at most ROOM. grid (sequences), 1024
// threads.
//
// `blocks`: int32 [sequences, max_selected], output: the always kept blocks and the chosen candidates, ascending.
// `chosen`: float [sequences, max_selected], output: the weights of `blocks`; inf for always kept blocks.
// `numbers`: int32 [sequences], output: how many blocks are selected.
// `mass`: float [sequences], output: the share of the attention mass that the selected blocks have.
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
