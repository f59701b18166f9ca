"""Connects vLLM's block manager (`compat.residency.ResidentManager`) to `ResidentRequests`: how
many tokens are pinned, who may begin, who is left out of a step, who moves off the device.
Without residency nothing of this happens."""

import time
from collections.abc import Set
from typing import Any

from hotkv_sparse.vllm.block_manager import DevicePool
from hotkv_sparse.vllm.scheduler.resident_requests import ResidentRequests
from hotkv_vllm.callbacks import CallbackEdge, callback
from hotkv_vllm.link import logger
from hotkv_vllm.scheduler.sharing import Sharing


class ResidentSide:
    """Scheduler thread only.

    sharing: its `cache.residencies` is the present `ResidentRequests`, None without residency.
    """

    def __init__(self, pool: DevicePool, sharing: Sharing, edge: CallbackEdge) -> None:
        self.edge = edge
        self._pool = pool
        self._sharing = sharing

    def __repr__(self) -> str:
        return f"ResidentSide({self._pool})"

    def bind(self, manager: Any) -> None:
        self._pool.bind(manager, self._kept_tokens, self._has_room, self._step_starts)
        if self._pool.spec is not None:
            logger.info("hotkv: %s", self._pool.describe())

    @callback(lambda *_: 0, last=0, is_part=True)
    def _kept_tokens(self, request_id: str) -> int:
        return 0 if self._residencies is None else self._residencies.kept_tokens(request_id)

    @callback(lambda *_: False, last=False, is_part=True)
    def _has_room(self, request_id: str) -> bool:
        return self._residencies is not None and self._residencies.has_room(request_id)

    @callback(lambda *_: None, is_part=True)
    def _step_starts(self) -> None:
        """Runs before vLLM plans a step."""
        residencies = self._residencies
        self._pool.leave_out(() if residencies is None else residencies.held(time.monotonic()))
        if residencies is not None:
            residencies.make_room()

    def is_freeing(self) -> bool:
        return self._residencies is not None and self._residencies.is_freeing(time.monotonic())

    def lost(self, first_blocks: Set[int]) -> None:
        """vLLM computes the requests that hold one of `first_blocks` anew.

        Limitation of vLLM 0.32: lost in the step that ends its prompt, a request gets no prompt
        logprobs. vLLM drops the step's output, and does not compute them again
        (`GPUModelRunner._get_prompt_logprobs_dict`).
        """
        if self._pool.spec is None:
            return
        request_ids = self._pool.requests_of(first_blocks)
        for request_id in request_ids:
            self._pool.lose(request_id)
        if self._residencies is not None:
            self._residencies.lost(request_ids)

    def lost_broke(self, first_blocks: Set[int]) -> None:
        """Takes the place of `lost` if handling a step's results has raised, so it shares no
        code with it."""
        self._pool.lose_blocks(first_blocks)

    @property
    def _residencies(self) -> ResidentRequests | None:
        cache = self._sharing.cache
        return None if cache is None else cache.residencies
