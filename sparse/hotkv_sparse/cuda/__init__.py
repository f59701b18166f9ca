"""Sparse decode on CUDA: kernels (`*.cu`), code that launches them (`device`), and a layer's decode
step made of them (`selector`).

The kernels compute the same as `hotkv_sparse` on a CPU, and tests compare the two. Sketches
(compact forms of blocks' keys) have the same bytes. No module imports CuPy or torch before the
first device object is made.
"""
