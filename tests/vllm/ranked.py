"""The harness with several ranks, each with a worker connector and KV memory; vLLM's
`KVOutputAggregator` joins them.

Ranks run in turn, and each changes values by its salt, so that another's shard is noticed. Notes
that differ: `test_ranks`.
"""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.distributed
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

from hotkv_vllm.identity import ranks
from hotkv_vllm.identity.ranks import RankNote
from tests.doubles.fake import FakeServer
from tests.vllm.harness import Engine

_PROCESS = [0]
"""Rank whose code runs; in vLLM a process."""


@dataclass(frozen=True, slots=True)
class Rank:
    worker: Any
    tensors: dict[str, torch.Tensor]
    salt: int


class SalvagingAggregator(KVOutputAggregator):
    """Joins a failed step's outputs with the next step's. Source: vLLM 0.33.0,
    `KVOutputAggregator.ft_defer_kv_connector_outputs` and `aggregate`."""

    def __init__(self, expected_finished_count: int) -> None:
        super().__init__(expected_finished_count)
        self.salvaged: list[KVConnectorOutput] = []

    def ft_defer_kv_connector_outputs(self, outputs: list[KVConnectorOutput | None]) -> None:
        for one in outputs:
            if one is not None:
                one.kv_cache_events = None
        self.salvaged += [one for one in outputs if one]

    def aggregate(
        self, outputs: list[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        salvaged, self.salvaged = self.salvaged, []
        first = [ModelRunnerOutput([], {}, kv_connector_output=one) for one in salvaged]
        return super().aggregate([*first, *outputs], len(first) + output_rank)


class StepFailed(RuntimeError):
    """A rank fails after it has made its KV output."""


class RankedEngine(Engine):
    """num_ranks: per pipeline stage.
    stages: `num_ranks` stages of one rank; `num_stages` is ignored.
    is_failing: the next step fails, as with `enable_fault_tolerance`; vLLM aborts all and
        salvages KV outputs (0.33.0, `MultiprocExecutor.collective_rpc`,
        `EngineCoreSentinel.on_fault`).
    """

    is_failing = False

    def __init__(
        self,
        server: FakeServer,
        *arguments: Any,
        num_ranks: int = 2,
        stages: bool = False,
        num_stages: int = 1,
        **settings: Any,
    ) -> None:
        if stages:
            num_ranks, num_stages = 1, num_ranks
        self.num_ranks, self.num_in_stage = num_ranks * num_stages, num_ranks
        self.ranks = list[Rank]()
        _PROCESS[0] = 0
        monkeypatch = arguments[1]
        monkeypatch.setattr(
            vllm.distributed,
            "get_tensor_model_parallel_rank",
            lambda: _PROCESS[0] % self.num_in_stage,
        )
        monkeypatch.setattr(
            vllm.distributed,
            "get_pp_group",
            lambda: SimpleNamespace(rank_in_group=_PROCESS[0] // self.num_in_stage),
        )
        monkeypatch.setattr(ranks, "agree", self._agree)
        sizes = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
        super().__init__(server, *arguments, **settings, **sizes)
        self.aggregator = SalvagingAggregator.from_connector(self.connector, self.num_ranks)

    def _agree(self, note: RankNote, num_ranks: int, engine_id: str) -> Any:
        places = [
            replace(note.place, rank=rank, stage=rank // self.num_in_stage)
            for rank in range(num_ranks)
        ]
        return ranks.decide([replace(note, place=place) for place in places], note.place.rank)

    def handshakes(self) -> dict[tuple[int, int], Any]:
        return {
            divmod(number, self.num_in_stage): handshake
            for number, worker in enumerate(self.each_worker())
            if (handshake := worker.get_handshake_metadata()) is not None
        }

    def _start_ranks(self) -> None:
        self.ranks.append(Rank(self.worker, self.tensors, 0))
        while len(self.ranks) < self.num_ranks:
            config = copy.copy(self.vllm_config)
            config.parallel_config = copy.copy(config.parallel_config)
            config.parallel_config.rank = _PROCESS[0] = len(self.ranks)
            worker = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, self.kv_config
            )
            tensors = allocate_kv_cache(self.kv_config, torch.device("cpu"), self.layout)
            worker.register_kv_caches(tensors)
            self.ranks.append(Rank(worker, tensors, len(self.ranks) << 10))

    def each_worker(self) -> Iterator[Any]:
        for number, rank in enumerate(self.ranks):
            _PROCESS[0] = number
            yield rank.worker

    @property
    def memories(self) -> list[tuple[dict[str, torch.Tensor], int]]:
        return [(rank.tensors, rank.salt) for rank in self.ranks]

    def _run(self, scheduled: Any) -> tuple[ModelRunnerOutput, int]:
        before, plan = (
            pickle.dumps((self.tokens, self.tables, self.states, self.preemptions)),
            pickle.dumps(scheduled),
        )
        outputs: list[ModelRunnerOutput | None] = []
        for rank in reversed(self.ranks):
            # All start from one state; the first rank's remains.
            self.tokens, self.tables, self.states, self.preemptions = pickle.loads(before)
            self.worker, self.tensors, self.salt = rank.worker, rank.tensors, rank.salt
            outputs.insert(0, super()._run(pickle.loads(plan))[0])
        if self.is_failing:
            self.is_failing = False
            self.aggregator.ft_defer_kv_connector_outputs(
                [one.kv_connector_output for one in outputs if one is not None]
            )
            raise StepFailed
        joined = self.aggregator.aggregate(outputs)
        assert joined is not None
        return joined, 0

    def step(self) -> None:
        try:
            super().step()
        except StepFailed:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


class ContextRankedEngine(RankedEngine):
    """In a `dcp_sharded` group each of two ranks holds every second token."""

    def __init__(self, server: FakeServer, folder: Any, monkeypatch: Any, **settings: Any) -> None:
        # vLLM requires more ranks than KV heads.
        monkeypatch.setattr(ModelConfig, "get_total_num_kv_heads", lambda _: 1)
        super().__init__(server, folder, monkeypatch, decode_context_parallel_size=2, **settings)

    def _places(self, name: str, group_id: int, first: int, end: int) -> tuple[Any, Any, Any]:
        spec: Any = self.kv_config.kv_cache_groups[group_id].kv_cache_spec
        if not spec.dcp_sharded:
            return super()._places(name, group_id, first, end)
        mine = np.arange(first + (first + bool(self.salt)) % 2, end, 2)
        values = self._values(name)
        known = np.array([values[at] for at in mine if at < len(values)], np.int16)
        table, size = np.array(self.tables[name][group_id]), 2 * spec.block_size
        return table[mine // size], mine % size // 2, known
