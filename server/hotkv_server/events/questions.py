"""Translates block hashes of Dynamo's router into the engine's, so that it can ask what is cached.

The router hashes each block's tokens alone: XXH3-64, seeded with the adapter. `PromptIndex`
computes these hashes from the contents of stored blocks and chains them as the router does. The
resulting *prefix hash* names a block with all before it, and maps to the engine's hash.

Source: `compute_block_hash_for_seq` and `compute_next_sequence_hash` of Dynamo 1.6.
"""

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from hotkv_proto.blocks import RunContent
from hotkv_proto.table import Words
from hotkv_server.cache.values import BoolMask
from hotkv_server.events.contents import Contents, KnownRun

SEED = 1337
MASK = (1 << 64) - 1


def block_hashes(content: RunContent, count: int) -> list[int]:
    """The router's 64-bit hash of each of the run's `count` blocks."""
    adapter = xxhash.xxh3_64_intdigest(content.lora_name.encode()) if content.lora_name else 0
    packed = content.token_ids.astype("<u4").tobytes()
    size = len(packed) // count
    return [
        xxhash.xxh3_64_intdigest(packed[start : start + size], SEED + adapter & MASK)
        for start in range(0, len(packed), size)
    ]


def chained(parent: int | None, block_hash: int) -> int:
    """Prefix hash of a block. `parent`: that of the block before; None for the first."""
    if parent is None:
        return block_hash
    return xxhash.xxh3_64_intdigest(array("Q", (parent, block_hash)).tobytes(), SEED)


@dataclass(slots=True)
class _Prefixes:
    """Stored blocks of a group. `of_block`: engine's hash (32 bytes) to prefix hash; `blocks`:
    back."""

    of_block: dict[bytes, int] = field(default_factory=dict)
    blocks: dict[int, bytes] = field(default_factory=dict)


Prefixes = dict[tuple[bytes, int], _Prefixes]
"""By (fingerprint, group)."""
UPDATE_S = 0.25
"""How long a call of `find` reads new contents."""
TURN_RUNS = 16
"""Runs (about 1 ms) after which the thread yields the GIL."""


class PromptIndex:
    """Finds stored blocks by the router's hashes. Thread-safe; no call waits for another: one call
    adds to the table, which only grows until a new one replaces it, and all others read it.

    `find` first reads what was stored since the last call, for UPDATE_S at most, so stores do no
    work for the index, and the first calls after a restart may find too little. A block with
    extra keys other than its adapter's name (a salt, an image) is never found: the router's hash
    lacks them.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._lock = threading.Lock()
        self._prefixes: Prefixes = {}
        self._read_to = 0
        # `_reading`: iteration under way, None between two; `_reads_to`: up to where it reads;
        # `_filling`: the table that it fills.
        self._reading: Iterator[KnownRun] | None = None
        self._reads_to = 0
        self._filling: Prefixes = self._prefixes

    def __repr__(self) -> str:
        return f"PromptIndex({sum(len(one.blocks) for one in self._prefixes.values())} blocks)"

    def find(
        self, fingerprint: bytes, group_index: int, hashes: Sequence[int]
    ) -> tuple[Words, BoolMask]:
        """Engine's hashes as words [n, 8], zeros if not found; mask [n] of those found.

        `hashes`: from the first block of the prompt on.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._update(time.monotonic() + UPDATE_S)
            finally:
                self._lock.release()
        blocks = self._prefixes.get((fingerprint, group_index), _Prefixes()).blocks
        names: list[bytes] = []
        prefix = None
        for one in hashes:
            prefix = chained(prefix, one)
            names.append(blocks.get(prefix, b""))
        packed = b"".join(name or bytes(32) for name in names)
        words = np.frombuffer(packed, np.uint32).reshape(-1, 8)
        return words, np.array([bool(name) for name in names], np.bool_)

    def _update(self, until_s: float) -> None:
        """`until_s`: time.monotonic."""
        if self._reading is None:
            num_known = sum(len(one.blocks) for one in self._prefixes.values())
            begin, self._filling = self._read_to, self._prefixes
            if num_known > 2 * self._contents.num_blocks + 1000:
                # Most of the index is about overwritten contents. Build a new one, and answer
                # from the old one meanwhile.
                begin, self._filling = 0, {}
            self._reads_to = self._contents.head
            self._reading = self._contents.runs(begin)
        reading, self._reading = self._reading, None
        for count, known in enumerate(reading, 1):
            # None during a step: if it raises, the iteration has ended, and the next call begins
            # another.
            self._reading = reading
            self._add(known)
            if time.monotonic() >= until_s:
                return
            if count % TURN_RUNS == 0:
                time.sleep(0)
            self._reading = None
        self._read_to, self._prefixes = self._reads_to, self._filling

    def _add(self, known: KnownRun) -> None:
        run = known.run()
        prefixes = self._filling.setdefault((known.fingerprint, run.group_index), _Prefixes())
        prefix = None
        if run.depth:
            prefix = prefixes.of_block.get(b"" if run.parent is None else run.parent.tobytes())
            if prefix is None:
                # The hash of a block covers all before it, which are not known.
                return
        name, keys = run.content.lora_name, run.content.extra_keys
        for at, one in enumerate(block_hashes(run.content, len(run.hashes))):
            if keys and keys[at] not in (None, (name,)):
                return
            prefix = chained(prefix, one)
            block_hash = run.hashes[at].tobytes()
            prefixes.of_block[block_hash] = prefix
            prefixes.blocks[prefix] = block_hash
