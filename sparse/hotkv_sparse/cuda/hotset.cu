// The hot set's step on the device (hotkv_sparse.hotset): which selected blocks are loaded now, into which slots, in whose place.
//
// Tables lie in device memory and are changed by these kernels alone, in the order of the stream: attention that was given to the
// stream earlier has read its table before a later step changes it. Copies that other streams make go to slots in state LOADING only,
// which no table names. The least recently used is evicted first, of equals the lowest block; always kept blocks and those without a copy never
// go.
#include "common.cuh"

constexpr signed char FREE = 0, MAPPED = 1, LOADING = 2, CANCELLED = 4;
constexpr int NO_SLOT = -1;
constexpr int STEP_THREADS = 1024;
constexpr u64 NO_KEY = 0;

// A sequence's tables: state, block_of, used_at [num_slots]; slot_of, has_copy [max_blocks].
struct Tables {
  signed char* state;
  int* block_of;
  int* used_at;
  int* slot_of;
  const u8* has_copy;

  __device__ void release(int slot) {
    slot_of[block_of[slot]] = NO_SLOT;
    block_of[slot] = NO_SLOT;
    state[slot] = FREE;
  }
};

// The largest key of all threads of the block; all must call it.
__device__ u64 largest(u64 key, u64* of_warps) {
  for (int step = WARP_LANES / 2; step > 0; step /= 2) key = max(key, __shfl_xor_sync(ALL_LANES, key, step));
  __syncthreads();
  if (threadIdx.x % WARP_LANES == 0) of_warps[threadIdx.x / WARP_LANES] = key;
  __syncthreads();
  for (int i = 0; i < blockDim.x / WARP_LANES; ++i) key = max(key, of_warps[i]);
  return key;
}

// The lowest free slot above `after`; -1: none.
__device__ int free_slot_after(const Tables& tables, int num_slots, int after, u64* of_warps) {
  u64 key = NO_KEY;
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x)
    if (slot > after && tables.state[slot] == FREE) key = max(key, static_cast<u64>(0xffffffffu - static_cast<u32>(slot)));
  key = largest(key, of_warps);
  return key == NO_KEY ? NO_SLOT : static_cast<int>(0xffffffffu - static_cast<u32>(key));
}

// The next block to go, used before step `clock`: `key` is that of the one before (at first all ones) and becomes its own; -1: none may go.
__device__ int coldest_after(const Tables& tables, int num_slots, int first, int last, int clock, u64& key, u64* of_warps) {
  u64 best = NO_KEY;
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) {
    const int block = tables.block_of[slot];
    if (tables.state[slot] != MAPPED || tables.used_at[slot] >= clock) continue;
    if (block < first || block >= last || !tables.has_copy[block]) continue;
    const u64 own = ~(static_cast<u64>(tables.used_at[slot]) << 32 | static_cast<u32>(block));
    if (own < key) best = max(best, own);
  }
  key = largest(best, of_warps);
  return key == NO_KEY ? NO_SLOT : static_cast<int>(~key & 0xffffffffu);
}

// Orders missing blocks: the heaviest first, of equals the one that is selected first; above NO_KEY.
__device__ __forceinline__ u64 weight_key(float weight, int i) {
  const u32 bits = __float_as_uint(weight + 0.0f), ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<u64>(ordered) << 32 | (0xffffffffu - static_cast<u32>(i));
}

