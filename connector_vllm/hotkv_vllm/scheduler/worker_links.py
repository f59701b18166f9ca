"""Which of the engine's workers have a session with the server, as they say themselves. Scheduler
thread only.

What is always true: while a worker is without a session nothing is offered and nothing planned for
storing, since that worker could neither load nor store. Workers say when their state changes, and
in each step in which they are asked; they are asked while one is absent.
"""

from collections.abc import Mapping

from hotkv_vllm import link

logger = link.logger

PATIENCE_S = 5.0
"""How long a worker may be without a session before a warning; sessions reconnect on their own, one
after the other."""


class WorkerLinks:
    """The workers' sessions, by rank."""

    def __init__(self) -> None:
        self._absent: dict[int, str] = {}
        self._since_s = 0.0
        self._said: set[int] = set()
        self._heard = True

    def __repr__(self) -> str:
        return f"WorkerLinks(absent: {self._absent})"

    @property
    def are_complete(self) -> bool:
        return not self._absent

    @property
    def will_say(self) -> bool:
        """A worker was absent when there was no server, and has not been heard of since: it may be
        there again."""
        return bool(self._absent) and not self._heard

    def told(self, links: Mapping[int, str], now_s: float, is_connected: bool = True) -> None:
        """By rank: why it has no session; empty for one that has. `is_connected`: the scheduler's
        own session."""
        if links:
            self._heard = is_connected
        for rank, why in links.items():
            if not why:
                self._absent.pop(rank, None)
                self._said.discard(rank)
                continue
            if not self._absent:
                self._since_s = now_s
            self._absent[rank] = why

    def check(self, is_connected: bool, now_s: float, patience_s: float | None = None) -> None:
        """Warns once of a worker that stays absent while the scheduler's own session
        `is_connected`."""
        if not self._absent:
            return
        if not is_connected:
            # No server: the scheduler's own session says so.
            self._since_s = now_s
            return
        if now_s < self._since_s + (PATIENCE_S if patience_s is None else patience_s):
            return
        for rank, why in self._absent.items():
            if rank not in self._said:
                self._said.add(rank)
                logger.warning(
                    "hotkv: worker %d has no session with the KV cache server (%s), so this "
                    "engine neither loads nor stores; the server "
                    "must run on the worker's node, answer at hotkv.target and be able to map "
                    "its memory (a unix: target; for CUDA a "
                    "server with the same GPU). The worker goes on trying",
                    rank,
                    why,
                )
