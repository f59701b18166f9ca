"""Sparse decode of a rank, as the connector's worker side drives it from step to step.

Always true: attention never uses a representation (compact form of a block's keys, by which blocks
are selected) that is older than the block's keys. If it is not known which blocks a step writes,
all representations are forgotten; if that fails, sparse decode is turned off. After a fault here
rows attend to everything, or blocks have no representations.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hotkv_client.arena import Arena
from hotkv_client.types import BlockRun, Int32s
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_vllm import link
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.hooks import HookEdge, hook, nothing
from hotkv_vllm.metadata import HotKVMetadata, HotKVWorkerMetadata
from hotkv_vllm.residency.cuda_worker import CudaWorker
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.residency.worker import ResidentWorker
from hotkv_vllm.sparse.reporter import SparseReporter
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.sparse.setup import install
from hotkv_vllm.sparse.worker import SparseWorker

logger = link.logger


class SparseRank:
    """Drives a rank's sparse worker. Does nothing without `hotkv.sparse`, and before `install` has
    found layers."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        centres: Centres | None,
        edge: HookEdge,
        arena_of: Callable[[], Arena | None] = lambda: None,
    ) -> None:
        """arena_of: returns the server's arena, as this process maps it now."""
        self.edge = edge
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config, self._is_resident = config, config.is_resident
        self._arena_of = arena_of
        self._logged_build = False
        self.centres = centres
        self.worker: SparseWorker | None = None
        self.cuda: CudaWorker | None = None
        self.reporter: SparseReporter | None = None

    def __repr__(self) -> str:
        return f"SparseRank({self.worker or self.cuda})"

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Returns (layer, vLLM's group) of the layers that decode sparsely."""
        layers = self.worker.layers.values() if self.worker is not None else ()
        return tuple((layer.index, layer.group) for layer in layers)

    @hook(nothing, is_part=True)
    def install_sparse(self, kv_caches: Mapping[str, Any]) -> None:
        """Puts sparse attention into the engine's layers."""
        if self._config.sparse is None:
            return
        try:
            if self._vllm_config.device_config.device_type == "cuda":
                self._install_cuda(self._config.sparse, kv_caches)
                return
            self.worker = install(
                self._config.sparse,
                self._config.sparse_recall_steps,
                self._vllm_config,
                self._kv_cache_config,
                kv_caches,
                self.centres,
            )
        except Unsupported as error:
            logger.warning("hotkv: sparse decode is off in this worker: %s", error)
            return
        if isinstance(self.worker, ResidentWorker):
            self.worker.residents.arena_of = self._arena_of
        self.reporter = SparseReporter(self.worker)

    @property
    def lacks_residency(self) -> bool:
        """Returns True if the configuration asks for residency, but no layer supports it. Then the
        scheduler must not free blocks early."""
        return self._is_resident and self.worker is None and self.cuda is None

    def _install_cuda(self, config: SparseConfig, kv_caches: Mapping[str, Any]) -> None:
        # Imports CUDA's backend of vLLM.
        from hotkv_vllm.residency import cuda_setup

        self.cuda = cuda_setup.install(
            config,
            self._config.representation_tokens,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self.centres,
        )
        self.cuda.arena_of = self._arena_of

    @hook(nothing, is_part=True)
    def opened(self) -> None:
        """Handles the opened session. On CUDA, makes the server's arena readable for the device
        now, before graphs are captured."""
        if self.cuda is not None and not self.cuda.map_arena():
            logger.warning(
                "hotkv: the device can't read the server's arena yet; the first request that "
                "needs it waits for that"
            )

    # ---------------------------------------------------------------------------------------- steps

    def will_write(self, blocks: Int32s) -> None:
        """Forgets the representations (compact forms of keys) of blocks that are about to be
        written."""
        if self.worker is not None:
            self.worker.will_write(blocks)

    def will_write_all(self) -> None:
        """Forgets all representations (compact forms of keys), because the whole KV memory is about
        to be discarded."""
        self.will_write(np.arange(self._kv_cache_config.num_blocks, dtype=np.int32))

    def begin_step(self, meta: HotKVMetadata) -> None:
        """Receives the scheduler's data about a step's rows and blocks."""
        rows = meta.sparse_rows or SparseRows()
        if self.cuda is not None:
            self.cuda.begin_resident(meta.resident or ResidentStep(), rows)
        if self.worker is not None:
            self.will_write(np.array(meta.allocated_blocks, np.int32))
            self._tell_reporter(meta)
            if isinstance(self.worker, ResidentWorker):
                self.worker.begin_resident(meta.resident or ResidentStep())
            self.worker.begin_step(rows)

    def find_lost(self, request_ids: Iterable[str]) -> set[str]:
        """Returns the requests among `request_ids` whose bytes in host memory were lost before this
        step, or before an earlier step, read them. Call this method after the step's last layer."""
        asked = set(request_ids)
        if asked and self.cuda is not None:
            self.cuda.find_lost()
            return {one for one in asked if self.cuda.sequences.is_lost(one)}
        if asked and isinstance(self.worker, ResidentWorker):
            self.worker.residents.find_lost()
            return {one for one in asked if self.worker.residents.is_lost(one)}
        return set()

    def take_lost(self) -> set[int]:
        """Returns the block id of the first block of each request whose bytes in host memory were
        lost."""
        if self.cuda is not None:
            return self.cuda.take_lost()
        worker = self.worker
        return worker.residents.take_lost() if isinstance(worker, ResidentWorker) else set()

    def lost_broke(self) -> set[int]:
        """Returns the block id of the first block of each request that has blocks in host memory
        only, because it is not known which bytes were lost."""
        if self.cuda is not None:
            return self.cuda.all_away()
        worker = self.worker
        return worker.residents.all_away() if isinstance(worker, ResidentWorker) else set()

    @hook(nothing, is_part=True)
    def _tell_reporter(self, meta: HotKVMetadata) -> None:
        if self.reporter is not None:
            self.reporter.before_step(meta.last_reports_of)

    def distrust(self) -> bool:
        """Forgets all representations (compact forms of keys), because it is not known which blocks
        a step overwrites.

        Returns False if the representations could not be forgotten; then sparse decode is off from
        now on."""
        if self.cuda is not None:
            self.cuda.start_over()
        if self.worker is None:
            return True
        try:
            self.worker.start_over()
        except Exception:  # noqa: BLE001 - hook edge: attention may use nothing that is stale
            self.worker.is_off = True
            self.edge.broke("start_over (sparse decode is off from now on)")
            return False
        return True

    @hook(nothing, is_part=True)
    def sparse_report(self, report: HotKVWorkerMetadata) -> None:
        """Adds the counts and selections since the last report."""
        worker = self.cuda if self.worker is None else self.worker
        if worker is not None:
            for name, value in worker.take_counters().items():
                report.count(name, value)
        told = None if self.reporter is None else self.reporter.after_step(time.monotonic())
        if told is not None:
            report.sparse = told if report.sparse is None else report.sparse.join(told)

    # -------------------------------------------------------------------------------------- builds

    def build(
        self,
        shared: SparseWorker,
        runs: tuple[BlockRun, ...],
        group_of: Callable[[int], int],
    ) -> tuple[BlockRun, ...] | None:
        """Builds, for a store, the representations (compact forms of keys) of the blocks in `runs`
        (consecutive blocks of a group). Returns the runs; None if the representations can't be
        built: the blocks are then stored without them. `group_of`: returns vLLM's group of a
        run."""
        try:
            for run in runs:
                shared.build(group_of(run.group_index), run.block_ids)
        except Exception:
            if not self._logged_build:
                self._logged_build = True
                logger.exception(
                    "hotkv: representations could not be built; their blocks are stored without "
                    "(said once)"
                )
            return None
        return runs
