"""Makes the mapped arena readable for CUDA kernels; never writes to it.

Always true: `addresses` names only blocks that the device may read whole. A device reads the arena
in one of three ways:

- a writable mapping (for users in `security.arena_writers`) is registered with CUDA;
- a read-only one is, if the device supports that, which many don't;
- nothing is registered if the device reads pageable memory (HMM, or Grace's shared page table).

Registration goes piece by piece from the start, and only over memory that the system has
allocated: otherwise it would allocate it and charge it to this process. `close` unregisters
before the mapping is dropped.
"""

import enum
import logging
import mmap
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.cuda.device import cupy_module

log = logging.getLogger(__name__)

I64 = npt.NDArray[np.int64]

DEFAULT_PIECE_BYTES = 1 << 30
WRITABLE_FLAGS = 1 | 2
"""Of cudaHostRegister: Portable and Mapped."""
REGISTER_FLAGS = WRITABLE_FLAGS | 8
"""ReadOnly too."""
POLL_S = 0.05
MOST_POLLS = 600
"""After so many polls without more memory, the rest of the arena stays unregistered."""
PAGEABLE_ACCESS, SAME_ADDRESS, READ_ONLY_REGISTER = 88, 91, 113
"""cudaDevAttrPageableMemoryAccess, cudaDevAttrCanUseHostPointerForRegisteredMem,
cudaDevAttrHostRegisterReadOnlySupported."""


class Access(enum.Enum):
    """How the device reads the arena."""

    REGISTERED = "registered"
    PAGEABLE = "pageable"


