"""vLLM's offloading in CPU engines, for tests: hotkv's compiled memcpy in place of its copies.

Set `spec_name` to HostTieringSpec and `spec_module_path` to this module, both in
`kv_connector_extra_config`.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from hotkv_proto import native

Ids = np.ndarray[Any, np.dtype[np.int64]]
Fragments = list[tuple[int, int, int]]
"""Parts of a page in bytes: offset in the engine's page, offset in the row's page, size."""


class HostTieringSpec(TieringOffloadingSpec):
    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            self._worker = HostCopies(
                kv_caches, region, self.blocks_per_chunk, self.config.canonical_layout
            )
        return self._worker


class HostCopies(OffloadingWorker):
    """Copies between KV memory and rows of the primary tier; done when `submit_*` returns. Pages
    are where vLLM's CPUOffloadingWorker puts them.

    is_canonical: rows' bytes do not depend on the number of ranks.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        blocks_per_chunk: int,
        is_canonical: bool,
    ) -> None:
        self._kernels = native.require("hotkv_proto.table_reading")
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages: list[torch.Tensor] = []
        # Per tensor, int8 [rows, blocks of a chunk, bytes of a page in a row].
        self._rows: list[torch.Tensor] = []
        self._is_canonical = is_canonical
        for number, tensor in enumerate(kv_caches.tensors):
            page_bytes = tensor.page_size_bytes
            self._pages.append(tensor.tensor.view(torch.int8).view(-1, page_bytes))
            row_bytes = self._row_bytes(number) if is_canonical else page_bytes
            make = (
                region.create_next_canonical_view
                if is_canonical
                else region.create_next_worker_view
            )
            row = make(row_bytes * blocks_per_chunk)
            shape = (row.shape[0], blocks_per_chunk, row_bytes)
            self._rows.append(
                row.as_strided(shape, (row.stride(0), row_bytes, 1), row.storage_offset())
            )
        self._done: list[TransferResult] = []

    def _row_bytes(self, tensor: int) -> int:
        """Of one block's page in the canonical layout, which has the parts of all ranks.

        tensor: vLLM's `tensor_idx`.
        """
        return max(
            ref.mapping.canonical_page_size_bytes
            for refs in self._refs
            for ref in refs
            if ref.tensor_idx == tensor and ref.mapping is not None
        )

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_row=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_row=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: Any, to_row: bool) -> bool:
        blocks = np.asarray(device.block_ids, np.int64)
        chunks = np.asarray(host.chunk_ids, np.int64)
        at = at_chunk = num_bytes = 0
        for refs, size, first in zip(
            self._refs, device.group_sizes, device.block_indices, strict=True
        ):
            if not size:
                continue
            inside = first % self._per_chunk + np.arange(size)
            count = int(inside[-1]) // self._per_chunk + 1
            ids, rows = blocks[at : at + size], chunks[at_chunk : at_chunk + count]
            rows, inside = rows[inside // self._per_chunk], inside % self._per_chunk
            for ref in refs:
                num_bytes += self._copy_ref(ref, ids, rows, inside, to_row)
            at, at_chunk = at + size, at_chunk + count
        assert at == len(blocks) and at_chunk == len(chunks)
        self._done.append(TransferResult(job_id, True, num_bytes, 1e-6))
        return True

    def _copy_ref(
        self, ref: CanonicalKVCacheRef, ids: Ids, rows: Ids, inside: Ids, to_row: bool
    ) -> int:
        page, row = self._pages[ref.tensor_idx], self._rows[ref.tensor_idx]
        mapping = ref.mapping
        if self._is_canonical and to_row and mapping is not None and mapping.num_writers > 1:
            # Each of the ranks with the same bytes copies a part of the pages.
            pages = rows * self._per_chunk + inside
            mine = pages % mapping.num_writers == mapping.writer_index
            ids, rows, inside = ids[mine], rows[mine], inside[mine]
        pages_at = page.data_ptr() + ids * page.stride(0)
        rows_at = row.data_ptr() + rows * row.stride(0) + inside * row.stride(1)
        num_bytes = 0
        for local, there, size in self._fragments(ref):
            source, to = pages_at + local, rows_at + there
            if not to_row:
                source, to = to, source
            sizes = np.full(len(ids), size, np.int64)
            self._kernels.copy_runs(0, 0, to, source, sizes, 0, len(ids), False)
            num_bytes += len(ids) * size
        return num_bytes

    def _fragments(self, ref: CanonicalKVCacheRef) -> Fragments:
        if not self._is_canonical or ref.mapping is None:
            return [(0, 0, ref.page_size_bytes)]
        return [
            (
                run.local_offset + i * run.local_stride,
                run.canonical_offset + i * run.canonical_stride,
                run.fragment_size,
            )
            for run in ref.mapping.runs
            for i in range(run.num_fragments)
        ]

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        self._pages, self._rows = [], []
        self._region.cleanup()
