"""A live session (`LiveSession`): its engine's memory, its transfers, and its queue of notices to
the client."""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_proto.keys import MAX_GROUPS, KeySpace
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS, Layout, MemoryHandle
from hotkv_proto.order import DeviceOrder
from hotkv_server.cache.values import EvictionNotice, SessionRecord
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import Allocation, Devices
from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory.mapping import PIECE_BYTES, FileMapping, has_holes
from hotkv_server.node.names import DisplayNames
from hotkv_server.node.order import SessionOrder, check_order, open_order
from hotkv_server.security.identity import Peer

# `SessionMemory` is the engine's memory: mapped files and opened device allocations, from their
# registration to the session's end.
#
# Always true: the memory is closed as a whole, once, after the last transfer that touches it. A
# failed registration leaves no file or allocation open. No copy begins while a file has holes, for
# whose pages the server would pay. Opening and closing the memory block: never do it on the event
# loop.


HUGE_PAGE_BUDGET_S = 1.0
"""Longest time, in seconds, that a registration spends on turning the pages of one file into huge
pages. Huge pages speed up copies, and the engine's own work on the memory."""


@dataclass(slots=True)
class SessionMemory:
    """The memory that a session's engine has registered, from and to which blocks are copied. Its
    layout (the engine's description of the memory) lists memory handles: each stands for a file or
    a device allocation.

    mappings: the mapped file of each handle, by handle id.
    allocations: (device, IPC handle) of each open device allocation.
    regions: address range of each handle's memory in this process, by handle id.
    order: reads the session's marks. A mark is a point in the queue of the engine's device; a
        transfer that names a mark must not begin earlier.
    """

    layout: Layout
    devices: Devices
    mappings: dict[str, FileMapping] = field(default_factory=dict)
    allocations: list[tuple[int, bytes]] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    order: SessionOrder = field(default_factory=SessionOrder)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    @property
    def huge_bytes(self) -> int:
        return sum(mapping.huge_bytes for mapping in self.mappings.values())

    def is_whole(self) -> bool:
        """Returns False if a mapped file has been truncated since it was mapped."""
        return all(mapping.is_whole() for mapping in self.mappings.values())

    def check_use(self, block_ids: Sequence[NDArray[np.int64]], sketches: Iterable[int]) -> None:
        """Raises HotKVError if the layout does not have these blocks or sketches, or if a
        mapped file was truncated or is sparse.

        block_ids: block ids in the engine's memory, an array for each run (consecutive blocks of a
            group).
        sketches: group indexes of sketches (compact forms of keys, for sparse
            attention), as the layout numbers them.
        """
        for ids in block_ids:
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.layout.num_blocks):
                raise invalid(
                    f"runs.block_ids go beyond the {self.layout.num_blocks} blocks of the layout"
                )
        for group_index in sketches:
            if not self.layout.covers(group_index):
                raise invalid(
                    f"runs.group_index {group_index} is a sketch that the layout has "
                    "no tensors of; register some"
                )
        for handle_id, mapping in self.mappings.items():
            found = mapping.look()
            if not found.is_whole:
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"handles: the file of {handle_id!r} has been truncated; register it again",
                )
            if found.is_sparse:
                raise _given_back(handle_id)

    def changed(self) -> list[str]:
        """Returns the handles of the files of which pages may have been freed since `check_holes`
        last looked at them."""
        return [name for name, mapping in self.mappings.items() if not mapping.look().is_known]

    def check_holes(self, handle_ids: Iterable[str]) -> None:
        """Raises HotKVError if one of these files has a hole. Any thread; takes milliseconds for a
        GiB."""
        for handle_id in handle_ids:
            if self.mappings[handle_id].has_holes():
                raise _given_back(handle_id)

    def close(self) -> None:
        """Unmaps and closes all memory of the session. Blocks the calling thread: it may have to
        wait for a device (if device memory or marks are open) or for the kernel (if the engine has
        died)."""
        self.order.close()
        while self.allocations:
            self.devices.close_memory(*self.allocations.pop())
        for mapping in self.mappings.values():
            mapping.close()


