"""Blocks of ended requests that wait for the next step's stores: their hash became known after the
request's last step.

What is always true: a tail that has a block which is about to be written is not stored, not even in
part, because what follows a gap is found by nobody.
"""

from collections.abc import Collection, Sequence

from hotkv_client.types import BlockRun
from hotkv_proto.retention import Retention
from hotkv_vllm.tracing.requests import RequestTrace

Tail = tuple[Retention, RequestTrace | None, tuple[BlockRun, ...]]


class Tails:
    """See the module. Scheduler thread only. `waiting`: the tails, and `blocks`: what they have."""

    def __init__(self) -> None:
        self.waiting: list[Tail] = []
        self.blocks: set[int] = set()

    def __repr__(self) -> str:
        return f"Tails({len(self.waiting)})"

    def add(
        self, retention: Retention, runs: Sequence[BlockRun], trace: RequestTrace | None = None
    ) -> None:
        """Keeps a request's tail until the next step."""
        if runs:
            self.waiting.append((retention, trace, tuple(runs)))

    def drop_written(self, written: Collection[int]) -> None:
        """Drops tails that have one of these blocks."""
        self.waiting = [
            (retention, trace, tail)
            for retention, trace, tail in self.waiting
            if not any(int(block) in written for run in tail for block in run.block_ids)
        ]

    def take(self) -> list[Tail]:
        """Returns what waits; from now on nothing does."""
        taken, self.waiting, self.blocks = self.waiting, [], set()
        return taken

    def forget(self) -> None:
        """Drops what waits."""
        self.waiting, self.blocks = [], set()
