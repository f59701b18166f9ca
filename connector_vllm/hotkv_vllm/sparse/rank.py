"""Connects the connector's worker side to sparse decode in a rank: installs sparse decode in the
engine's layers, and passes the scheduler's message about each step to the sparse worker (the object
that chooses, in each layer, the blocks to which a request attends).

Always true: attention never uses a sketch (compact form of a block's keys, by which blocks
are chosen) that is older than the block's keys. If it is not known which blocks a step writes, all
sketches are discarded. If discarding them raises, sparse decode is turned off. If other code
of this module raises, requests attend to their whole context, or blocks are stored without
sketches.
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
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import HotKVMetadata, StepReport
from hotkv_vllm.residency.cuda_worker import CudaWorker
from hotkv_vllm.residency.step import ResidentStep
from hotkv_vllm.residency.worker import ResidentWorker
from hotkv_vllm.sparse.reporter import SparseReporter
from hotkv_vllm.sparse.rows import SparseRows
from hotkv_vllm.sparse.setup import install
from hotkv_vllm.sparse.worker import SparseWorker

logger = link.logger


class SparseRank:
    """Sparse decode in one rank (worker process): owns the *sparse worker*, the object that chooses
    in each layer the blocks to which a decoding request attends. Passes the scheduler's message
    about each step to it, and collects its reports for the scheduler. Does nothing without the
    setting `hotkv.sparse`, or until `install_sparse` has found layers that can attend sparsely.

    centres: the model's mean keys, from which sketches (compact forms of blocks' keys) are
        computed; None without them.
    edge: measures the callbacks (methods that vLLM calls), and records their exceptions.
    worker: the sparse worker of a CPU engine; None without sparse decode or before
        `install_sparse`.
    cuda: the sparse worker of a CUDA engine. There sparse decode works only together with residency
        (old blocks of long contexts only in host memory). None in other engines.
    reporter: collects which blocks `worker` has chosen, and its counters, for the scheduler; None
        without `worker`.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ConnectorConfig,
        centres: Centres | None,
        edge: CallbackEdge,
        arena_of: Callable[[], Arena | None] = lambda: None,
    ) -> None:
        """Creates the object without a sparse worker; `install_sparse` creates the worker.

        arena_of: a function that returns the server's arena, mapped into this process, or None
            without a server. Residency reads blocks from it.
        """
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
        """Returns the layers that may attend sparsely, each as (layer number, number of its vLLM
        group). Empty on CUDA."""
        layers = self.worker.layers.values() if self.worker is not None else ()
        return tuple((layer.index, layer.group) for layer in layers)

    @callback(nothing, is_part=True)
    def install_sparse(self, kv_caches: Mapping[str, Any]) -> None:
        """Installs sparse attention in the engine's layers, if the settings ask for it. If the
        engine does not support it, logs a warning and leaves the layers unchanged.

        kv_caches: the tensor of each layer, by layer name.
        """
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
        """Returns True if the settings ask for residency (old blocks of long contexts only in host
        memory), but it could not be installed. hotkv must then be off in this rank, because its
        layers can't attend to blocks that the scheduler has freed on the device."""
        return self._is_resident and self.worker is None and self.cuda is None

    def _install_cuda(self, config: SparseConfig, kv_caches: Mapping[str, Any]) -> None:
        # `cuda_setup` is imported only for CUDA, because it imports vLLM's backend for CUDA.
        from hotkv_vllm.residency import cuda_setup

        self.cuda = cuda_setup.install(
            config,
            self._config.sketch_tokens,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self.centres,
        )
        self.cuda.arena_of = self._arena_of

    @callback(nothing, is_part=True)
    def opened(self) -> None:
        """Makes the server's arena readable for a CUDA device. Called when the rank's session has
        been opened, before vLLM captures graphs: during a capture CUDA may refuse to register
        memory."""
        if self.cuda is not None and not self.cuda.map_arena():
            logger.warning(
                "hotkv: the device can't read the server's arena yet; the first request that "
                "needs it waits for that"
            )

    # ---------------------------------------------------------------------------------------- steps

    def will_write(self, blocks: Int32s) -> None:
        """Discards the sketches (compact forms of keys) of the blocks with these ids,
        because these blocks are about to be written."""
        if self.worker is not None:
            self.worker.will_write(blocks)

    def will_write_all(self) -> None:
        """Discards all sketches (compact forms of keys), because vLLM is about to discard
        the KV memory."""
        self.will_write(np.arange(self._kv_cache_config.num_blocks, dtype=np.int32))

    def begin_step(self, meta: HotKVMetadata) -> None:
        """Passes the scheduler's message about a step to the sparse worker, before the step writes
        blocks."""
        rows = meta.sparse_rows or SparseRows()
        if self.cuda is not None:
            self.cuda.begin_resident(meta.resident or ResidentStep(), rows)
        if self.worker is not None:
            self.will_write(np.array(meta.allocated_blocks, np.int32))
            self._tell_reporter(meta)
            self.worker.begin_step(rows)
            if isinstance(self.worker, ResidentWorker):
                self.worker.begin_resident(meta.resident or ResidentStep())

    def find_lost(self, request_ids: Iterable[str]) -> set[str]:
        """Returns those of `request_ids` whose KV may be wrong. One cause: a step has read blocks
        in the server's memory, and the server no longer pinned them. Called after a step's last
        layer. Returns an empty set in an engine without residency (old blocks only in host
        memory)."""
        asked = set(request_ids)
        if asked and self.cuda is not None:
            self.cuda.find_lost()
            return {one for one in asked if self.cuda.sequences.is_lost(one)}
        if asked and isinstance(self.worker, ResidentWorker):
            self.worker.residents.find_lost()
            return {one for one in asked if self.worker.residents.is_lost(one)}
        return set()

    def take_lost(self) -> set[int]:
        """Returns the requests that have lost blocks in host memory since the last call, so that
        vLLM must compute them anew. Each request is given as the id of its first device block.
        Empty without residency (old blocks only in host memory)."""
        if self.cuda is not None:
            return self.cuda.take_lost()
        worker = self.worker
        return worker.residents.take_lost() if isinstance(worker, ResidentWorker) else set()

    def lost_broke(self) -> set[int]:
        """Returns all requests that have blocks only in host memory, each as the id of its first
        device block. Used if `take_lost` raised: all these requests then count as lost, and vLLM
        computes them anew."""
        if self.cuda is not None:
            return self.cuda.all_away()
        worker = self.worker
        return worker.residents.all_away() if isinstance(worker, ResidentWorker) else set()

    @callback(nothing, is_part=True)
    def _tell_reporter(self, meta: HotKVMetadata) -> None:
        if self.reporter is not None:
            self.reporter.before_step(meta.last_reports_of)

    def distrust(self) -> bool:
        """Handles a step without a message from the scheduler, so that it is not known which blocks
        the step overwrites: discards all sketches (compact forms of keys). Returns False if
        this has raised; sparse decode is then turned off for good."""
        if self.cuda is not None:
            self.cuda.start_over()
        if self.worker is None:
            return True
        try:
            self.worker.start_over()
        except Exception:  # noqa: BLE001 - callback edge: attention may use nothing that is stale
            self.worker.is_off = True
            self.edge.broke("start_over (sparse decode is off from now on)")
            return False
        return True

    @callback(nothing, is_part=True)
    def sparse_report(self, report: StepReport) -> None:
        """Adds to `report` the growth of counters since the last report, and which blocks were
        chosen."""
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
        """Builds the missing sketches (compact forms of keys) of blocks before a store
        copies them to the server. Returns `runs`, or None if building has raised: the blocks are
        then stored without sketches.

        shared: the sparse worker whose sketches are stored.
        runs: the sketches that the store contains, as runs of consecutive blocks.
        group_of: takes the group index of a run, and returns vLLM's number of the KV cache group.
        """
        try:
            for run in runs:
                shared.build(group_of(run.group_index), run.block_ids)
        except Exception:
            if not self._logged_build:
                self._logged_build = True
                logger.exception(
                    "hotkv: sketches could not be built; their blocks are stored without "
                    "(said once)"
                )
            return None
        return runs
