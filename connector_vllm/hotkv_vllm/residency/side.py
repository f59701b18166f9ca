"""What vLLM's pool of a resident engine is told: which tokens need not stay on the device, which
requests may begin, and which have lost their bytes.

Answers for every engine; of one that is not resident nothing is kept, and nothing lost.
"""

import time
from collections.abc import Set
from typing import Any

from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.hooks import HookEdge, hook
from hotkv_vllm.link import logger
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.sharing import Sharing


class ResidentSide:
    """See the module. Scheduler thread only."""

    def __init__(self, pool: DevicePool, sharing: Sharing, edge: HookEdge) -> None:
        self.edge = edge
        self._pool = pool
        self._sharing = sharing

    def __repr__(self) -> str:
        return f"ResidentSide({self._pool})"

    def bind(self, manager: Any) -> None:
        """Takes vLLM's manager of blocks."""
        self._pool.bind(manager, self._kept_tokens, self._has_room)
        if self._pool.spec is not None:
            logger.info("hotkv: %s", self._pool.describe())

    @hook(lambda *_: 0, last=0, is_part=True)
    def _kept_tokens(self, request_id: str) -> int:
        """Leading tokens of a request that need not stay on the device."""
        return 0 if self._residencies is None else self._residencies.kept_tokens(request_id)

    @hook(lambda *_: False, last=False, is_part=True)
    def _has_room(self, request_id: str) -> bool:
        """Whether a request that outgrows the device may begin."""
        return self._residencies is not None and self._residencies.has_room(request_id)

    def is_freeing(self) -> bool:
        """Whether blocks will be given back soon, so that no request need be preempted."""
        return self._residencies is not None and self._residencies.is_freeing(time.monotonic())

    def lost(self, first_blocks: Set[int]) -> None:
        """Bytes of the requests that have one of these blocks are gone: vLLM computes them anew."""
        if self._pool.spec is None:
            return
        request_ids = self._pool.requests_of(first_blocks)
        for request_id in request_ids:
            self._pool.lose(request_id)
        if self._residencies is not None:
            self._residencies.lost(request_ids)

    def lost_broke(self, first_blocks: Set[int]) -> None:
        """As `lost`, for a hook that has raised. Shares nothing with it."""
        self._pool.lose_blocks(first_blocks)

    @property
    def _residencies(self) -> ResidentRequests | None:
        cache = self._sharing.cache
        return None if cache is None else cache.residencies
