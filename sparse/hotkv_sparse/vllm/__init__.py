"""Sparse decode and contexts beyond device memory in vLLM: the companion of hotkv's connector.

`settings` makes the two parts that the connector asks: `scheduler.companion`, which decides, and
`worker.companion`, which carries out in each rank, with attention of `cpu` or `cuda`.
"""