def _given_back(handle_id: str) -> HotKVError:
    return HotKVError(
        Reason.INVALID_LAYOUT,
        f"handles: memory of the file of {handle_id!r} was given back; register it again",
    )


def check_handles(layout: Layout, order: DeviceOrder, devices: Devices) -> None:
    """Raises HotKVError if the layout names a device that this server does not see, or if `order`
    is not valid. `order`: how the engine sets marks. A mark is a point in the queue of the engine's
    device, for which a transfer can wait."""
    for index, handle in enumerate(layout.handles):
        if handle.is_cuda:
            try:
                devices.find(handle.device_uuid)
            except ValueError as error:
                raise HotKVError(
                    Reason.INVALID_LAYOUT, f"layout.handles[{index}].cuda_ipc: {error}"
                ) from error
    try:
        check_order(order, layout)
    except ValueError as error:
        raise invalid(f"order.{error}") from error


def _opened(
    devices: Devices, device: int, index: int, handle: MemoryHandle, tenant: str
) -> Allocation:
    """Opens the device allocation for which a memory handle stands, and returns it. `index`:
    position of the handle in the layout (the engine's description of its memory).

    Raises DeviceError if the allocation can't be opened; the message names the handle, and the
    settings that containers need. Raises ValueError if the memory lies on another device than
    `device`; the message names the field.
    """
    try:
        return devices.open_memory(device, handle.cuda_handle, tenant)
    except ValueError as error:
        raise ValueError(
            f"handles[{index}].cuda_ipc.device_uuid {error}; send the UUID of the device that "
            "the memory lies on"
        ) from error
    except DeviceError as error:
        raise DeviceError(
            f"{handle.handle_id!r} can't be opened: {error} (is the engine alive? In containers it "
            "needs the server's PID namespace, hostPID, and both the same GPUs)",
            is_lost=error.is_lost,
        ) from error


def _check_end(index: int, handle: MemoryHandle, allocation: Allocation) -> None:
    """Raises ValueError if the handle claims more bytes than its allocation has. A copy beyond the
    end of the allocation would make the device unusable for this process."""
    end = handle.base_offset_bytes + handle.num_bytes
    if allocation.num_bytes is not None and end > allocation.num_bytes:
        raise ValueError(
            f"handles[{index}].byte_count: {handle.handle_id!r} ends at byte {end}, beyond the "
            f"{allocation.num_bytes} bytes of its "
            "allocation; state where the memory lies in what CUDA allocated"
        )


