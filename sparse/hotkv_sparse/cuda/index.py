"""A layer's sketches on the device: a pool with a row per block, built from the engine's keys.

A row has the bytes of `hotkv_sparse.sketches`, so the server may store it and any engine load it.
Rounding may change only the code of a channel halfway between two levels, and a sigma's last bit.

Shapes: R rows of the pool, H KV heads, D channels, N bytes of a block and head.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse import formats
from hotkv_sparse.cuda.device import TOKEN_KERNELS, Array, Device
from hotkv_sparse.formats import Format
from hotkv_sparse.rotation import factors

FLOAT_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
"""Kernels' number of a float type."""
MAX_HEAD_SIZE = 256
_LINE_CHANNELS = {2: 16, 3: 32}
_BUILD_THREADS = 512


def float_kind(dtype: str) -> int:
    """Raises INVALID_FIELD."""
    if dtype not in FLOAT_KINDS:
        raise HotKVError(
            Reason.INVALID_FIELD,
            f"dtype is {dtype!r}; sparse decode on CUDA takes {', '.join(FLOAT_KINDS)}",
        )
    return FLOAT_KINDS[dtype]


@dataclass(frozen=True, slots=True)
class Pages:
    """A layer's keys, or values, on the device. For vLLM's caches [2, pages, tokens, heads,
    channels] or [pages, 2, …], NHD or HND, one object each for index 0 and 1, with the strides of
    these views.

    data: a tensor, or the address of page 0, token 0, head 0.
    dtype: of FLOAT_KINDS.
    page_stride, token_stride, head_stride: in elements; channels are contiguous.
    scales: what the elements must be multiplied by, float32 [1], or [H] with `scale_stride` 1;
        None: 1. Read by each kernel.
    """

    data: Array | int
    dtype: str
    page_stride: int
    token_stride: int
    head_stride: int
    scales: Array | int | None = None
    scale_stride: int = 0


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Sizes of a pool's rows. Raises INVALID_FIELD if kernels don't support them."""

    name: str
    kv_heads: int
    head_size: int
    block_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.head_size <= MAX_HEAD_SIZE or self.block_tokens < 1 or self.kv_heads < 1:
            why = (
                f"{self.kv_heads} heads of {self.head_size} channels, {self.block_tokens} "
                "tokens a block"
            )
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"the index has {why}; on CUDA heads have 1 to {MAX_HEAD_SIZE} channels",
            )
        if self.form.by_axes or (
            self.form.bits and (self.form.bits, self.line_groups) not in TOKEN_KERNELS
        ):
            raise HotKVError(
                Reason.INVALID_FIELD, f"no kernel scores {self.name} of {self.head_size} channels"
            )

    @property
    def form(self) -> Format:
        return formats.format_named(self.name)

    @property
    def channels(self) -> int:
        """With padding."""
        return formats.padded_channels(self.form, self.head_size)

    @property
    def num_runs(self) -> int:
        return formats.num_runs(self.block_tokens)

    @property
    def head_bytes(self) -> int:
        return formats.head_bytes(self.name, self.block_tokens, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Rounded up to sectors of 32 bytes."""
        return -(-self.kv_heads * self.head_bytes // 32) * 32

    @property
    def num_lines(self) -> int:
        """Of a run, as `score_tokens` counts."""
        return self.channels // _LINE_CHANNELS[self.form.bits]

    @property
    def line_groups(self) -> int:
        """Of four lines, per run."""
        return -(-self.num_lines // 4)

    @property
    def tile_bytes(self) -> int:
        """Prepared queries of 8 heads, as `score_tokens` reads them."""
        return self.line_groups * (4 if self.form.bits == 2 else 8) * 128

    def level_words(self) -> tuple[int, int]:
        """Levels as two words of four signed bytes: codes 0 to 3, codes 4 to 7."""
        levels = np.zeros(8, np.int8)
        levels[: len(self.form.levels)] = self.form.levels
        low, high = levels.view(np.uint32)
        return int(low), int(high)


class Index:
    """A layer's sketches on the device.

    pool: uint8 [R, row_bytes].
    mu_HD: None: 0.
    bias: by how much scores overestimate the log mass, in nats; None: the format's.
    """

    def __init__(
        self,
        device: Device,
        shape: IndexShape,
        num_rows: int,
        mu_HD: npt.NDArray[np.float32] | None = None,
        bias: float | None = None,
    ) -> None:
        if mu_HD is not None and mu_HD.shape != (shape.kv_heads, shape.head_size):
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"mu is {list(mu_HD.shape)}; the index needs [{shape.kv_heads}, {shape.head_size}]",
            )
        self.shape = shape
        self.num_rows = num_rows
        self.bias = shape.form.bias if bias is None else bias
        self.pool = device.zeros((num_rows, shape.row_bytes), np.uint8)
        self.mu = None if mu_HD is None else upload(device, mu_HD.astype(np.float32))
        self.factors = upload(device, factors(shape.head_size))
        self._device = device

    def __repr__(self) -> str:
        return f"Index({self.shape.name}, {self.num_rows} rows of {self.shape.row_bytes} bytes)"

    @functools.cached_property
    def _levels(self) -> Array:
        """Levels, then the thresholds between them in units of the key's rms."""
        levels = np.array(self.shape.form.levels, np.float64)
        thresholds = (levels[1:] + levels[:-1]) / 2.0 / self.shape.form.level_unit
        return upload(self._device, np.concatenate([levels, thresholds]).astype(np.float32))

    def build(
        self,
        keys: Pages,
        pages: Array | None,
        rows: Array,
        num_blocks: int,
        num_tokens: Array | None = None,
        addresses: Array | None = None,
    ) -> None:
        """Queues the build of sketches; keys must not change until it is done. Raises INVALID_FIELD
        for summary formats, which `hotkv_sparse.sketches` builds.

        pages: int32 [num_blocks]; not used with `addresses`.
        rows: int32 [num_blocks], of the pool; negative skips the block.
        num_tokens: int32 [num_blocks]; None: all are valid.
        addresses: int64 [num_blocks], of pages; 0 skips the block.
        """
        shape, form = self.shape, self.shape.form
        if not form.bits:
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"{form.name} is no token format; CUDA builds rot2u and rot3u",
            )
        if not num_blocks:
            return
        self._device.launch(
            "build_tokens",
            (num_blocks, shape.kv_heads, shape.num_runs),
            _BUILD_THREADS,
            (
                keys.data, np.int32(float_kind(keys.dtype)), np.int64(keys.page_stride),
                np.int64(keys.token_stride),
                np.int64(keys.head_stride), keys.scales, np.int32(keys.scale_stride),
                pages, addresses, rows, num_tokens, self.mu, self.factors, self._levels,
                np.int32(form.bits), np.float32(form.level_unit),
                np.int32(shape.block_tokens), np.int32(shape.head_size), np.int32(shape.channels),
                self.pool, np.int64(shape.row_bytes),
                np.int32(shape.head_bytes),
            ),
        )  # fmt: skip


def upload(device: Device, values: npt.NDArray[np.generic]) -> Array:
    array = device.zeros(values.shape, values.dtype)
    device.write(array, (0,) * values.ndim, np.ascontiguousarray(values))
    return array


def check_length(name: str, shape: Sequence[int], needed: Sequence[int]) -> None:
    """Raises INVALID_FIELD."""
    if tuple(shape) != tuple(needed):
        raise HotKVError(Reason.INVALID_FIELD, f"{name} is {list(shape)}; pass {list(needed)}")
