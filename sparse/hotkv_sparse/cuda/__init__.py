"""Sparse decode on CUDA: kernels (`*.cu`), how they are launched (`device`), and a layer's step
(`selector`).

Nothing here imports CuPy or torch until a device is made. The kernels' meaning is that of
`hotkv_sparse` on a CPU, which they are held against; the bytes of representations are the same
ones.
"""
