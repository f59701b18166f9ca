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
constexpr int CHOOSE_THREADS = 1024, PIECE_THREADS = 256;
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

// What a selection is made of. `behind`: always kept blocks after the candidates. `room`, `least`: candidates to choose,
// at most and, if their number adapts to the mass, at least. `missing`: mass that they must then reach.
struct Row {
  Candidates of;
  int behind, room, least;
  bool adapts;
  u64 missing;

  // Candidates to choose. `enough`: the fewest that reach `missing`.
  __device__ int number(int enough) const { return adapts ? min(room, max(missing ? enough : 0, least)) : room; }
};

__device__ Row row_of(
    const float* weights, int max_blocks, const int* plan, const float* always_mass, float adaptive_p, int max_selected, int sequence) {
  plan += sequence * PLAN_WORDS;
  const int first = plan[PLAN_FIRST], last = plan[PLAN_LAST], behind = plan[PLAN_COUNT] - last;
  const int room = max(min(plan[PLAN_ROOM], max_selected - first - behind), 0);
  const double missing = static_cast<double>(adaptive_p) - static_cast<double>(always_mass[sequence]);
  const bool adapts = adaptive_p > 0.0f && room > 0;
  const Candidates of = {weights + static_cast<long long>(sequence) * max_blocks, first, last - first};
  return {of, behind, room, plan[PLAN_MIN_ROOM], adapts, adapts && missing > 0.0 ? static_cast<u64>(ceil(missing * MASS_UNIT)) : 0};
}

// Best candidates to find: `count`, or with `by_mass` the fewest whose masses reach `mass`.
struct Goal {
  bool by_mass;
  int count;
  u64 mass;
};

// Chosen are all candidates with a key (weight as an integer) above `key`, and the lowest `equals` of those with this
// key. Key -1: all.
struct Bound {
  int key, equals;
};

struct Bins {
  u64 masses[BINS];
  int counts[BINS];
  u64 mass_above;
  int count_above, bin;
};

// A search examines keys of 31 bits from the highest on, in rounds of 11, 10 and 10.
constexpr int FIRST_SHIFT = 20, SHIFT = 10;

__device__ int bins_of(int shift) { return shift == FIRST_SHIFT ? 2048 : 1024; }

__device__ int longer(int prefix, int shift, int bin) { return shift == FIRST_SHIFT ? bin : prefix << SHIFT | bin; }

// Counts the candidates `from`, `from` + `step`, … whose keys have `prefix` before the bits of the round. All threads of
// the block must call it.
__device__ void count_round(Bins& bins, const Candidates& of, int from, int step, int shift, int prefix, bool by_mass) {
  const int num_bins = bins_of(shift);
  for (int i = threadIdx.x; i < num_bins; i += blockDim.x) {
    bins.masses[i] = 0;
    bins.counts[i] = 0;
  }
  __syncthreads();
  for (int i = from; i < of.count; i += step) {
    const int key = of.key(i);
    if (shift < FIRST_SHIFT && key >> (shift + SHIFT) != prefix) continue;
    atomicAdd(&bins.counts[key >> shift & (num_bins - 1)], 1);
    if (by_mass) atomicAdd(&bins.masses[key >> shift & (num_bins - 1)], of.mass(i));
  }
  __syncthreads();
}

// Finds the bin, from the highest down, in which the goal is reached: `bins.bin`; -1: in none. One warp.
__device__ void find_bin(Bins& bins, int num_bins, const Goal& goal) {
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
  const auto is_below = [&](u64 mass, int count) { return goal.by_mass ? mass < goal.mass : count < goal.count; };
  const bool is_here = is_below(mass_before, count_before) && !is_below(mass_before + masses, count_before + counts);
  const u32 votes = __ballot_sync(ALL_LANES, is_here);
  __syncwarp();
  if (votes && lane == __ffs((int)votes) - 1) {
    int bin = top;
    while (is_below(mass_before + bins.masses[bin], count_before + bins.counts[bin])) {
      mass_before += bins.masses[bin];
      count_before += bins.counts[bin];
      --bin;
    }
    bins.bin = bin;
    bins.mass_above = mass_before;
    bins.count_above = count_before;
  }
  if (!votes && lane == 0) bins.bin = -1;
}

// After the last round, or one without a bin. `key`: found by the rounds.
__device__ Bound bound_of(const Bins& bins, int key, const Goal& goal) {
  if (bins.bin < 0) return {-1, 0};
  if (!goal.by_mass) return {key, goal.count - bins.count_above};
  const int equals = bins.counts[bins.bin];
  const double each = static_cast<double>(bins.masses[bins.bin]) / equals;
  return {key, min(equals, static_cast<int>(ceil(static_cast<double>(goal.mass - bins.mass_above) / each)))};
}

__device__ int number_within(const Bins& bins, const Bound& bound, const Candidates& of) {
  return bound.key < 0 ? of.count : bins.count_above + bound.equals;
}

