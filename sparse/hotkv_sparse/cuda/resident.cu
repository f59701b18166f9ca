// Tables for sequences whose old blocks are only in host memory: finds each row's state and the blocks that a step
// completes, and stages the pages of a context.
//
// The host knows a request by its state, the batch by its row. The block that a row writes last is one request's alone
// and so identifies it. Before the step the host writes `row_of_block` int32 [num_blocks]: 2 * state, plus 1 if the row
// attends sparsely; -1 for others. So it need not read anything back.
#include "common.cuh"

// Finds the state of each row. A thread block of 128 for each row of the largest batch; those from `num_rows` on get no
// state, so that a graph captured with more rows skips them.
//
// `context_tokens`: int32 [rows], with the step's tokens.
// `starts`: int32 [rows + 1], first query of each row.
// `state_of_row`: int32 [rows], output: states; -1 without.
// `state_of`: int32 [rows], output: the same for rows that attend sparsely (the host says so, and there is one query),
//   else -1.
// `table`: [rows, table_stride], output: for other rows, a copy of `engine_table`.
// `lengths`: [rows], output: tokens of each context.
// `complete_pages`, `complete_rows`: int32 [num_complete], output: pages of the blocks that the step completes, and
//   rows of their sketches; -1 for an unused entry. Row r's begin at starts[r] / block_tokens + r, so those of two rows
//   never overlap.
extern "C" __global__ void __launch_bounds__(128) find_states(
    const int* context_tokens, const int* starts, int num_rows, const int* engine_table, long long engine_stride, int block_tokens,
    const int* row_of_block, int num_blocks, const int* rows, int max_blocks,
    int* state_of_row, int* state_of, int* complete_pages, int* complete_rows, int num_complete, int* table, long long table_stride,
    int* lengths) {
  const int row = blockIdx.x;
  if (row >= num_rows) {
    if (threadIdx.x == 0) state_of_row[row] = state_of[row] = -1;
    return;
  }
  const int begin = starts[row], end = starts[row + 1], queries = end - begin;
  const int tokens = queries > 0 ? min(context_tokens[row], max_blocks * block_tokens) : 0;
  const int count = (tokens + block_tokens - 1) / block_tokens;
  const int* blocks = engine_table + row * engine_stride;
  const int written = count ? blocks[count - 1] : -1;
  const int named = written >= 0 && written < num_blocks ? row_of_block[written] : -1;
  const int own = named < 0 ? -1 : named / 2;
  const bool is_sparse = named >= 0 && named % 2 == 1 && queries == 1;
  if (threadIdx.x == 0) {
    state_of_row[row] = own;
    state_of[row] = is_sparse ? own : -1;
    lengths[row] = tokens;
  }
  if (!is_sparse)
    for (int i = threadIdx.x; i < count; i += blockDim.x) table[row * table_stride + i] = blocks[i];
  const int first = own >= 0 ? (tokens - queries) / block_tokens : 0, num = own >= 0 ? tokens / block_tokens - first : 0;
  const int at = begin / block_tokens + row, next = row + 1 == num_rows ? num_complete : end / block_tokens + row + 1;
  for (int i = threadIdx.x; at + i < min(next, num_complete); i += blockDim.x) {
    complete_pages[at + i] = i < num ? blocks[first + i] : 0;
    complete_rows[at + i] = i < num ? rows[static_cast<long long>(own) * max_blocks + first + i] : -1;
  }
}

// Finds the keys of a state's blocks [0, count). Any grid, 128 threads.
//
// `addresses`: int64 [count], output: of pages, in the engine's cache (from `cache` on, `page_bytes` each) or, if away,
//   `layer_offset` bytes behind the start of the slot in the arena.
// `found_rows`: int32 [count], output: of sketches in the pools; -1 if the state is not in the batch.
extern "C" __global__ void __launch_bounds__(128) locate_keys(
    int state, int count, const int* state_of_row, int num_rows, const int* engine_table, long long engine_stride, const int* freed, int num_sinks,
    const long long* arena, const int* rows, int max_blocks, long long cache, long long page_bytes, long long layer_offset,
    long long* addresses, int* found_rows) {
  int row = 0;
  while (row < num_rows && state_of_row[row] != state) ++row;
  const Engine engine = {engine_table + (row < num_rows ? row : 0) * engine_stride, freed[state], num_sinks};
  for (int block = blockIdx.x * blockDim.x + threadIdx.x; block < count; block += gridDim.x * blockDim.x) {
    const long long at = static_cast<long long>(state) * max_blocks + block;
    const long long there = arena[at] ? arena[at] + layer_offset : 0;
    addresses[block] = engine.is_away(block) ? there : cache + engine.table[block] * page_bytes;
    found_rows[block] = row < num_rows ? rows[at] : -1;
  }
}

// Copies the first `count` pages of batch row `row` side by side to `target`, from its page `first_page` on; `table`
// int32 [count] gets each block's page there. grid (count, pieces), 256 threads. `faults[1]` counts blocks without an
// address.
extern "C" __global__ void __launch_bounds__(256) stage_pages(
    int row, const int* state_of_row, const int* engine_table, long long engine_stride, const int* freed, int num_sinks, const long long* arena,
    int max_blocks, long long cache, long long page_bytes, long long layer_offset, long long target, int first_page, int* table,
    int* faults) {
  const int state = state_of_row[row], block = blockIdx.x;
  if (threadIdx.x == 0 && blockIdx.y == 0) table[block] = first_page + block;
  const Engine engine = {engine_table + row * engine_stride, state < 0 ? 0 : freed[state], num_sinks};
  long long source = 0;
  if (!engine.is_away(block)) {
    source = cache + engine.table[block] * page_bytes;
  } else {
    source = arena[static_cast<long long>(state) * max_blocks + block];
    if (source) source += layer_offset;
  }
  if (!source) {
    if (threadIdx.x == 0 && blockIdx.y == 0) atomicAdd(faults + 1, 1);
    return;
  }
  copy_bytes(source, target + (first_page + block) * page_bytes, page_bytes, blockIdx.y, gridDim.y);
}
