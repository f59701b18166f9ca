"""Sparse decode and contexts beyond device memory in vLLM, beside hotkv's connector.

`companion` answers the connector's questions; `scheduler` decides, `worker` carries out in each
rank, with kernels of `cpu` or `cuda`. The connector never imports this package by name but in
`hotkv_vllm.companion`.
"""