// Searches with one thread block.
__device__ Bound find_bound(Bins& bins, const Candidates& of, const Goal& goal) {
  int prefix = 0;
  if (threadIdx.x == 0) {
    bins.mass_above = 0;
    bins.count_above = 0;
  }
  for (int shift = FIRST_SHIFT; shift >= 0; shift -= SHIFT) {
    count_round(bins, of, threadIdx.x, blockDim.x, shift, prefix, goal.by_mass);
    if (threadIdx.x < WARP_LANES) find_bin(bins, bins_of(shift), goal);
    __syncthreads();
    if (bins.bin < 0) break;
    prefix = longer(prefix, shift, bins.bin);
  }
  return bound_of(bins, prefix, goal);
}

// Writes the chosen ones of the candidates [begin, end), before which `above` candidates have a larger key than the
// bound and `equal` have its key. Returns the mass of those that this thread writes. All threads must call it.
__device__ u64 write_range(
    const Candidates& of, const Bound& bound, int begin, int end, int above, int equal, int* blocks, float* chosen, int* of_warps) {
  constexpr int HALF = 16;
  u64 mass = 0;
  for (int base = begin; base < end; base += blockDim.x) {
    const int i = base + threadIdx.x, key = i < end ? of.key(i) : -2;
    int total;
    const int before = sum_before((key > bound.key) | (key == bound.key) << HALF, of_warps, total);
    const int equal_before = equal + (before >> HALF);
    if (key > bound.key || (key == bound.key && equal_before < bound.equals)) {
      const int place = of.first + above + (before & ((1 << HALF) - 1)) + min(equal_before, bound.equals);
      blocks[place] = of.first + i;
      chosen[place] = of.weights[of.first + i];
      mass += of.mass(i);
    }
    above += total & ((1 << HALF) - 1);
    equal += total >> HALF;
  }
  return mass;
}

// Writes the always kept blocks around `number` candidates.
__device__ void write_always(const Row& row, int number, int* blocks, float* chosen) {
  const int first = row.of.first, last = first + row.of.count;
  for (int i = threadIdx.x; i < first; i += blockDim.x) {
    blocks[i] = i;
    chosen[i] = infinity();
  }
  for (int i = threadIdx.x; i < row.behind; i += blockDim.x) {
    blocks[first + number + i] = last + i;
    chosen[first + number + i] = infinity();
  }
}

__device__ float share_of(float always, u64 total) {
  return fminf(always + static_cast<float>(static_cast<double>(total) / MASS_UNIT), 1.0f);
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
  __shared__ int of_warps[CHOOSE_THREADS / WARP_LANES];
  __shared__ u64 total;
  const int sequence = blockIdx.x;
  const Row row = row_of(weights, max_blocks, plan, always_mass, adaptive_p, max_selected, sequence);
  if (threadIdx.x == 0) total = 0;
  int enough = 0;
  if (row.missing) {
    const Bound bound = find_bound(bins, row.of, {true, 0, row.missing});
    enough = number_within(bins, bound, row.of);
    __syncthreads();
  }
  const int number = row.number(enough);
  const Bound bound = number < row.of.count && number > 0 ? find_bound(bins, row.of, {false, number, 0}) : Bound{-1, 0};
  __syncthreads();
  blocks += static_cast<long long>(sequence) * max_selected;
  chosen += static_cast<long long>(sequence) * max_selected;
  const u64 sum = write_range(row.of, bound, 0, number > 0 ? row.of.count : 0, 0, 0, blocks, chosen, of_warps);
  if (sum) atomicAdd(&total, sum);
  write_always(row, number, blocks, chosen);
  __syncthreads();
  if (threadIdx.x == 0) {
    numbers[sequence] = row.of.first + number + row.behind;
    mass[sequence] = share_of(always_mass[sequence], total);
  }
}

// ---------------------------------------------------------------------------------------------------- several blocks
//
// For long contexts: the same selection by several thread blocks a sequence, bit for bit. No block waits for another; the
// last one of a launch does what needs the results of all.

// Between two launches, of a sequence. All zero at first. Bins are zero between two rounds.
struct Search {
  u64 masses[BINS];
  int counts[BINS];
  u64 mass_above, total;
  int count_above, prefix, enough, ended;
  Bound bound;
};

// Whether all other thread blocks of the sequence have come here. All threads must call it.
__device__ bool is_last_block(int& ended) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&ended, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (is_last && threadIdx.x == 0) ended = 0;
  __threadfence();
  return is_last;
}

