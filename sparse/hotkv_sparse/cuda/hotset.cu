// Updates the hot sets as `hotkv_sparse.hotset` does on a CPU: which selected blocks to load, into which slots, what to
// evict for them.
//
// Only these kernels change the tables, in the order of the stream, so attention queued earlier reads its table before
// a later step changes it. Other streams copy only to slots in state LOADING, which no table names. The least recently
// used block goes first, of equals the lowest position; never an always kept block, or one without a copy in host
// memory.
//
// Tables belong to a *state*, not to a row of the batch: row r has state `state_of[r]`, -1 if none.
//
// With an engine's block table (`engine_table` int32 [rows, engine_stride], or null), a block that is not *away* (see
// common.cuh) is in the page that it names; its slot holds no bytes. Every complete block then has a copy in host
// memory.
#include "common.cuh"

constexpr signed char FREE = 0, MAPPED = 1, LOADING = 2, CANCELLED = 4;
constexpr int NO_SLOT = -1;
constexpr int STEP_THREADS = 1024;
constexpr u64 NO_KEY = 0;

// Tables of a sequence. state, block_of, used_at: [num_slots]. slot_of, has_copy: [max_blocks]. has_copy null: all have
// one.
struct Tables {
  signed char* state;
  int* block_of;
  int* used_at;
  int* slot_of;
  const u8* has_copy;

  __device__ bool may_go(int block) const { return !has_copy || has_copy[block]; }

  __device__ void release(int slot) {
    slot_of[block_of[slot]] = NO_SLOT;
    block_of[slot] = NO_SLOT;
    state[slot] = FREE;
  }
};

// Largest key of the thread block. All threads must call it.
__device__ u64 largest(u64 key, u64* of_warps) {
  for (int step = WARP_LANES / 2; step > 0; step /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, step));
  __syncthreads();
  if (threadIdx.x % WARP_LANES == 0) of_warps[threadIdx.x / WARP_LANES] = key;
  __syncthreads();
  for (int i = 0; i < blockDim.x / WARP_LANES; ++i) key = max(key, of_warps[i]);
  return key;
}

// Calls `use(place, slot)` for up to `wanted` free slots, lowest first; returns their number. All threads must call it.
template <class Use>
__device__ int take_free_slots(const Tables& tables, int num_slots, int wanted, int* of_warps, Use use) {
  int number = 0;
  for (int base = 0; base < num_slots && number < wanted; base += blockDim.x) {
    const int slot = base + threadIdx.x;
    const bool is_free = slot < num_slots && tables.state[slot] == FREE;
    int total;
    const int place = number + sum_before(is_free, of_warps, total);
    if (is_free && place < wanted) use(place, slot);
    number += total;
  }
  __syncthreads();
  return max(min(number, wanted), 0);
}

// Next block to evict: the least recently used, last used before step `clock`; -1 if none. `key`: of the block returned
// last (all bits 1 at first); set to this block's.
__device__ int coldest_after(const Tables& tables, int num_slots, int first, int last, int clock, u64& key, u64* of_warps) {
  u64 best = NO_KEY;
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) {
    const int block = tables.block_of[slot];
    if (tables.state[slot] != MAPPED || tables.used_at[slot] >= clock) continue;
    if (block < first || block >= last || !tables.may_go(block)) continue;
    const u64 own = ~(static_cast<u64>(tables.used_at[slot]) << 32 | static_cast<u32>(block));
    if (own < key) best = max(best, own);
  }
  key = largest(best, of_warps);
  return key == NO_KEY ? NO_SLOT : static_cast<int>(~key & 0xffffffffu);
}

// Key of a missing block: larger if heavier, of equals for the first in the selection; above NO_KEY.
__device__ __forceinline__ u64 weight_key(float weight, int i) {
  const u32 bits = __float_as_uint(weight + 0.0f), ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(ordered) << 32 | (0xffffffffu - static_cast<u32>(i));
}

