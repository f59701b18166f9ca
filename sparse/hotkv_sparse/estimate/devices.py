"""Devices as the arithmetic of memory needs them: a name, and how much memory it has."""

import dataclasses
import os
from dataclasses import dataclass

from hotkv_sparse.estimate.figures import check_count, refuse

GIB = 1 << 30
HERE = "here"


@dataclass(frozen=True, slots=True)
class Device:
    """One device. `source`: where `memory_bytes` is from. INVALID_FIELD if that makes no sense."""

    name: str
    source: str
    memory_bytes: int

    def __post_init__(self) -> None:
        check_count("device.memory_bytes", self.memory_bytes)

    def with_memory(self, memory_bytes: int) -> "Device":
        """The device with other memory."""
        source = f"{self.source}; memory as given"
        return dataclasses.replace(self, source=source, memory_bytes=memory_bytes)


# Memory is what nvidia-smi shows, not the name's decimal gigabytes.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40g", "NVIDIA A100 data sheet, SXM4", 40 * GIB),
        Device("a100-80g", "NVIDIA A100 data sheet, SXM4", 80 * GIB),
        # No data sheet of NVIDIA's has it. RFC #37263 does.
        Device("a100-96g", "the device of RFC #37263: 96 decimal GB", 96 * 10**9),
        Device("h100", "NVIDIA H100 data sheet, SXM5", 81559 << 20),
        Device("h200", "NVIDIA H200 data sheet, SXM5", 143771 << 20),
        Device("b200", "NVIDIA HGX B200 data sheet", 183359 << 20),
        Device("l40s", "NVIDIA L40S data sheet", 46068 << 20),
        Device("gh200", "NVIDIA GH200 data sheet: 96 GB of HBM3", 97871 << 20),
    )
}


def device_named(name: str) -> Device:
    """The table's device, or this machine for HERE; otherwise INVALID_FIELD."""
    if name == HERE:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(HERE, "this machine's own memory", memory_bytes)
    if name not in DEVICES:
        raise refuse("device", name, f"use one of {', '.join(DEVICES)}, or {HERE}: this machine")
    return DEVICES[name]
