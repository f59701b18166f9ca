"""Devices (GPUs): the protocol by which the server uses CUDA, its implementation, and the memory of
vLLM engines on devices.

`runtime` is the protocol; `cupy_runtime` and `driver` implement it on a machine with GPUs.
`devices` opens the memory of engines. `start` finds the devices when the server starts, and makes
copy engines for them.
"""
