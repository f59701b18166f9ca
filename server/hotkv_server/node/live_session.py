"""A live session: its engine's memory, its transfers, and its queue of notices to the client."""

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid
from hotkv_proto.keys import MAX_GROUPS, KeySpace
from hotkv_proto.layout import (
    DONE_FLAG,
    END_WORDS,
    ENDS_HANDLE,
    FENCE_HANDLE,
    FENCE_WORDS,
    MAX_BACKINGS,
    Layout,
    MemoryHandle,
)
from hotkv_proto.order import DeviceOrder
from hotkv_server.cache.values import EvictionNotice, SessionRecord
from hotkv_server.dataplane.engines import CopyJob
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import Allocation, Devices, MappedRange
from hotkv_server.device.runtime import DeviceError
from hotkv_server.logs import Pairs
from hotkv_server.memory.mapping import PIECE_BYTES, FileMapping, has_holes
from hotkv_server.node.names import DisplayNames
from hotkv_server.node.order import SessionOrder, check_order, open_order
from hotkv_server.security.identity import Peer

# The engine's memory, from registration to the session's end.
#
# Always true: it is closed as a whole, once, after the last transfer. A failed registration
# leaves nothing open. No copy begins while a file has holes, for whose pages the server would
# pay. Opening and closing block.


HUGE_PAGE_BUDGET_S = 1.0
"""For making one file's pages huge at registration, which speeds up copies and the engine's own
work."""


