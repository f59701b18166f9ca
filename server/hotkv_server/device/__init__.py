"""Devices: what the server asks of CUDA, who answers, and what is open on them.

`runtime` is the protocol, `cupy_runtime` and `driver` answer it on a machine with GPUs; `devices`
has engines' memory open; `start` looks for devices and makes copy engines for them.
"""
