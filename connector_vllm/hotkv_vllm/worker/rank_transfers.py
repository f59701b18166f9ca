"""Sends the transfers of one rank to the server.

What is always true: nothing is sent without a server, or while this rank holds other weights or
adapters than the scheduler's plans rest on. A transfer that could not be begun has failed.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hotkv_client.types import BlockRun, TransferResult
from hotkv_vllm import link
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.adapter_watch import AdapterWatch, watch_adapters
from hotkv_vllm.metadata import LoadJob, StoreJob
from hotkv_vllm.worker.device_order import Mark
from hotkv_vllm.worker.rank_loads import never_begun
from hotkv_vllm.worker.session import RankSession


class RankTransfers:
    """See the module. Owns the watch over the rank's adapters."""

    def __init__(self, vllm_config: Any, rank: RankSession, config: ConnectorConfig) -> None:
        self._vllm_config = vllm_config
        self._rank = rank
        self._config = config
        self.adapters = AdapterWatch(None, vllm_config.parallel_config.rank)

    def __repr__(self) -> str:
        return f"RankTransfers({'' if self.is_trusted else 'not '}trusted, {self.adapters})"

    def watch_adapters(self) -> None:
        """Watches the adapters of the vLLM worker that is registering its KV caches."""
        if not self.adapters.is_watching:
            self.adapters = watch_adapters(self._vllm_config)

    @property
    def is_trusted(self) -> bool:
        """Returns True if this rank holds what the scheduler's plans and the session's key space
        rest on."""
        weights = self._rank.weights
        return self.adapters.is_trusted and (weights is None or not weights.held)

    def name(self, transfer_id: str) -> str:
        """Names this rank's part of a transfer."""
        return f"{transfer_id}-k{self._rank.place.rank}"

    def load(self, job: LoadJob, mark: Mark) -> "Future[TransferResult]":
        """Begins a load behind the mark. Never raises."""
        runs = job.runs if self._rank.shared is None else (*job.runs, *job.representations)
        return self._begun(
            lambda session: session.load(
                self.name(job.transfer_id),
                job.lease_id,
                runs,
                job.timeout_s,
                mark.after,
                job.traceparent,
            )
        )

    def store(
        self, job: StoreJob, runs: tuple[BlockRun, ...], mark: Mark
    ) -> "Future[TransferResult]":
        """Begins a store of `runs` behind the mark. Never raises."""
        return self._begun(
            lambda session: session.store(
                self.name(job.lease_id),
                job.lease_id,
                runs,
                self._config.store_timeout_s,
                job.options,
                mark.after,
                job.fence_index,
            )
        )

    def cancel(self, transfer_id: str) -> None:
        """Asks the server to end a transfer; its future's end is the acknowledgement."""
        if self._rank.session is not None:
            self._rank.session.cancel(self.name(transfer_id))

    def _begun(
        self, begin: Callable[[link.CacheSession], "Future[TransferResult]"]
    ) -> "Future[TransferResult]":
        """The transfer's future; a failed one if it could not be begun."""
        if self._rank.session is None or not self._rank.session.connected:
            return never_begun("no server")
        if not self.is_trusted:
            return never_begun("weights or adapters have changed")
        try:
            return begin(self._rank.session)
        except Exception as error:  # noqa: BLE001 - hook edge: a transfer that was not begun has failed, whatever the cause
            return never_begun(f"{type(error).__name__}: {error}")
