"""`Desk`: an `Admission` over a fake server, without an engine."""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_client.types import LinkState
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.identity.adapters import Adapters
from hotkv_vllm.link import StateLog, StreamCount
from hotkv_vllm.scheduler import admission
from hotkv_vllm.scheduler.admission import Admission
from hotkv_vllm.scheduler.reports import UseReports
from hotkv_vllm.scheduler.request import Phase
from hotkv_vllm.scheduler.reset import CacheReset
from hotkv_vllm.scheduler.sharing import Assembly, Engine, Sharing
from hotkv_vllm.stats import CallbackClock
from tests.vllm.parts import TOKENS, Parts, request
from tests.vllm.specs import full_spec

LONG = 4 * TOKENS + 5
"""Four full blocks and some tokens."""


class Desk:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        stores: bool = True,
        **parts: Any,
    ) -> None:
        self.parts = Parts(**parts)
        self.now_s = 100.0
        monkeypatch.setattr(admission.time, "monotonic", lambda: self.now_s)
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                is_kv_consumer=True, is_kv_producer=stores, engine_id="engine"
            ),
            parallel_config=SimpleNamespace(
                world_size=1, data_parallel_size=1, decode_context_parallel_size=1
            ),
            model_config=SimpleNamespace(max_model_len=LONG),
            num_speculative_tokens=0,
            num_lookahead_tokens=0,
            scheduler_config=SimpleNamespace(policy="fcfs"),
            cache_config=SimpleNamespace(enable_prefix_caching=True),
        )
        kv = SimpleNamespace(
            num_blocks=64,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=full_spec()) for _ in self.parts.specs],
        )
        engine = Engine(
            vllm_config,
            kv,
            self.parts.config,
            self.parts.stats,
            Adapters(1, lambda text: None),
            self.parts.exactness,
            False,
        )
        self.adapters = engine.adapters
        self.parts.finder.failed_loads = engine.failed_loads
        self.sharing = Sharing(engine)
        session, planner = self.parts.session, self.parts.planner
        streams = StreamCount(lambda state, why: None)
        streams(LinkState.CONNECTED, "")
        self.cache = Assembly(
            planner._cache_groups,
            session,
            StateLog("scheduler", "unix:/none.sock", logging.INFO),
            streams,
            self.parts.finder,
            planner,
            UseReports(session, TOKENS, self.parts.stats, self.parts.groups.keys, None),
            CacheReset(session, planner),
        )
        self.sharing.cache = self.cache
        self.edge = CallbackEdge(CallbackClock("test"), self.parts.stats.add)
        self.desk = Admission(engine, self.sharing)

    def arrive(self, one: Any) -> Any:
        self.desk.arrived(one)
        return self.desk.states.get(one.request_id)

    def hit(self, one: Any, computed: int = 0) -> int:
        for _ in range(4):
            tokens, _ = self.desk.match(one, computed)
            if tokens is not None:
                return tokens
        raise AssertionError("asked again and again")

    def load(self, name: str = "a") -> Any:
        self.parts.put(name, range(4))
        one = request(name, LONG)
        self.arrive(one)
        assert self.hit(one) == 4 * TOKENS
        self.desk.allocated(one, blocks([1, 2, 3, 4, 5]), 4 * TOKENS)
        assert self.desk.states[name].is_loading
        return one

    def tails(self) -> list[list[int]]:
        """Block ids of each run."""
        jobs, _ = self.parts.planner.plan([], lambda _: None, {}, lambda: ())
        return [run.block_ids.tolist() for job in jobs for run in job.runs]


class WithAdapter:
    def __init__(self, name: str) -> None:
        vars(self).update(vars(request(name, LONG)))
        self.lora_request = SimpleNamespace(
            lora_name="one", lora_path="/one", lora_int_id=1, load_inplace=False
        )


def blocks(*groups: Sequence[int]) -> Any:
    """A `KVCacheBlocks`, by group."""
    return SimpleNamespace(
        get_block_ids=lambda: tuple(list(ids) for ids in groups),
        blocks=tuple([SimpleNamespace(block_id=block) for block in ids] for ids in groups),
    )


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Desk]:
    return lambda **settings: Desk(monkeypatch, **settings)


def ended(one: Desk, asks: Any, table: Sequence[int] = (1, 2, 3, 4, 5)) -> list[list[int]]:
    one.desk.finished(asks, [list(table)])
    assert "a" not in one.desk.states
    return one.tails()


def granted(parts: Parts, name: str = "a", blocks: int = 4, computed: int = 0) -> Any:
    """The load has not begun."""
    parts.put(name, range(blocks))
    state = parts.state(request(name, LONG))
    assert parts.hit(state, computed) == blocks * TOKENS - computed
    assert state.hit.phase is Phase.GRANTED and state.hit.lease_id in parts.server.leases
    return state