// A round of a search. grid (pieces, sequences), 256 threads. Arguments as in `choose`. `by_mass`: finds how many
// candidates reach the missing mass; 0: after that, the bound.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS) search_round(
    const float* weights, int max_blocks, const int* plan, const float* always_mass, float adaptive_p, int max_selected, int by_mass,
    int shift, Search* searches) {
  __shared__ Bins bins;
  const int sequence = blockIdx.y, num_bins = bins_of(shift);
  const Row row = row_of(weights, max_blocks, plan, always_mass, adaptive_p, max_selected, sequence);
  Search& search = searches[sequence];
  const Goal goal = {by_mass != 0, row.number(search.enough), row.missing};
  const bool is_needed = by_mass ? row.missing != 0 : goal.count > 0 && goal.count < row.of.count;
  const int prefix = shift == FIRST_SHIFT ? 0 : search.prefix;
  if (!is_needed || prefix < 0) return;
  count_round(bins, row.of, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, shift, prefix, goal.by_mass);
  for (int i = threadIdx.x; i < num_bins; i += blockDim.x) {
    if (!bins.counts[i]) continue;
    atomicAdd(&search.counts[i], bins.counts[i]);
    if (by_mass) atomicAdd(&search.masses[i], bins.masses[i]);
  }
  if (!is_last_block(search.ended)) return;
  for (int i = threadIdx.x; i < num_bins; i += blockDim.x) {
    bins.counts[i] = __ldcg(&search.counts[i]);
    bins.masses[i] = __ldcg(&search.masses[i]);
    search.counts[i] = 0;
    search.masses[i] = 0;
  }
  if (threadIdx.x == 0) {
    bins.count_above = shift == FIRST_SHIFT ? 0 : search.count_above;
    bins.mass_above = shift == FIRST_SHIFT ? 0 : search.mass_above;
  }
  __syncthreads();
  if (threadIdx.x < WARP_LANES) find_bin(bins, num_bins, goal);
  __syncthreads();
  if (threadIdx.x != 0) return;
  search.prefix = bins.bin < 0 ? -1 : longer(prefix, shift, bins.bin);
  search.count_above = bins.count_above;
  search.mass_above = bins.mass_above;
  if (shift > 0 && bins.bin >= 0) return;
  const Bound bound = bound_of(bins, search.prefix, goal);
  if (by_mass) search.enough = number_within(bins, bound, row.of);
  else search.bound = bound;
}

// Of the candidates, a piece of [begin, end) for each thread block.
struct Range {
  int begin, end;
};

__device__ Range range_of(const Candidates& of) {
  const int size = (of.count + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  return {min(static_cast<int>(blockIdx.x) * size, of.count), min((static_cast<int>(blockIdx.x) + 1) * size, of.count)};
}

__device__ Bound bound_of(const Row& row, const Search& search) {
  const int number = row.number(search.enough);
  return number > 0 && number < row.of.count ? search.bound : Bound{-1, 0};
}

// Counts the candidates above the bound and those at it: `counts` int32 [sequences, pieces, 2]. grid (pieces, sequences),
// 256 threads.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS) count_chosen(
    const float* weights, int max_blocks, const int* plan, const float* always_mass, float adaptive_p, int max_selected,
    const Search* searches, int* counts) {
  __shared__ int of_warps[PIECE_THREADS / WARP_LANES];
  const int sequence = blockIdx.y;
  const Row row = row_of(weights, max_blocks, plan, always_mass, adaptive_p, max_selected, sequence);
  const Bound bound = bound_of(row, searches[sequence]);
  const Range range = range_of(row.of);
  int above = 0, equal = 0;
  for (int i = range.begin + threadIdx.x; i < range.end; i += blockDim.x) {
    const int key = row.of.key(i);
    above += key > bound.key;
    equal += key == bound.key;
  }
  int* own = counts + 2 * (static_cast<long long>(sequence) * gridDim.x + blockIdx.x);
  int all_above, all_equal;
  sum_before(above, of_warps, all_above);
  sum_before(equal, of_warps, all_equal);
  if (threadIdx.x != 0) return;
  own[0] = all_above;
  own[1] = all_equal;
}

// Writes the selection. grid (pieces, sequences), 256 threads. Arguments as in `choose` and `count_chosen`.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS) write_chosen(
    const float* weights, int max_blocks, const int* plan, const float* always_mass, float adaptive_p, int max_selected,
    Search* searches, const int* counts, int* blocks, float* chosen, int* numbers, float* mass) {
  __shared__ int of_warps[PIECE_THREADS / WARP_LANES];
  const int sequence = blockIdx.y;
  const Row row = row_of(weights, max_blocks, plan, always_mass, adaptive_p, max_selected, sequence);
  Search& search = searches[sequence];
  const int number = row.number(search.enough);
  const Bound bound = bound_of(row, search);
  const Range range = range_of(row.of);
  blocks += static_cast<long long>(sequence) * max_selected;
  chosen += static_cast<long long>(sequence) * max_selected;
  counts += 2 * static_cast<long long>(sequence) * gridDim.x;
  int above = 0, equal = 0;
  for (int piece = threadIdx.x; piece < static_cast<int>(blockIdx.x); piece += blockDim.x) {
    above += counts[2 * piece];
    equal += counts[2 * piece + 1];
  }
  int all_above, all_equal;
  sum_before(above, of_warps, all_above);
  sum_before(equal, of_warps, all_equal);
  const int end = number > 0 ? range.end : range.begin;
  const u64 sum = write_range(row.of, bound, range.begin, end, all_above, all_equal, blocks, chosen, of_warps);
  if (sum) atomicAdd(&search.total, sum);
  if (blockIdx.x == 0) write_always(row, number, blocks, chosen);
  if (!is_last_block(search.ended) || threadIdx.x != 0) return;
  numbers[sequence] = row.of.first + number + row.behind;
  mass[sequence] = share_of(always_mass[sequence], __ldcg(&search.total));
  search.total = 0;
}
