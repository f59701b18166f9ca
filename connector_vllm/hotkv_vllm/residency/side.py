"""Connects vLLM's block manager to `ResidentRequests`, which manages requests whose old blocks may
be only in the server's memory (residency).

The block manager (`compat.residency.ResidentManager`) asks how many tokens of a request the server
has pinned, and whether a request may begin. Before each step, this module makes vLLM leave out
requests that must wait for room in the server, and moves requests off the device if the device's
pool lacks blocks.

In an engine without residency the methods of `ResidentSide` do nothing.
"""

import time
from collections.abc import Set
from typing import Any

from hotkv_vllm.callbacks import CallbackEdge, callback
from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.link import logger
from hotkv_vllm.residency.resident_requests import ResidentRequests
from hotkv_vllm.scheduler.sharing import Sharing


class ResidentSide:
    """Answers the block manager's questions about resident requests (requests whose old blocks may
    be only in the server's memory), and handles losses of their blocks. Scheduler thread only.

    pool: gives access to vLLM's block manager and to the device's blocks.
    sharing: the scheduler side's part that depends on the key space. Its `cache.residencies` is the
        present `ResidentRequests`, None without residency.
    edge: measures the callbacks (methods that vLLM calls), and records their exceptions.
    """

    def __init__(self, pool: DevicePool, sharing: Sharing, edge: CallbackEdge) -> None:
        self.edge = edge
        self._pool = pool
        self._sharing = sharing

    def __repr__(self) -> str:
        return f"ResidentSide({self._pool})"

    def bind(self, manager: Any) -> None:
        """Connects vLLM's block manager to this object."""
        self._pool.bind(manager, self._kept_tokens, self._has_room, self._step_starts)
        if self._pool.spec is not None:
            logger.info("hotkv: %s", self._pool.describe())

    @callback(lambda *_: 0, last=0, is_part=True)
    def _kept_tokens(self, request_id: str) -> int:
        """Returns how many leading tokens of a request the server holds and has pinned, so that
        their blocks need not stay on the device."""
        return 0 if self._residencies is None else self._residencies.kept_tokens(request_id)

    @callback(lambda *_: False, last=False, is_part=True)
    def _has_room(self, request_id: str) -> bool:
        """Returns True if the server has reserved room for all present blocks of the request, so
        that not all of them need to stay on the device."""
        return self._residencies is not None and self._residencies.has_room(request_id)

    @callback(lambda *_: None, is_part=True)
    def _step_starts(self) -> None:
        """Prepares the step that vLLM is about to plan: leaves requests out of it if the server has
        no room for their next block, and moves requests off the device (their old blocks are then
        only in the server) if the device's pool lacks blocks."""
        residencies = self._residencies
        self._pool.leave_out(() if residencies is None else residencies.held(time.monotonic()))
        if residencies is not None:
            residencies.make_room()

    def is_freeing(self) -> bool:
        """Returns True if resident requests (requests whose old blocks may be only in the server's
        memory) will soon free device blocks, so that vLLM can wait for these blocks instead of
        preempting a request."""
        return self._residencies is not None and self._residencies.is_freeing(time.monotonic())

    def lost(self, first_blocks: Set[int]) -> None:
        """Handles the workers' report that requests have lost blocks in the server: vLLM preempts
        the requests that hold one of `first_blocks`, and computes them anew. Does nothing in an
        engine without residency.

        first_blocks: ids of the first device blocks of the lost requests.

        Limitation, with vLLM 0.32: if a request is lost in the step that ends its prompt, its user
        gets no prompt logprobs. vLLM drops the step's output, and does not compute the logprobs
        again (`GPUModelRunner._get_prompt_logprobs_dict`).
        """
        if self._pool.spec is None:
            return
        request_ids = self._pool.requests_of(first_blocks)
        for request_id in request_ids:
            self._pool.lose(request_id)
        if self._residencies is not None:
            self._residencies.lost(request_ids)

    def lost_broke(self, first_blocks: Set[int]) -> None:
        """Makes vLLM preempt the requests that hold one of `first_blocks`, and compute them anew.
        Called in place of `lost` if an exception was raised while a step's results were handled,
        perhaps by `lost`; so this method shares no code with it.

        first_blocks: ids of the first blocks of the lost requests.
        """
        self._pool.lose_blocks(first_blocks)

    @property
    def _residencies(self) -> ResidentRequests | None:
        cache = self._sharing.cache
        return None if cache is None else cache.residencies
