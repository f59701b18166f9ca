"""Copies pages into hot slots of a CPU engine (`OptimizedSwapHandler`), by address (`PageCopier`).

Always true:
- `ResidentSequence.content` names a page only once it has been copied.
- A job that `wait` returns for has ended. Several transfers under one job id are one job.
"""

import ctypes
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.base import TransferResult as JobResult

from hotkv_proto import native
from hotkv_proto.blocks import TransferResult
from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.host_blocks import HostBlocks, ended_well

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
NO_BLOCKS, NO_ADDRESSES = np.empty(0, np.int32), np.empty(0, np.int64)
MAX_THREADS = 4
BYTES_PER_THREAD = 1 << 20
"""A copy uses one thread more per so many bytes."""


# ------------------------------------------------------------------------------------------- copies


class PageCopier:
    """Copies pages by address, without the GIL. Only one thread may call it.

    method: a value of `COPY_METHODS`. `memcpy`: one call for pages that are consecutive in both
        memories; `batch`: one call of the compiled loop; `kernel` and `auto`: the loop, divided
        among threads.
    """

    def __init__(self, num_threads: int | None = None, method: str = "auto") -> None:
        """num_threads: with the caller; None for the number of cores, up to MAX_THREADS."""
        usual = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))
        self._num_threads = 1 if method == "batch" else num_threads or usual
        self._is_memcpy = method == "memcpy"
        self._threads: ThreadPoolExecutor | None = None
        self._sizes: I64 = np.array([], np.int64)

    def __repr__(self) -> str:
        return f"PageCopier({self._num_threads} threads)"

    def copy(self, to: I64, source: I64, page_bytes: int) -> None:
        """Returns when all is copied. Pages must not overlap. Addresses are int64, contiguous."""
        count = len(to)
        if not count:
            return
        if self._is_memcpy:
            _copy_runs(to, source, page_bytes)
            return
        if len(self._sizes) < count or self._sizes[0] != page_bytes:
            self._sizes = np.full(max(count, 64), page_bytes, np.int64)
        parts = min(self._num_threads, 1 + count * page_bytes // BYTES_PER_THREAD)
        if parts == 1:
            self._part(to, source)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads - 1, "hotkv-pages")
        edges = np.linspace(0, count, parts + 1).astype(int)
        try:
            others = [
                self._threads.submit(self._part, to[a:b], source[a:b])
                for a, b in itertools.pairwise(edges[1:])
            ]
        except RuntimeError:
            # The operating system refuses a thread. The pool is ended, because it would execute
            # the refused copy later.
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
            self._part(to, source)
            return
        self._part(to[: edges[1]], source[: edges[1]])
        for other in others:
            other.result()

    def _part(self, to: I64, source: I64) -> None:
        kernels = native.require("hotkv_proto.table_reading")
        kernels.copy_runs(0, 0, to, source, self._sizes, 0, len(to), False)


def _copy_runs(to: I64, source: I64, page_bytes: int) -> None:
    is_end = (np.diff(to) != page_bytes) | (np.diff(source) != page_bytes)
    edges = [0, *(np.flatnonzero(is_end) + 1).tolist(), len(to)]
    for first, last in itertools.pairwise(edges):
        ctypes.memmove(int(to[first]), int(source[first]), (last - first) * page_bytes)


# ----------------------------------------------------------------------------------------- swapping


class HotFill(NamedTuple):
    """Pages that hot slots get in a layer.

    content: of `ResidentSequence.hot_content`; becomes `positions` at `slots` with the copy.
    """

    content: I32
    slots: I32
    positions: I32


class SwapIn(NamedTuple):
    """Pages of a layer to copy to the device before it attends.

    blocks: of these pages, int32: host blocks, in engines positions in the contexts.
    to, source: addresses, int64.
    """

    layer_idx: int
    page_bytes: int
    blocks: I32 = NO_BLOCKS
    to: I64 = NO_ADDRESSES
    source: I64 = NO_ADDRESSES
    fills: tuple[HotFill, ...] = ()

    @staticmethod
    def joined(parts: "Sequence[SwapIn]") -> "SwapIn":
        """parts: at least one, of the same layer."""
        if len(parts) == 1:
            return parts[0]
        layer_idx, page_bytes = parts[0][:2]
        _, _, *arrays, fills = zip(*parts, strict=True)
        blocks, to, source = map(np.concatenate, arrays)
        return SwapIn(layer_idx, page_bytes, blocks, to, source, tuple(itertools.chain(*fills)))


class SwapOut(NamedTuple):
    """Pages of a layer to copy to host memory after it attended: of host blocks `blocks` from
    device blocks `device_blocks`, int32."""

    layer_idx: int
    blocks: I32
    device_blocks: I32


