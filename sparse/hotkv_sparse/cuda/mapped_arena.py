"""Makes the server's arena readable for CUDA kernels. The arena is host memory that this process
has mapped.

This module never writes to the arena. Always true: `MappedArena.addresses` returns an address for a
block only if the device may read the whole block. If memory must be registered with CUDA, this is
done piece by piece from the arena's start, and `close` unregisters the memory before the mapping is
dropped. There are three ways in which a device can read the arena:

- If this process has mapped the arena writable: the memory is registered with CUDA. The server
  provides writable mappings to the users in its setting `security.arena_writers`.
- If the device supports read-only registration: the memory is registered with CUDA as read-only.
  Many devices do not support this, and without it CUDA refuses to register a read-only mapping.
- If the device can read pageable memory (HMM, or a page table shared with the host, as on Grace):
  the memory is not registered.

Only bytes for which the system has already allocated memory are registered. Registering other bytes
would allocate their memory, and charge it to this process.
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
"""Flags of cudaHostRegister for a writable mapping: Portable and Mapped."""
REGISTER_FLAGS = WRITABLE_FLAGS | 8
"""Flags of cudaHostRegister for a read-only mapping: WRITABLE_FLAGS and ReadOnly."""
POLL_S = 0.05
MOST_POLLS = 600
"""While a part of a piece (the bytes that one call registers) has no memory yet, the piece is
checked every POLL_S seconds. If MOST_POLLS checks in a row find no more memory than before, the
part without memory, and all later pieces, are not registered."""
PAGEABLE_ACCESS, SAME_ADDRESS, READ_ONLY_REGISTER = 88, 91, 113
"""CUDA's numbers of the device attributes cudaDevAttrPageableMemoryAccess,
cudaDevAttrCanUseHostPointerForRegisteredMem and cudaDevAttrHostRegisterReadOnlySupported."""


class Access(enum.Enum):
    """The way in which a device reads the arena (the server's host memory with all blocks).

    registered: the memory is registered with CUDA.
    pageable: the device can read pageable memory, so that no memory is registered.
    """

    REGISTERED = "registered"
    PAGEABLE = "pageable"


class MappedArena:
    """The server's arena, mapped into this process and made readable for a device.

    `start` registers the memory with CUDA in the background; `wait` waits until all memory is
    registered. Call `wait` before a CUDA graph is captured, because CUDA may forbid registration
    during a capture.

    memory: uint8 [bytes], the mapping (`hotkv_client`'s `Session.arena().memory`). This object
        keeps a reference to it until `close`.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        device: int = 0,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        is_writable: bool = False,
        memory_end: Callable[[int], int] | None = None,
    ) -> None:
        """Chooses the way in which the device will read the memory (see the module). Raises
        HotKVError; its reason is NOT_ALLOWED if the device supports none of the ways.

        device: CUDA's number of the device.
        piece_bytes: bytes that a call registers with CUDA, a multiple of the page size.
        is_writable: whether the mapping of `memory` is writable.
        memory_end: the system may still be allocating the arena's memory, from its start on. Takes
            an offset, and returns the first offset from there on that has no memory yet. None: all
            memory is allocated.
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
        """Why the device can't read the arena beyond `readable_bytes`; empty if no error
        occurred."""
        self.readable_bytes = self.num_bytes if self.access is Access.PAGEABLE else 0
        """Number of bytes, from the arena's start, that the device may read. It only grows until
        `close`."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hotkv-register", daemon=True)

    def __repr__(self) -> str:
        state = f", {self.error}" if self.error else ""
        return (
            f"MappedArena({self.access.value}, {self.readable_bytes >> 20} of "
            f"{self.num_bytes >> 20} MiB{state})"
        )

    def start(self) -> None:
        """Starts to register the memory with CUDA, piece by piece, on a thread. Does nothing if the
        device can read the memory without registration (pageable memory)."""
        if self.access is Access.REGISTERED:
            self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the device can read the whole arena, or the registration has failed
        (`error`), or `timeout_s` has passed.

        Returns whether the device can read the whole arena.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self._memory is not None and self.readable_bytes == self.num_bytes

    def addresses(self, offsets: I64, slot_bytes: int) -> I64:
        """Returns the device addresses of slots (places of blocks in the arena), int64, for
        `Workspace.set_blocks`.

        An address is 0, which means "no copy" to `set_blocks`, if the offset is negative or the
        device can't read the slot yet. Raises HotKVError for slots outside the arena. The server
        reuses a slot after the block's lease has ended, so replace the addresses before the lease
        ends.

        offsets: int64, offsets of the slots in the arena (`LeaseGrant.offsets`).
        slot_bytes: size of each of these slots.
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
        """Waits for the device, unregisters all memory, and drops the mapping. Blocks the calling
        thread.

        After this call the caller must not queue steps that read the arena. During the call no
        CUDA graph may be captured.
        """
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
        """Waits until the system has allocated the memory of a piece (`count` bytes of the arena
        from offset `start` on), because only such memory may be registered with CUDA. Returns how
        many leading bytes of the piece have memory, in whole memory pages: fewer than `count` if no
        more memory is allocated, or if the registration is stopped."""
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