def open_session_memory(
    layout: Layout,
    order: DeviceOrder,
    fds: dict[str, int],
    devices: Devices,
    on_cut: Callable[[], None],
    tenant: str = "",
    is_over: Callable[[], bool] = lambda: False,
) -> SessionMemory:
    """Maps all files of a layout (the description of an engine's memory), fills their page tables,
    and opens all device allocations of the layout. Blocks the calling thread. Raises INVALID_LAYOUT
    if a file or an allocation does not fit the layout or can't be opened.

    layout: the engine's memory, and the tensors in it.
    order: the marks that the engine offers, which are opened too. A mark is a point in the queue of
        the engine's device.
    fds: descriptors by handle id; closed here, also if the call raises.
    on_cut: called, in any thread, when the server finds that the client has truncated a file. The
        file's mapping is empty memory from then on (`FileMapping`).
    tenant: the tenant to whom the memory belongs.
    is_over: returns True once the session has ended; the call then raises UNKNOWN_SESSION soon.
    """
    memory = SessionMemory(layout, devices)
    try:
        for index, handle in enumerate(layout.handles):
            base, name = handle.base_offset_bytes, f"memory {handle.handle_id!r}"
            if handle.is_cuda:
                device = devices.find(handle.device_uuid)
                allocation = _opened(devices, device, index, handle, tenant)
                memory.allocations.append((device, handle.cuda_handle))
                _check_end(index, handle, allocation)
                memory.regions[handle.handle_id] = Region(
                    allocation.address + base, handle.num_bytes, name, device
                )
                continue
            if has_holes(fds[handle.handle_id], base + handle.num_bytes):
                raise ValueError(
                    f"handles[{index}].file_mapping: parts of the file of {handle.handle_id!r} "
                    "have no memory yet; write all of it before it is registered"
                )
            mapping = FileMapping(
                fds.pop(handle.handle_id), base + handle.num_bytes, handle.handle_id, on_cut=on_cut
            )
            memory.mappings[handle.handle_id] = mapping
            mapping.make_huge(0, HUGE_PAGE_BUDGET_S)
            for at in range(0, mapping.num_bytes, PIECE_BYTES):
                if is_over():
                    raise HotKVError(Reason.UNKNOWN_SESSION, "session_id was closed meanwhile")
                mapping.populate(at, min(PIECE_BYTES, mapping.num_bytes - at))
            memory.regions[handle.handle_id] = Region(
                mapping.address + base, handle.num_bytes, name
            )
        memory.order = open_order(order, devices, memory.mappings, memory.regions)
    except BaseException as error:
        memory.close()
        for fd in fds.values():
            os.close(fd)
        if isinstance(error, DeviceError | OSError | ValueError):
            field_name = "layout." if str(error).startswith("handles[") else "layout.handles: "
            raise HotKVError(Reason.INVALID_LAYOUT, f"{field_name}{error}") from error
        raise
    return memory


# A live session: its secret id, its memory, its transfers, and its queue of notices.
#
# Always true: the queue is bounded. If a client does not read its notices, its session is closed;
# other sessions never wait for it.


OUTBOX_MESSAGES = 4096


def unread() -> HotKVError:
    """Returns the error with which the server closes a session whose client does not read its
    notices (for example of evictions)."""
    return HotKVError(
        Reason.OVERLOADED, "the client does not read what it is sent; the session is closed"
    )


@dataclass(frozen=True, slots=True)
class Drain:
    """Notice to a session that the server drains: it refuses new work, and begins to stop when all
    transfers have ended, at the latest after `deadline_s` seconds."""

    deadline_s: float


Notice = EvictionNotice | Drain


