"""Devices: the protocol by which the server uses CUDA, its implementation, and the objects on
devices.

`runtime` is the protocol; `cupy_runtime` and `driver` implement it on a machine with GPUs.
`devices` holds the open memory of engines. `start` finds devices and makes copy engines for them.
"""
