"""Measures a context of a million tokens in host memory, with the shape of Qwen2.5-14B: time to a
hit's first token, per token, and of a whole prefill.

`python -m bench.gpu.million [--json] [--quick]`, with torch and CuPy; a minute, 40 GB of device
memory, 4 GiB of host memory (all layers read the same pages). 48 layers, 8 KV heads of 128
channels, 5 query heads per KV head, random weights, torch's attention; a step selects 2048 tokens,
in a CUDA graph.

A hit's first token takes all layers' sketches, from keys in the arena, and a step. A whole
prefill is extrapolated from a layer's times for a chunk of 8k at the start, the middle and the
end.
"""

import sys
from time import perf_counter

import torch

from bench.gpu.context import CONFIG, SMALL_CONFIG
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.gpu.kernels import tensor_kernels
from bench.gpu.model import QWEN_14B, TINY, DummyModel
from bench.gpu.resident_model import HostPages, Prefill, Resident, Some
from bench.report import median

NUM_TOKENS, STEPS = 1 << 20, 24
SMALL_TOKENS, SMALL_STEPS = 768, 3
OVERHEAD_TARGET = 0.55
"""What ShadowKV reports, of the time to first token."""


def decode(kernels: Some, model: DummyModel, host: HostPages, small: bool) -> list[Figure]:
    """Also the pages that a token's step copies from the arena."""
    steps, config = (SMALL_STEPS, SMALL_CONFIG) if small else (STEPS, CONFIG)
    one = Resident(kernels, model, host, config, rows=1, steps=steps + 4)
    context, began_s = one.context, perf_counter()
    context.catch_up()
    one.advance()
    one.go_on()
    int(one.tokens.ids[0])
    first_s, pulled = perf_counter() - began_s, context.pulled()
    times = one.step_times_ms(steps)
    pulled = (context.pulled() - pulled) // steps
    return [
        Figure(f"{host.num_tokens >> 10}k, 14B: first token of a prefix hit, s", first_s),
        Figure(f"{host.num_tokens >> 10}k, 14B: per token, ms", median(times)),
        Figure(f"{host.num_tokens >> 10}k, 14B: pages pulled a token", pulled),
    ]


def prefill(kernels: Some, model: DummyModel, host: HostPages, small: bool) -> list[Figure]:
    config = SMALL_CONFIG if small else CONFIG
    found = Prefill(kernels, model, host, config, chunk=128 if small else 8192).measured()
    total_s = found.dense_s + found.added_s
    return [
        Figure(
            f"{host.num_tokens >> 10}k, 14B: first token of a whole prefill (computed), s", total_s
        ),
        Figure(
            f"{host.num_tokens >> 10}k, 14B: residency adds, of dense prefill",
            found.overhead,
            OVERHEAD_TARGET,
            True,
        ),
    ]


def main() -> int:
    options = gpu_parser("A million tokens in host memory, 14B.").parse_args()
    kernels, small = tensor_kernels(options.made_up), options.made_up
    figures: list[Figure] = []
    try:
        with torch.inference_mode():
            model = DummyModel(TINY if small else QWEN_14B, kernels.place)
            count = SMALL_TOKENS if small else NUM_TOKENS // (8 if options.quick else 1)
            host = HostPages(model.shape, count)
            figures += decode(kernels, model, host, small)
            kernels.clear()
            figures += prefill(kernels, model, host, small)
            host.close()
    finally:
        print_figures(figures, {"made_up": options.made_up}, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
