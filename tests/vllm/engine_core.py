"""Pause, sleep and reset of vLLM's own `EngineCore`, simulated.

`Executor` calls the connector as GPU workers of vLLM 0.33 (`v1/worker/gpu_worker.py`) do. CPU
workers and 0.32 call nothing.
"""

from typing import Any

import torch
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from tests.vllm.other_connectors import our_connector


class Executor:
    """Sleep and wake-up leave garbage: vLLM maps other memory."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_sleeping = False

    def collective_rpc(self, method: str) -> None:
        assert method == "synchronize_device"
        if self._engine.device is not None:
            self._engine.device.run_to(self._engine.device.given)

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any]]:
        """vLLM 0.33 calls it after a wake-up."""
        return [{rank: handshake} for rank, handshake in self._engine.handshakes().items()]

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def sleep(self, level: int) -> None:
        for worker in self._engine.each_worker():
            our_connector(worker).unregister_kv_caches()
        self._garble()
        self.is_sleeping = True

    def discard(self, tags: tuple[str, ...]) -> None:
        self.sleep(1)

    def wake_up(self, tags: list[str] | None) -> None:
        self._garble()
        if tags is None or "kv_cache" in tags:
            for worker in self._engine.each_worker():
                our_connector(worker).restore_kv_caches()
        self.is_sleeping = False

    def _garble(self) -> None:
        for tensors, _ in self._engine.memories:
            for memory in tensors.values():
                memory.view(torch.int16).numpy()[:] = 0x5A5A


class Core:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.core = EngineCore.__new__(EngineCore)
        self.core.scheduler = engine.scheduler
        self.core.model_executor = Executor(engine)
        self.core.mm_receiver_cache = None
        self.core.batch_queue = None

    def pause(self, mode: str = "abort") -> None:
        self._drained(mode)
        self.core.pause_scheduler(mode=mode)

    def sleep(self, mode: str = "abort") -> None:
        self._drained(mode)
        self.core.sleep(1, mode=mode)

    def wake_up(self) -> None:
        self.core.wake_up()
        # So does vLLM 0.33.
        self.engine.connector.set_xfer_handshake_metadata_pp_aware(self.engine.handshakes())

    def _drained(self, mode: str) -> None:
        """Runs until idle, as vLLM's engine process does before a reset."""
        if mode == "abort":
            self.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        while self.engine.queue:
            self.engine._collect()
