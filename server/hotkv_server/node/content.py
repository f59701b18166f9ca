"""What an engine says of the blocks that it stores, besides their hashes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ExtraKey = str | bytes | tuple[str, int]
"""An adapter's name or a cache salt; a digest of prompt embeddings; a multi-modal input and the
place of its first token."""
KEY_BYTES = 64
"""About the memory of an extra key, besides its characters."""
BlockExtraKeys = tuple[ExtraKey, ...] | None


@dataclass(frozen=True, slots=True)
class RunContent:
    """An engine's description of a run for events, besides its hashes.

    `token_ids` int32 [blocks · block_tokens], empty if it sent none. `extra_keys`: one entry a
    block, or none at all.
    """

    token_ids: NDArray[np.int32]
    lora_name: str = ""
    extra_keys: tuple[BlockExtraKeys, ...] = ()

    @property
    def num_bytes(self) -> int:
        """About its memory."""
        keys = [key for keys in self.extra_keys if keys for key in keys]
        texts = sum(KEY_BYTES + len(key[0] if isinstance(key, tuple) else key) for key in keys)
        return int(self.token_ids.nbytes) + len(self.lora_name) + texts + 8 * len(self.extra_keys)