// Calls `use(rank, block)` for all of `blocks` for which `takes(block)`, the heaviest with rank 0. All threads must call
// it; `takes` must not change meanwhile. `keys`: shared, one per thread.
template <class Takes, class Use>
__device__ void rank_blocks(const int* blocks, const float* weights, int number, u64* keys, Takes takes, Use use) {
  const auto key_of = [&](int i) { return i < number && takes(blocks[i]) ? weight_key(weights[i], i) : NO_KEY; };
  for (int base = 0; base < number; base += blockDim.x) {
    const u64 own = key_of(base + threadIdx.x);
    int rank = 0;
    for (int start = 0; start < number; start += blockDim.x) {
      __syncthreads();
      keys[threadIdx.x] = key_of(start + threadIdx.x);
      __syncthreads();
      const int size = own == NO_KEY ? 0 : min(static_cast<int>(blockDim.x), number - start);
      for (int i = 0; i < size; ++i) rank += keys[i] > own;
    }
    if (own != NO_KEY) use(rank, blocks[base + threadIdx.x]);
  }
}

// Assigns slots to blocks that contexts gained, before the engine writes them. grid (rows), 1024 threads. All new
// blocks of a sequence get one, or none: then `faults[0]` counts it, and the next step tries again.
//
// `known`: int [states], blocks considered so far.
// `epochs`: int [states], or null. If it differs from `seen`, this layer builds the hot set anew (another request has
//   the state), with only the always kept blocks.
// `seen`: int [states], number for which it was last built.
// `is_first`: u8 [states], set to 1 for such a hot set, for its next `hot_step`.
// `content`: int [states, num_slots], the block whose bytes each slot holds.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_grow(
    const int* plan, const int* state_of, int max_blocks, signed char* state, int* block_of, int* used_at, int num_slots, int* slot_of,
    const u8* has_copy, const int* capacities, int* clocks, int* known, int* faults, const int* epochs, int* seen, u8* is_first,
    int* content) {
  __shared__ u64 of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int sums_of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int num_mapped, num_able;
  const int row = blockIdx.x, sequence = state_of[row], thread = threadIdx.x;
  if (sequence < 0) return;
  const long long at_slots = static_cast<long long>(sequence) * num_slots, at_blocks = static_cast<long long>(sequence) * max_blocks;
  Tables tables = {state + at_slots, block_of + at_slots, used_at + at_slots, slot_of + at_blocks, has_copy ? has_copy + at_blocks : nullptr};
  const int first = plan[row * PLAN_WORDS + PLAN_FIRST], last = plan[row * PLAN_WORDS + PLAN_LAST];
  const int count = plan[row * PLAN_WORDS + PLAN_COUNT];
  const bool is_fresh = epochs && seen[sequence] != epochs[sequence];
  const int from = is_fresh ? 0 : known[sequence], clock = is_fresh ? 0 : clocks[sequence];
  if (thread == 0) num_mapped = num_able = 0;
  __syncthreads();
  if (is_fresh) {
    for (int slot = thread; slot < num_slots; slot += blockDim.x) {
      tables.state[slot] = FREE;
      tables.block_of[slot] = content[at_slots + slot] = NO_SLOT;
      tables.used_at[slot] = 0;
    }
    for (int block = thread; block < max_blocks; block += blockDim.x) tables.slot_of[block] = NO_SLOT;
    if (thread == 0) {
      clocks[sequence] = known[sequence] = 0;
      seen[sequence] = epochs[sequence];
      is_first[sequence] = 1;
    }
    __syncthreads();
  }
  if (count <= from) return;
  for (int slot = thread; slot < num_slots; slot += blockDim.x) {
    const int block = tables.block_of[slot];
    if (tables.state[slot] == MAPPED) atomicAdd(&num_mapped, 1);
    if (tables.state[slot] == FREE || (tables.state[slot] == MAPPED && first <= block && block < last &&
        tables.may_go(block))) atomicAdd(&num_able, 1);
  }
  __syncthreads();
  // Anew, only always kept blocks get slots here, others in the first `hot_step`.
  const int num_new = is_fresh ? first + count - last : count - from;
  const int growth = capacities[sequence] - num_mapped, excess = max(-growth, 0);
  if (num_able < num_new + excess) {
    if (thread == 0) atomicAdd(&faults[0], 1);
    return;
  }
  const auto put = [&](int i, int slot) {
    const int block = !is_fresh ? from + i : i < first ? i : last + i - first;
    tables.slot_of[block] = slot;
    tables.block_of[slot] = block;
    tables.state[slot] = MAPPED;
    tables.used_at[slot] = clock;
  };
  u64 key = ~0ull;
  for (int i = take_free_slots(tables, num_slots, min(num_new, growth), sums_of_warps, put); i < num_new; ++i) {
    const int victim = coldest_after(tables, num_slots, first, last, clock + 1, key, of_warps);
    if (victim == NO_SLOT) break;
    const int slot = tables.slot_of[victim];
    __syncthreads();
    if (thread == 0) {
      tables.release(slot);
      put(i, slot);
    }
    __syncthreads();
  }
  // The capacity has shrunk below the size of the hot set.
  for (int i = 0; i < excess; ++i) {
    const int victim = coldest_after(tables, num_slots, first, last, clock + 1, key, of_warps);
    if (victim == NO_SLOT) break;
    if (thread == 0) tables.release(tables.slot_of[victim]);
    __syncthreads();
  }
  if (thread == 0) known[sequence] = count;
}

