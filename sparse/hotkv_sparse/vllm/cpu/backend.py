"""vLLM's attention backend for CPU with sparse decode. hotkv's plugin registers it in place of
`CPU_ATTN`.

A layer attends as vLLM's own until a `SparseWorker` is attached to it. If hotkv's code raises,
all requests attend to their whole context in this layer and step. Source:
`vllm/v1/attention/backends/cpu_attn.py` of vLLM 0.32.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.cpu.batch import Batch, Rewrite, SparseLayer
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.settings import is_sparse_configured, resident_settings


class HotAttentionBackend(CPUAttentionBackend):
    """Has the name, page packing and metadata of vLLM's backend."""

    _resident: tuple[SparseConfig, Any] | None = None

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        transfer = get_current_vllm_config().kv_transfer_config
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        config = resident_settings(extra)
        HotAttentionBackend._resident = (
            None if config is None else (config, get_current_vllm_config())
        )
        return HotAttentionImpl if is_sparse_configured(extra) else CPUAttentionBackendImpl

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Returns a `ResidentSpec` if the model that this process built last has residency."""
        spec = super().customize_spec(spec)
        if cls._resident is None:
            return spec
        from hotkv_sparse.vllm import block_manager

        return block_manager.customized(spec, *cls._resident)


class HotAttentionImpl(CPUAttentionBackendImpl):
    """One layer's attention; vLLM's own until `attach`."""

    _sparse: "tuple[SparseWorker, SparseLayer] | None" = None

    def attach(self, worker: SparseWorker, layer: SparseLayer) -> None:
        self._sparse = (worker, layer)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's kernel; rows that the scheduler has listed attend to the blocks that the worker
        chooses."""
        if self._sparse is not None and attn_metadata is not None:
            worker, sparse_layer = self._sparse
            try:
                if sparse_layer.index in worker.first_prompt.waiting:
                    self._show(worker, sparse_layer, query, key, attn_metadata)
                found = self._rewritten(worker, sparse_layer, layer.isa, query, attn_metadata)
                if found is not None:
                    metadata, pages = found
                    return super().forward(
                        layer,
                        query,
                        key,
                        value,
                        kv_cache if pages is None else pages,
                        metadata,
                        output,
                        output_scale,
                        output_block_scale,
                    )
            except Exception:  # noqa: BLE001 - the engine's edge: a fault of ours must not become a request's
                worker.gave_up(sparse_layer.name)
        return super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )

    def _show(
        self,
        worker: SparseWorker,
        sparse_layer: SparseLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        metadata: CPUAttentionMetadata,
    ) -> None:
        """Passes the step's keys and queries to `worker.first_prompt`, which calibrates the
        layer with them."""
        batch = _batch(metadata)
        num_tokens = int(batch.starts[-1])
        keys, queries = (
            part[:num_tokens].reshape(num_tokens, -1, self.head_size).float().numpy()
            for part in (key, query)
        )
        worker.first_prompt.see(sparse_layer.index, batch, keys, queries)

    def _rewritten(
        self,
        worker: SparseWorker,
        sparse_layer: SparseLayer,
        isa: str,
        query: torch.Tensor,
        metadata: CPUAttentionMetadata,
    ) -> tuple[CPUAttentionMetadata, torch.Tensor | None] | None:
        """vLLM's metadata with the worker's block tables, and the pages to which these refer
        (None: the layer's own). None if vLLM's own metadata is right for all rows."""
        if (
            not isinstance(metadata.causal, bool)
            or not metadata.causal
            or metadata.dynamic_causal is not None
        ):
            worker.gave_up(sparse_layer.name)
            return None

        def query_of(token: int) -> Any:
            return query[token].float().numpy().reshape(self.num_heads, self.head_size)

        rewrite = worker.attend(sparse_layer, metadata, lambda: _batch(metadata), query_of)
        if rewrite is None:
            return None
        return self._with(rewrite, isa, query.dtype, metadata), rewrite.pages

    def _with(
        self, rewrite: Rewrite, isa: str, dtype: torch.dtype, metadata: CPUAttentionMetadata
    ) -> CPUAttentionMetadata:
        """vLLM's metadata with the tables and lengths of `rewrite`. Consecutive layers with
        equal lengths and shapes share the schedule."""
        made = rewrite.made
        if not isinstance(made, _Made):
            tables, seq_lens = torch.from_numpy(rewrite.tables), torch.from_numpy(rewrite.seq_lens)
            made = rewrite.made = _Made(
                replace(metadata, block_table=tables, seq_lens=seq_lens), None
            )
        key = (
            rewrite.seq_lens.tobytes(),
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            isa,
            dtype,
        )
        if key != made.key:
            made.metadata.scheduler_metadata = self._schedule(made.metadata, isa, dtype)
            made.key = key
        return made.metadata

    def _schedule(
        self, metadata: CPUAttentionMetadata, isa: str, dtype: torch.dtype
    ) -> torch.Tensor:
        schedule: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(metadata.seq_lens),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            seq_lens=metadata.seq_lens,
            dtype=dtype,
            query_start_loc=metadata.query_start_loc,
            causal=metadata.causal,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            dynamic_causal=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return schedule


@dataclass(slots=True)
class _Made:
    """Metadata made for a `Rewrite`, reused by later layers with the same one.

    key: lengths and shapes of the schedule in it; None before the first schedule.
    """

    metadata: CPUAttentionMetadata
    key: tuple[bytes, int, int, int, str, torch.dtype] | None


def _batch(metadata: CPUAttentionMetadata) -> Batch:
    num_tokens = metadata.num_actual_tokens
    return Batch(
        metadata.query_start_loc.numpy(),
        metadata.seq_lens.numpy(),
        metadata.block_table.numpy(),
        metadata.slot_mapping[:num_tokens].numpy().astype(np.int64, copy=False),
    )
