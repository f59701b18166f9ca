"""Token ids of stored blocks, kept until a tier announces the blocks.

A tier's event would have hashes only otherwise, and a router that matches tokens would not find
the blocks below host memory.

Always true: what is kept is bounded in bytes, and the oldest runs go first. On the event loop only.
"""

from collections import deque

from hotkv_proto.blocks import RunContent
from hotkv_server.events.drive import UNKNOWN, BlocksStored, Content

BLOCK_BYTES = 256
"""Estimated memory of a block beside its run's arrays."""

Key = tuple[int, int, bytes]
"""A block: its key space, group and hash."""


class KnownContents:
    """The contents of the blocks that were stored last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._runs: deque[BlocksStored] = deque()
        self._by_block: dict[Key, tuple[BlocksStored, int]] = {}
        self.unknown_blocks = 0
        """Blocks that were asked for in vain."""

    def __repr__(self) -> str:
        return f"KnownContents({len(self._by_block)} blocks, {self._num_bytes} bytes)"

    def keep(self, run: BlocksStored) -> None:
        """Keeps the contents of a run, if the engine has sent its tokens."""
        if not len(run.content.token_ids):
            return
        self._runs.append(run)
        self._num_bytes += _bytes_of(run)
        self._by_block.update((key, (run, at)) for at, key in enumerate(_keys(run)))
        while self._num_bytes > self._max_bytes:
            oldest = self._runs.popleft()
            self._num_bytes -= _bytes_of(oldest)
            for key in _keys(oldest):
                # A block that was stored again belongs to a later run.
                if key in self._by_block and self._by_block[key][0] is oldest:
                    del self._by_block[key]

    def find(self, key_space_id: int, group_index: int, block_hash: bytes) -> Content:
        """Returns the content of a block, as far as it is known. `block_hash`: 32 bytes."""
        found = self._by_block.get((key_space_id, group_index, block_hash))
        if found is None:
            self.unknown_blocks += 1
            return UNKNOWN
        run, at = found
        whole, block_tokens = run.content, len(run.content.token_ids) // len(run.hashes)
        return Content(
            run.hashes[at - 1] if at else run.parent,
            RunContent(
                whole.token_ids[at * block_tokens : (at + 1) * block_tokens].copy(),
                whole.lora_name,
                whole.extra_keys[at : at + 1],
            ),
        )


def _keys(run: BlocksStored) -> list[Key]:
    packed = run.hashes.tobytes()
    size = len(packed) // len(run.hashes)
    return [
        (run.key_space_id, run.group_index, packed[start : start + size])
        for start in range(0, len(packed), size)
    ]


def _bytes_of(run: BlocksStored) -> int:
    return run.num_bytes + BLOCK_BYTES * len(run.hashes)
