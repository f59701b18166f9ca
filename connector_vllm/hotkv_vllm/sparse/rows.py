"""Decides which rows (requests) of a step attend sparsely, and names these rows to the workers.

Always true: the scheduler side decides alone, once per step (`RowNames.of_step`). Attention, the
kernels on CUDA and `identity.exactness` read that decision and never decide themselves. A row that
is not named attends to its whole context. A named row may do so too, for instance after a fault,
and its KV counts as inexact all the same.

A row's name is the pair (id of the block that the row writes, request id). A worker's attention
sees the rows' block tables, not their requests, so it finds a row by the block. The block
identifies the row: a decode step writes only to an incomplete block, and requests share only
complete blocks. So the order in which the runner passes rows does not matter. The request id tells
the worker to which request the row belongs, also after a preemption, which changes all block ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from hotkv_sparse import SparseConfig


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The rows (requests) of a step that attend sparsely: request `request_ids[i]` writes block
    `block_ids[i]`, one pair per group.

    ended: requests that have ended.
    """

    block_ids: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResidentOnly:
    """Limits the decision on CUDA, where only requests that outgrow the device (`outgrows`) have
    kernels that attend sparsely.

    replays_decode: True if steps in which every row has one token may be replayed from CUDA graphs.
        A graph can't copy a context to a staging area. So in such a step a row with blocks in host
        memory only (`has_away`) must attend sparsely, even if it is still in its prompt.
    """

    outgrows: Callable[[str], bool]
    has_away: Callable[[str], bool]
    replays_decode: bool


class RowNames:
    """Decides, on the scheduler's side, which rows of each step attend sparsely. Knows the requests
    that have arrived and not ended."""

    def __init__(
        self,
        config: SparseConfig,
        groups: Sequence[tuple[int, int]],
        limits: ResidentOnly | None = None,
    ) -> None:
        """groups: (vLLM's group, its block tokens) of each full attention group.
        limits: None in a CPU engine, where every row can attend sparsely or to its whole context.
        """
        self._min_tokens = config.min_context_tokens
        self._groups = tuple(groups)
        self._limits = limits
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
        """Returns vLLM's request of this id; None if it is not known."""
        return self._requests.get(request_id)

    def of_step(self, scheduler_output: Any) -> SparseRows:
        """Returns the rows of this step that attend sparsely, and the requests that have ended
        since the step before. Decides at the first call for a step, which must come before vLLM
        advances its requests; later calls for the same step, or for a copy of it, return the
        same."""
        if self._decided[0] is not scheduler_output.num_scheduled_tokens:
            self._decided = scheduler_output.num_scheduled_tokens, self._decide(scheduler_output)
        return self._decided[1]

    def _decide(self, scheduler_output: Any) -> SparseRows:
        ended, self._ended = tuple(self._ended), []
        block_state, scheduled = (
            scheduler_output.kv_connector_block_state,
            scheduler_output.num_scheduled_tokens,
        )
        if block_state is None:
            return SparseRows(ended=ended)
        limits = self._limits
        is_replayed = (
            limits is not None and limits.replays_decode and set(scheduled.values()) == {1}
        )
        block_ids: list[int] = []
        request_ids: list[str] = []
        for request_id, num_tokens in scheduled.items():
            request = self._requests.get(request_id)
            if num_tokens != 1 or request is None or not self._is_sparse(request, is_replayed):
                continue
            tables = block_state.get_block_ids(request_id)
            if tables is None:
                continue
            for group, block_tokens in self._groups:
                block_ids.append(int(tables[group][request.num_computed_tokens // block_tokens]))
                request_ids.append(request_id)
        return SparseRows(tuple(block_ids), tuple(request_ids), ended)

    def _is_sparse(self, request: Any, is_replayed: bool) -> bool:
        """Returns True for a decode row with a long context, if the device can attend sparsely, and
        for a row that a replayed graph could not attend to otherwise."""
        position, limits = request.num_computed_tokens, self._limits
        decodes = position >= request.num_prompt_tokens and position + 1 >= self._min_tokens
        if limits is None:
            return decodes
        return limits.outgrows(request.request_id) and (
            decodes or (is_replayed and limits.has_away(request.request_id))
        )


_NAMES_OF: "WeakValueDictionary[str, RowNames]" = WeakValueDictionary()


def announce(engine_id: str, names: RowNames) -> None:
    """Registers that this engine decodes sparsely, so that hotkv's code in other connectors of the
    engine (in vLLM's MultiConnector) can ask for its sparse rows."""
    _NAMES_OF[engine_id] = names


def sparse_rows(engine_id: str, scheduler_output: Any) -> SparseRows | None:
    """Returns the rows of this step that attend sparsely, whichever connector of the engine asked
    for sparse decode; None in an engine that never decodes sparsely."""
    names = _NAMES_OF.get(engine_id)
    return None if names is None else names.of_step(scheduler_output)
