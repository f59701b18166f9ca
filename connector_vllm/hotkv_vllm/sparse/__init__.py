"""Sparse decode in engines.

In the scheduler, `rows` decides which rows of a step attend sparsely. In a worker, vLLM calls
`backend` for every layer, and `worker` decides which blocks each row attends to, with `sequence`
(hot sets) and `pool` (sketches). `offloading` has the names of vLLM's RFC #37263; engines don't
use it. The arithmetic is in `hotkv_sparse`.
"""
