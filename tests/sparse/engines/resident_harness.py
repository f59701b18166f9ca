"""The harness with residency: a simulated worker reads old blocks in the fake server's arena.

With `pipelined` a step is always under way.
"""

import pickle
import time
from collections import deque
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotkv_sparse.vllm.block_manager import ResidentSpec
from hotkv_sparse.vllm.scheduler import resident_requests
from hotkv_sparse.vllm.step import ResidentStep, SparseStep
from hotkv_sparse.vllm.worker import companion as rank_side
from tests.doubles.fake import FakeServer
from tests.vllm.harness import Engine, _layer
from tests.vllm.oracle import check_stored
from tests.vllm.other_connectors import ours
from tests.vllm.specs import full_spec
from tests.vllm.tiny import BLOCK_TOKENS

CHUNK = 64
SPARSE = {
    "scorer": "rot2u",
    "sparse_topk": 8 * BLOCK_TOKENS,
    "min_context_tokens": 4 * BLOCK_TOKENS,
    "sink_tokens": BLOCK_TOKENS,
    "recent_tokens": BLOCK_TOKENS,
}
STEP_S = 0.02
RUBBISH = 0x3C3C


@dataclass(slots=True, eq=False)
class Away:
    """A worker's state, like `ResidentSequence`.

    num_freed: blocks from the sinks up to this index have left the device.
    offsets: bytes.
    is_lost: a block could not be read.
    """

    first_block: int = 0
    num_freed: int = 0
    offsets: list[int] = field(default_factory=list)
    hot: tuple[int, ...] = ()
    pin: Any = None
    is_lost: bool = False


