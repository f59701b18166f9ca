"""Holds the sketches of the engine's blocks, in memory that the server can map: a row per layer,
format and block, and a mark per layer and block whose rows are built.

Always true:
- The row of a marked block is the sketch of the keys in its page, wherever they came from: prefill,
  decode, vLLM's own prefix cache, or a load.
- A row never changes while a store reads it: rows of marked blocks are not written, and a mark is
  cleared only before the page is written, when stores that read the block have ended.

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
"""Block ids, int32, to keys, float32 [blocks, tokens, KV heads, channels]."""

BUILD_BLOCKS = 64
"""At a time; limits the memory for keys."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape and formats of a layer's sketches.

    mu: centre, float32 [KV heads, channels], for formats that encode each token; None for zero.
    biases: by which formats overestimate the log of a block's mass with this centre; others have
        defaults.
    axes: for `mix2`; None until calibrated.
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
        return self.axes is not None or not any(map(needs_axes, self.formats))

    def row_bytes(self, name: str) -> int:
        return bytes_per_block(name, self.block_tokens, self.kv_heads, self.head_size)

    def centre_of(self, name: str) -> F32 | None:
        """None for a format that summarizes blocks."""
        return self.mu if token_scorer(name) else None


@dataclass(frozen=True, slots=True)
class PoolRows:
    """One layer and format: block b's row begins at byte `offset` + b * `row_bytes`."""

    layer: int
    name: str
    offset: int
    row_bytes: int


class BlockReprManager:
    """Owns the sketches of all sparse layers. Used by one thread.

    layers: all have the same number of blocks.
    fd: the pool's file, open as long as this object lives; None if the system provides none.
    rows: by layer index, then in the layer's order of formats.
    num_forgets: grows when marks are cleared: results of `lacking` are then outdated.
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
        """Keyed by format; row b is block b's."""
        return self._sources[layer_idx]

    def shape(self, layer_idx: int) -> LayerShape:
        return self._layers[layer_idx]

    def is_calibrated(self, layer_idx: int) -> bool:
        return layer_idx not in self._uncalibrated

    def calibrate(self, layer_idx: int, mu: F32, axes: Axes) -> None:
        """Clears the layer's marks."""
        shape = replace(self._layers[layer_idx], mu=mu, biases={}, axes=axes)
        self._layers[layer_idx] = shape
        self._uncalibrated.discard(layer_idx)
        self.num_forgets += 1
        for name, source in self._sources[layer_idx].items():
            self._sources[layer_idx][name] = _source(shape, name, source.pool)
        self._built[layer_idx][:] = False

    def built(self, layer_idx: int) -> npt.NDArray[np.bool_]:
        """A copy, by block id."""
        return self._built[layer_idx].copy()

    def forget(self, blocks: I32, layers: Sequence[int] | None = None) -> None:
        """Must be called before the pages change.

        layers: None for all.
        """
        self.num_forgets += 1
        for index in self._built if layers is None else layers:
            self._built[index][blocks] = False

    def forget_all(self) -> None:
        self.num_forgets += 1
        self._marks[:] = False

    def lacking(self, blocks: I32) -> set[int]:
        """Layers without the sketch of at least one of `blocks`."""
        is_built: npt.NDArray[np.bool_] = np.logical_and.reduce(self._marks[:, blocks], axis=1)
        return {index for index, has_all in zip(self._built, is_built, strict=True) if not has_all}

    def mark_built(self, layer_idx: int, blocks: I32) -> None:
        """A load has written both pages and rows."""
        self._built[layer_idx][blocks] = True

    def update(self, layer_idx: int, new_blocks: I32) -> int:
        """Builds missing sketches of complete blocks. Returns how many; 0 if the layer is not
        calibrated."""
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
    """The parts of a pool, each on a new memory page, and its size in bytes."""
    rows, at = [], 0
    for index in sorted(layers):
        for name in layers[index].formats:
            rows.append(PoolRows(index, name, at, layers[index].row_bytes(name)))
            at += -(-layers[index].num_blocks * rows[-1].row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(rows), at


def _zeros(num_bytes: int) -> tuple[int | None, U8]:
    """Zeroed memory that another process can map, and its file; None if the system provides none.

    All of it is allocated at once: Linux charges a memory page to the cgroup of the process that
    touches it first, which must not be the server, and the server rejects a file with holes.
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
