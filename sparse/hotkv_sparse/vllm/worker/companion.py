"""`SparseRank`: what the connector's worker side asks about sparse decode and residency.

Always true: attention never uses a sketch that is older than the block's keys. If it is not
known which blocks a step writes, all are discarded; if that raises, sparse decode is turned off.
If other code here raises, requests attend to their whole context, or blocks are stored without
sketches.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hotkv_client.arena import Arena
from hotkv_client.types import BlockRun, Int32s
from hotkv_proto.keys import KeySpace
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres
from hotkv_sparse.vllm.cpu.resident_worker import ResidentWorker
from hotkv_sparse.vllm.cpu.setup import install
from hotkv_sparse.vllm.cpu.shared import HANDLE, shared_pool
from hotkv_sparse.vllm.cpu.worker import SparseWorker
from hotkv_sparse.vllm.cuda.worker import CudaWorker
from hotkv_sparse.vllm.settings import SparseSettings
from hotkv_sparse.vllm.step import SparseStep
from hotkv_sparse.vllm.worker.reporter import SparseReporter
from hotkv_vllm import link
from hotkv_vllm.callbacks import CallbackEdge, callback, nothing
from hotkv_vllm.companion import Attachment
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.metadata import HotKVMetadata, StepReport
from hotkv_vllm.worker.layout import ExportedMemory

logger = link.logger


class SparseRank:
    """Owns the *sparse worker*, which chooses the blocks to attend to. Does nothing until
    `register` has found layers.

    worker: of a CPU engine.
    cuda: of a CUDA engine, where sparse decode needs residency.
    reporter: None without `worker`.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: SparseSettings,
        centres: Centres | None,
        edge: CallbackEdge,
        arena_of: Callable[[], Arena | None],
    ) -> None:
        """arena_of: the mapped arena, for residency; None without a server."""
        self.edge = edge
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._arena_of = arena_of
        self._logged_build = False
        self._num_faults = 0
        # vLLM's group by the session's group of attachments.
        self._attached: dict[int, int] = {}
        self.centres = centres
        self.worker: SparseWorker | None = None
        self.cuda: CudaWorker | None = None
        self.reporter: SparseReporter | None = None

    def __repr__(self) -> str:
        return f"SparseRank({self.worker or self.cuda})"

    @property
    def note(self) -> tuple[tuple[int, int], ...]:
        """(layer number, vLLM's group) of each layer that may attend sparsely; empty on CUDA."""
        layers = self.worker.layers.values() if self.worker is not None else ()
        return tuple((layer.index, layer.group) for layer in layers)

    def register(self, kv_caches: Mapping[str, Any]) -> str:
        self._install(kv_caches)
        if self._config.is_resident and self.worker is None and self.cuda is None:
            # The scheduler would free blocks on the device that these layers need.
            return "its layers can't attend to blocks in host memory; see its log"
        return ""

    @callback(nothing, is_part=True, safe="The layers attend to all tokens.")
    def _install(self, kv_caches: Mapping[str, Any]) -> None:
        """Logs a warning and leaves the layers unchanged if the engine does not support it."""
        try:
            if self._vllm_config.device_config.device_type == "cuda":
                self._install_cuda(self._config.sparse, kv_caches)
                return
            self.worker = install(
                self._config.sparse,
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

    def _install_cuda(self, config: SparseConfig, kv_caches: Mapping[str, Any]) -> None:
        # It imports vLLM's backend for CUDA.
        from hotkv_sparse.vllm.cuda import setup as cuda_setup

        self.cuda = cuda_setup.install(
            config,
            self._config.sketch_tokens,
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            self.centres,
        )
        self.cuda.arena_of = self._arena_of

    @callback(
        nothing,
        is_part=True,
        safe="The first request that needs the arena makes it readable for the device.",
    )
    def opened(self) -> None:
        """Lets a CUDA device read the arena, before vLLM captures graphs: during a capture CUDA
        may refuse to register memory."""
        if self.cuda is not None and not self.cuda.map_arena():
            logger.warning(
                "hotkv: the device can't read the server's arena yet; the first request that "
                "needs it waits for that"
            )

    # ---------------------------------------------------------------------------------------- steps

    def will_write(self, blocks: Int32s) -> None:
        """Discards the sketches of these blocks."""
        if self.worker is not None:
            self.worker.will_write(blocks)

    def begin_step(self, meta: HotKVMetadata) -> None:
        step: SparseStep = meta.companion or SparseStep()
        if self.cuda is not None:
            self.cuda.begin_resident(step.resident, step.rows)
        if self.worker is not None:
            self.will_write(np.array(meta.allocated_blocks, np.int32))
            self._tell_reporter(step.last_reports_of)
            self.worker.begin_step(step.rows)
            if isinstance(self.worker, ResidentWorker):
                self.worker.begin_resident(step.resident)

    def find_lost(self, request_ids: Iterable[str]) -> set[str]:
        """Those of `request_ids` whose KV may be wrong, for example because a step has read
        blocks that were no longer pinned. Called after a step's last layer. Empty without
        residency."""
        asked = set(request_ids)
        if asked and self.cuda is not None:
            self.cuda.find_lost()
            return {one for one in asked if self.cuda.sequences.is_lost(one)}
        if asked and isinstance(self.worker, ResidentWorker):
            self.worker.residents.find_lost()
            return {one for one in asked if self.worker.residents.is_lost(one)}
        return set()

    def take_lost(self) -> set[int]:
        """First blocks of the requests that vLLM must compute anew, since the last call. Empty
        without residency."""
        if self.cuda is not None:
            return self.cuda.take_lost()
        worker = self.worker
        return worker.residents.take_lost() if isinstance(worker, ResidentWorker) else set()

    def lost_broke(self) -> set[int]:
        """First blocks of all requests with blocks only in host memory, because `take_lost` has
        raised."""
        if self.cuda is not None:
            return self.cuda.all_away()
        worker = self.worker
        return worker.residents.all_away() if isinstance(worker, ResidentWorker) else set()

    @callback(
        nothing,
        is_part=True,
        safe=(
            "The server does not count the selections that are not reported. This has no other "
            "effect."
        ),
    )
    def _tell_reporter(self, last_reports_of: tuple[str, ...]) -> None:
        if self.reporter is not None:
            self.reporter.before_step(last_reports_of)

    def distrust(self) -> bool:
        """Discards all sketches, because it is not known which blocks the step overwrites. False if
        that

        raised: sparse decode is then off for good.
        """
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

    @callback(
        nothing, is_part=True, safe="Selections and counters are reported later, or not at all."
    )
    def add_report(self, report: StepReport) -> None:
        if self._num_faults:
            report.count("sparse_faults", self._num_faults)
            self._num_faults = 0
        worker = self.cuda if self.worker is None else self.worker
        if worker is not None:
            for name, value in worker.take_counters().items():
                report.count(name, value)
        told = None if self.reporter is None else self.reporter.after_step(time.monotonic())
        if told is not None:
            earlier = report.companion
            report.companion = told if earlier is None else earlier.join(told)

    # --------------------------------------------------------------------------------- attachments

    def attach(
        self,
        memory: ExportedMemory,
        space: KeySpace,
        groups: Sequence[CacheGroup],
        num_shards: int,
    ) -> tuple[ExportedMemory, tuple[Attachment, ...]] | None:
        """One kind per group with sparse layers. None on CUDA, or with a warning if the sketches
        can't be shared."""
        if self.worker is None:
            return None
        layers = list(self.worker.layers.values())
        num_groups = len(space.groups)
        try:
            pool = shared_pool(self.worker.sketches, layers, groups, num_shards, self.centres)
            both = pool.beside(memory, num_groups)
            kinds = {num_groups + place: kind for place, kind in enumerate(pool.kinds)}
            try:
                both.layout.validate(space.groups, kinds)
            except ValueError:
                os.close(both.fds[HANDLE])
                raise
        except (Unsupported, OSError, ValueError) as error:
            logger.warning("hotkv: sketches are built in this engine and not shared: %s", error)
            return None
        self._attached = {
            index: groups[kind.group_index].vllm_group for index, kind in kinds.items()
        }
        return both, pool.kinds

    def build(self, runs: Sequence[BlockRun]) -> bool:
        """Builds missing sketches."""
        assert self.worker is not None, "a rank without sketches attaches none"
        try:
            for run in runs:
                self.worker.build(self._attached[run.group_index], run.block_ids)
        except Exception:
            self._num_faults += 1
            if not self._logged_build:
                self._logged_build = True
                logger.exception(
                    "hotkv: sketches could not be built; their blocks are stored without "
                    "(said once)"
                )
            return False
        return True

    def loaded(self, group_index: int, block_ids: Int32s) -> None:
        assert self.worker is not None, "a rank without sketches attaches none"
        self.worker.loaded(self._attached[group_index], block_ids)
