"""Representations of the engine's blocks, by layer and block id.

What is always true: a block that is marked built holds the representation of the keys in its page. Whoever writes a page calls
`forget` first; `update` builds from the pages what is missing. So it makes no difference how keys came: by prefill, decode, a local
prefix hit, or a load.

Shapes: B blocks, T tokens of a block, H KV heads, D channels, N bytes of a block and head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotkv.sparse import build
from hotkv.sparse.formats import head_bytes
from hotkv.sparse.selector import Source

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
KeysOf = Callable[[I32], F32]
"""Unpacked keys float32 [B, T, H, D] of the blocks int32 [B]."""

BUILD_BLOCKS = 64
"""Blocks built at a time: bounds what unpacked keys weigh."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer's representations are made of; `formats` are their names."""

    num_blocks: int
    block_tokens: int
    kv_heads: int
    head_size: int
    formats: tuple[str, ...]


class BlockReprManager:
    """Owns the representations of all sparse layers. One thread. Memory is taken as blocks are built."""

    def __init__(self, layers: Mapping[int, LayerShape], keys_of: Mapping[int, KeysOf]) -> None:
        self._layers = dict(layers)
        self._keys_of = dict(keys_of)
        self._built = {index: np.zeros(shape.num_blocks, np.bool_) for index, shape in layers.items()}
        self._sources = {
            index: {
                name: Source(np.zeros((shape.num_blocks, shape.kv_heads, head_bytes(name, shape.block_tokens, shape.head_size)), np.uint8))
                for name in shape.formats
            }
            for index, shape in layers.items()
        }

    def __repr__(self) -> str:
        return f"BlockReprManager(layers {len(self._layers)}, built {sum(int(built.sum()) for built in self._built.values())})"

    def sources(self, layer_idx: int) -> Mapping[str, Source]:
        """Where a layer's representations lie, by format; row b is block b."""
        return self._sources[layer_idx]

    def forget(self, blocks: I32, layers: Sequence[int] | None = None) -> None:
        """The pages of `blocks` are about to change, or have changed (`layers` None: in all layers)."""
        for index in self._built if layers is None else layers:
            self._built[index][blocks] = False

    def update(self, layer_idx: int, new_blocks: I32) -> int:
        """Builds what is missing of `new_blocks`, all of them complete; returns how many blocks that were."""
        built = self._built[layer_idx]
        missing = new_blocks[~built[new_blocks]]
        for start in range(0, len(missing), BUILD_BLOCKS):
            part = missing[start : start + BUILD_BLOCKS]
            keys = self._keys_of[layer_idx](part)
            for name, source in self._sources[layer_idx].items():
                source.pool[part] = build(name, keys)
            built[part] = True
        return len(missing)