class MappedArena:
    """`start` registers in the background, `wait` waits for it. Wait before a CUDA graph is
    captured: CUDA may forbid registration meanwhile.

    memory: uint8 [bytes], the mapping (`hotkv_client`'s `Session.arena().memory`); kept until
        `close`.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        device: int = 0,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        is_writable: bool = False,
        memory_end: Callable[[int], int] | None = None,
    ) -> None:
        """Raises HotKVError; NOT_ALLOWED if the device supports none of the ways.

        piece_bytes: of one registration; a multiple of the page size.
        memory_end: from an offset to the first one at or behind it that has no memory yet. None:
            all is allocated.
        """
        self._memory_end = memory_end
        self._cupy = cupy_module()
        self._memory: npt.NDArray[np.uint8] | None = memory
        self._device, self._piece_bytes = device, piece_bytes
        self.address, self.num_bytes = int(memory.ctypes.data), int(memory.size)
        if (
            piece_bytes < 1
            or piece_bytes % mmap.PAGESIZE
            or self.address % mmap.PAGESIZE
            or not memory.flags.c_contiguous
        ):
            why = f"memory is at {self.address:#x}, piece_bytes is {piece_bytes}"
            raise HotKVError(
                Reason.INVALID_FIELD,
                f"{why}; pass a whole mapping, and a positive multiple of {mmap.PAGESIZE}",
            )
        self._flags = WRITABLE_FLAGS if is_writable else REGISTER_FLAGS
        self.access = self._find_access(is_writable)
        self.error = ""
        """Why the device reads no further than `readable_bytes`; empty: no error."""
        self.readable_bytes = self.num_bytes if self.access is Access.PAGEABLE else 0
        """From the start; only grows until `close`."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotkv-register", daemon=True)

    def __repr__(self) -> str:
        state = f", {self.error}" if self.error else ""
        return (
            f"MappedArena({self.access.value}, {self.readable_bytes >> 20} of "
            f"{self.num_bytes >> 20} MiB{state})"
        )

    def start(self) -> None:
        """Does nothing if the device reads pageable memory."""
        if self.access is Access.REGISTERED:
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all is readable, registration has failed, or `timeout_s` has passed;
        returns whether all is readable."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self._memory is not None and self.readable_bytes == self.num_bytes

    def addresses(self, offsets: I64, slot_bytes: int) -> I64:
        """Device addresses of slots, int64, for `Workspace.set_blocks`; 0 ("no copy") if the offset
        is negative or not readable yet. Raises HotKVError for slots outside the arena. Replace them
        before the block's lease ends, after which the server reuses the slot.

        offsets: int64 (`LeaseGrant.offsets`).
        """
        if slot_bytes < 1 or np.any(offsets > self.num_bytes - slot_bytes):
            why = f"slots of {slot_bytes} bytes at offsets up to {int(offsets.max(initial=0))}"
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"offsets name {why}, the arena has {self.num_bytes}; pass what its own lease "
                    "granted"
                ),
            )
        is_readable = (offsets >= 0) & (offsets <= self.readable_bytes - slot_bytes)
        return np.where(is_readable, offsets + self.address, 0).astype(np.int64)

    def close(self) -> None:
        """Waits for the device, unregisters all and drops the mapping. Blocks. No CUDA graph may
        be captured meanwhile, and no steps that read the arena queued afterwards."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._memory is None:
            return
        pieces, self.readable_bytes = range(0, self.readable_bytes, self._piece_bytes), 0
        with self._cupy.cuda.Device(self._device) as device:
            device.synchronize()
            for start in pieces if self.access is Access.REGISTERED else ():
                try:
                    self._cupy.cuda.runtime.hostUnregister(self.address + start)
                except self._cupy.cuda.runtime.CUDARuntimeError as error:
                    log.warning("arena not unregistered at=%d: %s", start, error)
        self._memory = None

    def _find_access(self, is_writable: bool) -> Access:
        runtime = self._cupy.cuda.runtime
        if (
            is_writable or runtime.deviceGetAttribute(READ_ONLY_REGISTER, self._device)
        ) and runtime.deviceGetAttribute(SAME_ADDRESS, self._device):
            return Access.REGISTERED
        if runtime.deviceGetAttribute(PAGEABLE_ACCESS, self._device):
            return Access.PAGEABLE
        raise HotKVError(
            Reason.NOT_ALLOWED,
            f"device {self._device} can neither register read-only memory nor read pageable "
            "memory; add this process's user to the server's security.arena_writers, let the "
            "server load blocks (Session.load), or give the host HMM: NVIDIA's open kernel "
            "modules, and Linux 6.1.24 or newer",
        )

    def _work(self) -> None:
        runtime = self._cupy.cuda.runtime
        try:
            with self._cupy.cuda.Device(self._device):
                while self.readable_bytes < self.num_bytes and not self._stop.is_set():
                    start = self.readable_bytes
                    count = min(self._piece_bytes, self.num_bytes - start)
                    held = self._await_memory(start, count)
                    if held:
                        runtime.hostRegister(
                            self.address + start,
                            -(-held // mmap.PAGESIZE) * mmap.PAGESIZE,
                            self._flags,
                        )
                        self.readable_bytes = start + held
                    if held < count:
                        break
        except runtime.CUDARuntimeError as error:
            self.error = (
                f"{error}; is there enough free memory, and may this process lock as "
                "much (ulimit -l unlimited)?"
            )
            log.warning(
                "arena not registered beyond bytes=%d of=%d: %s",
                self.readable_bytes,
                self.num_bytes,
                self.error,
            )

    def _await_memory(self, start: int, count: int) -> int:
        """Waits for the memory of a piece. Returns how many bytes of it may be registered, in
        whole pages: less than `count` if no more comes, or at a stop."""
        end, num_polls = start, 0
        while self._memory_end is not None and end < start + count:
            reached = self._memory_end(end)
            num_polls = 0 if reached > end else num_polls + 1
            end = reached
            if num_polls == MOST_POLLS:
                self.error = (
                    "the server brings no more memory in: memory is short, or its arena.prefault "
                    "and arena.pin are off"
                )
                log.warning("arena not registered beyond bytes=%d: %s", end, self.error)
            if self.error or (num_polls and self._stop.wait(POLL_S)):
                return (min(end, start + count) - start) // mmap.PAGESIZE * mmap.PAGESIZE
        return count