// A step's counts.
constexpr int LOADED = 0, VICTIMS = 1, PREFETCH = 2, SELECTED = 3, RESIDENT = 4, ATTENDED = 5, SEQUENCE_TOKENS = 6, STEP_WORDS = 8;

// Assigns slots to missing selected blocks, and evicts others for them. grid (sequences), 1024 threads. Missing always
// kept blocks come first, even beyond `max_corrections`, up to `max_loads`. A state's first step ignores
// `max_corrections`.
//
// `is_first`: u8 [states], 1 before that step; set to 0.
// `capacities`, `clocks`: int32 [states], of the hot set; number of its steps.
// `loads`: int32 [sequences, 2, max_loads], output: blocks, slots.
// `victims`: int32 [sequences, max_victims], output.
// `prefetch`: int32 [sequences, max_prefetch], output: missing blocks not in `loads`, heaviest first.
// `counts`: int32 [sequences, STEP_WORDS], output.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_step(
    const int* blocks, const float* weights, const int* numbers, int max_selected, const int* plan, const int* state_of, int max_blocks,
    signed char* state, int* block_of,
    int* used_at, int num_slots, int* slot_of, const u8* has_copy, const int* capacities, int* clocks, int max_corrections,
        int drops_unselected,
    int max_loads, int max_victims, int max_prefetch, int* loads, int* victims, int* prefetch, int* counts, u8* is_first) {
  __shared__ u64 of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int sums_of_warps[STEP_THREADS / WARP_LANES];
  __shared__ u64 keys[STEP_THREADS];
  __shared__ int num_mapped, num_missing, num_kept, num_always, num_victims, num_loads, num_rest;
  const int row = blockIdx.x, sequence = state_of[row], thread = threadIdx.x;
  const int number = sequence < 0 ? 0 : numbers[row];
  counts += row * STEP_WORDS;
  if (number == 0) {
    if (thread < STEP_WORDS) counts[thread] = 0;
    return;
  }
  const long long at_slots = static_cast<long long>(sequence) * num_slots, at_blocks = static_cast<long long>(sequence) * max_blocks;
  Tables tables = {state + at_slots, block_of + at_slots, used_at + at_slots, slot_of + at_blocks, has_copy ? has_copy + at_blocks : nullptr};
  const int first = plan[row * PLAN_WORDS + PLAN_FIRST], last = plan[row * PLAN_WORDS + PLAN_LAST];
  blocks += static_cast<long long>(row) * max_selected;
  weights += static_cast<long long>(row) * max_selected;
  int* load_blocks = loads + static_cast<long long>(row) * 2 * max_loads;
  int* load_slots = load_blocks + max_loads;
  victims += static_cast<long long>(row) * max_victims;
  prefetch += static_cast<long long>(row) * max_prefetch;
  const int clock = clocks[sequence] + 1;
  if (is_first && is_first[sequence]) max_corrections = max_loads;
  if (thread == 0) num_mapped = num_missing = num_kept = num_always = num_victims = num_loads = num_rest = 0;
  __syncthreads();

  // Mark mapped ones as used in this step, count missing ones.
  for (int i = thread; i < number; i += blockDim.x) {
    const int slot = tables.slot_of[blocks[i]];
    const bool is_always = isinf(weights[i]);
    if (is_always) atomicAdd(&num_always, 1);
    if (slot >= 0 && tables.state[slot] == MAPPED) {
      tables.used_at[slot] = clock;
    } else {
      atomicAdd(&num_missing, 1);
      if (is_always) atomicAdd(&num_kept, 1);
    }
  }
  __syncthreads();
  if (thread == 0) {
    clocks[sequence] = clock;
    if (is_first) is_first[sequence] = 0;
  }
  for (int slot = thread; slot < num_slots; slot += blockDim.x) {
    if (tables.state[slot] != MAPPED) continue;
    const int block = tables.block_of[slot];
    if (drops_unselected && tables.used_at[slot] < clock && first <= block && block < last && tables.may_go(block)) {
      const int place = atomicAdd(&num_victims, 1);
      if (place < max_victims) victims[place] = block;
      tables.release(slot);
    } else {
      atomicAdd(&num_mapped, 1);
    }
  }
  __syncthreads();

  // Slots for missing blocks: free ones below the capacity, then those of the least recently used blocks.
  const int wanted = min(min(num_missing, max(num_kept, max_corrections)), max_loads), growth = capacities[sequence] - num_mapped;
  const int num_free = take_free_slots(tables, num_slots, min(wanted, growth), sums_of_warps, [&](int i, int slot) { load_slots[i] = slot; });
  if (thread == 0) num_loads = num_free;
  __syncthreads();
  u64 before;
  // The second round is for always kept blocks only, and evicts even selected ones.
  for (int is_second = 0; is_second < 2; ++is_second) {
    const int excess = is_second ? min(num_kept, wanted) - num_loads : wanted - num_loads + max(-growth, 0);
    before = ~0ull;
    for (int i = 0; i < excess; ++i) {
      const int block = coldest_after(tables, num_slots, first, last, clock + is_second, before, of_warps);
      if (block == NO_SLOT) break;
      if (thread == 0) {
        const int slot = tables.slot_of[block];
        tables.release(slot);
        if (num_victims < max_victims) victims[num_victims] = block;
        ++num_victims;
        --num_mapped;
        if (num_loads < wanted) load_slots[num_loads++] = slot;
      }
      __syncthreads();
    }
    __syncthreads();
  }

  // The heaviest missing blocks get these slots, the next heaviest are listed for the prefetch.
  const int num = num_loads;
  rank_blocks(blocks, weights, number, keys, [&](int block) {
    const int slot = tables.slot_of[block];
    return num > 0 && (slot < 0 || tables.state[slot] != MAPPED);
  }, [&](int rank, int block) { if (rank < num) load_blocks[rank] = block; });
  __syncthreads();
  for (int i = thread; i < num; i += blockDim.x) {
    const int block = load_blocks[i], old = tables.slot_of[block], slot = load_slots[i];
    if (old >= 0) {  // a prefetch of this block: its slot becomes free, at the latest when the prefetch has ended
      tables.block_of[old] = NO_SLOT;
      tables.state[old] = tables.state[old] == LOADING ? CANCELLED : FREE;
    }
    tables.slot_of[block] = slot;
    tables.block_of[slot] = block;
    tables.state[slot] = MAPPED;
    tables.used_at[slot] = clock;
  }
  __syncthreads();
  rank_blocks(blocks, weights, number, keys, [&](int block) { return max_prefetch > 0 && tables.slot_of[block] < 0; },
      [&](int rank, int block) {
        if (rank >= max_prefetch) return;
        prefetch[rank] = block;
        atomicAdd(&num_rest, 1);
      });
  __syncthreads();
  if (thread != 0) return;
  counts[LOADED] = num;
  counts[VICTIMS] = num_victims;
  counts[PREFETCH] = num_rest;
  counts[SELECTED] = number - num_always;
  counts[RESIDENT] = (number - num_missing) - (num_always - num_kept);
}

