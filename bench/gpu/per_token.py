"""Measures the time per token for contexts of 16k to a million tokens in host memory, of which a
step selects 2,048, against dense attention on the device.

`python -m bench.gpu.per_token [--json] [--quick]`, with torch and CuPy; a minute, 40 GB of
device memory, 4 GiB of host memory. One sequence, random weights in the shape of an 8B model,
CUDA graphs. All layers read one layer's context, so contexts can be timed whose KV would not
fit.
"""

import copy
import sys

import torch

from bench.gpu.context import BLOCK_TOKENS, CONFIG, SMALL_CONFIG
from bench.gpu.decode import dense_rate, resident_rate
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.kernels import tensor_kernels
from bench.gpu.model import LLAMA_8B, TINY, DummyModel
from bench.gpu.resident_model import HostPages
from hotkv_client.command.tables import table

LENGTHS = tuple(1 << power for power in range(14, 21))
SMALL_LENGTHS = (256, 512)
STEPS, QUICK_STEPS, SMALL_STEPS = 24, 8, 3


def beginning(host: HostPages, num_tokens: int) -> HostPages:
    """The first `num_tokens`, as a view of the same pages."""
    part = copy.copy(host)
    part.num_tokens, part.pages = num_tokens, host.pages[: num_tokens // BLOCK_TOKENS]
    return part


def main() -> int:
    options = gpu_parser("Time per token as the context grows.").parse_args()
    kernels, small = tensor_kernels(options.made_up), options.made_up
    lengths, config = (SMALL_LENGTHS, SMALL_CONFIG) if small else (LENGTHS, CONFIG)
    steps = SMALL_STEPS if small else QUICK_STEPS if options.quick else STEPS
    figures: list[Figure] = []
    rows: list[tuple[object, ...]] = []
    try:
        with torch.inference_mode():
            model = DummyModel(TINY if small else LLAMA_8B, kernels.place)
            host = HostPages(model.shape, max(lengths))
            for num_tokens in lengths:
                kernels.clear()
                dense_ms = 1e3 / dense_rate(kernels, model, 1, num_tokens, steps)
                kernels.clear()
                part = beginning(host, num_tokens)
                rate, taken_bytes = resident_rate(kernels, model, part, config, 1, steps)
                share = taken_bytes / (num_tokens * model.shape.token_bytes)
                name, ours_ms = f"{num_tokens >> 10}k", 1e3 / rate
                rows.append((name, f"{dense_ms:.1f}", f"{ours_ms:.1f}", f"{share:.3f}"))
                print(*rows[-1], flush=True)
                figures += [
                    Figure(f"per token, {name}: dense, ms", dense_ms),
                    Figure(f"per token, {name}: residency, ms", ours_ms),
                ]
            kernels.clear()
            host.close()
    finally:
        heads = ("context", "dense ms", "residency ms", "device memory / KV")
        print(table(heads, rows))
        print_figures(figures, {"made_up": options.made_up}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
