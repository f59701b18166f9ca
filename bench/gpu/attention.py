"""Times FlashAttention 3, of vLLM's own kernels, for a decode step of one layer over paged KV: in
vLLM's default layout, and in BLHNC, which hotkv asks for.

`python -m bench.gpu.attention [--json] [--lengths TOKENS...]`, with a GPU of Hopper's and vLLM.
Llama-3.1-8B's heads, blocks of 16 tokens at random places, one sequence. BLHNC keeps all layers of
a block together, so that its steps from block to block are LAYERS times as long; here its memory
holds STORED layers. Answers in both layouts are compared.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu.engine import about, find_side
from bench.gpu.figures import Figure, gpu_parser, print_figures
from bench.report import median

BLOCK_TOKENS, QUERY_HEADS, KV_HEADS, CHANNELS = 16, 32, 8, 128
STORED = 4
"""Layers in memory: 32 of a million tokens would not fit."""
LENGTHS = (32 << 10, 128 << 10, 512 << 10, 1 << 20)
SMALL_LENGTHS = (256, 1024)
ROUNDS, STEPS = 5, 20


@dataclass(frozen=True, slots=True)
class Paged:
    """Keys and values [blocks, tokens, heads, channels], views of one memory."""

    keys: torch.Tensor
    values: torch.Tensor


def default_layout(num_blocks: int, device: torch.device, dtype: torch.dtype) -> Paged:
    """LBNHC."""
    sizes = (num_blocks, BLOCK_TOKENS, KV_HEADS, 2 * CHANNELS)
    page = torch.empty(sizes, dtype=dtype, device=device)
    return Paged(page[..., :CHANNELS], page[..., CHANNELS:])


def blhnc(num_blocks: int, device: torch.device, dtype: torch.dtype) -> Paged:
    sizes = (num_blocks, STORED, KV_HEADS, BLOCK_TOKENS, 2 * CHANNELS)
    page = torch.empty(sizes, dtype=dtype, device=device)[:, STORED // 2].transpose(1, 2)
    return Paged(page[..., :CHANNELS], page[..., CHANNELS:])


LAYOUTS: dict[str, Callable[[int, torch.device, torch.dtype], Paged]] = {
    "LBNHC": default_layout,
    "BLHNC": blhnc,
}


def flash(query: torch.Tensor, kv: Paged, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    device = query.device
    answer: torch.Tensor = flash_attn_varlen_func(
        query,
        kv.keys,
        kv.values,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(2, dtype=torch.int32, device=device),
        max_seqlen_k=num_tokens,
        seqused_k=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        softmax_scale=CHANNELS**-0.5,
        causal=True,
        block_table=table[None],
        fa_version=3,
    )
    return answer


def plain(query: torch.Tensor, kv: Paged, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """In torch, for a rehearsal."""
    keys, values = (
        part[table.long()].reshape(num_tokens, KV_HEADS, CHANNELS).transpose(0, 1)
        for part in (kv.keys, kv.values)
    )
    groups = query[0].view(KV_HEADS, QUERY_HEADS // KV_HEADS, CHANNELS)
    answer = torch.nn.functional.scaled_dot_product_attention(groups, keys, values)
    return answer.reshape(1, QUERY_HEADS, CHANNELS)


def step_us(run: Callable[[], Any], is_made_up: bool) -> float:
    """Median of ROUNDS; on a GPU by its events, STEPS in a row."""
    times = []
    for _ in range(ROUNDS):
        if is_made_up:
            begin_s = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - begin_s))
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / STEPS)
    return median(times)


def measure(num_tokens: int, is_made_up: bool) -> list[Figure]:
    """Raises AssertionError if the layouts' answers differ."""
    device, attend = torch.device("cpu" if is_made_up else "cuda"), plain if is_made_up else flash
    dtype = torch.float32 if is_made_up else torch.bfloat16
    generator = torch.Generator(device).manual_seed(1)
    num_blocks = num_tokens // BLOCK_TOKENS
    table = torch.randperm(num_blocks, generator=generator, device=device).int()
    query = torch.randn((1, QUERY_HEADS, CHANNELS), generator=generator, device=device).to(dtype)
    answers, figures = [], []
    for name, layout in LAYOUTS.items():
        kv = layout(num_blocks, device, dtype)
        fill = torch.Generator(device).manual_seed(2)
        for part in (kv.keys, kv.values):
            drawn = torch.randn(part.shape, generator=fill, device=device, dtype=dtype)
            part.copy_(drawn)
        answers.append(attend(query, kv, table, num_tokens))
        took_us = step_us(partial(attend, query, kv, table, num_tokens), is_made_up)
        figures.append(Figure(f"attention {num_tokens >> 10}k, {name}, us a layer", took_us))
        del kv, part, drawn
    if not torch.allclose(*answers, rtol=1e-2, atol=1e-2):
        raise AssertionError(f"the layouts' answers differ at {num_tokens} tokens")
    default_us, own_us = (figure.measured for figure in figures)
    return [
        *figures,
        Figure(f"attention {num_tokens >> 10}k, BLHNC / default", own_us / default_us),
    ]


def main() -> int:
    flags = gpu_parser("FlashAttention 3 in two layouts.")
    flags.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="in tokens")
    options = flags.parse_args()
    side, figures = find_side(options.made_up), list[Figure]()
    try:
        with torch.inference_mode():
            for num_tokens in SMALL_LENGTHS if options.made_up else options.lengths:
                figures += measure(num_tokens, options.made_up)
    finally:
        print_figures(figures, about(side), as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
