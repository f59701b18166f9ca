"""vLLM's real TieringOffloadingManager over hotkv's tier and a real server, without an engine.

A `Rig` looks up as `OffloadingConnectorScheduler` and plays the device's copies. A row's bytes
follow from its key.
"""

import hashlib
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from hotkv_proto.blocks import Retention
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.config import ConfigError, ConnectorConfig
from hotkv_vllm.offloading import scheduler
from hotkv_vllm.offloading.scheduler import DoorScheduler
from hotkv_vllm.offloading.tier import HotKVTier
from hotkv_vllm.stats import CallbackClock, HotKVStats
from tests.support.waiting import wait_for

ROW_BYTES = 4096
PATIENT = {f"hotkv.{name}_timeout_s": 60.0 for name in ("lookup", "load", "store")}
"""A call given up is a miss."""
CHUNK_TOKENS = 16
END_OF_STEP = ScheduleEndContext((), ())


def keys_of(name: str, count: int, group: int = 0) -> list[OffloadKey]:
    return [
        make_offload_key(hashlib.sha256(f"{name}/{number}".encode()).digest(), group)
        for number in range(count)
    ]


def row_of(key: OffloadKey) -> Any:
    """uint8 [ROW_BYTES]."""
    return np.frombuffer(hashlib.sha256(key).digest() * (ROW_BYTES // 32), np.uint8)


def scheduler_side(
    tier: Any,
    patch: pytest.MonkeyPatch,
    *,
    role: str = "kv_both",
    num_ranks: int = 1,
    num_replicas: int = 1,
    publishes_events: bool = False,
) -> DoorScheduler:
    """For a model with one group."""
    patch.setattr(scheduler.checks, "counts_media", lambda _: False)
    for sizes in ("group_block_tokens", "hit_block_tokens"):
        patch.setattr(scheduler, sizes, lambda *_: (CHUNK_TOKENS,))
    patch.setattr(scheduler, "doubtful_tokens", lambda *_: None)
    read: Future[str] = Future()
    read.set_result("of the files")
    patch.setattr(scheduler.model_weights, "begin_reading", lambda *_: read)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=num_ranks, data_parallel_size=num_replicas),
        kv_transfer_config=SimpleNamespace(
            engine_id="engine",
            is_kv_consumer=role != "kv_producer",
            is_kv_producer=role != "kv_consumer",
        ),
        model_config=SimpleNamespace(served_model_name="model", max_model_len=1024),
        num_speculative_tokens=0,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=publishes_events),
    )
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=CHUNK_TOKENS))
    blocks: Any = SimpleNamespace(num_blocks=4, kv_cache_groups=[group])
    edge = CallbackEdge(CallbackClock("test"), HotKVStats().add)
    return DoorScheduler(config, blocks, ConnectorConfig(), tier, edge)


class Rig:
    """longest_lookup_s: most time of one request's lookups in a step."""

    def __init__(
        self, target: str, num_rows: int = 64, num_groups: int = 1, **settings: Any
    ) -> None:
        self.config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(CHUNK_TOKENS, (f"layer {number}",), number)
                for number in range(num_groups)
            ),
            worker_kv_bytes_per_block=ROW_BYTES,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=f"rig-{uuid.uuid4().hex[:8]}",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(CHUNK_TOKENS, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
        self.region = SharedOffloadRegion(
            self.config.engine_id, num_rows, None, ROW_BYTES, ROW_BYTES
        )
        self.primary = CPUPrimaryTierOffloadingManager(num_rows, self.region, enable_events=True)
        view = self.primary.get_kv_memoryview()
        settings = {"hotkv.target": target, "hotkv.weights_identity": "w", **PATIENT, **settings}
        spec = SimpleNamespace(config=self.config)
        try:
            self.tier = HotKVTier(spec, view, "HotKVTier", **settings)
        except ConfigError:
            self.primary.shutdown()
            raise
        self.rows = np.asarray(view).view(np.uint8)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])
        self.longest_lookup_s = 0.0
        self._number = 0

    def connected(self, timeout_s: float = 20.0) -> "Rig":
        session = self.tier.session
        assert session is not None
        assert session.wait_connected(timeout_s)
        return self

    def request(self, keys: Sequence[OffloadKey], **more: Any) -> ReqContext:
        self._number += 1
        context = ReqContext(f"request {self._number}", **more)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, CHUNK_TOKENS * (number + 1))
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(END_OF_STEP)
        # vLLM 0.33 holds promotions from a reset until then.
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def settle(self) -> None:
        wait_for(self._steps_until_idle, "the end of all jobs")

    def _steps_until_idle(self) -> bool:
        self.step()
        return not self.manager.has_pending_work()

    def offer(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Plays the device's copy into the primary tier."""
        out = self.manager.prepare_store(keys, context)
        if out is None:
            return
        for key, row in zip(out.keys_to_store, out.store_spec.chunk_ids, strict=True):
            self.rows[row] = row_of(key)
        if out.keys_to_store:
            self.manager.complete_store(set(out.keys_to_store), context)

    def store(self, keys: Sequence[OffloadKey], *, has_tokens: bool = False) -> None:
        """has_tokens: hotkv also learns the tokens, as from `DoorScheduler.arrived`."""
        if has_tokens:
            tokens = [*range(len(keys) * CHUNK_TOKENS)]
            request = SimpleNamespace(
                request_id=f"request {self._number + 1}",
                all_token_ids=tokens,
                mm_features=(),
                prompt_embeds=None,
                cache_salt=None,
                lora_request=None,
            )
            self.tier.tell(request, Retention(), is_excluded=False)
        context = self.request(keys)
        self.offer(context, keys)
        self.settle()
        self.manager.on_request_finished(context)

    def lookup_once(self, context: ReqContext, keys: Sequence[OffloadKey]) -> int | None:
        """Hits until the first miss; None if an answer is deferred."""
        hits, is_deferred = 0, False
        began_s = time.perf_counter()
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is LookupResult.MISS:
                break
            is_deferred |= answer is not LookupResult.HIT
            hits += answer is not LookupResult.RETRY
        self.longest_lookup_s = max(self.longest_lookup_s, time.perf_counter() - began_s)
        return None if is_deferred else hits

    def lookup(
        self, context: ReqContext, keys: Sequence[OffloadKey], patience_s: float = 30.0
    ) -> int:
        until_s = time.monotonic() + patience_s
        while (hits := self.lookup_once(context, keys)) is None:
            assert time.monotonic() < until_s, f"{context.req_id} is still deferred"
            self.step()
            time.sleep(0.0005)
        return hits

    def load(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Compares the rows in place of a copy."""
        if keys:
            spec = self.manager.prepare_load(keys, context)
            for key, row in zip(keys, spec.chunk_ids, strict=True):
                assert np.array_equal(self.rows[row], row_of(key)), "a row has wrong bytes"
            self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)

    def hits(self, keys: Sequence[OffloadKey], patience_s: float = 30.0) -> int:
        context = self.request(keys)
        hits = self.lookup(context, keys, patience_s)
        self.load(context, keys[:hits])
        return hits

    def close(self) -> None:
        self.rows = None
        self.settle()
        self.manager.shutdown()