// Blocks that `hot_table` puts in order at a time.
constexpr int TABLE_WORDS = 2048, TABLE_BLOCKS = 32 * TABLE_WORDS;

// Writes the block table for attention, in the order of the context, and the counts ATTENDED and SEQUENCE_TOKENS, which
// are 0 without a state. So attention over a whole context rounds as over the engine's own table. grid (rows), 1024
// threads.
//
// `slots`: int32 [rows, num_slots], output: of these blocks.
// `table`: int32 [rows, table_stride], output: their pages.
// `lengths`: int32 [rows], output: SEQUENCE_TOKENS.
// `content`: as in `hot_grow`, or null. Set here for blocks that are away: their pages have been copied into the slots.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_table(
    const int* plan, const int* state_of, int block_tokens, const signed char* state, const int* block_of, int num_slots, const int* pages,
    const int* engine_table, long long engine_stride, const int* freed, int num_sinks, int* content, int* slots, int* table,
    long long table_stride, int* lengths, int* counts) {
  __shared__ u32 is_mapped[TABLE_WORDS];  // a bit per block
  __shared__ int before[TABLE_WORDS];     // mapped blocks before those of the word
  __shared__ int of_warps[STEP_THREADS / WARP_LANES];
  const int row = blockIdx.x, sequence = state_of[row];
  if (sequence < 0) {
    if (threadIdx.x == 0) counts[row * STEP_WORDS + ATTENDED] = counts[row * STEP_WORDS + SEQUENCE_TOKENS] = 0;
    return;
  }
  const int num_blocks = plan[row * PLAN_WORDS + PLAN_COUNT], tokens = plan[row * PLAN_WORDS + PLAN_TOKENS];
  const long long at = static_cast<long long>(sequence) * num_slots, at_row = static_cast<long long>(row) * num_slots;
  const Engine engine = {engine_table ? engine_table + row * engine_stride : nullptr, engine_table ? freed[sequence] : 0, num_sinks};
  table += row * table_stride;
  int number = 0;
  bool has_last = false;
  for (int start = 0; start < num_blocks; start += TABLE_BLOCKS) {
    const int size = min(TABLE_BLOCKS, num_blocks - start), num_words = (size + 31) / 32;
    for (int word = threadIdx.x; word < num_words; word += blockDim.x) is_mapped[word] = 0;
    __syncthreads();
    for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) {
      const int place = block_of[at + slot] - start;
      if (state[at + slot] == MAPPED && place >= 0 && place < size) atomicOr(&is_mapped[place / 32], 1u << place % 32);
    }
    __syncthreads();
    for (int first = 0; first < num_words; first += blockDim.x) {
      const int word = first + threadIdx.x;
      int total;
      const int lower = sum_before(word < num_words ? __popc(is_mapped[word]) : 0, of_warps, total);
      if (word < num_words) before[word] = number + lower;
      number += total;
    }
    has_last = is_mapped[num_words - 1] >> (size - 1) % 32 & 1;
    __syncthreads();
    for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) {
      const int block = block_of[at + slot], place = block - start;
      if (state[at + slot] != MAPPED || place < 0 || place >= size) continue;
      const int entry = before[place / 32] + __popc(is_mapped[place / 32] & ((1u << place % 32) - 1u));
      slots[at_row + entry] = slot;
      table[entry] = engine.page_of(block, pages[at + slot]);
      if (content && engine.is_away(block)) content[at + slot] = block;
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const int length = number * block_tokens - (has_last ? num_blocks * block_tokens - tokens : 0);
  counts[row * STEP_WORDS + ATTENDED] = number;
  counts[row * STEP_WORDS + SEQUENCE_TOKENS] = length;
  lengths[row] = length;
}

