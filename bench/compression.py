"""Measures lossless compression of keys and values: bytes saved, and speed on one core. SmolLM2
computes them in float32 for the system's texts, rounded to bfloat16.

Prints a table; `--json` prints a JSON object last:

- `compress_ratio`: bytes of blocks of 16 tokens, divided by those of their encoded forms.
- `compress_stored_ratio`: the same, with forms rounded up to their slots.
- `compress_keys_ratio`, `compress_values_ratio`: of keys and of values alone.
  `compress_worst_layer_ratio`: the lowest of a single layer.
- `compress_encode_gb_s`, `compress_decode_gb_s`, `compress_copy_gb_s`: bytes of blocks per second
  and thread, beyond all caches, in turns; best of several rounds.
- `compress_float32_ratio`, `compress_float16_ratio`: other types, without rounding up. An
  exponent takes 4 bits instead of 8 in float32, 3 instead of 5 in float16.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn import functional

from bench.report import at_least, parser, print_figures
from bench.sparse.llama import Llama
from bench.sparse.texts import texts
from hotkv_server.tiers.compression.form import ESCAPE_BYTES, TILE_VALUES, escapes_at, room_bytes
from hotkv_server.tiers.compression.staged import Codec
from hotkv_server.tiers.protocol import Codes, Int64s
from tools.smollm2 import prepare

MIB = 1 << 20
BLOCK_TOKENS = 16
TEXT_TOKENS = 512
SPEED_BYTES = 256 * MIB
CALL_BYTES = 4 * MIB
ROUNDS = 7
BOUNDS = {
    "compress_ratio": at_least(1.30),
    "compress_stored_ratio": at_least(1.30),
    "compress_encode_gb_s": at_least(2.0),
    "compress_decode_gb_s": at_least(4.0),
}
FLOAT16_EXPONENTS = 8


def keys_and_values(folder: Path) -> NDArray[np.float32]:
    """[layer, keys or values, token, head, channel] of all tokens of the system's texts."""
    model = Llama(folder)
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    found = texts([], lambda text: encode(text).ids, TEXT_TOKENS, 1)[:-1]
    parts = []
    with torch.no_grad():
        for text in found:
            hidden = model.embed(torch.tensor(text.tokens))
            positions, layers = torch.arange(len(text.tokens)), []
            for layer in range(model.shape.num_layers):
                parts_SHD = model.queries_keys_values(layer, hidden, positions)
                query, key, value = (part.transpose(0, 1)[None] for part in parts_SHD)
                attended = functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
                hidden = model.after_attention(layer, hidden, attended[0].transpose(0, 1))
                layers.append(torch.stack(parts_SHD[1:]))
            parts.append(torch.stack(layers))
    whole: NDArray[np.float32] = torch.cat(parts, dim=2).numpy()
    return whole


def rounded(floats: NDArray[np.float32]) -> Codes:
    """Bytes of the values as bfloat16."""
    halves = torch.from_numpy(np.ascontiguousarray(floats)).bfloat16().view(torch.int16)
    found: Codes = halves.numpy().reshape(-1).view(np.uint8)
    return found


