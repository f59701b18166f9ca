"""Sparse decode on CUDA: kernels (`*.cu`), their launch (`device`), and a layer's step
(`selector`).

No module imports CuPy or torch until a device is made. The kernels do the same as `hotkv_sparse` on
a CPU, and tests compare both. The bytes of representations are the same.
"""