class Residents(Engine):
    """now_s: each step adds STEP_S.
    num_read: blocks that steps read from the arena.
    """

    def __init__(
        self,
        server: FakeServer,
        folder: Path,
        monkeypatch: Any,
        *,
        residency: str = "host",
        pipelined: bool = False,
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(rank_side.SparseRank, "register", lambda *_: "")
        monkeypatch.setattr(resident_requests, "QUANTUM_TOKENS", 2 * BLOCK_TOKENS)
        plain, in_flight = full_spec(), CHUNK * (1 + pipelined)
        self.spec = ResidentSpec(
            **{one.name: getattr(plain, one.name) for one in fields(FullAttentionSpec) if one.init},
            sink_blocks=1,
            recent_tokens=BLOCK_TOKENS,
            keeps_tokens=BLOCK_TOKENS + in_flight + CHUNK,
            hot_blocks=4,
            sparse_from_tokens=4 * BLOCK_TOKENS,
            begins_whole=residency == "auto",
        )
        self.pending: deque[tuple[Any, bytes]] = deque()
        self.away: dict[str, Away] = {}
        self.lost: set[int] = set()
        self.num_read = 0
        super().__init__(
            server,
            folder,
            monkeypatch,
            specs={f"layer.{i}": self.spec for i in range(2)},
            pipelined=pipelined,
            extra={"sparse": SPARSE | {"residency": residency}, **(extra or {})},
            max_tokens_per_step=CHUNK,
            max_model_len=4096,
            **more,
        )
        sparse = self.worker._worker.companion
        sparse.take_lost = self._take_lost
        sparse.find_lost = lambda names: {
            name for name in names if name not in self.away or self.away[name].is_lost
        }
        for session in server.sessions:
            self._order_calls(session)

    def _order_calls(self, session: Any) -> None:
        """A real connection keeps the order of calls."""
        close = session.close_residency

        def close_residency(residency_id: str) -> None:
            self.server.settle("open_residency")
            close(residency_id)

        session.close_residency = close_residency

    @property
    def books(self) -> Any:
        return self.connector._scheduler.companion.residents

    # ---------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """As `EngineCore.step_with_batch_queue`."""
        self.now_s += STEP_S
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.metas.append(scheduled.kv_connector_metadata)
            self.pending.append((scheduled, pickle.dumps(scheduled)))
            goes_on = scheduled.total_num_scheduled_tokens or self.scheduler.has_requests()
            if self.pipelined and len(self.pending) == 1 and goes_on:
                return
        self.end_step()

    def end_step(self) -> None:
        scheduled, frozen = self.pending.popleft()
        self.queue.append((scheduled, *self._run(pickle.loads(frozen))))
        self._collect()

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.pending:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.requests}")

    # --------------------------------------------------------------------------------------- worker

    def _take_lost(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost

    def _lose(self, one: Away) -> None:
        if not one.is_lost:
            one.is_lost = True
            self.lost.add(one.first_block)

    def _hear(self, step: ResidentStep, ended: tuple[str, ...]) -> None:
        """As `ResidentSequences` does."""
        for name in (*step.preempted, *ended):
            self.away.pop(name, None)
        for row in step.rows:
            one = self.away.setdefault(row.request_id, Away())
            one.first_block, one.num_freed = row.first_block, row.num_freed
            one.hot = row.hot_blocks or one.hot
            one.pin = row.pin or one.pin
            if row.kept and not row.kept[0].first:
                one.offsets = []
            for kept in row.kept:
                assert kept.first == len(one.offsets), "a part of the list is missing"
                one.offsets += kept.offsets.tolist()
        for name in step.lost:
            if name in self.away:
                self._lose(self.away[name])

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        meta = ours(scheduled.kv_connector_metadata)
        step = meta.companion or SparseStep()
        self._hear(step.resident, step.rows.ended)
        for name in scheduled.num_scheduled_tokens:
            if name in self.away and self.away[name].hot:
                # The worker may overwrite hot slots at any time.
                for layer in self.tensors:
                    self._cells(layer)[list(self.away[name].hot)] = RUBBISH
        return super()._forward(scheduled)

    def _check(self, name: str, computed: int) -> None:
        one, sinks = self.away.get(name), self.spec.sink_blocks
        if one is None or one.num_freed <= sinks:
            super()._check(name, computed)
            return
        if one.is_lost:
            return
        for first, stop in ((0, sinks), (one.num_freed, -(-computed // BLOCK_TOKENS))):
            end = min(stop * BLOCK_TOKENS, computed)
            if first * BLOCK_TOKENS >= end:
                continue
            places = self._places(name, 0, first * BLOCK_TOKENS, end)
            assert (places[0] != 0).all(), f"{name}: attention would read the null block"
            for layer in self.tensors:
                self._check_layer(f"{name} of {computed}", first * BLOCK_TOKENS, layer, *places)
        for block in range(sinks, one.num_freed):
            if block >= len(one.offsets):
                self._lose(one)
                return
            self._read(name, one, block)

    def _read(self, name: str, one: Away, block: int) -> None:
        """The block must be right and pinned. Without an arena the request is lost."""
        self.num_read += 1
        residencies = self.server.residencies
        if one.pin is None or not residencies.arena.holds(one.pin):
            self._lose(one)
            return
        offset = one.offsets[block]
        if self.server.up and one.pin.start_number == residencies.start_number:
            pinned = [r for r in residencies.open.values() if r.opened == one.pin]
            assert pinned, f"{name} reads block {block}, and its residency is closed"
            assert pinned[0].offsets.get((0, block)) == offset, f"{name}: block {block}"
        values = self._values_at(name, block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        shape = self._cells("layer.0").shape[1:]
        num_bytes = 2 * int(np.prod(shape))
        for number, layer in enumerate(self.tensors):
            at = offset + number * num_bytes
            page = residencies.arena.memory[at : at + num_bytes].view(np.int16).reshape(shape)
            expected = (values ^ _layer(layer))[None, :, None]
            assert (page == expected).all(), f"{name}: wrong KV in block {block} of the arena"

    def check_server(self) -> int:
        """Returns the number of blocks that others can find."""
        shown = {key: shards for key, shards in self.server.blocks.items() if key[2] in self.named}
        return check_stored(SimpleNamespace(sessions=self.server.sessions, blocks=shown), [self])
