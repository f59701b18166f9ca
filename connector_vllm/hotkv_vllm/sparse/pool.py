"""Holds the sketches (compact forms of keys, by which sparse attention selects blocks) of
the engine's device blocks, by layer and block id, in memory that the server can map.

In each layer and format, each block has a row in the pool: the bytes of its sketch. For
each layer and block, a flag (mark) says whether the block's rows are built: `update` builds missing
sketches from the keys in the block's page (its KV in the layer); `mark_built` sets the mark
of blocks whose rows a load has written; `forget` clears marks, and must be called before a block's
page is written.

Always true:
- If a block is marked as built, its row holds the sketch of the keys in the block's page,
  wherever these keys came from: prefill, decode, vLLM's own prefix cache, or a load.
- A row never changes while a store reads it: a row is written only while its block is not marked as
  built, the mark is cleared only when the page is about to be written, and before that the stores
  that read the block have ended.

Shapes: B blocks, T tokens of a block, H KV heads, D channels, N bytes of a block and head.
"""

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hotkv_sparse import build
from hotkv_sparse.axes import Axes
from hotkv_sparse.formats import bytes_per_block, needs_axes, token_scorer
from hotkv_sparse.selection import Source

logger = logging.getLogger("vllm.hotkv")
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
KeysOf = Callable[[I32], F32]
"""A function that takes ids of blocks (int32), and returns these blocks' unpacked keys, float32
[blocks, tokens, KV heads, channels]."""

BUILD_BLOCKS = 64
"""Sketches (compact forms of keys) are built for this many blocks at a time, to limit the
memory for the blocks' unpacked keys."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape and formats of a layer's sketches (compact forms of keys).

    formats: names of the formats in which each block is represented.
    mu: float32 [KV heads, channels], the mean key of each head (the centre). Formats that encode
        each token subtract the centre from the keys first. None means a centre of zero.
    biases: by format name, by how much the format overestimates the log of a block's attention mass
        (sum of exp(q · k * scale) over its tokens) with this centre. A format that is not listed
        has its default bias.
    axes: the principal axes of keys that some formats (`mix2`) need; None until the engine has
        calibrated them.
    """

    num_blocks: int
    block_tokens: int
    kv_heads: int
    head_size: int
    formats: tuple[str, ...]
    mu: F32 | None = None
    biases: Mapping[str, float] = field(default_factory=dict)
    axes: Axes | None = None

    @property
    def is_calibrated(self) -> bool:
        """Returns True if sketches (compact forms of keys) can be built in all formats: the
        principal axes of the keys are known, or no format needs axes."""
        return self.axes is not None or not any(map(needs_axes, self.formats))

    def row_bytes(self, name: str) -> int:
        """Returns the bytes of a block's sketch (compact form of keys) in a format.

        name: name of the format.
        """
        return bytes_per_block(name, self.block_tokens, self.kv_heads, self.head_size)

    def centre_of(self, name: str) -> F32 | None:
        """Returns `mu` (the mean key of each head) for a format that encodes each token. Returns
        None for a format that summarizes blocks, because it does not use `mu`.

        name: name of the format.
        """
        return self.mu if token_scorer(name) else None


@dataclass(frozen=True, slots=True)
class PoolRows:
    """The places of a layer's sketches (compact forms of keys) of one format in the pool:
    the row of block b begins at byte `offset` + b * `row_bytes` of the pool.

    layer: index of the layer.
    name: name of the format.
    """

    layer: int
    name: str
    offset: int
    row_bytes: int