@dataclass(slots=True, eq=False)
class LiveSession:
    """An open session.

    secret_id: any client that presents this id may make unary calls for the session, and pass
        descriptors for the session over the descriptor socket.
    notices: queue of notices to the client.
    jobs: copy jobs of the transfers in flight, by transfer id.
    settled: event that is set when a transfer or a read of the arena ends. A closing session waits
        for it.
    received_fds: descriptors that came over the descriptor socket and were not registered yet, by
        handle id.
    fence: mapped page by which the engine revokes stores; None if the client has sent no such page.
    on_end: function that ends the session's stream, given the reason.
    """

    record: SessionRecord
    secret_id: str
    key_space: KeySpace
    client_name: str
    """Name of the client's program, which is shown to operators."""
    names: DisplayNames
    peer: Peer | None = None
    """The proven identity of the client, which decides for which tenant the session may act; None
    if access is open to all."""
    notices: asyncio.Queue[Notice] = field(default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES))
    jobs: dict[str, CopyJob] = field(default_factory=dict)
    inflight_bytes: int = 0
    """Bytes of the transfers in flight."""
    num_reads: int = 0
    """Number of running selections (for sparse attention) and comparisons with checksums. They
    read slots of the arena that the session's leases pin."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    memory: SessionMemory | None = None
    """The engine's memory; None until it is registered."""
    received_fds: dict[str, int] = field(default_factory=dict)
    fence: FileMapping | None = None
    hears_evictions: bool = True
    """True if the session gets eviction notices."""
    closing: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """`closing`: True from the moment when the session begins to close. `closed`: set when it has
    released its memory and leases."""
    maps_arena: bool = True
    maps_table: bool = True
    knows_words: bool = False
    """These three fields say which things the server passes to the client over the session's link
    (the session's connection on the descriptor socket). `maps_arena`, `maps_table`: the descriptors
    of the arena and of the block table. `knows_words`: the position of the validity words, by which
    a client that reads blocks directly in the arena checks that they are still pinned."""
    knows_tiers: bool = False
    """True if the server may delay the answer to a lookup until a shared tier has answered."""
    takes_batches: bool = False
    """True if one message of the session's stream may carry several messages, in both
    directions."""
    close_link: Callable[[], None] | None = None
    """Function that closes the session's link (its connection on the descriptor socket); None
    without a link."""
    on_end: Callable[[HotKVError], None] | None = None
    loaded_bytes: int = 0
    stored_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    """Prefill speed of the session's engine, as the engine has measured it; 0 if unknown."""

    def __repr__(self) -> str:
        return (
            f"LiveSession({self.record.number}, {self.record.engine_id!r}, "
            f"{self.record.role}, {len(self.jobs)} transfers)"
        )

    @property
    def name(self) -> str:
        """The session's number and engine, for the log."""
        return f"session={self.record.number} engine={self.engine_name}"

    @property
    def engine_name(self) -> str:
        """The name by which the session's engine is shown to people."""
        return self.names.engine(self.record.engine_id)

    @property
    def model_name(self) -> str:
        """The name by which the session's model is shown to people."""
        return self.names.model_of(self.key_space, self.record.engine_id)

    @property
    def has_arena(self) -> bool:
        """True if the client has received the arena's descriptor over the session's link
        (connection on the descriptor socket)."""
        return self.maps_arena and self.close_link is not None

    def group_index(self, named: int) -> int:
        """Converts `named`, the number by which the client names a KV cache group, to the number by
        which the server stores the group's blocks. In the client's numbering, the key space's
        groups come first. The kinds of sketches (compact forms of keys, for sparse
        attention) that the session declared follow.

        Raises INVALID_FIELD for a number that is negative or too high.
        """
        num_groups, kinds = len(self.key_space.groups), self.record.sketches
        if 0 <= named < num_groups:
            return named
        if not 0 <= named - num_groups < len(kinds):
            raise invalid(
                f"group_index is {named}; this key space has {num_groups} groups and the "
                f"session declares {len(kinds)} sketches"
            )
        return kinds[named - num_groups]

    def named(self, group_index: int) -> int:
        """Converts the number by which the server stores a group's blocks to the number by which
        the client names the group. This is the inverse of the method `group_index`."""
        if group_index < MAX_GROUPS:
            return group_index
        return len(self.key_space.groups) + self.record.sketches.index(group_index)

    def notify(self, notice: Notice) -> None:
        """Queues a notice to the client, for example of evictions. Ends the session if the queue is
        full."""
        try:
            self.notices.put_nowait(notice)
        except asyncio.QueueFull:
            self.end(unread())

    def end(self, why: HotKVError) -> None:
        """Ends the session's stream with the error `why`, which closes the session."""
        if self.on_end is not None:
            self.on_end(why)

    def receive(self, handle_id: str, fd: int) -> None:
        """Stores a file descriptor that came over the descriptor socket. If it is the descriptor of
        the fence (the page by which the engine revokes stores), maps the file. From here on the
        session owns the descriptor, even if this method raises.

        Raises DUPLICATE_ID if `handle_id` already has a descriptor, ValueError if the fence's file
        is too short, OSError if it can't be mapped.
        """
        if handle_id in self.received_fds or (handle_id == FENCE_HANDLE and self.fence is not None):
            os.close(fd)
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"handle_ids: a descriptor for {handle_id!r} has come before; open another session",
            )
        if handle_id == FENCE_HANDLE:
            self.fence = FileMapping(fd, FENCE_WORDS * 4, handle_id, on_cut=self.cancel_transfers)
        else:
            self.received_fds[handle_id] = fd

    def take_files(self, handle_ids: Sequence[str]) -> dict[str, int]:
        """Returns the received file descriptors of these memory handles; the caller then owns the
        descriptors. If a descriptor is missing, raises UNKNOWN_HANDLE, and the session still owns
        all descriptors."""
        for handle_id in handle_ids:
            if handle_id not in self.received_fds:
                raise HotKVError(
                    Reason.UNKNOWN_HANDLE,
                    f"layout.handles: no descriptor for {handle_id!r} has come over the descriptor "
                    "socket",
                )
        return {handle_id: self.received_fds.pop(handle_id) for handle_id in handle_ids}

    def forget(self, handle_ids: Sequence[str]) -> None:
        """Closes the received descriptors of these memory handles, because the link (connection on
        the descriptor socket) over which the descriptors came has failed."""
        for handle_id in handle_ids:
            if handle_id == FENCE_HANDLE and self.fence is not None:
                self.fence.close()
                self.fence = None
            elif handle_id in self.received_fds:
                os.close(self.received_fds.pop(handle_id))

    def cancel_transfers(self) -> None:
        """Cancels all transfers of the session. May be called from any thread."""
        for job in list(self.jobs.values()):
            job.cancel()

    def check_fence(self, fence_index: int) -> None:
        """Checks that the engine can revoke a store with the word `fence_index` of the fence page
        (the page that engine and server share). Raises INVALID_FIELD if the index is too high, or
        if the session has no whole fence page. Accepts 0, for a store that is never revoked."""
        if not 0 <= fence_index < FENCE_WORDS:
            raise invalid(
                f"fence_index is {fence_index}; allowed are 0 (for none) to {FENCE_WORDS - 1}"
            )
        if fence_index and self.fence is None:
            raise invalid(
                f"fence_index is {fence_index}, but this session has linked no fence, so that the "
                f"store could not be revoked; send the page's descriptor as {FENCE_HANDLE!r} with "
                "the link, or 0 for a store that is never revoked"
            )
        if fence_index and self.fence is not None and not self.fence.is_whole():
            raise invalid(
                f"fence_index is {fence_index}, but the file of the fence is shorter than its "
                f"{FENCE_WORDS * 4} bytes by now; open another session with a whole one"
            )

    def is_revoked(self, fence_index: int) -> bool:
        """Returns True if the engine has revoked a store. `fence_index`: number of the store's word
        in the fence page, which engine and server share. Returns True also if the page is missing
        or truncated, because the engine then could not revoke the store.

        Called after the copy and before the blocks become ready, so that bytes which the engine may
        have overwritten are dropped.
        """
        if not fence_index:
            return False
        if self.fence is None or not self.fence.is_whole():
            return True
        word = ctypes.c_uint32.from_address(self.fence.address + 4 * fence_index).value
        # If the client has just truncated the page, the word reads as 0, as if the store were not
        # revoked. So check once more that the page is whole.
        return word != 0 or not self.fence.is_whole()

    def release_memory(self) -> None:
        """Unmaps the session's memory and its fence page (by which the engine revokes stores).
        Closes descriptors that were never registered, and the session's link (connection on the
        descriptor socket).

        Blocks the calling thread if the session has memory or such descriptors. A second call does
        nothing.
        """
        # Clear the attributes before closing their objects, because a registration on the event
        # loop may read them meanwhile.
        memory, self.memory = self.memory, None
        fence, self.fence = self.fence, None
        fds, self.received_fds = self.received_fds, {}
        if memory is not None:
            memory.close()
        if fence is not None:
            fence.close()
        for fd in fds.values():
            os.close(fd)
        if self.close_link is not None:
            self.close_link()
            self.close_link = None
