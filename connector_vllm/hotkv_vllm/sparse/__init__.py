"""Sparse decode in CPU engines: a decode step attends only to some blocks of a long context (the
hot set), which each layer chooses with the step's query.

In the scheduler, `rows` decides which rows (requests) of a step attend sparsely. In a worker, vLLM
calls `backend` for every layer, and `worker` decides which blocks each row attends to. For this,
`worker` uses `sequence` (the hot sets of a request) and `pool` (sketches: compact forms of
the blocks' keys, by which blocks are scored). `offloading` has classes with the names of vLLM's RFC
#37263 for the same purpose; engines don't use them. The arithmetic is in `hotkv_sparse`.
"""
