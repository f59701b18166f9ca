"""vLLM's real scheduler, KV cache manager and allocator, with an arithmetic function as the model:
a step takes microseconds.

A token's KV value depends on all tokens up to it, and every value that attention would read is
checked: KV that is wrong, late or overwritten fails at once. The connector is called as by
vLLM's V1 runner, with `v2=True` by the V2 runner's code. With a `device`, reads and writes wait
in its queue, at the latest until the step's output is read.
"""

import functools
import itertools
import pickle
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from hotkv_vllm import link
from hotkv_vllm.worker import rank_session, rank_stores
from hotkv_vllm.worker.device_order import Marks
from tests.doubles.fake import FakeServer
from tests.vllm.device import ScriptedDevice
from tests.vllm.specs import full_model
from tests.vllm.tiny import BLOCK_TOKENS, engine_args, transfer_config, write_model

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:
    kv_cache_planning = None

_MASK = 0x7FFF
_TRANSFER_GROUP: list[Any] = []
"""Worker connector of the engine whose step runs; vLLM has one per process."""


class V2Config(VllmConfig):
    """vLLM refuses the V2 runner without Triton."""

    use_v2_model_runner = property(lambda _: True)


def planned(config: VllmConfig, specs: dict[str, KVCacheSpec], num_bytes: int) -> KVCacheConfig:
    """vLLM 0.33 moved these functions, and groups layers first."""
    if kv_cache_planning is None:
        return kv_cache_utils.get_kv_cache_configs(config, [specs], [num_bytes])[0]
    groups = kv_cache_planning.get_global_kv_cache_groups(config, [specs])
    return kv_cache_planning.get_kv_cache_configs(config, [specs], [num_bytes], groups)[0]


