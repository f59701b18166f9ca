"""The byte formats of sketches, so small that every step can score all blocks. A *token* format has
a scale and a code of a few bits per channel for each token, a *summary* format one or two vectors
(*parts*) per block. Little-endian. Bytes are stored and read by other engines: a changed format
must change `LAYOUT_VERSION`.

In a token format a sketch, of a KV head and layer, has ceil(block's tokens / 16) *runs*, 16 tokens
in *lines* of 64 bytes. A line has, for each token, w bits of the codes of 32 / w channels:

    low lines   uint8 [lines][16 tokens][4]   w = 2: the lowest 2 bits of each code
    high lines  uint8 [lines][16 tokens][4]   w = 1: the highest bit of each 3-bit code
    sigma       float16 [16]                  scale per token; negative if there is no token

Byte b (0 to 3) of a token in line l holds, in its bits p * w to p * w + w - 1, the bits of channel
l * (32 / w) + 4 p + b, for p from 0 to 8 / w - 1. So one shift and one mask give a kernel four
channels' codes of sixteen tokens, as byte-product instructions take them. Channels are padded to
whole lines with any value.

mix2 is a token format whose channels are principal axes (`axes`), strongest first. A run has fine
lines (w = 4, 8 channels each), coarse lines (w = 2, 16 channels each), then sigma, with codes
ordered as above. The weakest channels have no code: there are as many lines as in rot2u, half of
them (rounded down) fine. Code c stands for (c - (2^w - 1) / 2) steps.

In a summary format a sketch has its parts, uint8 [parts][channels padded to 32], a byte being a
value + 128, and 128 in the padding; then their scales, float32 [parts], negative if the block
has no token. quest has maximum and minimum over the tokens, mean has the mean.
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
"""In a line of 4-bit and of 2-bit codes."""
AXES_KERNEL = 42
LEVEL_OFFSET = 128
"""Added to a level (a signed byte), so that kernels can multiply unsigned bytes."""
NO_TOKEN = -1.0
"""Scale of a token that does not exist."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format and its constants.

    bits: of a code; 0 for summary formats.
    levels: the integer that each code stands for, ascending.
    level_unit: level of a rotated channel as large as the key's rms.
    bias: by how much scores without a centre overestimate the log mass, in nats; subtracted.
    parts: 0 for token formats.
    by_axes: mix2: `bits` is a mean over channels, `levels` is empty.
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
        """Kernels' number of a summary format."""
        return ("quest", "mean").index(self.name)

    @property
    def kernel(self) -> int:
        """`score_tokens`' number of a token format."""
        return AXES_KERNEL if self.by_axes else self.bits


# Lloyd-Max levels of the normal distribution (Max 1960: ±.4528, ±1.510; ±.2451, ±.7560, ±1.344,
# ±2.152), rounded to integers with the largest at 127. Sigma is computed from these, so rounding
# adds no bias. `bias` of rot2u and rot3u was measured on SmolLM2-135M without a centre: the mean
# over blocks, weighted by true mass. A good centre lowers it; with its axes mix2 has .02 at
# most.
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
    """Raises INVALID_FIELD."""
    if name not in FORMATS:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"sketch {name!r} is unknown; use one of {', '.join(FORMATS)}",
        )
    return FORMATS[name]


def token_scorer(name: str) -> bool:
    """Whether scores estimate the mass, so that it may be summed and compared with `adaptive_p`."""
    return format_named(name).bits > 0


def needs_axes(name: str) -> bool:
    return format_named(name).by_axes


def num_lines(head_size: int) -> tuple[int, int]:
    """(fine, coarse) lines of a run in mix2."""
    total = -(-head_size // COARSE_CHANNELS)
    return total // 2, total - total // 2


def num_runs(block_tokens: int) -> int:
    return -(-block_tokens // RUN_TOKENS)


def padded_channels(form: Format, head_size: int) -> int:
    """Stored channels of a head, padded to whole lines or, in summary formats, to 32. mix2
    leaves out the weakest."""
    if form.by_axes:
        fine, coarse = num_lines(head_size)
        return fine * FINE_CHANNELS + coarse * COARSE_CHANNELS
    step = {0: PART_ALIGN, 2: 16, 3: 32}[form.bits]
    return -(-head_size // step) * step


def run_bytes(form: Format, head_size: int) -> int:
    if form.by_axes:
        return LINE_BYTES * sum(num_lines(head_size)) + 2 * RUN_TOKENS
    return RUN_TOKENS * (padded_channels(form, head_size) * form.bits // 8 + 2)


def head_bytes(name: str, block_tokens: int, head_size: int) -> int:
    """Of a block and KV head."""
    form = format_named(name)
    if form.bits:
        return num_runs(block_tokens) * run_bytes(form, head_size)
    return form.parts * (padded_channels(form, head_size) + 4)


def bytes_per_block(name: str, block_tokens: int, kv_heads: int, head_size: int) -> int:
    """Of a layer, all KV heads."""
    return kv_heads * head_bytes(name, block_tokens, head_size)


def version(
    name: str,
    head_size: int,
    mu_HD: npt.NDArray[np.float32] | None,
    axes_bytes: bytes = b"",
) -> int:
    """A 63-bit hash of all that gives a sketch's bytes their meaning: layout, format, levels,
    signs, centre (None: 0) and `Axes.to_bytes()`. Different versions must never be scored
    together. `Sketch.version` hashes these over layers and formats."""
    form = format_named(name)
    digest = hashlib.sha256(f"hotkv-sketch-{LAYOUT_VERSION}:{form!r}:{head_size}:".encode())
    if form.bits:
        digest.update(signs(head_size).tobytes())
    if mu_HD is not None and np.any(mu_HD):
        digest.update(np.ascontiguousarray(mu_HD, dtype="<f4").tobytes())
    digest.update(axes_bytes)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