class OptimizedSwapHandler(OffloadingWorker):
    """vLLM's worker for offloading, for whole blocks (`submit_load`, `submit_store`) and for a
    layer's pages (`transfer_async`). Used by one thread.

    A load is copied before the call returns: whoever submits it waits for it next, and handing it
    to a thread takes longer than most copies. Large ones are divided among threads. A store goes on
    when the call has returned.

    copier: copies by the setting `copy_method`.
    """

    def __init__(
        self,
        copier: PageCopier,
        layers: Sequence[SparseLayer] = (),
        places: Mapping[int, int] | None = None,
        host: HostBlocks | None = None,
    ) -> None:
        """layers, places: offsets in a slot by layer index; both only for whole blocks.
        host: None: nothing can be stored, as in engines, whose connector stores blocks.
        """
        self.copier = copier
        self._layers, self._places = list(layers), dict(places or {})
        self._host = host
        # Layers that have swapped out each host block that waits for the others.
        self._leaving: dict[int, set[int]] = {}
        # By job.
        self._stores: dict[int, list[Future[TransferResult]]] = {}
        # Jobs of `submit_load` and `submit_store` until `get_finished` returns them.
        self._submitted: dict[int, JobResult] = {}

    def __repr__(self) -> str:
        return f"OptimizedSwapHandler({self.copier!r}, jobs {len(self._stores)})"

    def transfer_async(self, job_id: int, spec: SwapIn | SwapOut) -> bool:
        """Adds copies to a job. A block is stored once each layer has swapped it out. Always True:
        vLLM's answer for a job that was taken. Raises HotKVError if nothing can be stored here."""
        if isinstance(spec, SwapIn):
            self.copier.copy(spec.to, spec.source, spec.page_bytes)
            for fill in spec.fills:
                fill.content[fill.slots] = fill.positions
        elif len(spec.blocks):
            for block in spec.blocks.tolist():
                self._leaving.setdefault(block, set()).add(spec.layer_idx)
            num_layers = [len(self._leaving[block]) for block in spec.blocks.tolist()]
            is_whole = np.array(num_layers) == len(self._layers)
            self._store(job_id, spec.blocks[is_whole], spec.device_blocks[is_whole])
        return True

    def _store(self, job_id: int, blocks: I32, device_blocks: I32) -> None:
        if self._host is None:
            raise HotKVError(
                Reason.INVALID_FIELD, "no host memory to store in; an engine's connector stores"
            )
        for block in blocks.tolist():
            self._leaving.pop(block, None)
        for job in list(self._stores.keys() - self._submitted.keys()):
            if all(store.done() for store in self._stores[job]):
                del self._stores[job]
        self._stores.setdefault(job_id, []).extend(self._host.store(blocks, device_blocks))

    def wait(self, job_ids: Iterable[int]) -> None:
        """Returns when the jobs have ended, well or not: the pages of a failed store are still on
        the device, and the next step swaps them out again. Unknown jobs have ended."""
        if self._stores:
            asked = set(job_ids)
            wait_futures([store for job_id in asked for store in self._stores.get(job_id, ())])
            for job_id in asked - self._submitted.keys():
                self._stores.pop(job_id, None)

    # -------------------------------------------------------------------------- vLLM's interface

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copies host blocks, a `BlockIDsLoadStoreSpec`, in all layers. False if they can't be
        read.

        expedited: of vLLM 0.33; every load has ended when this returns.
        """
        began_s = time.perf_counter()
        if self._host is None or not isinstance(src_spec, BlockIDsLoadStoreSpec):
            return False
        try:
            slots = self._host.addresses(src_spec.block_ids)
            for layer in self._layers:
                size, base = layer.pages.page_bytes, layer.pages.tensor.data_ptr()
                to = base + dst_spec.block_ids.astype(np.int64) * size
                self.copier.copy(to, slots + self._places[layer.index], size)
            self._host.check()
        except HotKVError:
            return False
        took_s = time.perf_counter() - began_s
        self._submitted[job_id] = JobResult(job_id, True, self._bytes_of(slots), took_s)
        return True

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Stores device blocks in host blocks, a `BlockIDsLoadStoreSpec`. False if nothing can be
        stored here."""
        if self._host is None or not isinstance(dst_spec, BlockIDsLoadStoreSpec):
            return False
        self._store(job_id, dst_spec.block_ids, src_spec.block_ids)
        num_bytes = self._bytes_of(dst_spec.block_ids)
        self._submitted[job_id] = JobResult(job_id, True, num_bytes)
        return True

    def _bytes_of(self, blocks: npt.NDArray[Any]) -> int:
        return len(blocks) * sum(layer.pages.page_bytes for layer in self._layers)

    def get_finished(self) -> list[JobResult]:
        """Jobs of `submit_load` and `submit_store` that have ended since the last call."""
        ended = []
        for job_id, result in list(self._submitted.items()):
            stores = self._stores.get(job_id, [])
            if all(store.done() for store in stores):
                self._stores.pop(job_id, None)
                result.success = all(map(ended_well, stores))
                ended.append(self._submitted.pop(job_id))
        return ended

    def shutdown(self) -> None:
        """Waits for all stores."""
        wait_futures([store for stores in self._stores.values() for store in stores])
