"""What a store has come to, from the answers of all ranks.

What is always true: a block counts as stored only if every rank has its shard in the server.
"""

from typing import Any

import numpy as np

from hotkv_client.types import BlockResult
from hotkv_vllm.scheduler.hidden_keys import HiddenKeys
from hotkv_vllm.scheduler.stores_in_flight import StoreInFlight
from hotkv_vllm.stats import HotKVStats


def settle(store: StoreInFlight, stats: HotKVStats, hidden: HiddenKeys) -> None:
    """Counts what a store has come to, and offers again what it has stored."""
    whole, num_stored = stored_whole(store)
    num_whole = int(whole.sum())
    for name, count in (
        ("stored_blocks", num_stored),
        ("present_blocks", num_whole - num_stored),
        ("refused_blocks", store.num_blocks - num_whole),
    ):
        if count:
            stats.add(name, count)
    if len(hidden):
        keys = [(run.group_index, one) for run in store.runs for one in run.hashes]
        for (group, block_hash), good in zip(keys, whole.tolist(), strict=True):
            if good:
                hidden.clear(group, block_hash)


def stored_whole(store: StoreInFlight) -> tuple[Any, int]:
    """Which blocks of a store all ranks have stored, as a mask, and how many of these are new to
    the server."""
    num_blocks = store.num_blocks
    answers = np.full((max(1, len(store.results)), num_blocks), BlockResult.ABORTED, np.uint8)
    for row, result in enumerate(store.results):
        part = np.frombuffer(result, np.uint8)[:num_blocks]
        answers[row, : len(part)] = part
    is_written = (answers <= BlockResult.WRITTEN).all(axis=0)
    whole = is_written & (answers <= BlockResult.PRESENT).any(axis=0)
    return whole, int((whole & (answers == BlockResult.STORED).any(axis=0)).sum())