// Copies the blocks of `loads` from the mapped arena into their slots. grid (max_loads, pieces, rows), 256 threads.
//
// `arena`: int64 [states, max_blocks], addresses of blocks in host memory; 0: none (counted in `faults[1]`).
// `fragments`: int64 [num_fragments, 3], contiguous pieces of a block: offset in it, address in page 0 (`page_bytes` *
//   p higher in page p), number of bytes.
// `pages`: of each slot.
extern "C" __global__ void __launch_bounds__(256) pull_blocks(
    const int* loads, int max_loads, const int* counts, const int* state_of, const long long* arena, int max_blocks,
    const long long* fragments, int num_fragments, long long page_bytes, const int* pages, int num_slots, int* faults) {
  const int row = blockIdx.z;
  if (blockIdx.x >= counts[row * STEP_WORDS + LOADED]) return;
  const int sequence = state_of[row];
  const int* load = loads + static_cast<long long>(row) * 2 * max_loads + blockIdx.x;
  const long long from = arena[static_cast<long long>(sequence) * max_blocks + load[0]];
  if (!from) {
    if (threadIdx.x == 0 && blockIdx.y == 0) atomicAdd(faults + 1, 1);
    return;
  }
  const long long page = pages[static_cast<long long>(sequence) * num_slots + load[max_loads]];
  for (int i = 0; i < num_fragments; ++i)
    copy_bytes(from + fragments[3 * i], fragments[3 * i + 1] + page * page_bytes, fragments[3 * i + 2], blockIdx.y, gridDim.y);
}

