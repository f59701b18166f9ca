"""A cache of one session whose blocks come in chains of numbers."""

from collections.abc import Sequence

from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies import POLICIES
from hotkv_server.cache.values import CoreConfig, HashList, Run
from tests.core.support import begin_store, expire, make_key_space, make_table, words_of

SLAB = 4 * SLOT_ALIGN
NUM_SLOTS = 64


class Cache:
    """One session and one group; blocks are numbers, and come in chains. `parent_of` what was
    stored behind what."""

    def __init__(self, policy: str) -> None:
        config = CoreConfig(NUM_SLOTS * SLOT_ALIGN, SLAB, 200, max_blocks_per_call=1000)
        self.core = CacheCore(config, make_table(200), POLICIES[policy](200))
        self.session = self.core.open_session(
            "engine", "rank", make_key_space("one", SLOT_ALIGN, SLOT_ALIGN), 0.0
        ).number
        self.now_s = 0.0
        self.resident: set[int] = set()
        self.evicted: list[int] = []
        self._number_of: dict[bytes, int] = {}
        self._num_calls = 0
        self._next_fresh = 1 << 40

    def fresh(self, num_blocks: int) -> list[int]:
        """Numbers that nothing else has."""
        self._next_fresh += num_blocks
        return list(range(self._next_fresh - num_blocks, self._next_fresh))

    def store(
        self, chain: Sequence[int], start: int = 0, retention: Retention = NO_RETENTION
    ) -> list[int]:
        """Stores a chain from a position on; returns a result a block."""
        self._num_calls += 1
        name = f"store {self._num_calls}"
        parent = words_of(chain[start - 1 : start])[0] if start else None
        hashes = words_of(chain[start:])
        self._number_of |= {
            row.tobytes(): number for row, number in zip(hashes, chain[start:], strict=True)
        }
        begin_store(
            self.core,
            self.session,
            name,
            name,
            [Run(0, hashes, parent, start)],
            0,
            0.0,
            self.now_s,
            retention,
        )
        self.read_notices()
        results: list[int] = self.core.end_store(self.session, name, True, self.now_s)[0].tolist()
        self.resident |= {
            n
            for n, result in zip(chain[start:], results, strict=True)
            if result == BlockResult.STORED
        }
        return results

    def read_notices(self) -> None:
        gone = [
            self._number_of[row.tobytes()]
            for notice in self.core.take_effects()
            for row in notice.hashes
        ]
        self.evicted += gone
        self.resident -= set(gone)

    def touch(self, chain: Sequence[int], retention: Retention = NO_RETENTION) -> None:
        self.core.touch(self.session, [HashList(0, words_of(chain))], self.now_s, retention)

    def flood(self, num_blocks: int, until_s: float, chain_blocks: int = 10) -> None:
        """Chains that nobody ever asks for again, evenly until then."""
        parts = [
            min(chain_blocks, num_blocks - done) for done in range(0, num_blocks, chain_blocks)
        ]
        step_s = (until_s - self.now_s) / max(1, len(parts))
        for part in parts:
            self.advance(self.now_s + step_s)
            self.store(self.fresh(part))

    def advance(self, now_s: float) -> None:
        self.now_s = now_s
        expire(self.core, now_s)

    def found(self, chain: Sequence[int]) -> list[int]:
        mask = self.core.lookup(1, [HashList(0, words_of(chain))])[0]
        return [number for number, hit in zip(chain, mask.tolist(), strict=True) if hit]

    def check(self) -> None:
        self.core.check_invariants()
        self.core.space.policy.check_invariants()
        assert self.found(sorted(self.resident)) == sorted(self.resident)
