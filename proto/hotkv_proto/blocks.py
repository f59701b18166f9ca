"""Blocks as engines name them in calls: by their hashes, in runs to be stored or loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GroupHashes:
    """Block hashes of one group, in chain order."""

    group_index: int
    hashes: Sequence[bytes]


ExtraKey = str | bytes | tuple[str, int]
"""An adapter's name or a cache salt; a digest of prompt embeddings; a multi-modal input and the
place of its first token."""
BlockExtraKeys = Sequence[ExtraKey] | None
KEY_BYTES = 64
"""About the memory of an extra key, besides its characters."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A chain of consecutive blocks of one group. `block_ids` int32 [n] in engine memory; empty
    when only reserving.

    `parent_hash`: hash before the first, empty at the root. `depth`: position of the first block in
    its chain, in blocks. For events, if the server publishes any: `token_ids` of all
    the blocks; `lora_name`; `extra_keys` besides tokens that are hashed into each block, as vLLM's
    events name them, or nothing if no block has any.
    """

    group_index: int
    hashes: Sequence[bytes]
    block_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    parent_hash: bytes = b""
    depth: int = 0
    token_ids: Sequence[int] | Int32s = ()
    lora_name: str = ""
    extra_keys: Sequence[BlockExtraKeys] = ()


@dataclass(frozen=True, slots=True)
class RunContent:
    """An engine's description of a run for events, besides its hashes.

    `token_ids` int32 [blocks · block_tokens], empty if it sent none. `extra_keys`: one entry a
    block, or none at all.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[tuple[ExtraKey, ...] | None, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About its memory."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Blocks of one group to load: positions in the lease's hash list of that group, int32 [n], and
    block ids int32 [n]."""

    group_index: int
    lease_positions: Int32s
    block_ids: Int32s
