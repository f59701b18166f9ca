"""`Cache`: a core with one session; a block is a number, a prompt a list of numbers."""

from collections.abc import Sequence

from hotkv_proto.blocks import NO_RETENTION, BlockResult, Retention
from hotkv_server.cache.values import HashList
from tests.core.support import World, expire, words_of

NUM_SLOTS = 64


class Cache(World):
    def __init__(self, policy: str) -> None:
        super().__init__(NUM_SLOTS // 4, 200, policy)
        self.session = self.open()
        self.now_s = 0.0
        self.resident: set[int] = set()
        self._number_of: dict[bytes, int] = {}
        self._next_fresh = 1 << 40

    def fresh(self, num_blocks: int) -> list[int]:
        self._next_fresh += num_blocks
        return list(range(self._next_fresh - num_blocks, self._next_fresh))

    def add(
        self, chain: Sequence[int], start: int = 0, retention: Retention = NO_RETENTION
    ) -> list[int]:
        new, parent = chain[start:], chain[start - 1] if start else None
        self._number_of |= {words_of([number])[0].tobytes(): number for number in new}
        results = self.store(
            self.session, new, self.now_s, depth=start, parent=parent, retention=retention
        )
        self.read_notices()
        done = zip(new, results, strict=True)
        self.resident |= {number for number, result in done if result == BlockResult.STORED}
        return results

    def read_notices(self) -> None:
        gone = [
            self._number_of[row.tobytes()]
            for notice in self.core.take_effects()
            for row in notice.hashes
        ]
        self.resident -= set(gone)

    def touch(self, chain: Sequence[int], retention: Retention = NO_RETENTION) -> None:
        self.core.touch(self.session.number, [HashList(0, words_of(chain))], self.now_s, retention)

    def flood(self, num_blocks: int, until_s: float, chain_blocks: int = 10) -> None:
        """Stores new chains, evenly until `until_s`. None is requested again."""
        starts = range(0, num_blocks, chain_blocks)
        step_s = (until_s - self.now_s) / max(1, len(starts))
        for start in starts:
            self.advance(self.now_s + step_s)
            self.add(self.fresh(min(chain_blocks, num_blocks - start)))

    def advance(self, now_s: float) -> None:
        self.now_s = now_s
        expire(self.core, now_s)

    def check(self) -> None:
        self.core.check_invariants()
        self.core.space.policy.check_invariants()
        assert self.found(sorted(self.resident)) == sorted(self.resident)
