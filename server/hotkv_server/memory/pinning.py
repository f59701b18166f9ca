"""Pins the arena for devices: a thread registers it with CUDA piece by piece, from its start.

Always true: the first `pinned_bytes` are registered, and only grow until `shrink` or `close`. If
CUDA refuses a piece, the thread ends, and `error` names the permission that may be missing. Bytes
that are not pinned are copied too, but slowly.
"""

import logging
import mmap
import threading
import time
from collections.abc import Callable

from hotkv_proto import limits
from hotkv_server.device.runtime import DeviceError, DeviceRuntime

log = logging.getLogger(__name__)


class ArenaPinner:
    """piece_bytes: a multiple of the page size.
    error: why pinning ended early.
    took_s: so far.
    prepare: called with (start, num_bytes) before a part is pinned, for example to make huge
        pages: pinned pages can't be moved.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        address: int,
        num_bytes: int,
        piece_bytes: int,
        prepare: Callable[[int, int], None] | None = None,
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % mmap.PAGESIZE or address % mmap.PAGESIZE:
            raise ValueError(
                f"piece_bytes is {piece_bytes}; it must be a positive multiple of "
                f"{mmap.PAGESIZE}, as the address must"
            )
        self.address = address
        self.num_bytes = num_bytes
        self.piece_bytes = piece_bytes
        self.error = ""
        self.took_s = 0.0
        self.unpinned_bytes = 0
        """Bytes of the pieces that `close` has unregistered so far, or tried to; the last piece
        counts whole."""
        self._runtime = runtime
        self._prepare = prepare
        self.pinned_bytes = 0
        # First bytes of the registered pieces: after a resize they differ in length.
        self._pieces: list[int] = []
        self._new_thread()

    def __repr__(self) -> str:
        return (
            f"ArenaPinner({self.pinned_bytes >> 20} of {self.num_bytes >> 20} "
            f"MiB{', ' + self.error if self.error else ''})"
        )

    @property
    def is_done(self) -> bool:
        return self.pinned_bytes >= self.num_bytes

    def is_alive(self) -> bool:
        """False if the thread has died, but not because all is pinned, of `error`, or of
        `close`."""
        return (
            self.is_done
            or bool(self.error)
            or self._stop.is_set()
            or self._thread.ident is None
            or self._thread.is_alive()
        )

    def pin_next(self) -> None:
        """Blocks. Raises DeviceError."""
        start = self.pinned_bytes
        count = min(self.piece_bytes, self.num_bytes - start)
        if self._prepare is not None:
            self._prepare(start, count)
        self._runtime.register(self.address + start, -(-count // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._pieces.append(start)
        self.pinned_bytes = start + count

    def grow(self, num_bytes: int) -> None:
        """Pins the arena's new end too, in the background. Blocks until the present piece is
        pinned."""
        self._halt()
        self.num_bytes = num_bytes
        if not self.error:
            self.start()

    def shrink(self, num_bytes: int) -> int:
        """Unregisters pieces that lie wholly behind. Returns the end of those that stay: their
        memory must not be given back. Blocks."""
        self._halt()
        self.num_bytes = num_bytes
        while self._pieces and self._pieces[-1] >= num_bytes:
            try:
                self._runtime.unregister(self.address + self._pieces[-1])
            except DeviceError as error:
                log.warning("arena not unpinned at=%d: %s", self._pieces[-1], error)
                break
            self.pinned_bytes = self._pieces.pop()
        if not self.error:
            self.start()
        return max(num_bytes, self.pinned_bytes)

    def _new_thread(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotkv-pin", daemon=True)

    def _halt(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._new_thread()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Unregisters all pieces. Blocks. The copy engines must be closed."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        pieces, self._pieces, self.pinned_bytes = self._pieces, [], 0
        for start in pieces:
            try:
                self._runtime.unregister(self.address + start)
            except DeviceError as error:
                log.warning("arena not unpinned at=%d: %s", start, error)
            self.unpinned_bytes = start + self.piece_bytes

    def _work(self) -> None:
        started_s = time.monotonic()
        try:
            while not self.is_done and not self._stop.is_set():
                self.pin_next()
                self.took_s = time.monotonic() - started_s
        except (DeviceError, OSError) as error:
            self.error = refusal(error, self.num_bytes)
            log.warning(
                "arena not pinned beyond bytes=%d of=%d: %s",
                self.pinned_bytes,
                self.num_bytes,
                self.error,
            )
        else:
            log.info("arena pinned bytes=%d took_s=%.1f", self.pinned_bytes, self.took_s)


def refusal(error: Exception, num_bytes: int) -> str:
    """Why pinning failed and which permission to grant, for people."""
    granted = limits.memlock_bytes()
    if granted < num_bytes:
        return (
            f"{error}; is there enough free memory? Locked memory is limited to {granted} bytes, "
            "which not all drivers count: grant "
            "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (Docker), or raise the "
            "container runtime's own limit (Kubernetes)"
        )
    return (
        f"{error}; is there enough free memory, and may this process use the device "
        "(/dev/nvidia*, CAP_IPC_LOCK in containers)?"
    )