@dataclass(slots=True)
class SessionMemory:
    """Each handle of the layout is a file, a device allocation or a range of a device.

    mappings, regions: by handle id. `words` is the mapping of marks, which transfers do not copy.
    allocations: (device, IPC handle) of each that is open.
    """

    layout: Layout
    devices: Devices
    mappings: dict[str, FileMapping] = field(default_factory=dict)
    allocations: list[tuple[int, bytes]] = field(default_factory=list)
    ranges: list[MappedRange] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    order: SessionOrder = field(default_factory=SessionOrder)
    words: FileMapping | None = None
    is_prompt: bool = False
    """An access to its files waits for nothing."""

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    @property
    def huge_bytes(self) -> int:
        return sum(mapping.huge_bytes for mapping in self.mappings.values())

    @property
    def pool(self) -> Executor | None:
        """On whose thread to close it; None: any."""
        return self.devices.pool(self.used_devices)

    @property
    def used_devices(self) -> set[int]:
        """Numbers."""
        return {device for device, _ in self.allocations} | {one.device for one in self.ranges}

    def is_whole(self) -> bool:
        """False if a mapped file has been truncated."""
        return all(mapping.is_whole() for mapping in self.mappings.values())

    def check_use(
        self, block_ids: Sequence[NDArray[np.int64]], sketches: Iterable[int]
    ) -> list[str]:
        """Files of which pages may have been freed since the last `check_holes`. Raises HotKVError
        if the layout lacks these, or a mapped file was truncated or is sparse.

        block_ids: in the engine's memory, an array for each run.
        sketches: group indexes, as the layout numbers them.
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
        changed = []
        for handle_id, mapping in self.mappings.items():
            found = mapping.look()
            if not found.is_whole:
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"handles: the file of {handle_id!r} has been truncated; register it again",
                )
            if found.is_sparse:
                raise _given_back(handle_id)
            if not found.is_known:
                changed.append(handle_id)
        return changed

    def check_holes(self, handle_ids: Iterable[str]) -> None:
        """Raises HotKVError for a hole. Any thread; takes milliseconds for a GiB."""
        for handle_id in handle_ids:
            if self.mappings[handle_id].has_holes():
                raise _given_back(handle_id)

    def close(self) -> None:
        """Blocks: waits for a device, or for the kernel if the engine has died."""
        self.order.close()
        while self.allocations:
            self.devices.close_memory(*self.allocations.pop())
        while self.ranges:
            self.devices.unmap_range(self.ranges.pop())
        for mapping in self.mappings.values():
            mapping.close()
        if self.words is not None:
            self.words.close()


def _given_back(handle_id: str) -> HotKVError:
    return HotKVError(
        Reason.INVALID_LAYOUT,
        f"handles: memory of the file of {handle_id!r} was given back; register it again",
    )


def check_handles(layout: Layout, order: DeviceOrder, devices: Devices, engine: str = "") -> None:
    """Raises HotKVError if this server does not see a device of the layout, or can't use it, or
    the offer of marks is not valid."""
    for index, handle in enumerate(layout.handles):
        if handle.is_cuda:
            try:
                devices.find(handle.device_uuid, engine)
            except ValueError as error:
                source = "cuda_range" if handle.backings else "cuda_ipc"
                raise HotKVError(
                    Reason.INVALID_LAYOUT, f"layout.handles[{index}].{source}: {error}"
                ) from error
    try:
        check_order(order, layout)
    except ValueError as error:
        raise invalid(f"order.{error}") from error


def _opened(
    devices: Devices, device: int, index: int, handle: MemoryHandle, tenant: str
) -> Allocation:
    """Raises DeviceError, whose message names the settings that containers need; ValueError if
    the memory lies on another device."""
    try:
        return devices.open_memory(device, handle.cuda_handle, tenant)
    except ValueError as error:
        raise ValueError(
            f"handles[{index}].cuda_ipc.device_uuid {error}; send the UUID of the device that "
            "the memory lies on"
        ) from error
    except DeviceError as error:
        raise DeviceError(
            f"{handle.handle_id!r} can't be opened: {error} (is the engine alive? In containers "
            "both need the same GPUs, and may need one PID namespace: hostPID)",
            is_lost=error.is_lost,
        ) from error


def _mapped(
    devices: Devices, device: int, index: int, handle: MemoryHandle, backings: dict[str, int]
) -> MappedRange:
    """Raises as `_opened`."""
    try:
        return devices.map_range(
            device, [(backings[one.backing_id], one.num_bytes) for one in handle.backings]
        )
    except ValueError as error:
        raise ValueError(
            f"handles[{index}].cuda_range.device_uuid {error}; send the UUID of the device that "
            "the memory lies on"
        ) from error
    except DeviceError as error:
        raise DeviceError(
            f"{handle.handle_id!r} can't be mapped: {error}; send the descriptors that "
            "cuMemExportToShareableHandle gives, with all bytes of each "
            "(handles.cuda_range.backings)",
            is_lost=error.is_lost,
        ) from error


def _check_end(index: int, handle: MemoryHandle, allocation: Allocation) -> None:
    """Raises ValueError: a copy beyond its end would make the device unusable for this process."""
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
    backings: dict[str, int] | None = None,
) -> SessionMemory:
    """Maps a layout's files, fills their page tables, opens device allocations, maps ranges of
    devices, and opens the offered marks. Blocks. Raises INVALID_LAYOUT.

    fds: by handle id; closed here, also if this raises.
    backings: descriptors by the backing's id, likewise.
    on_cut: called in any thread when the client has truncated a file (`FileMapping`).
    is_over: True once the session has ended; then raises UNKNOWN_SESSION.
    """
    memory = SessionMemory(layout, devices)
    try:
        for index, handle in enumerate(layout.handles):
            base, name = handle.base_offset_bytes, f"memory {handle.handle_id!r}"
            if handle.backings:
                device = devices.find(handle.device_uuid)
                mapped = _mapped(devices, device, index, handle, backings or {})
                memory.ranges.append(mapped)
                memory.regions[handle.handle_id] = Region(
                    mapped.address + base, handle.num_bytes, name, device
                )
                continue
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
        if all(tensor.handle_id != order.flags_handle_id for tensor in layout.tensors):
            memory.words = memory.mappings.pop(order.flags_handle_id, None)
        memory.is_prompt = all(mapping.is_in_memory for mapping in memory.mappings.values())
    except BaseException as error:
        memory.close()
        for fd in fds.values():
            os.close(fd)
        if isinstance(error, DeviceError | OSError | ValueError):
            field_name = "layout." if str(error).startswith("handles[") else "layout.handles: "
            raise HotKVError(Reason.INVALID_LAYOUT, f"{field_name}{error}") from error
        raise
    finally:
        for fd in (backings or {}).values():
            os.close(fd)
    return memory


# A live session's queue of notices is bounded. A client that does not read them loses its
# session; others never wait for it.


OUTBOX_MESSAGES = 4096
PAGES = {FENCE_HANDLE: FENCE_WORDS * 4, ENDS_HANDLE: END_WORDS * 8}
"""Bytes of the pages of words."""


def unread() -> HotKVError:
    return HotKVError(
        Reason.OVERLOADED, "the client does not read what it is sent; the session is closed"
    )


@dataclass(frozen=True, slots=True)
class Drain:
    """The server drains, and stops at the latest after `deadline_s`."""

    deadline_s: float


Notice = EvictionNotice | Drain


@dataclass(slots=True, eq=False)
class LiveSession:
    """A scheduler's or a rank's connection.

    secret_id: lets any client call for the session, or pass it descriptors.
    jobs: copies in flight, by transfer id.
    settled: set when a transfer or a read of the arena ends; closing waits for it.
    received_fds: not registered yet, by handle id.
    received_backings: likewise, of device memory, by the backing's id.
    pages: the client's pages of words, by handle id, as far as it sent them: its fence, by which
        it revokes stores, and its page of ends, which says early what is done.
    """

    record: SessionRecord
    secret_id: str
    key_space: KeySpace
    client_name: str
    names: DisplayNames
    peer: Peer | None = None
    """Decides for which tenants the client may act; None if access is open to all."""
    notices: asyncio.Queue[Notice] = field(default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES))
    jobs: dict[str, CopyJob] = field(default_factory=dict)
    inflight_bytes: int = 0
    """Of all transfers in flight."""
    num_reads: int = 0
    """Running selections and checksum comparisons, of slots that leases pin."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    memory: SessionMemory | None = None
    received_fds: dict[str, int] = field(default_factory=dict)
    pages: dict[str, FileMapping] = field(default_factory=dict)
    received_backings: dict[str, int] = field(default_factory=dict)
    wants_evictions: bool = True
    closing: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """A `closing` session has released its memory and leases."""
    maps_arena: bool = True
    maps_table: bool = True
    knows_words: bool = False
    """What the client gets over its link: descriptors of arena and block table, place of the
    validity words."""
    knows_tiers: bool = False
    """Answers to its lookups may wait for a shared store."""
    close_link: Callable[[], None] | None = None
    """Closes the session's connection on the descriptor socket; None without one."""
    on_end: Callable[[HotKVError], None] | None = None
    loaded_bytes: int = 0
    stored_bytes: int = 0
    prefill_tokens_per_s: float = 0.0
    """As the engine has measured it; 0 if unknown."""

    def __repr__(self) -> str:
        return (
            f"LiveSession({self.record.number}, {self.record.engine_id!r}, "
            f"{self.record.role}, {len(self.jobs)} transfers)"
        )

    @property
    def name(self) -> str:
        return Pairs({"session": self.record.number, "engine": self.engine_name})

    @property
    def engine_name(self) -> str:
        return self.names.engine(self.record.engine_id)

    @property
    def model_name(self) -> str:
        return self.names.model_of(self.key_space, self.record.engine_id)

    @property
    def has_arena(self) -> bool:
        """True if the client has received the arena's descriptor."""
        return self.maps_arena and self.close_link is not None

    def group_index(self, named: int) -> int:
        """A client's number of a group as the server's. Clients count the key space's groups,
        then the session's kinds of sketches. Raises INVALID_FIELD."""
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
        """The inverse of `group_index`."""
        if group_index < MAX_GROUPS:
            return group_index
        return len(self.key_space.groups) + self.record.sketches.index(group_index)

    def notify(self, notice: Notice) -> None:
        """Ends the session if its queue of notices is full."""
        try:
            self.notices.put_nowait(notice)
        except asyncio.QueueFull:
            self.end(unread())

    def end(self, why: HotKVError) -> None:
        if self.on_end is not None:
            self.on_end(why)

    def receive(self, handle_id: str, fd: int) -> None:
        """Takes a descriptor from the descriptor socket, and maps it if it is a page of words. Owns
        it even if this raises: DUPLICATE_ID, ValueError for a short page, OSError."""
        if handle_id in self.received_fds or handle_id in self.pages:
            os.close(fd)
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"handle_ids: a descriptor for {handle_id!r} has come before; open another session",
            )
        if num_bytes := PAGES.get(handle_id):
            mapping = FileMapping(fd, num_bytes, handle_id, on_cut=self.cancel_transfers)
            self.pages[handle_id] = mapping
        else:
            self.received_fds[handle_id] = fd

    def receive_backings(self, fds: dict[str, int]) -> None:
        """Takes descriptors of device memory, by id; owns none if it raises: DUPLICATE_ID,
        TOO_LARGE, or INVALID_FIELD once the session is linked."""
        if self.close_link is not None:
            raise invalid("backing_ids come before the link; open another session for other memory")
        if twice := self.received_backings.keys() & fds.keys():
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"backing_ids: a descriptor for {min(twice)!r} has come before; send each once",
            )
        check_most(
            MAX_BACKINGS, len(self.received_backings) + len(fds), "backing_ids and those before: {}"
        )
        self.received_backings.update(fds)

    def take_descriptors(
        self, handle_ids: Sequence[str], backing_ids: Sequence[str]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Of files and of backings, by id. The caller then owns them. If one is missing, raises
        UNKNOWN_HANDLE; if a backing is left over, INVALID_LAYOUT. The session then keeps all."""
        asked = ((handle_ids, self.received_fds), (backing_ids, self.received_backings))
        for ids, received in asked:
            for one in ids:
                if one not in received:
                    raise HotKVError(
                        Reason.UNKNOWN_HANDLE,
                        f"layout.handles: no descriptor for {one!r} has come over the descriptor "
                        "socket",
                    )
        if left_over := self.received_backings.keys() - set(backing_ids):
            raise HotKVError(
                Reason.INVALID_LAYOUT,
                f"layout.handles: no cuda_range names {min(left_over)!r}, whose descriptor has "
                f"come ({len(left_over)} such); send only those that are mapped",
            )
        files, backings = ({one: received.pop(one) for one in ids} for ids, received in asked)
        return files, backings

    def forget(self, handle_ids: Sequence[str]) -> None:
        """Their link has failed."""
        for handle_id in handle_ids:
            if handle_id in self.pages:
                self.pages.pop(handle_id).close()
            elif handle_id in self.received_fds:
                os.close(self.received_fds.pop(handle_id))

    def cancel_transfers(self) -> None:
        """Any thread."""
        for job in list(self.jobs.values()):
            job.cancel()

    def check_fence(self, fence_index: int) -> None:
        """Raises INVALID_FIELD if the engine could not revoke a store with this word. 0: none."""
        if not 0 <= fence_index < FENCE_WORDS:
            raise invalid(
                f"fence_index is {fence_index}; allowed are 0 (for none) to {FENCE_WORDS - 1}"
            )
        fence = self.pages.get(FENCE_HANDLE)
        if fence_index and fence is None:
            raise invalid(
                f"fence_index is {fence_index}, but this session has linked no fence, so that the "
                f"store could not be revoked; send the page's descriptor as {FENCE_HANDLE!r} with "
                "the link, or 0 for a store that is never revoked"
            )
        if fence_index and fence is not None and not fence.is_whole():
            raise invalid(
                f"fence_index is {fence_index}, but the file of the fence is shorter than its "
                f"{FENCE_WORDS * 4} bytes by now; open another session with a whole one"
            )

    def is_revoked(self, fence_index: int) -> bool:
        """True if the store's word is set, or the fence page is missing or truncated. Called
        between the copy and the blocks becoming ready. 0: no word."""
        if not fence_index:
            return False
        fence = self.pages.get(FENCE_HANDLE)
        if fence is None or not fence.is_whole():
            return True
        word = ctypes.c_uint32.from_address(fence.address + 4 * fence_index).value
        # A page that was just truncated reads as 0, so check once more.
        return word != 0 or not fence.is_whole()

    def check_end(self, end_index: int) -> None:
        """Raises INVALID_FIELD if the session has no such word. 0: none."""
        if not 0 <= end_index < END_WORDS:
            raise invalid(f"end_index is {end_index}; allowed are 0 (for none) to {END_WORDS - 1}")
        if end_index and ENDS_HANDLE not in self.pages:
            raise invalid(
                f"end_index is {end_index}, but this session has linked no page of ends; send the "
                f"page's descriptor as {ENDS_HANDLE!r} with the link, or 0"
            )

    def tell_done(self, end_index: int, num_bytes: int) -> bool:
        """Writes a transfer's word; False without one."""
        page = self.pages.get(ENDS_HANDLE)
        if not end_index or page is None:
            return False
        word = ctypes.c_uint64.from_address(page.address + 8 * end_index)
        word.value = DONE_FLAG + num_bytes
        return True

    def release_memory(self) -> None:
        """Unmaps memory and pages, closes unregistered descriptors and the link. May block.
        A second call does nothing."""
        # A registration on the event loop may read these meanwhile, so clear them first.
        memory, self.memory = self.memory, None
        pages, self.pages = self.pages, {}
        fds = [*self.received_fds.values(), *self.received_backings.values()]
        self.received_fds, self.received_backings = {}, {}
        if memory is not None:
            memory.close()
        for page in pages.values():
            page.close()
        for fd in fds:
            os.close(fd)
        if self.close_link is not None:
            self.close_link()
            self.close_link = None
