"""Decides which rows (requests) of a step attend sparsely, and lists them for the workers.

Always true: the scheduler side alone decides, once per step (`RowNames.of_step`). Two parts use
this decision: the workers' attention, and `identity.exactness`, which prevents that inexact KV is
shared. A row that is not listed attends to its whole context. A listed row may attend to its whole
context too, for instance after an exception; its KV counts as inexact nevertheless.

A row is listed by two ids:
- The id of the block that it writes in this step. Attention in a worker gets the rows' block tables
  but not their request ids, so it finds a listed row by this block. No two rows write the same
  block: a decode step writes only to an incomplete block, and requests share only complete blocks.
- Its request id, by which the worker finds the request's state, even after a preemption, which
  changes all block ids of the request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from hotkv_sparse import SparseConfig


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The rows (requests) of a step that attend sparsely, for the workers. Entry i says that
    request `request_ids[i]` writes device block `block_ids[i]` in the step; by this block a worker
    finds the row in vLLM's batch. A row has one entry for each KV cache group.

    ended: ids of requests that have ended since the last step.
    """

    block_ids: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResidentOnly:
    """Says which rows may attend sparsely on CUDA: only rows of resident requests (requests whose
    old blocks may be only in the server's memory).

    outgrows: takes a request id, and returns True if the request is resident.
    has_away: takes a request id, and returns True if some blocks of the request are only in host
        memory.
    replays_decode: True if vLLM may replay a CUDA graph for steps in which every row has one token.
        A graph can't copy a context to a staging area. So in such a step every row that has blocks
        only in host memory must attend sparsely, even a row that still computes its prompt.
    """

    outgrows: Callable[[str], bool]
    has_away: Callable[[str], bool]
    replays_decode: bool


class RowNames:
    """Decides, on the scheduler side, which rows (requests) of each step attend sparsely. Holds
    vLLM's `Request` of each running request."""

    def __init__(
        self,
        config: SparseConfig,
        groups: Sequence[tuple[int, int]],
        limits: ResidentOnly | None = None,
        lacks_layers: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begins without requests.

        groups: for each KV cache group of full attention, its number in vLLM and the tokens of a
            block.
        limits: on CUDA, says which rows (requests) may attend sparsely; None in a CPU engine, where
            all rows may.
        lacks_layers: a function that returns True if no worker of the engine could install sparse
            attention in any layer. Then no row attends sparsely. Not called with residency or on
            CUDA.
        """
        self._config = config
        self._groups = tuple(groups)
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
        """Returns vLLM's `Request`; None if the request is not known."""
        return self._requests.get(request_id)

    def of_step(self, scheduler_output: Any) -> SparseRows:
        """Returns the rows (requests) of a step that attend sparsely, and the requests that have
        ended since the step before. The first call for a step makes the decision. Later calls for
        the same step (the same `SchedulerOutput`, or a copy of it) return the same result. The
        first call must come before vLLM adds the step's tokens to the requests'
        `num_computed_tokens`.

        scheduler_output: vLLM's `SchedulerOutput` of the step.
        """
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
        """Returns True if a request with a single token in the step is to attend sparsely. In
        general, this is so if it decodes and has a long context. Exceptions:
        - Without residency (all blocks stay on the device), False if sparse attention would attend
          to all blocks anyway, so that its KV counts as exact. This is so if no layer attends
          sparsely, or if a step may choose as many blocks as the context has.
        - On CUDA, False if the request is not resident (`ResidentOnly`). But in a step that may be
          replayed from a CUDA graph, True for each request with blocks only in host memory.

        is_replayed: True if vLLM may replay a CUDA graph for the step.
        """
        position, limits, config = request.num_computed_tokens, self._limits, self._config
        decodes = (
            position >= request.num_prompt_tokens and position + 1 >= config.min_context_tokens
        )
        if limits is None:
            is_exact = config.residency == "off" and (
                self._lacks_layers()
                or all(config.covers(position + 1, size) for _, size in self._groups)
            )
            return decodes and not is_exact
        return limits.outgrows(request.request_id) and (
            decodes or (is_replayed and limits.has_away(request.request_id))
        )


_NAMES_OF: "WeakValueDictionary[str, RowNames]" = WeakValueDictionary()


def announce(engine_id: str, names: RowNames) -> None:
    """Registers an engine's `RowNames` in this process, so that all hotkv connectors of the engine
    (in vLLM's MultiConnector) find it with `sparse_rows`."""
    _NAMES_OF[engine_id] = names


def sparse_rows(engine_id: str, scheduler_output: Any) -> SparseRows | None:
    """Returns the rows (requests) of a step that attend sparsely, as decided by the engine's hotkv
    connector that has sparse decode configured (`announce`). Returns None if the engine has no such
    connector."""
    names = _NAMES_OF.get(engine_id)
    return None if names is None else names.of_step(scheduler_output)