class BlockReprManager:
    """Owns the sketches (compact forms of keys) of all sparse layers, in one pool. Used by
    one thread.

    layers: by layer index, the shape and formats of the layer's sketches. All layers
        have the same number of blocks.
    keys_of: by layer index, a function that returns the unpacked keys of blocks (`KeysOf`).
    fd: the pool's file, which another process can map; open as long as this object lives. None if
        the system provides no such file.
    num_bytes: size of the pool.
    rows: the parts of the pool, one per layer and format: ordered by layer index, and within a
        layer by the order of its formats.
    num_forgets: a counter that grows with each call that marks sketches as not built, so
        that callers notice that a result of `lacking` is outdated.
    """

    def __init__(self, layers: Mapping[int, LayerShape], keys_of: Mapping[int, KeysOf]) -> None:
        self._layers = dict(layers)
        self._keys_of = dict(keys_of)
        (num_blocks,) = {shape.num_blocks for shape in layers.values()}
        self._marks = np.zeros((len(layers), num_blocks), np.bool_)
        self._built = dict(zip(layers, self._marks, strict=True))
        self._uncalibrated = {index for index, shape in layers.items() if not shape.is_calibrated}
        self.num_forgets = 0
        self.rows, self.num_bytes = _placed(self._layers)
        self.fd, memory = _zeros(self.num_bytes)
        if self.fd is not None:
            weakref.finalize(self, os.close, self.fd)
        self._sources: dict[int, dict[str, Source]] = {index: {} for index in layers}
        for part in self.rows:
            shape = self._layers[part.layer]
            pool = memory[part.offset : part.offset + shape.num_blocks * part.row_bytes].reshape(
                shape.num_blocks, shape.kv_heads, -1
            )
            self._sources[part.layer][part.name] = _source(shape, part.name, pool)

    def __repr__(self) -> str:
        return (
            f"BlockReprManager(layers {len(self._layers)}, built "
            f"{sum(int(built.sum()) for built in self._built.values())})"
        )

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """Returns a layer's sketches (compact forms of keys) by format. Row b belongs to
        block b."""
        return self._sources[layer_idx]

    def shape(self, layer_idx: int) -> LayerShape:
        """Returns the sizes and formats of a layer's sketches (compact forms of keys); also
        the mean key and the principal axes of its keys, once `calibrate` has set them."""
        return self._layers[layer_idx]

    def is_calibrated(self, layer_idx: int) -> bool:
        """Returns True if the layer's sketches (compact forms of keys) can be built: the
        layer's axes are known, or its formats need no axes."""
        return layer_idx not in self._uncalibrated

    def calibrate(self, layer_idx: int, mu: F32, axes: Axes) -> None:
        """Sets the mean key and the principal axes of a layer's keys, by which its sketches
        (compact forms of keys) are computed. Marks all its sketches as not built.

        mu: the mean key of each head, float32 [KV heads, channels].
        axes: the principal axes of the layer's keys.
        """
        shape = replace(self._layers[layer_idx], mu=mu, biases={}, axes=axes)
        self._layers[layer_idx] = shape
        self._uncalibrated.discard(layer_idx)
        self.num_forgets += 1
        for name, source in self._sources[layer_idx].items():
            self._sources[layer_idx][name] = _source(shape, name, source.pool)
        self._built[layer_idx][:] = False

    def built(self, layer_idx: int) -> npt.NDArray[np.bool_]:
        """Returns a mask over block ids: True if the block's sketch (compact form of keys)
        is built in the layer. The array is a copy."""
        return self._built[layer_idx].copy()

    def forget(self, blocks: I32, layers: Sequence[int] | None = None) -> None:
        """Marks the sketches (compact forms of keys) of `blocks` as not built, because the
        blocks' pages are about to change, or have changed.

        layers: indices of the layers; None for all layers.
        """
        self.num_forgets += 1
        for index in self._built if layers is None else layers:
            self._built[index][blocks] = False

    def forget_all(self) -> None:
        """Marks all sketches (compact forms of keys) as not built. Used if it is not known
        which pages change."""
        self.num_forgets += 1
        self._marks[:] = False

    def lacking(self, blocks: I32) -> set[int]:
        """Returns the indices of the layers in which the sketch (compact form of keys) of
        at least one of `blocks` is not built."""
        is_built: npt.NDArray[np.bool_] = np.logical_and.reduce(self._marks[:, blocks], axis=1)
        return {index for index, has_all in zip(self._built, is_built, strict=True) if not has_all}

    def mark_built(self, layer_idx: int, blocks: I32) -> None:
        """Marks the sketches (compact forms of keys) of `blocks` as built in a layer. Called
        after a load that has written both the blocks' pages and their rows."""
        self._built[layer_idx][blocks] = True

    def update(self, layer_idx: int, new_blocks: I32) -> int:
        """Builds the missing sketches (compact forms of keys) of `new_blocks` in a layer.
        The blocks must be complete. Returns the number of blocks whose sketch was built; 0
        if the layer is not calibrated yet (mean and axes of its keys are not known)."""
        built = self._built[layer_idx]
        if not self.is_calibrated(layer_idx):
            return 0
        missing = new_blocks[~built[new_blocks]]
        for start in range(0, len(missing), BUILD_BLOCKS):
            part = missing[start : start + BUILD_BLOCKS]
            keys = self._keys_of[layer_idx](part)
            for name, source in self._sources[layer_idx].items():
                source.pool[part] = build(name, keys, source.mu, axes=source.axes)
            built[part] = True
        return len(missing)


def _source(shape: LayerShape, name: str, pool: U8) -> Source:
    axes = shape.axes if needs_axes(name) else None
    return Source(pool, shape.centre_of(name), shape.biases.get(name), axes=axes)


def _placed(layers: Mapping[int, LayerShape]) -> tuple[tuple[PoolRows, ...], int]:
    """Returns the layout of a pool for these layers: its parts, one per layer and format, and its
    size in bytes. Each part begins on a new memory page."""
    rows, at = [], 0
    for index in sorted(layers):
        for name in layers[index].formats:
            rows.append(PoolRows(index, name, at, layers[index].row_bytes(name)))
            at += -(-layers[index].num_blocks * rows[-1].row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(rows), at


def _zeros(num_bytes: int) -> tuple[int | None, U8]:
    """Allocates zeroed memory that another process can map. Returns the descriptor of its file and
    the memory. The descriptor is None if the operating system provides no such file.

    All memory of the file is allocated at once, for two reasons. First, Linux charges a memory page
    to the cgroup of the process that touches the page first, and this must not be the server.
    Second, the server rejects a file with holes (parts without memory).
    """
    try:
        fd = os.memfd_create("hotkv-sketches")
    except (AttributeError, OSError) as error:
        logger.warning(
            "hotkv: sketches stay in this engine, the system gives no memory to share: %s",
            error,
        )
        return None, np.zeros(num_bytes, np.uint8)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return fd, np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)
    except (OSError, ValueError) as error:
        os.close(fd)
        logger.warning(
            "hotkv: sketches stay in this engine, %d bytes can't be shared: %s",
            num_bytes,
            error,
        )
        return None, np.zeros(num_bytes, np.uint8)
