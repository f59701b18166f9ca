"""This machine as a device: memory bandwidth and matrix products measured in about a second, and
the shares of them that vLLM's CPU engine reaches.

The shares were measured by `python -m bench.estimate --fit` on an AMD EPYC (Zen 4, AVX-512 with
bf16), one thread. Another processor has others: products in bf16 beat numpy's in float32 only where
it has instructions for them.
"""

import os
import time
from collections.abc import Callable

import numpy as np

from hotkv_sparse.estimate.devices import Device

COPIED_BYTES = 1 << 27
"""Far more than any cache of one core."""
MATRIX_SIZE = 1024
ROUNDS = 5


def measure_here(clock: Callable[[], float] = time.perf_counter) -> Device:
    """Measures the machine. `clock` gives seconds; one that counts processor time of a single
    thread is not disturbed by other programs. Takes about a second, and 256 MiB."""
    bandwidth, flops = copy_bandwidth(clock), product_flops(clock)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return cpu_device(memory_bytes, bandwidth, flops)


def cpu_device(memory_bytes: int, bandwidth: float, flops: float) -> Device:
    """A CPU engine's device. `bandwidth`: bytes a second that a copy reads and writes; `flops`:
    operations a second of a product in float32. Host memory is the same memory, so the link is a
    copy: half the bandwidth arrives."""
    return Device(
        "here",
        f"measured: copies {bandwidth / 1e9:.3g} GB/s read and written, products "
        f"{flops / 1e9:.3g} Gflop/s in float32",
        memory_bytes,
        bandwidth=bandwidth,
        flops=flops,
        link=bandwidth / 2,
        peer=bandwidth / 2,
        weight_ratio=0.606,
        attention_ratio=0.219,
        score_ratio=0.056,
        build_ratio=0.02,
        compute_ratio=2.26,
        prefill_attention_ratio=0.577,
        link_ratio=1.0,
        step_s=0.00677,
        layer_s=0.000421,
        select_s=0.000356,
        select_block_s=0.0,
        parallel_rows=False,
    )


def copy_bandwidth(clock: Callable[[], float]) -> float:
    """Bytes a second that a copy reads and writes together; the best of some rounds."""
    source, target = np.ones(COPIED_BYTES // 8), np.zeros(COPIED_BYTES // 8)
    return 2 * COPIED_BYTES / _best(clock, lambda: np.copyto(target, source))


def product_flops(clock: Callable[[], float]) -> float:
    """Operations a second of a product of matrices in float32; the best of some rounds."""
    matrix = np.random.default_rng(0).random((MATRIX_SIZE, MATRIX_SIZE), np.float32)
    product = np.empty_like(matrix)
    return 2 * MATRIX_SIZE**3 / _best(clock, lambda: np.matmul(matrix, matrix, out=product))


def _best(clock: Callable[[], float], work: Callable[[], object]) -> float:
    took = []
    for _ in range(ROUNDS):
        began = clock()
        work()
        took.append(clock() - began)
    return max(min(took), 1e-9)
