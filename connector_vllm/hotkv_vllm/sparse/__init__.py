"""Sparse decode in CPU engines: attention to a hot set of blocks, chosen with each step's own
query.

vLLM calls `backend` for every layer. There `worker` decides which blocks each row of the batch
attends to. It uses `sequence` (hot sets of a sequence) and `pool` (representations: compact forms
of the blocks' keys, by which blocks are scored). `rows` decides in the scheduler which rows attend
sparsely, and tells the worker the request of each. `offloading` offers the same parts under the
names of vLLM's RFC #37263. The arithmetic is in `hotkv_sparse`.
"""
