"""Measures contexts in host memory on a GPU, with the shape of an 8B model: a decode step's time,
the pages that it copies from the arena, and the copy of a layer's whole context, as a prefill
needs.

`python -m bench.gpu.residency [--json] [--quick]`, with CuPy; 20 s, 4 GB of device memory, 512
MiB of host memory. 32 layers, 8 KV heads of 128 channels, 4 query heads per KV head, one
sequence of 128k tokens in blocks of 16; a step selects 2048. Random keys and queries are the
hard case: real queries change less. `bench.gpu.decode` times attention and the model. At the
end, device copies are compared with the arena.
"""

import sys
import time

import numpy as np

from bench.gpu.context import (
    BLOCK_TOKENS,
    CONFIG,
    SMALL_CONFIG,
    STEPS,
    Context,
    page_bytes_of,
    random_pages,
    registered,
)
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.kernels import CudaArrays, HostArrays, array_kernels
from bench.gpu.model import LLAMA_8B, TINY
from bench.report import median

SMALL_TOKENS, SMALL_STEPS = 768, 6


def measure(
    kernels: "CudaArrays | HostArrays", num_tokens: int, *, small: bool = False
) -> list[Figure]:
    """small: a tiny model and few steps, for the CPU."""
    device, shape = kernels.device, TINY if small else LLAMA_8B
    count, steps = (SMALL_TOKENS, SMALL_STEPS) if small else (num_tokens, STEPS)
    config, page_bytes = SMALL_CONFIG if small else CONFIG, page_bytes_of(shape)
    pages = random_pages(count // BLOCK_TOKENS, page_bytes)
    began_s = time.perf_counter()
    arena = registered(pages)
    registered_s = time.perf_counter() - began_s
    context = Context(
        device, config, count, pages, arena.address, kernels.address, shape=shape, steps=steps
    )
    time_ms = kernels.milliseconds
    caught_up_s = time_ms(context.catch_up) / 1e3
    first_ms = time_ms(context.step)
    run = kernels.captured(context.step)
    pulled, times_ms = context.pulled(), []
    for _ in range(steps - 2):
        context.advance()
        times_ms.append(time_ms(run))
    pulled = (context.pulled() - pulled) // len(times_ms)
    target = device.zeros((context.freed, page_bytes), np.uint8)
    staged_s = median([time_ms(lambda: context.stage(target)) for _ in range(3)]) / 1e3
    staged = device.read(target)[context.num_here :]
    if not np.array_equal(staged, pages[context.num_here : context.freed]) or not context.check():
        raise ValueError("the device's bytes are not those of the arena")
    arena.close()
    step_s, name = median(times_ms) / 1e3, f"residency {num_tokens >> 10}k"
    return [
        Figure(f"{name}: register, GB/s", pages.nbytes / registered_s / 1e9),
        Figure(f"{name}: sketches of a hit, s", caught_up_s),
        Figure(f"{name}: first step, ms", first_ms),
        Figure(f"{name}: choose and pull, ms a step", 1e3 * step_s),
        Figure(f"{name}: pages pulled a step", pulled),
        Figure(f"{name}: pulled, GB/s", pulled * page_bytes / step_s / 1e9),
        Figure(f"{name}: staging, GB/s", context.freed * page_bytes / staged_s / 1e9),
    ]


def main() -> int:
    options = gpu_parser(__doc__ or "").parse_args()
    kernels = array_kernels(options.made_up)
    num_tokens = 1 << 15 if options.quick else 1 << 17
    figures = measure(kernels, num_tokens, small=options.made_up)
    print_figures(figures, {"made_up": options.made_up}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