// Copies mapped blocks that are away from the mapped arena into their slots, unless these hold them already
// (`content`): so also a block whose page the engine freed after it joined the hot set. grid (num_slots, pieces, rows),
// 256 threads. `faults[2]` counts copied pages.
extern "C" __global__ void __launch_bounds__(256) pull_pages(
    const int* state_of, const signed char* state, const int* block_of, const int* content, int num_slots, const int* freed, int num_sinks,
    const long long* arena, int max_blocks, const long long* fragments, int num_fragments, long long page_bytes, const int* pages,
    int* faults) {
  const int row = blockIdx.z, sequence = state_of[row];
  if (sequence < 0) return;
  const long long at = static_cast<long long>(sequence) * num_slots + blockIdx.x;
  const int block = block_of[at];
  if (state[at] != MAPPED || block < num_sinks || block >= freed[sequence] || content[at] == block) return;
  const long long from = arena[static_cast<long long>(sequence) * max_blocks + block], page = pages[at];
  if (!from || page < 0) {
    if (threadIdx.x == 0 && blockIdx.y == 0) atomicAdd(faults + 1, 1);
    return;
  }
  for (int i = 0; i < num_fragments; ++i)
    copy_bytes(from + fragments[3 * i], fragments[3 * i + 1] + page * page_bytes, fragments[3 * i + 2], blockIdx.y, gridDim.y);
  if (threadIdx.x == 0 && blockIdx.y == 0) atomicAdd(faults + 2, 1);
}
