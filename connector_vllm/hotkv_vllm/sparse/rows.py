"""Tells a worker which request a row of the batch is, by the block that the row's step writes.

A worker's attention sees block tables, not requests. The block that a decode step writes belongs to
one request alone: shared blocks are complete, and complete blocks are not written. So the pair
(block being written, request) identifies rows, in whatever order the runner gives them, and also
after preemption, which changes all block ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from hotkv_sparse import SparseConfig


@dataclass(frozen=True, slots=True)
class SparseRows:
    """One step: `block_ids[i]` is the block that request `request_ids[i]` writes (one pair per
    group); `ended`: requests that have ended."""

    block_ids: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class RowNames:
    """The scheduler's side. Knows the requests that have arrived and not ended."""

    def __init__(self, config: SparseConfig, groups: Sequence[tuple[int, int]]) -> None:
        """`groups`: (vLLM's group, its block tokens) of each full attention group."""
        self._min_tokens = config.min_context_tokens
        self._groups = tuple(groups)
        self._requests: dict[str, Any] = {}
        self._ended: list[str] = []

    def __repr__(self) -> str:
        return f"RowNames(requests {len(self._requests)})"

    def arrived(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def ended(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._ended.append(request_id)

    def request(self, request_id: str) -> Any:
        """vLLM's request of this id; None if it is not known."""
        return self._requests.get(request_id)

    def decoding(self, scheduler_output: Any) -> list[tuple[str, int]]:
        """(request, position of its token) of this step's rows that decode with a long context.
        Before vLLM advances its requests."""
        rows = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or num_tokens != 1:
                continue
            position = request.num_computed_tokens
            if position >= request.num_prompt_tokens and position + 1 >= self._min_tokens:
                rows.append((request_id, position))
        return rows

    def of_step(self, scheduler_output: Any) -> SparseRows:
        """Rows of this step that decode with a long context. Call once per step, before vLLM
        advances its requests."""
        ended, self._ended = tuple(self._ended), []
        block_state = scheduler_output.kv_connector_block_state
        if block_state is None:
            return SparseRows(ended=ended)
        block_ids: list[int] = []
        request_ids: list[str] = []
        for request_id, position in self.decoding(scheduler_output):
            tables = block_state.get_block_ids(request_id)
            if tables is None:
                continue
            for group, block_tokens in self._groups:
                block_ids.append(int(tables[group][position // block_tokens]))
                request_ids.append(request_id)
        return SparseRows(tuple(block_ids), tuple(request_ids), ended)


_NAMES_OF: "WeakValueDictionary[str, RowNames]" = WeakValueDictionary()


def announce(engine_id: str, names: RowNames) -> None:
    """Tells other connectors of this engine, beside hotkv in vLLM's MultiConnector, that it decodes
    sparsely."""
    _NAMES_OF[engine_id] = names


def sparse_requests(engine_id: str, scheduler_output: Any) -> list[str] | None:
    """Requests of this step that decode sparsely, whichever connector of the engine asked for it;
    None in an engine that never does."""
    names = _NAMES_OF.get(engine_id)
    return (
        None
        if names is None
        else [request_id for request_id, _ in names.decoding(scheduler_output)]
    )