def blocks_of(floats: NDArray[np.float32]) -> tuple[Codes, int]:
    """(bytes of all blocks, bytes of a block). As in a slot: layer after layer, keys before
    values."""
    num_layers, _, num_tokens, heads, channels = floats.shape
    shape = (num_layers, 2, num_tokens // BLOCK_TOKENS, BLOCK_TOKENS, heads, channels)
    found = rounded(floats.reshape(shape).transpose(2, 0, 1, 3, 4, 5))
    return found, len(found) // (num_tokens // BLOCK_TOKENS)


class Run:
    """Consecutive blocks of equal size in `content`; `room`: bytes for each form."""

    def __init__(self, content: Codes, size: int, room: int) -> None:
        self.content, self.room, count = content, room, len(content) // size
        self.begins, self.sizes = np.arange(count, dtype=np.int64) * size, _full(count, size)
        self.places, self.rooms = np.arange(count, dtype=np.int64) * room, _full(count, room)
        self.staged, self.back = np.zeros(count * room, np.uint8), np.zeros_like(content)
        self.encoder = Codec(content, self.staged)
        self.decoder = Codec(self.back, self.staged)

    def encode(self, rows: slice = slice(None)) -> Int64s:
        """Bytes of each form."""
        columns = (self.begins, self.sizes, self.places, self.rooms)
        return self.encoder.encode(*(column[rows] for column in columns))

    def decode(self, rows: slice = slice(None)) -> Int64s:
        """1 for each decoded block."""
        columns = (self.begins, self.sizes, self.places, self.rooms)
        return self.decoder.decode(*(column[rows] for column in columns))


def _full(count: int, number: int) -> Int64s:
    return np.full(count, number, np.int64)


def used_bytes(content: Codes, size: int) -> Int64s:
    """Bytes of each form; each must decode to its block. There is room for any number of
    escapes."""
    run = Run(content, size, escapes_at(size // 2) + size // 2 * ESCAPE_BYTES)
    used = run.encode()
    assert (run.decode() == 1).all() and np.array_equal(run.back, content)
    return used


def ratios(floats: NDArray[np.float32]) -> dict[str, float]:
    content, size = blocks_of(floats)
    used = used_bytes(content, size)
    assert (used <= room_bytes(size)).all(), "a block does not fit its room"
    figures = {
        "compress_ratio": len(content) / float(used.sum()),
        "compress_stored_ratio": size / room_bytes(size),
    }
    worst = []
    for number, name in enumerate(("keys", "values")):
        layers = [rounded(part[number]) for part in floats]
        forms = [float(used_bytes(part, len(part))[0]) for part in layers]
        figures[f"compress_{name}_ratio"] = len(layers) * len(layers[0]) / sum(forms)
        worst += [len(layers[0]) / form for form in forms]
    figures["compress_worst_layer_ratio"] = min(worst)
    # Of a float32 the upper half is encoded, like a bfloat16.
    figures["compress_float32_ratio"] = 2 * len(content) / (len(content) + float(used.sum()))
    figures["compress_float16_ratio"] = float16_ratio(floats)
    return figures


def float16_ratio(floats: NDArray[np.float32]) -> float:
    """Estimated: exponents in 3 bits, rare ones escaped as for bfloat16."""
    exponents = (floats.astype(np.float16).view(np.uint16).reshape(-1) >> 10) & 31
    tiles = exponents[: len(exponents) // TILE_VALUES * TILE_VALUES].reshape(-1, TILE_VALUES)
    covered = [
        np.sort(np.bincount(tile, minlength=32))[-FLOAT16_EXPONENTS:].sum() for tile in tiles
    ]
    escaped = 1 - float(np.sum(covered)) / tiles.size
    return 16 / (14 + 8 * ESCAPE_BYTES * escaped)


def speeds(content: Codes, size: int) -> dict[str, float]:
    """10^9 bytes per second, by figure."""
    content = np.tile(content, -(-SPEED_BYTES // len(content)))
    run = Run(content, size, room_bytes(size))
    count, step = len(run.sizes), max(1, CALL_BYTES // size)
    parts = [slice(at, at + step) for at in range(0, count, step)]
    jobs: dict[str, Callable[[], object]] = {
        "encode": lambda: [run.encode(part) for part in parts],
        "decode": lambda: [run.decode(part) for part in parts],
        "copy": lambda: np.copyto(run.back, content),
    }
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            began_s = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - began_s)
    return {f"compress_{name}_gb_s": len(content) / took / 1e9 for name, took in best.items()}


def measure() -> dict[str, Any]:
    """Raises FileNotFoundError if SmolLM2 is not installed."""
    torch.set_num_threads(1)
    floats = keys_and_values(prepare())
    return ratios(floats) | speeds(*blocks_of(floats))


def main() -> int:
    options = parser("Exact compression of keys and values.").parse_args()
    print_figures(measure(), BOUNDS, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
