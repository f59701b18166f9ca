"""Translates the block hashes of Dynamo's router into the block hashes of the engine, so that the
router can ask which blocks of a prompt are cached.

The router sends a 64-bit hash for each block of a prompt: the XXH3-64 of the block's tokens, seeded
with the adapter if there is one. This hash does not depend on the preceding blocks. The server
knows blocks only by the engine's hashes. So `PromptIndex` reads the token ids of stored blocks
(`events.contents`) and computes the router's hashes from them. It also chains the hashes of a
sequence, as the router does. The result is the *prefix hash* of each block, which identifies the
block together with all preceding blocks. `PromptIndex` maps prefix hashes to the engine's hashes.

Source of the hashes: `compute_block_hash_for_seq` and `compute_next_sequence_hash` of Dynamo 1.6.
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
    """Returns the 64-bit hash of each block of a run (consecutive blocks), as the KV router of
    Dynamo computes it.

    `content`: tokens and adapter of the run.
    `count`: number of blocks in the run.
    """
    adapter = xxhash.xxh3_64_intdigest(content.lora_name.encode()) if content.lora_name else 0
    packed = content.token_ids.astype("<u4").tobytes()
    size = len(packed) // count
    return [
        xxhash.xxh3_64_intdigest(packed[start : start + size], SEED + adapter & MASK)
        for start in range(0, len(packed), size)
    ]


def chained(parent: int | None, block_hash: int) -> int:
    """Returns the prefix hash of a block: the router's hash of the prompt up to the end of the
    block.

    `parent`: prefix hash of the block before; None for the first block of a prompt.
    `block_hash`: the router's hash of the block.
    """
    if parent is None:
        return block_hash
    return xxhash.xxh3_64_intdigest(array("Q", (parent, block_hash)).tobytes(), SEED)


@dataclass(slots=True)
class _Prefixes:
    """The stored blocks of a KV cache group, with their prefix hashes (the router's hashes of the
    prompt up to the end of each block).

    `of_block`: maps the engine's block hash (32 bytes) to the prefix hash.
    `blocks`: maps the prefix hash to the engine's block hash.
    """

    of_block: dict[bytes, int] = field(default_factory=dict)
    blocks: dict[int, bytes] = field(default_factory=dict)


Prefixes = dict[tuple[bytes, int], _Prefixes]
"""The stored blocks with their prefix hashes, by (fingerprint of the key space, group)."""
UPDATE_S = 0.25
"""Longest time that a call of `find` reads new contents."""
TURN_RUNS = 16
"""After reading this many runs (consecutive blocks that were stored together), which takes a
millisecond, the thread lets other threads have the GIL."""


class PromptIndex:
    """Finds stored blocks by the router's hashes of a prompt; see the module.

    Each call of `find` first reads the contents (token ids of blocks) that were stored since the
    last call, so stores do no work for the index. A call reads for at most UPDATE_S, and the next
    call continues. So after a restart the first calls may find too few blocks.

    Always true: a block that has extra keys other than the name of its adapter (a salt, an image)
    is not found, because the router's hash does not include these keys. Thread-safe; a call does
    not wait for another call.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._lock = threading.Lock()
        self._prefixes: Prefixes = {}
        self._read_to = 0
        # Contents are read in parts. `_reading` is the iteration over contents that is under way;
        # None between two iterations. `_reads_to` is the position up to which it will have read all
        # contents. `_filling` is the table that it fills.
        self._reading: Iterator[KnownRun] | None = None
        self._reads_to = 0
        self._filling: Prefixes = self._prefixes

    def __repr__(self) -> str:
        return f"PromptIndex({sum(len(one.blocks) for one in self._prefixes.values())} blocks)"

    def find(
        self, fingerprint: bytes, group_index: int, hashes: Sequence[int]
    ) -> tuple[Words, BoolMask]:
        """Translates the router's hashes of a prompt into the engine's block hashes. Returns two
        arrays: the engine's hashes as uint32 words [n, 8], zeros for a block that was not found;
        and a mask [n] of the blocks that were found.

        `hashes`: the router's 64-bit hash of each block, from the first block of the prompt on.
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
        """Adds newly stored blocks to the index: reads the contents (token ids of stored blocks)
        that it has not read yet, at most until `until_s`, a time of time.monotonic."""
        if self._reading is None:
            num_known = sum(len(one.blocks) for one in self._prefixes.values())
            begin, self._filling = self._read_to, self._prefixes
            if num_known > 2 * self._contents.num_blocks + 1000:
                # Most of the index is about blocks whose contents have been overwritten. Make a new
                # index, and answer from the old one until the new one is complete.
                begin, self._filling = 0, {}
            self._reads_to = self._contents.head
            self._reading = self._contents.runs(begin)
        reading, self._reading = self._reading, None
        for count, known in enumerate(reading, 1):
            # `_reading` is None while the iteration makes a step: if the step raises, the iteration
            # has ended, and the next call begins another one.
            self._reading = reading
            self._add(known)
            if time.monotonic() >= until_s:
                return
            if count % TURN_RUNS == 0:
                # Release the GIL, for the event loop.
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
                return
        name, keys = run.content.lora_name, run.content.extra_keys
        for at, one in enumerate(block_hashes(run.content, len(run.hashes))):
            if keys and keys[at] not in (None, (name,)):
                return
            prefix = chained(prefix, one)
            block_hash = run.hashes[at].tobytes()
            prefixes.of_block[block_hash] = prefix
            prefixes.blocks[prefix] = block_hash
