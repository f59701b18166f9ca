"""Engine memory: mapped files and opened device allocations, from registration to the session's
end.

Always true: it is closed as a whole, once, and not before the last transfer that touches it has
ended; a registration that fails leaves nothing open. No transfer begins into a file with holes: the
kernel charges a page to the process that touches it first, so a client could make the server
allocate memory for it. Opening and closing block: never on the event loop.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.layout import Layout, MemoryHandle
from hotkv_proto.order import DeviceOrder
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.devices import Allocation, Devices
from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory.mapping import FileMapping, has_holes
from hotkv_server.node.order import SessionOrder, check_order, open_order

HUGE_PAGE_BUDGET_S = 1.0
"""Longest time that registration spends on huge pages. They make copies, and the engine's own work
on the memory, faster."""


@dataclass(slots=True)
class SessionMemory:
    """Registered memory of a session: its layout, and a region for each handle. `allocations`:
    (device, IPC handle) that are open for it."""

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

    @property
    def waits_for_devices(self) -> bool:
        """True if `close` waits for a device."""
        return bool(self.allocations) or self.order.marks is not None

    def is_whole(self) -> bool:
        """False if a file has been truncated since it was mapped."""
        return all(mapping.is_whole() for mapping in self.mappings.values())

    def check_use(
        self, block_ids: Sequence[NDArray[np.int64]], representations: Iterable[int]
    ) -> None:
        """Raises HotKVError unless these blocks can be transferred, and these representations, as
        the layout counts them."""
        for ids in block_ids:
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.layout.num_blocks):
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"runs.block_ids go beyond the {self.layout.num_blocks} blocks of the layout",
                )
        for group_index in representations:
            if not self.layout.covers(group_index):
                raise HotKVError(
                    Reason.INVALID_FIELD,
                    f"runs.group_index {group_index} is a representation that the layout has "
                    "no tensors of; register some",
                )
        for handle_id, mapping in self.mappings.items():
            if not mapping.is_whole():
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"handles: the file of {handle_id!r} has been truncated; register it again",
                )
            if mapping.has_holes():
                raise HotKVError(
                    Reason.INVALID_LAYOUT,
                    f"handles: memory of the file of {handle_id!r} was given back; register it "
                    "again",
                )

    def close(self) -> None:
        """Closes and unmaps everything. Blocks if it has memory of devices."""
        self.order.close()
        while self.allocations:
            self.devices.close_memory(*self.allocations.pop())
        for mapping in self.mappings.values():
            mapping.close()


def check_handles(layout: Layout, order: DeviceOrder, devices: Devices) -> None:
    """Raises HotKVError if the layout names a device that this server does not see, or the order
    contradicts itself."""
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
        raise HotKVError(Reason.INVALID_FIELD, f"order.{error}") from error


def _opened(
    devices: Devices, device: int, index: int, handle: MemoryHandle, tenant: str
) -> Allocation:
    """Opens the allocation of a layout's handle.

    Raises DeviceError that names the handle and what containers need, ValueError that names the
    field.
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
    """Raises ValueError if the handle states more bytes than the allocation has: copies beyond its
    end would lose the device."""
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
) -> SessionMemory:
    """Maps all files with their page tables and opens all allocations. Blocks. Raises
    INVALID_LAYOUT.

    Takes the descriptors over, also if it raises. `on_cut`: see FileMapping. `tenant`: owner of the
    memory.
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
            if has_holes(fds[handle.handle_id]):
                raise ValueError(
                    f"handles[{index}].file_mapping: parts of the file of {handle.handle_id!r} "
                    "have no memory yet; write or fallocate all of it before it is registered"
                )
            mapping = FileMapping(
                fds.pop(handle.handle_id), base + handle.num_bytes, handle.handle_id, on_cut=on_cut
            )
            memory.mappings[handle.handle_id] = mapping
            mapping.make_huge(0, HUGE_PAGE_BUDGET_S)
            mapping.populate()
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