// grid (sequences), 1024 threads, before a step: blocks from `known` [sequences] up to the context's end get slots, for the engine to
// write its new keys and values to; `known` follows. All of a sequence's new blocks get slots, or none (counted in `faults[0]`; `known`
// stays, the next step tries again).
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_grow(
    const int* plan, int max_blocks, signed char* state, int* block_of, int* used_at, int num_slots, int* slot_of, const u8* has_copy,
    const int* capacities, const int* clocks, int* known, int* faults) {
  __shared__ u64 of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int num_mapped, num_able;
  const int sequence = blockIdx.x, thread = threadIdx.x;
  const long long at_slots = static_cast<long long>(sequence) * num_slots, at_blocks = static_cast<long long>(sequence) * max_blocks;
  Tables tables = {state + at_slots, block_of + at_slots, used_at + at_slots, slot_of + at_blocks, has_copy + at_blocks};
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  const int from = known[sequence], count = plan[sequence * PLAN_WORDS + PLAN_COUNT], clock = clocks[sequence];
  if (thread == 0) num_mapped = num_able = 0;
  __syncthreads();
  if (count <= from) return;
  for (int slot = thread; slot < num_slots; slot += blockDim.x) {
    const int block = tables.block_of[slot];
    if (tables.state[slot] == MAPPED) atomicAdd(&num_mapped, 1);
    if (tables.state[slot] == FREE || (tables.state[slot] == MAPPED && first <= block && block < last &&
        tables.has_copy[block])) atomicAdd(&num_able, 1);
  }
  __syncthreads();
  int growth = capacities[sequence] - num_mapped;
  const int excess = max(-growth, 0);
  if (num_able < count - from + excess) {
    if (thread == 0) atomicAdd(&faults[0], 1);
    return;
  }
  int free_slot = -1;
  u64 key = ~0ull;
  for (int block = from; block < count;) {
    free_slot = growth > 0 ? free_slot_after(tables, num_slots, free_slot, of_warps) : NO_SLOT;
    int slot = free_slot, victim = NO_SLOT;
    if (slot == NO_SLOT) {
      growth = 0;
      victim = coldest_after(tables, num_slots, first, last, clock + 1, key, of_warps);
      if (victim == NO_SLOT) break;
      slot = tables.slot_of[victim];
    }
    __syncthreads();
    if (thread == 0) {
      if (victim != NO_SLOT) tables.release(slot);
      tables.slot_of[block] = slot;
      tables.block_of[slot] = block;
      tables.state[slot] = MAPPED;
      tables.used_at[slot] = clock;
    }
    __syncthreads();
    --growth;
    ++block;
  }
  // A capacity that has shrunk.
  for (int i = 0; i < excess; ++i) {
    const int victim = coldest_after(tables, num_slots, first, last, clock + 1, key, of_warps);
    if (victim == NO_SLOT) break;
    if (thread == 0) tables.release(tables.slot_of[victim]);
    __syncthreads();
  }
  if (thread == 0) known[sequence] = count;
}

// Counts of a step, for each sequence.
constexpr int LOADED = 0, VICTIMS = 1, PREFETCH = 2, SELECTED = 3, RESIDENT = 4, ATTENDED = 5, SEQUENCE_TOKENS = 6, STEP_WORDS = 8;

