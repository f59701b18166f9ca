"""Decides which rows of a step attend sparsely, and lists them for the workers.

Always true: the scheduler side alone decides, once per step (`RowNames.of_step`), for attention and
for `identity.exactness`, which keeps inexact KV from being shared. A listed row may attend to its
whole context all the same, for instance after an exception; its KV counts as inexact nevertheless.

A row is listed by the last block that it writes, because attention gets block tables but no request
ids; no two rows write the same block, since only complete ones are shared. It is also listed by
its request id, which finds the request's state even after a preemption has changed all block
ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotkv_sparse import SparseConfig


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Request `request_ids[i]` writes device block `block_ids[i]`; one entry per group.

    ended: since the last step.
    """

    block_ids: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResidentOnly:
    """On CUDA only requests that have left the device may attend sparsely.

    has_moved: its old blocks may leave the device.
    replays_decode: vLLM may replay a CUDA graph if every row has one token. A graph can't stage
        a context, so a row with blocks only in host memory must then attend sparsely, even one
        that computes its prompt.
    """

    has_moved: Callable[[str], bool]
    replays_decode: bool


class RowNames:
    """Holds vLLM's `Request` of each running request."""

    def __init__(
        self,
        config: SparseConfig,
        groups: Sequence[tuple[int, int]],
        has_away: Callable[[str], bool] = lambda request_id: False,
        limits: ResidentOnly | None = None,
        lacks_layers: Callable[[], bool] = lambda: False,
        num_drafts: int = 0,
    ) -> None:
        """groups: (vLLM's number, tokens of a block) of full attention.
        has_away: some of the request's blocks are only in host memory.
        limits: None on CPUs, where all rows may attend sparsely.
        lacks_layers: no worker could install sparse attention. Not called with residency or on
            CUDA.
        num_drafts: most tokens that speculative decoding adds to a row.
        """
        self._most_tokens = 1 + num_drafts
        self._config = config
        self._groups = tuple(groups)
        self._has_away = has_away
        self._limits = limits
        self._lacks_layers = lacks_layers
        self._requests: dict[str, Any] = {}
        self._ended: list[str] = []
        self._decided: tuple[Any, SparseRows] = (None, SparseRows())

    def __repr__(self) -> str:
        return f"RowNames(requests {len(self._requests)})"

    def arrived(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._ended.append(request_id)

    def request(self, request_id: str) -> Any:
        return self._requests.get(request_id)

    def of_step(self, scheduler_output: Any) -> SparseRows:
        """The first call for a step must come before vLLM adds its tokens to
        `num_computed_tokens`. Calls with the same `SchedulerOutput`, or a copy, return the same."""
        if self._decided[0] is not scheduler_output.num_scheduled_tokens:
            self._decided = scheduler_output.num_scheduled_tokens, self._decide(scheduler_output)
        return self._decided[1]

    def _decide(self, scheduler_output: Any) -> SparseRows:
        ended, self._ended = tuple(self._ended), []
        block_state = scheduler_output.kv_connector_block_state
        scheduled = scheduler_output.num_scheduled_tokens
        limits = self._limits
        is_replayed = (
            limits is not None and limits.replays_decode and set(scheduled.values()) == {1}
        )
        block_ids: list[int] = []
        request_ids: list[str] = []
        for request_id, num_tokens in scheduled.items():
            request = self._requests.get(request_id)
            is_short = num_tokens <= self._most_tokens
            if not is_short or request is None or not self._is_sparse(request, is_replayed):
                continue
            tables = block_state.get_block_ids(request_id)
            if tables is None:
                continue
            last = request.num_computed_tokens + num_tokens - 1
            for group, block_tokens in self._groups:
                block_ids.append(int(tables[group][last // block_tokens]))
                request_ids.append(request_id)
        return SparseRows(tuple(block_ids), tuple(request_ids), ended)

    def _is_sparse(self, request: Any, is_replayed: bool) -> bool:
        """A row with one token, and drafts, attends sparsely if it decodes a long context, or one
        with blocks only in host memory. Exceptions:
        - Without residency not if it would attend to all blocks anyway, so that its KV is exact.
        - On CUDA only if it has moved; in a step that may be replayed, each row with blocks only in
          host memory."""
        position, limits, config = request.num_computed_tokens, self._limits, self._config
        has_away = self._has_away(request.request_id)
        decodes = position >= request.num_prompt_tokens and (
            has_away or position + 1 >= config.min_context_tokens
        )
        if limits is None:
            is_exact = config.residency == "off" and (
                self._lacks_layers()
                or all(config.covers(position + 1, size) for _, size in self._groups)
            )
            return decodes and not is_exact
        return limits.has_moved(request.request_id) and (decodes or (is_replayed and has_away))
