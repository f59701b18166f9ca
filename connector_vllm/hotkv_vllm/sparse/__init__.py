"""Sparse decode in CPU engines: attention to a hot set of blocks, chosen with each step's own
query.

`backend` is what vLLM calls for every layer; `worker` decides there what each row of the batch
attends to, with `sequence` (one sequence's hot sets) and `pool` (representations of the engine's
blocks). `rows` tells the worker, from the scheduler, which request a row is. `offloading` gives the
same pieces the names of vLLM's RFC #37263. The arithmetic is `hotkv_sparse`.
"""
