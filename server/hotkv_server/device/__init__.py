"""Devices (GPUs). `runtime` is the protocol by which the server uses CUDA; `cupy_runtime` and
`driver` implement it. `devices` opens the memory of engines. `start` finds devices at the
server's start and makes copy engines."""
