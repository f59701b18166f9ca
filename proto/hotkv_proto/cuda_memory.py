"""Types of CUDA's virtual memory management, for ctypes.

A range of addresses has *backings*: pieces of device memory that CUDA maps side by side. Each is
shared by a POSIX descriptor; an interprocess handle of such memory does not exist.

Numbers and layouts: `cuda.h` of CUDA 13.0.
"""

import ctypes
from ctypes import c_int, c_ubyte, c_ushort, c_void_p

POSIX_DESCRIPTOR = 1
FABRIC = 8
"""Bits of `AllocationProperties.handle_types`: how the memory may be exported."""
ON_DEVICE = 1
READ_AND_WRITE = 3
PINNED = 1


class Location(ctypes.Structure):
    """CUmemLocation; all 0 is no hint."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte),
        ("is_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("access", c_int))
