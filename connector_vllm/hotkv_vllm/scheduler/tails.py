"""Blocks of ended requests that wait for the next step's stores: their hash became known after the
request's last step.

What is always true: a tail that has a block which is about to be written is not stored, not even in
part, because what follows a gap is found by nobody.
"""

from collections.abc import Collection, Sequence

from hotkv.retention import Retention
from hotkv_client.types import BlockRun

Tail = tuple[Retention, tuple[BlockRun, ...]]


class Tails:
    """See the module. Scheduler thread only. `blocks`: of all tails since they were last taken."""

    def __init__(self) -> None:
        self._waiting: list[Tail] = []
        self.blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"Tails({len(self)})"

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, retention: Retention, runs: Sequence[BlockRun]) -> None:
        """Keeps a request's tail until the next step."""
        if runs:
            self._waiting.append((retention, tuple(runs)))

    def drop_written(self, written: Collection[int]) -> None:
        """Drops tails that have one of these blocks."""
        self._waiting = [
            (retention, tail)
            for retention, tail in self._waiting
            if not any(int(block) in written for run in tail for block in run.block_ids)
        ]

    def take(self) -> list[Tail]:
        """Returns what waits; from now on nothing does."""
        taken = self._waiting
        self.forget()
        return taken

    def forget(self) -> None:
        """Drops what waits."""
        self._waiting, self.blocks = [], set()
