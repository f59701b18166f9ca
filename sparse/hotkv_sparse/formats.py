"""The byte formats of sketches.

A sketch holds an approximation of the keys of a block, for a KV head and layer. It is so
small that every decode step can score all blocks. There are two kinds of formats. A *token* format
has, for each token, a scale and a code (quantised value) of a few bits per channel. A *summary*
format has one or two vectors per block. Byte order is little-endian. The server stores these bytes
with the blocks and other engines read them, so any change of a format must change `LAYOUT_VERSION`.

A sketch in a token format consists of ceil(block's tokens / 16) runs. A run holds 16 tokens
in lines of 64 bytes. A line has, for each token, w bits of the codes of 32 / w channels:
  low lines   uint8 [lines][16 tokens][4]   w = 2: the lowest 2 bits of each code
  high lines  uint8 [lines][16 tokens][4]   w = 1: the highest bit of each 3-bit code
  sigma       float16 [16]                  scale per token; negative if there is no token
Byte b (0 to 3) of a token in line l holds, in its bits p * w to p * w + w - 1, the bits of channel
l * (32 / w) + 4 p + b, for p from 0 to 8 / w - 1. This order is chosen for speed: by one shift and
one mask, a kernel extracts from a line the codes of four channels of sixteen tokens, in the form
that the CPU's byte-product instructions expect. Channels are padded to whole lines; the padding may
have any value.

mix2 is a token format whose channels are a head's principal axes (`hotkv_sparse.axes`), strongest
first. A run begins with fine lines, which have codes of w = 4 bits for 8 channels each. Coarse
lines follow, which have codes of w = 2 bits for 16 channels each; sigma is last. Within a line,
codes have the order shown above. The weakest channels have no code. A run has as many lines, and so
as many bytes, as in the format rot2u; half of the lines (rounded down) are fine. Codes are evenly
spaced: code c stands for the value (c - (2^w - 1) / 2) quantisation steps.

A sketch in a summary format consists of two arrays. The first has the vectors (parts),
uint8 [parts][channels padded to a multiple of 32]; a byte is a value + 128, and 128 in the padding.
The second has the scale of each part, float32 [parts]; negative if the block has no token. The
format quest has two parts, the maximum and the minimum over the tokens; the format mean has one
part, the mean.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.rotation import signs

LAYOUT_VERSION = 1
RUN_TOKENS = 16
LINE_BYTES = 64
PART_ALIGN = 32
FINE_CHANNELS, COARSE_CHANNELS = 8, 16
"""Number of channels in a line of 4-bit codes (fine) and of 2-bit codes (coarse)."""
AXES_KERNEL = 42
LEVEL_OFFSET = 128
"""Number that is added to a level (a signed byte) so that kernels can multiply unsigned bytes."""
NO_TOKEN = -1.0
"""Stored as the scale of a token that does not exist (a place behind the last token of a run)."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format of sketches (compact forms of blocks' keys). Token formats have `bits` and
    `levels`; summary formats have `parts`.

    bits: bits of a code (the quantised value of a channel); 0 for summary formats.
    levels: for each code, the integer that it stands for, ascending.
    level_unit: the integer level that stands for a rotated channel as large as the key's rms.
    bias: by how much scores without a centre (mean key) overestimate the log of a block's attention
        mass, in nats. It is subtracted from scores.
    parts: number of vectors per block of a summary format; 0 for token formats.
    by_axes: whether codes are along principal axes of the keys (mix2). Then `bits` is the mean over
        channels, and `levels` is empty.
    """

    name: str
    bits: int = 0
    levels: tuple[int, ...] = ()
    level_unit: float = 0.0
    bias: float = 0.0
    parts: int = 0
    by_axes: bool = False

    @property
    def kind(self) -> int:
        """Returns the number by which kernels identify this format; only for summary formats (one
        or two vectors per block)."""
        return ("quest", "mean").index(self.name)

    @property
    def kernel(self) -> int:
        """Returns the number by which `score_tokens` identifies a token format: its bits, or
        `AXES_KERNEL`."""
        return AXES_KERNEL if self.by_axes else self.bits


# The levels (the values for which codes stand) are the Lloyd-Max levels of the normal distribution
# (Max 1960: ±.4528, ±1.510; ±.2451, ±.7560, ±1.344, ±2.152), rounded to integers with the largest
# at 127. A token's scale sigma is computed from these integers, so their rounding adds no bias. The
# `bias` of rot2u (.33) and of rot3u (.09) was measured on SmolLM2-135M without a centre: the mean
# over blocks, weighted by their true mass. A good centre lowers the bias. With its axes, mix2 has a
# bias of at most .02.
FORMATS: dict[str, Format] = {
    "rot2u": Format(
        "rot2u", bits=2, levels=(-127, -38, 38, 127), level_unit=127 / 1.510, bias=0.33
    ),
    "rot3u": Format(
        "rot3u",
        bits=3,
        levels=(-127, -79, -45, -14, 14, 45, 79, 127),
        level_unit=127 / 2.152,
        bias=0.09,
    ),
    "mix2": Format("mix2", bits=2, bias=0.0, by_axes=True),
    "quest": Format("quest", parts=2),
    "mean": Format("mean", parts=1),
}


def format_named(name: str) -> Format:
    """Returns the format with this name. Raises INVALID_FIELD if there is no such format."""
    if name not in FORMATS:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"sketch {name!r} is unknown; use one of {', '.join(FORMATS)}",
        )
    return FORMATS[name]


def token_scorer(name: str) -> bool:
    """Returns True if the format is a token format (a code per channel of each token). Scores in a
    token format estimate a block's attention mass, the sum of its tokens' exp(q · k * scale). So
    the masses of blocks may be summed and compared with the setting `adaptive_p`."""
    return format_named(name).bits > 0


def needs_axes(name: str) -> bool:
    """Returns True if the format needs calibrated axes: principal axes of the keys, measured on
    text (`hotkv_sparse.axes.Axes`)."""
    return format_named(name).by_axes


def num_lines(head_size: int) -> tuple[int, int]:
    """Returns the number of fine lines (4-bit codes) and of coarse lines (2-bit codes) in a run of
    the format mix2. A run holds 16 tokens of a head; a line is 64 bytes of codes."""
    total = -(-head_size // COARSE_CHANNELS)
    return total // 2, total - total // 2


def num_runs(block_tokens: int) -> int:
    """Returns the number of runs in a block. A run is the unit in which token formats store tokens:
    16 tokens of a head."""
    return -(-block_tokens // RUN_TOKENS)


def padded_channels(form: Format, head_size: int) -> int:
    """Returns the number of stored channels of a head, including the padding: to whole lines (64
    bytes of codes) in token formats, to multiples of 32 in summary formats. mix2 does not store the
    weakest channels."""
    if form.by_axes:
        fine, coarse = num_lines(head_size)
        return fine * FINE_CHANNELS + coarse * COARSE_CHANNELS
    step = {0: PART_ALIGN, 2: 16, 3: 32}[form.bits]
    return -(-head_size // step) * step


def run_bytes(form: Format, head_size: int) -> int:
    """Returns the size in bytes of a run, the unit in which a token format stores tokens: 16 tokens
    of a KV head with `head_size` channels."""
    if form.by_axes:
        return LINE_BYTES * sum(num_lines(head_size)) + 2 * RUN_TOKENS
    return RUN_TOKENS * (padded_channels(form, head_size) * form.bits // 8 + 2)


def head_bytes(name: str, block_tokens: int, head_size: int) -> int:
    """Returns the size of the sketch (compact form of the keys) of a block and KV head, in
    bytes."""
    form = format_named(name)
    if form.bits:
        return num_runs(block_tokens) * run_bytes(form, head_size)
    return form.parts * (padded_channels(form, head_size) + 4)


def bytes_per_block(name: str, block_tokens: int, kv_heads: int, head_size: int) -> int:
    """Returns the size of the sketch (compact form of the keys) of a block in a layer, for
    all KV heads, in bytes."""
    return kv_heads * head_bytes(name, block_tokens, head_size)


def version(
    name: str,
    head_size: int,
    mu_HD: npt.NDArray[np.float32] | None,
    axes_bytes: bytes = b"",
) -> int:
    """Returns a 63-bit hash of all inputs that define the meaning of the bytes of a sketch
    (compact form of a block's keys) in a format. Sketches of different versions must never
    be scored together.

    The hash covers the layout, the format, its levels, the signs of the rotation, the centre
    `mu_HD` (mean key of each head; None: 0) and `axes_bytes`, which is `Axes.to_bytes()`.
    `Sketch.version`, the version of a kind of sketch, is a hash over these hashes
    for all its layers and formats.
    """
    form = format_named(name)
    digest = hashlib.sha256(f"hotkv-sketch-{LAYOUT_VERSION}:{form!r}:{head_size}:".encode())
    if form.bits:
        digest.update(signs(head_size).tobytes())
    if mu_HD is not None and np.any(mu_HD):
        digest.update(np.ascontiguousarray(mu_HD, dtype="<f4").tobytes())
    digest.update(axes_bytes)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
