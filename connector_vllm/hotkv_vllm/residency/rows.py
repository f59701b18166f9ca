"""What the workers of a resident engine hear of a step's requests: where blocks are that are not on
the device. Scheduler thread only."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hotkv_vllm.compat.residency import DevicePool
from hotkv_vllm.residency.resident import Resident
from hotkv_vllm.residency.step import ResidentRow
from hotkv_vllm.sparse.rows import RowNames


class ResidentRows:
    """See the module. `residents`: by request id, those that outgrow the device."""

    def __init__(
        self, residents: Mapping[str, Resident], pool: DevicePool, block_tokens: int
    ) -> None:
        self._residents = residents
        self._pool = pool
        self._block_tokens = block_tokens

    def __repr__(self) -> str:
        return f"ResidentRows({len(self._residents)} requests)"

    def fresh_hot_blocks(self, request_ids: Iterable[str]) -> list[int]:
        """Hot slots of these requests that the workers have not heard of: they are about to be
        written."""
        fresh: list[int] = []
        for request_id in request_ids:
            one = self._residents.get(request_id)
            if one is not None and not one.told_hot:
                fresh += self._pool.hot_blocks(request_id)
        return fresh

    def of_step(self, scheduler_output: Any, names: RowNames) -> tuple[ResidentRow, ...]:
        """The rows of a step that is planned. Before vLLM advances its requests, which `names`
        knows."""
        block_state = scheduler_output.kv_connector_block_state
        told = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tables = None if block_state is None else block_state.get_block_ids(request_id)
            request = names.request(request_id)
            if tables is not None and request is not None:
                context_tokens = request.num_computed_tokens + num_tokens
                told.append(self._row(request_id, tables[0], context_tokens, num_tokens))
        return tuple(told)

    def _row(
        self, request_id: str, table: Sequence[int], context_tokens: int, new_tokens: int
    ) -> ResidentRow:
        written = int(table[(context_tokens - 1) // self._block_tokens])
        one = self._residents.get(request_id)
        num_freed = self._pool.num_freed(request_id)
        if one is None:
            # What came under other weights has no places: if blocks were given back, it is lost.
            return ResidentRow(request_id, written, int(table[0]), num_freed > 0, num_freed)
        hot = self._pool.hot_blocks(request_id)
        return one.news(written, int(table[0]), num_freed, hot, context_tokens, new_tokens)