class _SavesLate:
    """`post_forward` of vLLM 0.32 does not end its step."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def wait_for_save(self) -> None: ...

    def clear_connector_metadata(self) -> None: ...


class Engine:
    """Wrong KV raises AssertionError in `step`."""

    def __init__(
        self,
        server: FakeServer,
        folder: Path,
        monkeypatch: Any,
        *,
        specs: dict[str, KVCacheSpec] | None = None,
        blocks: int = 64,
        pipelined: bool = False,
        v2: bool = False,
        device: ScriptedDevice | None = None,
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        max_tokens_per_step: int = 256,
        extra: dict[str, Any] | None = None,
        flush_timeout_s: float = 0.02,
        within: Callable[[dict[str, Any]], dict[str, Any]] = lambda ours: ours,
        **more: Any,
    ) -> None:
        """specs: by layer; by default full attention.
        device: None: work runs at once.
        extra: settings of hotkv's connector.
        within: turns its `kv_transfer_config` into the engine's.
        more: arguments of vLLM.
        """
        monkeypatch.setattr(link, "open_session", server.open)
        self.server, self.device, self.layout = server, device, layout
        # A real server needs time.
        self.patience_s: float = getattr(server, "patience_s", 0.0)
        self.pipelined, self.v2 = pipelined, v2
        # Behind a drafter, runner V2 saves after it has taken the step's results since 0.33,
        # before that until 0.32.
        self.saves_late = more.get("speculative_config") is not None
        self.model = torch.nn.Linear(2, 2)
        monkeypatch.setattr(rank_session, "marks_for", lambda _, wanted: Marks(device, wanted))
        longest = more.get("max_model_len", 512)
        fitting = min(longest, (blocks - 2) * BLOCK_TOKENS)
        more |= {"max_num_batched_tokens": max_tokens_per_step, "max_model_len": fitting}
        arguments = engine_args(write_model(folder), blocks=blocks, **more)
        arguments["num_gpu_blocks_override"] = blocks
        arguments.pop("disable_log_stats")
        monkeypatch.setattr(rank_stores, "FLUSH_TIMEOUT_S", flush_timeout_s)
        extra = {"lookup_timeout_s": 60.0, **(extra or {})}
        transfer = within(transfer_config(**extra))
        engine = EngineArgs(**arguments, kv_transfer_config=transfer)
        self.vllm_config = engine.create_engine_config()
        if v2:
            self.vllm_config.__class__ = V2Config
        self.vllm_config.cache_config.kv_cache_layout = layout.name
        specs = specs or full_model()
        num_drafts = self.vllm_config.num_speculative_tokens
        for name, spec in specs.items():
            if isinstance(spec, MambaSpec):
                self.vllm_config.cache_config.mamba_cache_mode = "align"
                specs[name] = replace(spec, num_speculative_blocks=num_drafts)
        pages = sum(spec.page_size_bytes for spec in specs.values())
        worker_kv = planned(self.vllm_config, specs, 4 * blocks * pages)
        kv = generate_scheduler_kv_cache_config([worker_kv])
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv, self.vllm_config)
        for config in (kv, worker_kv):
            config.num_blocks = worker_kv.num_blocks
            config.hash_block_size = hash_block_size
            config.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
                kv, self.vllm_config, block_size, hash_block_size
            )
        self.vllm_config.cache_config.num_gpu_blocks = kv.num_blocks
        self.kv_config = worker_kv
        self.worker: Any = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.WORKER, worker_kv
        )
        self.tensors = allocate_kv_cache(worker_kv, torch.device("cpu"), layout)
        # The key space must not depend on the small `max_model_len` by which vLLM accepts few
        # blocks.
        self.vllm_config.model_config.max_model_len = longest
        monkeypatch.setattr(
            kv_connector_model_runner_mixin, "get_kv_transfer_group", lambda: _TRANSFER_GROUP[0]
        )
        self.active = self._active(monkeypatch) if v2 else None
        if self.active is None:
            self.worker.register_kv_caches(self.tensors)
        self.vllm_config.model_config.max_model_len = fitting
        self.vllm_config.scheduler_config.async_scheduling = pipelined
        scheduler_class = AsyncScheduler if pipelined else Scheduler
        self.scheduler = scheduler_class(
            self.vllm_config,
            kv,
            StructuredOutputManager(self.vllm_config),
            block_size,
            hash_block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self.salt = 0
        self._start_ranks()
        self.connector.set_xfer_handshake_metadata_pp_aware(self.handshakes())
        hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hash_block_tokens = hash_block_size
        self.named: dict[bytes, Named] = {}
        self.hasher = self._naming(get_request_block_hasher(hash_block_size, hash_function))
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}
        # By request: index of its recurrent state's block, and the tokens that it covers.
        self.states: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.pooled: dict[str, list[float]] = {}
        self.external: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.queue: deque[tuple[Any, ModelRunnerOutput, int]] = deque()
        self.preemptions = 0
        self.counters: dict[str, float] = {}
        self.metas: list[Any] = []
        self.before_forward: Callable[[], None] | None = None
        self.after_zeroing: Callable[[], None] | None = None
        # A number that changes KV values. A request keeps what its first step found.
        self.content_of: Callable[[Any], int] = lambda lora: int(lora.lora_int_id)
        self.contents: dict[str, int] = {}
        self.shown: dict[str, dict[int, int]] = {}

    def get_model(self) -> torch.nn.Module:
        """Its weights change KV only after `changing_weights.show_weights`."""
        return self.model

    def _start_ranks(self) -> None:
        """This engine has one rank."""

    def handshakes(self) -> dict[tuple[int, int], Any]:
        """By pipeline stage and tensor-parallel rank."""
        handshake = self.worker.get_handshake_metadata()
        return {} if handshake is None else {(0, 0): handshake}

    def each_worker(self) -> Iterator[Any]:
        """While the loop handles a rank, code runs as in it."""
        yield self.worker

    @property
    def memories(self) -> list[tuple[dict[str, torch.Tensor], int]]:
        """KV tensors and salt, by which another rank's shard is noticed."""
        return [(self.tensors, self.salt)]

    def _naming(self, hasher: Callable[[Request], list[Any]]) -> Callable[[Request], list[Any]]:
        """Records in `named` what each hash covers."""

        def hashes_of(request: Request) -> list[Any]:
            known, new = len(request.block_hashes), hasher(request)
            for place, block_hash in enumerate(new, known + 1):
                self.named[block_hash] = Named(self, request, place * self.hash_block_tokens)
            return new

        return hashes_of

    def _active(self, monkeypatch: Any) -> Any:
        """Runner V2 calls the connector through the result."""
        from vllm.v1.worker.gpu import kv_connector

        _TRANSFER_GROUP[:] = [self.worker]
        monkeypatch.setattr(kv_connector, "get_kv_transfer_group", lambda: _TRANSFER_GROUP[0])
        return kv_connector.ActiveKVConnector(self.vllm_config, self.tensors)

    # -------------------------------------------------------------------------------------- driving

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        transfer: Any = None,
        **more: Any,
    ) -> Request:
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        parameters = self._parameters(max_tokens, extra)
        request = Request(name, list(prompt) or None, *parameters, block_hasher=self.hasher, **more)
        self.requests[name], self.outputs[name] = request, []
        self.shown[name] = media_of(request)
        self.tokens.pop(name, None)
        self.contents.pop(name, None)
        self.scheduler.add_request(request)
        return request

    def _parameters(self, max_tokens: int, extra: dict[str, Any] | None) -> tuple[Any, Any]:
        return SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        ), None

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.queue.append((scheduled, *self._execute(scheduled)))
        waits = self.pipelined and scheduled.total_num_scheduled_tokens > 0
        while len(self.queue) > waits:
            self._collect()

    def _collect(self) -> None:
        scheduled, output, point = self.queue.popleft()
        if self.device is not None:
            self.device.run_to(point)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            told = outputs.scheduler_stats
            stats = (told and told.kv_connector_stats) or {}
            for counter, growth in stats.get("HotKVConnector", stats).items():
                self.counters[counter] = self.counters.get(counter, 0) + growth
            for one in outputs.outputs:
                self.outputs[one.request_id] += one.new_token_ids
                if one.pooling_output is not None:
                    self.pooled[one.request_id] = one.pooling_output.tolist()
                if one.prefill_stats is not None:
                    self.external[one.request_id] = one.prefill_stats.num_external_cached_tokens
                    self.local[one.request_id] = one.prefill_stats.num_local_cached_tokens
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)

    def run(self, max_steps: int = 2000) -> None:
        """Fails after `max_steps`, with a real server not before `patience_s`."""
        until_s = time.monotonic() + self.patience_s
        for num_steps in itertools.count():
            if not self.scheduler.has_requests() and not self.queue:
                return
            assert num_steps < max_steps or time.monotonic() < until_s, (
                f"not finished after {num_steps} steps: {self.scheduler.requests}"
            )
            self.step()

    def generate(
        self, name: str, prompt: Sequence[int], max_tokens: int = 1
    ) -> tuple[list[int], int]:
        """Output tokens, and the number of prompt tokens from hotkv."""
        self.add(name, prompt, max_tokens)
        self.run()
        return self.outputs[name], self.external.get(name, 0)

    def fill(self, prompt_tokens: Sequence[int], max_tokens: int = 4) -> list[int]:
        """A second request carries the stores' results to the scheduler."""
        answer, _ = self.generate(f"fills {len(self.requests)}", prompt_tokens, max_tokens)
        self.generate(f"reports {len(self.requests)}", prompt(99, 10), 2)
        return answer

    def hit(self, prompt_tokens: Sequence[int], max_tokens: int = 4) -> int:
        self.drop_local()
        answer, hit = self.generate(f"hits {len(self.requests)}", prompt_tokens, max_tokens)
        assert len(answer) == max_tokens
        return hit

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def shutdown(self) -> None:
        for worker in self.each_worker():
            worker.shutdown()
        self.connector.shutdown()

    def drop_local(self) -> None:
        self.run()
        assert self.scheduler.reset_prefix_cache()

    def drop_local_if_idle(self) -> None:
        if not self.scheduler.requests:
            self.drop_local()

    # ---------------------------------------------------------------------------------------- model

    def _execute(self, scheduled: Any) -> tuple[ModelRunnerOutput, int]:
        """Output, and the point that the device must reach before it can be read."""
        self.metas.append(scheduled.kv_connector_metadata)
        return self._run(pickle.loads(pickle.dumps(scheduled)))

    def _run(self, scheduled: Any) -> tuple[ModelRunnerOutput, int]:
        run = self._run_v1 if self.active is None else self._run_v2
        output, sampled, point = run(scheduled)
        names = list(scheduled.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        return self._output(names, index, sampled, output), point

    def _output(
        self, names: list[str], index: dict[str, int], sampled: dict[str, list[int]], kv: Any
    ) -> ModelRunnerOutput:
        return ModelRunnerOutput(names, index, [sampled[n] for n in names], kv_connector_output=kv)

    def _computed(self, scheduled: Any) -> tuple[dict[str, list[int]], int]:
        if self.before_forward is not None:
            self.before_forward()
        self._take_tokens(scheduled)
        sampled = self._forward(scheduled)
        has_work = self.device is not None and scheduled.total_num_scheduled_tokens
        return sampled, self.device.given if has_work else 0  # type: ignore[union-attr]

    def _run_v1(self, scheduled: Any) -> tuple[KVConnectorOutput, dict[str, list[int]], int]:
        """`handle_preemptions` comes before the mixin (`GPUModelRunner.execute_model`),
        `wait_for_save` after it with a drafter (`sample_tokens`)."""
        _TRANSFER_GROUP[:] = [self.worker]
        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self._zero_blocks(scheduled)
        has_drafter = self.vllm_config.speculative_config is not None
        defers = has_drafter and scheduled.total_num_scheduled_tokens > 0
        with (
            set_forward_context(None, self.vllm_config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled, defers) as output,
        ):
            sampled, point = self._computed(scheduled)
        if defers:
            self.worker.wait_for_save()
            self.worker.clear_connector_metadata()
        meta = pickle.dumps(output.kv_connector_worker_meta)
        output.kv_connector_worker_meta = pickle.loads(meta)
        return output, sampled, point

    def _run_v2(self, scheduled: Any) -> tuple[KVConnectorOutput, dict[str, list[int]], int]:
        """As `execute_model` and `sample_tokens` of V2's `GPUModelRunner`."""
        assert self.active is not None
        self._zero_blocks(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            sampled, point = self._computed(scheduled)
            output = self.active.no_forward(scheduled).kv_connector_output
            return output or KVConnectorOutput(), sampled, point
        names = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=torch.arange(len(names)),
            req_ids=names,
            num_tokens=scheduled.total_num_scheduled_tokens,
        )
        self.active.pre_forward(scheduled, batch, attn_metadata={})
        sampled, point = self._computed(scheduled)
        self.active.finish_forward()
        return self._finish_v2(scheduled.finished_req_ids), sampled, point

    def _finish_v2(self, finished: set[str]) -> KVConnectorOutput:
        """In the order `saves_late`."""
        assert self.active is not None
        if not self.saves_late:
            return self.active.post_forward(finished)
        connector = self.active.kv_connector
        if hasattr(self.active, "finalize_step"):
            output = self.active.post_forward(finished, defer_finalize=True)
        else:
            self.active.kv_connector = _SavesLate(connector)
            output = self.active.post_forward(finished)
            self.active.kv_connector = connector
        connector.wait_for_save()
        connector.clear_connector_metadata()
        return output

    def _take_tokens(self, scheduled: Any) -> None:
        """V1 updates them so; V2 lists resumed requests as new."""
        cached = scheduled.scheduled_cached_reqs
        assert self.v2 or cached.resumed_req_ids <= cached.all_token_ids.keys(), (
            "a resumed request comes without its tokens"
        )
        for name, tokens in cached.all_token_ids.items():
            self.tokens[name] = list(tokens)

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        for name in scheduled.finished_req_ids:
            self.tables.pop(name, None)
        cached = scheduled.scheduled_cached_reqs
        gone = scheduled.finished_req_ids, scheduled.preempted_req_ids or (), cached.resumed_req_ids
        for name in itertools.chain(*gone):
            self.states.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.tokens[new.req_id] = list(
                new.prefill_token_ids or new.prompt_token_ids or [0] * new.prompt_len
            )
            self.tables[new.req_id] = tuple(list(ids) for ids in new.block_ids)
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        for name, ids, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[name] = done
            if name in cached.resumed_req_ids:
                self.preemptions += 1
                self.tables[name] = tuple(list(group) for group in ids)
            elif ids is not None:
                for mine, more in zip(self.tables[name], ids, strict=True):
                    mine += more
        sampled: dict[str, list[int]] = {}
        for name in scheduled.num_scheduled_tokens:
            lora = self.requests[name].lora_request
            if lora is not None:
                self.contents.setdefault(name, self.content_of(lora))
        for name in scheduled.num_scheduled_tokens:
            self._check_state(name, computed[name])
        # A request may hit blocks that another fills in this step, as in each layer of a real
        # model.
        for name, count in scheduled.num_scheduled_tokens.items():
            self._write(name, computed[name], count)
            num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            self._write_checkpoint(name, computed[name], computed[name] + count)
            self._write_states(name, computed[name] + count, num_drafts)
        for name, count in scheduled.num_scheduled_tokens.items():
            self._check(name, computed[name])
            is_due = computed[name] + count >= len(self.tokens[name])
            sampled[name] = self._sample(name) if is_due else []
        return sampled

    def _sample(self, name: str) -> list[int]:
        self.tokens[name].append(next_token(self._values(name)))
        return self.tokens[name][-1:]

    def _zero_blocks(self, scheduled: Any) -> None:
        ids = np.array(scheduled.new_block_ids_to_zero or (), np.int64)
        for layer in self.tensors if len(ids) else ():
            self._give(functools.partial(self._zero_layer, layer, ids))
        for copy in scheduled.kv_cache_block_copies or ():
            self._copy_block(self.tensors, copy.src_block_id, copy.dst_block_id)
        if self.after_zeroing is not None and len(ids):
            self.after_zeroing()

    def _zero_layer(self, layer: str, ids: Any) -> None:
        self._cells(layer)[ids] = 0

    def _copy_block(self, layers: Iterable[str], source: int, target: int) -> None:
        for layer in layers:
            self._give(functools.partial(self._copy_layer, layer, source, target))

    def _copy_layer(self, layer: str, source: int, target: int) -> None:
        self._cells(layer)[target] = self._cells(layer)[source]

    def _attention_groups(self) -> Iterator[tuple[int, Any]]:
        for group_id, group in enumerate(self.kv_config.kv_cache_groups):
            if not isinstance(group.kv_cache_spec, MambaSpec):
                yield group_id, group

    def _state_groups(self, name: str) -> Iterator[tuple[list[int], Any]]:
        for table, group in zip(self.tables[name], self.kv_config.kv_cache_groups, strict=True):
            if isinstance(group.kv_cache_spec, MambaSpec):
                yield table, group

    def _check_state(self, name: str, computed: int) -> None:
        """A step begins with the state of the last computed token. Source: `preprocess_mamba`."""
        for table, group in self._state_groups(name) if computed else ():
            first = (computed - 1) // group.kv_cache_spec.block_size
            block = table[self.states.get(name, (first, computed))[0]]
            assert block, f"{name}: a layer would read the null block"
            state = [block], [0], self._values_at(name, computed - 1, computed)
            for layer in group.layer_names:
                self._give(functools.partial(self._check_layer, name, computed, layer, *state))

    def _write_checkpoint(self, name: str, start: int, end: int) -> None:
        """A state before the step's end, as of Mamba-2."""
        drafter = self.vllm_config.speculative_config
        for table, group in self._state_groups(name):
            (offset,), (column,) = compute_mamba_prefill_checkpoints(
                [end],
                [end - start],
                hash_block_size=self.hash_block_tokens,
                mamba_block_size=group.kv_cache_spec.block_size,
                checkpoint_alignment=group.kv_cache_spec.prefill_checkpoint_alignment,
                drop_eagle_block=drafter is not None and drafter.use_eagle_block_drop(),
                cache_hit_alignment_tokens=self.kv_config.cache_hit_alignment_tokens,
            )
            if not offset:
                continue
            values = self._values_at(name, start + offset - 1, start + offset)
            for layer in group.layer_names:
                write = functools.partial(self._write_layer, layer, [table[column]], [0], values)
                self._give(write)

    def _write_states(self, name: str, end: int, num_drafts: int) -> None:
        """States before the drafts, then behind each in the following blocks."""
        for table, group in self._state_groups(name):
            at = -(-end // group.kv_cache_spec.block_size) - 1
            self.states[name] = at, end - num_drafts
            values = self._values_at(name, end - num_drafts - 1, end)
            state = table[at : at + len(values)], [0] * len(values), values
            for layer in group.layer_names:
                self._give(functools.partial(self._write_layer, layer, *state))

    def _check(self, name: str, computed: int) -> None:
        for group_id, group in self._attention_groups():
            window = getattr(group.kv_cache_spec, "sliding_window", None)
            chunk = getattr(group.kv_cache_spec, "attention_chunk_size", None)
            first = max(0, computed - (window - 1)) if window else 0
            if chunk:
                first = computed // chunk * chunk
            places = self._places(name, group_id, first, computed)
            assert (places[0] != 0).all(), f"{name}: attention would read the null block"
            what = f"{name} of {computed}"
            for layer in group.layer_names:
                self._give(functools.partial(self._check_layer, what, first, layer, *places))

    def _check_layer(
        self, name: str, first: int, layer: str, blocks: Any, offsets: Any, values: Any
    ) -> None:
        rows = self._cells(layer)[blocks, :, offsets, :]
        expected = (values ^ _layer(layer) ^ self.salt)[:, None, None]
        wrong = np.flatnonzero((rows != expected).any(axis=(1, 2)))
        assert not len(wrong), (
            f"{name}: wrong KV at token {first + wrong[0]}, {layer}, blocks {blocks}"
        )

    def _write(self, name: str, computed: int, count: int) -> None:
        for group_id, group in self._attention_groups():
            blocks, offsets, values = self._places(name, group_id, computed, computed + count)
            known = blocks[: len(values)], offsets[: len(values)], values
            for layer in group.layer_names:
                self._give(functools.partial(self._write_layer, layer, *known))

    def _write_layer(self, layer: str, blocks: Any, offsets: Any, values: Any) -> None:
        expected = values ^ _layer(layer) ^ self.salt
        self._cells(layer)[blocks, :, offsets, :] = expected[:, None, None]

    def _give(self, work: Callable[[], None]) -> None:
        if self.device is None:
            work()
        else:
            self.device.give(work)

    def _cells(self, layer: str) -> Any:
        """int16 [blocks, KV heads, tokens, values of a token]."""
        return self.tensors[layer].view(torch.int16).numpy()

    def _places(self, name: str, group_id: int, first: int, end: int) -> tuple[Any, Any, Any]:
        """Block ids, offsets and values of tokens `first` to `end`; fewer values if the last
        tokens are unknown."""
        positions = np.arange(first, end)
        table = np.array(self.tables[name][group_id])
        values = self._values_at(name, first, end)
        block_tokens = self.kv_config.kv_cache_groups[group_id].kv_cache_spec.block_size
        return table[positions // block_tokens], positions % block_tokens, values

    def _values_at(self, name: str, first: int, end: int) -> Any:
        return np.array(self._values(name)[first:end], np.int16)

    def _values(self, name: str) -> list[int]:
        return self.values_of(name, self.tokens[name])

    def values_of(self, name: str, tokens: Sequence[int]) -> list[int]:
        """A value depends on all inputs up to it."""
        shown = self.shown.get(name)
        if shown:
            tokens = [shown.get(place, token) for place, token in enumerate(tokens)]
        content = self.contents.get(name)
        return _value(tokens) if content is None else _value([content, *tokens])[1:]

    @property
    def tints(self) -> tuple[int, ...]:
        """What values in vLLM's prefix cache may be off by."""
        return (0,)


@dataclass(frozen=True, slots=True)
class Named:
    """A block hash covers the request's first `num_tokens` tokens."""

    engine: "Engine"
    request: Request
    num_tokens: int

    def values(self) -> list[int]:
        tokens = self.request.all_token_ids[: self.num_tokens]
        return self.engine.values_of(self.request.request_id, tokens)


def media_of(request: Request) -> dict[int, int]:
    """What replaces the token id, by position."""
    if request.prompt_embeds is not None:
        rows = request.prompt_embeds.to(torch.float32).contiguous().numpy()
        return {place: zlib.crc32(row.tobytes()) for place, row in enumerate(rows)}
    shown = {}
    for feature in request.mm_features:
        at = feature.mm_position
        for place in range(at.length):
            shown[at.offset + place] = zlib.crc32(f"{feature.identifier}/{place}".encode())
    return shown


def next_token(values: Sequence[int]) -> int:
    return 3 + values[-1] % 1000


def _layer(name: str) -> int:
    return 1 + int(name.rpartition(".")[2])


def _value(tokens: Sequence[int]) -> list[int]:
    return list(_values(tuple(tokens)))


@functools.lru_cache(4096)
def _values(tokens: tuple[int, ...]) -> tuple[int, ...]:
    values, state = [], 7
    for token in tokens:
        state = (state * 31337 + token * 17 + 5) & 0x7FFFFFFF
        values.append((state >> 8) & _MASK)
    return tuple(values)


def prompt(seed: int, length: int) -> list[int]:
    """Prompts of one seed are prefixes of each other."""
    state, tokens = seed * 7919 + 13, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        tokens.append(3 + (state >> 12) % 1000)
    return tokens
