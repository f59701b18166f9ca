"""Chains: which entry comes before each block in the prompts that it was stored for.

Owns the parent words of records. Always true: a link is a hint. The entry that it names may be
removed and its number given to another, so a link holds only if that entry is ready, of the same
key space and group, and one block less deep.
"""

import numpy as np

from hotkv_proto import native, table
from hotkv_proto.table import RESERVED_FLAG, Words
from hotkv_server.cache.table.index import BlockIndex
from hotkv_server.cache.values import Entries


class Chains:
    """Links between the entries of one index."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._records = index.table.records
        self._kernels = native.require("hotkv_server.cache.table.kernels")

    def __repr__(self) -> str:
        return f"Chains({self._index!r})"

    def set_parents(self, entries: Entries, parents: Entries) -> None:
        """Notes the entry before each reserved one, 0 for none."""
        self._records[entries, table.W_PARENT] = parents

    def link(
        self, key_space_id: int, group_index: int, words: Entries, parent: Words | None
    ) -> None:
        """Notes which entry comes before each of a chain. `words` [n]: entry words, 0 for none;
        `parent` [8]: the hash before the first.

        Entries that were there already are linked too: the block before them may have come back
        under another number.
        """
        first = np.uint32(0)
        if parent is not None:
            found = self._index.find(key_space_id, group_index, parent.reshape(1, 8))
            first = found[0] & ~RESERVED_FLAG
        self._kernels.link(self._records, words, first)

    def ending_with(
        self, key_space_id: int, group_index: int, last: Words | None, most: int
    ) -> Entries:
        """Ready blocks of the chain that ends with the hash `last` [8], as far as they are linked;
        none if that block is not ready."""
        if last is None:
            return np.empty(0, np.uint32)
        end = self._index.find(key_space_id, group_index, last.reshape(1, 8))
        if not table.is_ready(end)[0]:
            return np.empty(0, np.uint32)
        return np.append(self.ancestors(int(end[0]), most), end)

    def ancestors(self, entry: int, most: int) -> Entries:
        """Ready entries before this one, from the farthest to the nearest, as far as links
        hold."""
        nearest_first = np.empty(most, np.uint32)
        count = int(self._kernels.ancestors(self._records, entry, nearest_first))
        return nearest_first[:count][::-1].copy()
