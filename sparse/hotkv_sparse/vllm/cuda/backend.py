"""vLLM's FlashAttention backend with residency. hotkv's plugin registers it in place of
`FLASH_ATTN`. It has run on an H200, with vLLM's Triton kernel in place of FlashAttention's.

It serves engines with residency and `hotkv.allow_sparse_cuda`, and returns vLLM's own classes in
all others.

Decode steps are captured in full CUDA graphs. Each layer first launches the kernels of
`CudaWorker.layer_step`, which write a block table and lengths, then vLLM's attention kernel with
these.

Prefill and mixed batches run without a graph. A row that attends to its whole context, some of it
only in host memory, gets a separate call of attention over a copy in a staging area. If hotkv's
code raises, requests with blocks only in host memory are lost.

Source: `vllm/v1/attention/backends/flash_attn.py` of vLLM 0.32.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from hotkv_sparse import SparseConfig
from hotkv_sparse.cuda.residents import EngineBatch
from hotkv_sparse.vllm.cuda.worker import AttentionRun, CudaLayer, CudaWorker, HostBatch
from hotkv_sparse.vllm.settings import cuda_settings
from hotkv_vllm.compat import NULL_BLOCK


def _wanted() -> tuple[SparseConfig, Any] | None:
    """Settings of the engine whose model is being built; None without residency."""
    vllm_config = get_current_vllm_config()
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    config = cuda_settings(extra)
    return None if config is None else (config, vllm_config)


class HotFlashBackend(FlashAttentionBackend):
    """Has the name and page format of vLLM's backend."""

    _resident: tuple[SparseConfig, Any] | None = None

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        HotFlashBackend._resident = _wanted()
        return FlashAttentionImpl if HotFlashBackend._resident is None else HotFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        is_plain = HotFlashBackend._resident is None
        return FlashAttentionMetadataBuilder if is_plain else HotFlashBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Returns a `ResidentSpec` if the model that this process built last has residency
        (`compat.block_manager.customized`)."""
        spec = super().customize_spec(spec)
        if cls._resident is None:
            return spec
        from hotkv_sparse.vllm import block_manager

        return block_manager.customized(spec, *cls._resident)


@dataclass
class HotFlashMetadata(FlashAttentionMetadata):
    """worker: has planned the batch; None if vLLM's own attention serves it, because there is no
    worker yet or its planning has raised."""

    worker: CudaWorker | None = None


class HotFlashBuilder(FlashAttentionMetadataBuilder):
    """Passes each batch to the worker. Disables FlashAttention's ahead-of-time schedule, which
    is computed from whole contexts, while sparse rows attend to parts."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.aot_schedule = False
        self._layer_names = list(layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HotFlashMetadata:
        """Lets vLLM's own attention serve the batch if the worker raises; all its requests then
        count as lost."""
        built = super().build(common_prefix_len, common_attn_metadata, fast_build)
        worker = self._worker()
        if worker is not None:
            try:
                worker.begin_batch(_batch(built, common_attn_metadata))
            except Exception:  # noqa: BLE001 - the engine's edge: a fault of ours must not end the engine
                worker.batch_broke(set(built.block_table[:, 0].tolist()) - {NULL_BLOCK})
                worker = None
        own = {f.name: getattr(built, f.name) for f in fields(FlashAttentionMetadata)}
        return HotFlashMetadata(**own, worker=worker)

    def _worker(self) -> CudaWorker | None:
        """None until the connector has attached one."""
        context = self.vllm_config.compilation_config.static_forward_context
        impl = getattr(context.get(self._layer_names[0]), "impl", None)
        attached = impl.attached if isinstance(impl, HotFlashImpl) else None
        return None if attached is None else attached[0]


class HotFlashImpl(FlashAttentionImpl):
    """One layer's attention; vLLM's own until `attach`."""

    attached: tuple[CudaWorker, CudaLayer] | None = None

    def attach(self, worker: CudaWorker, layer: CudaLayer) -> None:
        """Called once, before vLLM captures graphs."""
        self.attached = (worker, layer)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's kernel over the worker's block table, with a separate call for each staged row."""
        scales = (output_scale, output_block_scale)
        given = (query, key, value, output)
        if self.attached is None or getattr(attn_metadata, "worker", None) is None:
            return super().forward(layer, *given[:3], kv_cache, attn_metadata, output, *scales)
        worker, own = self.attached
        try:
            worker.layer_step(own, query[: attn_metadata.num_actual_tokens])
            rewritten = _over(worker, attn_metadata)
            for run in worker.runs:
                parts, metadata = given, rewritten
                if len(worker.runs) > 1:
                    parts, metadata = _part(worker, run, given, rewritten)
                pages = kv_cache
                if run.staged_blocks:
                    worker.stage(own, run)
                    metadata = _staged(worker, run, metadata)
                    pages = worker.staging
                super().forward(layer, *parts[:3], pages, metadata, parts[3], *scales)
        except Exception:  # noqa: BLE001 - the engine's edge: a fault of ours must not become a request's
            worker.gave_up(own.name)
            return super().forward(layer, *given[:3], kv_cache, attn_metadata, output, *scales)
        return output


def _batch(built: FlashAttentionMetadata, common: CommonAttentionMetadata) -> HostBatch:
    table = built.block_table
    device = EngineBatch(
        built.seq_lens,
        built.query_start_loc,
        table,
        table.stride(0),
        len(built.seq_lens),
        built.num_actual_tokens,
    )
    return HostBatch.of(device, common.query_start_loc_cpu.numpy(), built.query_start_loc)


def _over(worker: CudaWorker, metadata: FlashAttentionMetadata) -> FlashAttentionMetadata:
    """Puts the worker's block table and lengths in, whose addresses are the same in each step,
    as captured graphs need."""
    table, lengths = worker.table, worker.lengths
    assert isinstance(table, torch.Tensor) and isinstance(lengths, torch.Tensor)
    num_rows = len(metadata.seq_lens)
    return replace(metadata, block_table=table[:num_rows], seq_lens=lengths[:num_rows])


def _part(
    worker: CudaWorker,
    run: AttentionRun,
    given: tuple[torch.Tensor, ...],
    metadata: FlashAttentionMetadata,
) -> tuple[tuple[torch.Tensor, ...], FlashAttentionMetadata]:
    """The part of a batch that one call of attention serves.

    given: query, key, value and output of the whole batch.
    """
    starts = worker.starts
    begin, end = int(starts[run.first]), int(starts[run.last])
    rows = slice(run.first, run.last)
    own = starts[run.first : run.last + 1]
    return tuple(tensor[begin:end] for tensor in given), replace(
        metadata,
        num_actual_tokens=end - begin,
        max_query_len=int((own[1:] - own[:-1]).max(initial=1)),
        query_start_loc=metadata.query_start_loc[run.first : run.last + 1] - begin,
        seq_lens=metadata.seq_lens[rows],
        block_table=metadata.block_table[rows],
    )


def _staged(
    worker: CudaWorker, run: AttentionRun, metadata: FlashAttentionMetadata
) -> FlashAttentionMetadata:
    """Puts the table in that `CudaWorker.stage` has written."""
    table = worker.staged_table
    assert isinstance(table, torch.Tensor)
    return replace(metadata, block_table=table[None, : run.staged_blocks])
