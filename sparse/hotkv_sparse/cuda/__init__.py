"""Sparse decode on CUDA: kernels (`*.cu`), what launches them (`device`), a layer's step
(`selector`).

The kernels compute what `hotkv_sparse` computes on a CPU, with the same bytes; tests compare.
CuPy and torch are imported with the first device object.
"""