// grid (sequences), 1024 threads. Lists: loads int32 [sequences, 2, max_loads] (blocks, slots), victims int32 [sequences, max_victims],
// prefetch int32 [sequences, max_prefetch], heaviest first: what was missing beyond the loads; counts int32 [sequences, STEP_WORDS].
// Always kept blocks that are missing are loaded first, whatever `max_corrections` says, as far as max_loads reaches. `capacities`
// int32, `clocks` int32 [sequences].
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_step(
    const int* blocks, const float* weights, const int* numbers, int max_selected, const int* plan, int max_blocks, signed char* state,
    int* block_of,
    int* used_at, int num_slots, int* slot_of, const u8* has_copy, const int* capacities, int* clocks, int max_corrections,
        int drops_unselected,
    int max_loads, int max_victims, int max_prefetch, int* loads, int* victims, int* prefetch, int* counts) {
  __shared__ u64 of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int num_mapped, num_missing, num_kept, num_always, num_victims, num_loads;
  const int sequence = blockIdx.x, thread = threadIdx.x;
  const long long at_slots = static_cast<long long>(sequence) * num_slots, at_blocks = static_cast<long long>(sequence) * max_blocks;
  Tables tables = {state + at_slots, block_of + at_slots, used_at + at_slots, slot_of + at_blocks, has_copy + at_blocks};
  const int first = plan[sequence * PLAN_WORDS + PLAN_FIRST], last = plan[sequence * PLAN_WORDS + PLAN_LAST];
  blocks += static_cast<long long>(sequence) * max_selected;
  weights += static_cast<long long>(sequence) * max_selected;
  int* load_blocks = loads + static_cast<long long>(sequence) * 2 * max_loads;
  int* load_slots = load_blocks + max_loads;
  victims += static_cast<long long>(sequence) * max_victims;
  prefetch += static_cast<long long>(sequence) * max_prefetch;
  counts += sequence * STEP_WORDS;
  const int number = numbers[sequence], clock = clocks[sequence] + 1;
  if (thread == 0) num_mapped = num_missing = num_kept = num_always = num_victims = num_loads = 0;
  __syncthreads();
  if (number == 0) {
    if (thread < STEP_WORDS) counts[thread] = 0;
    return;
  }

  // Resident blocks are used; the rest is missing.
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
  if (thread == 0) clocks[sequence] = clock;
  for (int slot = thread; slot < num_slots; slot += blockDim.x) {
    if (tables.state[slot] != MAPPED) continue;
    const int block = tables.block_of[slot];
    if (drops_unselected && tables.used_at[slot] < clock && first <= block && block < last && tables.has_copy[block]) {
      const int place = atomicAdd(&num_victims, 1);
      if (place < max_victims) victims[place] = block;
      tables.release(slot);
    } else {
      atomicAdd(&num_mapped, 1);
    }
  }
  __syncthreads();

  // Slots: free ones while the set may grow, then those of the coldest blocks.
  const int wanted = min(min(num_missing, max(num_kept, max_corrections)), max_loads), growth = capacities[sequence] - num_mapped;
  int free_slot = -1;
  for (int i = 0; i < min(wanted, growth); ++i) {
    free_slot = free_slot_after(tables, num_slots, free_slot, of_warps);
    if (free_slot == NO_SLOT) break;
    if (thread == 0) load_slots[num_loads++] = free_slot;
  }
  __syncthreads();
  const int excess = wanted - num_loads + max(-growth, 0);
  u64 before = ~0ull;
  for (int i = 0; i < excess; ++i) {
    const int block = coldest_after(tables, num_slots, first, last, clock, before, of_warps);
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

  // Blocks: the heaviest of those missing; the next ones are for the prefetcher.
  const int num = num_loads;
  int num_rest = 0;
  before = ~0ull;
  for (int i = 0; i < min(num_missing, num + max_prefetch); ++i) {
    u64 key = NO_KEY;
    for (int j = thread; j < number; j += blockDim.x) {
      const int slot = tables.slot_of[blocks[j]];
      if (slot >= 0 && (tables.state[slot] == MAPPED || i >= num)) continue;
      const u64 own = weight_key(weights[j], j);
      if (own < before) key = max(key, own);
    }
    key = largest(key, of_warps);
    if (key == NO_KEY) break;
    before = key;
    const int block = blocks[0xffffffffu - static_cast<u32>(key)];
    if (i >= num) {
      if (thread == 0) prefetch[num_rest] = block;
      ++num_rest;
      continue;
    }
    if (thread == 0) {
      const int old = tables.slot_of[block], slot = load_slots[i];
      if (old >= 0) {  // a prefetch of it: the slot is free, or becomes so when the writer is done
        tables.block_of[old] = NO_SLOT;
        tables.state[old] = tables.state[old] == LOADING ? CANCELLED : FREE;
      }
      load_blocks[i] = block;
      tables.slot_of[block] = slot;
      tables.block_of[slot] = block;
      tables.state[slot] = MAPPED;
      tables.used_at[slot] = clock;
    }
    __syncthreads();
  }
  if (thread != 0) return;
  counts[LOADED] = num;
  counts[VICTIMS] = num_victims;
  counts[PREFETCH] = num_rest;
  counts[SELECTED] = number - num_always;
  counts[RESIDENT] = (number - num_missing) - (num_always - num_kept);
}

// grid (sequences), 1024 threads: what attention may read: slots int32 [sequences, num_slots], those of mapped blocks in the order of
// slots, but the last block of the context at the end, and table, their pages: a block table of one sequence of SEQUENCE_TOKENS tokens.
// Fills ATTENDED, SEQUENCE_TOKENS.
extern "C" __global__ void __launch_bounds__(STEP_THREADS) hot_table(
    const int* plan, int block_tokens, const signed char* state, const int* block_of, int num_slots, const int* pages, int* slots,
    int* table,
    int* counts) {
  __shared__ int of_warps[STEP_THREADS / WARP_LANES];
  __shared__ int last_slot;
  const int sequence = blockIdx.x, lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
  const int num_blocks = plan[sequence * PLAN_WORDS + PLAN_COUNT], tokens = plan[sequence * PLAN_WORDS + PLAN_TOKENS];
  const long long at = static_cast<long long>(sequence) * num_slots;
  if (threadIdx.x == 0) last_slot = NO_SLOT;
  __syncthreads();
  int number = 0;
  for (int base = 0; base < num_slots; base += blockDim.x) {
    const int slot = base + threadIdx.x;
    const bool is_mapped = slot < num_slots && state[at + slot] == MAPPED, is_last = is_mapped && block_of[at + slot] == num_blocks - 1;
    if (is_last) last_slot = slot;
    const u32 votes = __ballot_sync(ALL_LANES, is_mapped && !is_last);
    if (lane == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    int before = number;
    for (int other = 0; other < blockDim.x / WARP_LANES; ++other) {
      if (other < warp) before += of_warps[other];
      number += of_warps[other];
    }
    if (is_mapped && !is_last) {
      const int place = before + __popc(votes & ((1u << lane) - 1u));
      slots[at + place] = slot;
      table[at + place] = pages[at + slot];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  counts[sequence * STEP_WORDS + ATTENDED] = number + (last_slot >= 0);
  counts[sequence * STEP_WORDS + SEQUENCE_TOKENS] = number * block_tokens + (last_slot >= 0 ? tokens - (num_blocks - 1) * block_tokens : 0);
  if (last_slot >= 0) {
    slots[at + number] = last_slot;
    table[at + number] = pages[at + last_slot];
  }
}

// grid (max_loads, pieces, sequences), 256 threads: copies the loads of a step from the mapped arena (host memory, by its address) into
// their slots. `arena` int64 [sequences, max_blocks]: address of each block in host memory, 0: none (counted in `faults[1]`).
// `fragments` int64 [num_fragments, 3]: bytes into the block, address in page 0, bytes; a page's fragment lies `page_bytes` further
// than that of the one before. `pages`: the page of each slot.
extern "C" __global__ void __launch_bounds__(256) pull_blocks(
    const int* loads, int max_loads, const int* counts, const long long* arena, int max_blocks, const long long* fragments,
    int num_fragments,
    long long page_bytes, const int* pages, int num_slots, int* faults) {
  constexpr int IN_FLIGHT = 4;
  const int sequence = blockIdx.z;
  if (blockIdx.x >= counts[sequence * STEP_WORDS + LOADED]) return;
  const int* load = loads + static_cast<long long>(sequence) * 2 * max_loads + blockIdx.x;
  const long long from = arena[static_cast<long long>(sequence) * max_blocks + load[0]];
  if (!from) {
    if (threadIdx.x == 0 && blockIdx.y == 0) atomicAdd(faults + 1, 1);
    return;
  }
  const long long page = pages[static_cast<long long>(sequence) * num_slots + load[max_loads]];
  for (int i = 0; i < num_fragments; ++i) {
    const long long source = from + fragments[3 * i], target = fragments[3 * i + 1] + page * page_bytes, bytes = fragments[3 * i + 2];
    const bool is_aligned = ((source | target | bytes) & 15) == 0;
    const long long units = is_aligned ? bytes / 16 : bytes, stride = static_cast<long long>(gridDim.y) * blockDim.x;
    long long at = blockIdx.y * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (!is_aligned) {
      for (; at < units; at += stride) reinterpret_cast<u8*>(target)[at] = reinterpret_cast<const volatile u8*>(source)[at];
      continue;
    }
    for (; at < units; at += IN_FLIGHT * stride) {
      uint4 words[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j)
        if (at + j * stride < units) words[j] = reinterpret_cast<const uint4*>(source)[at + j * stride];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j)
        if (at + j * stride < units) reinterpret_cast<uint4*>(target)[at + j * stride] = words[j];
    }
  }
}
