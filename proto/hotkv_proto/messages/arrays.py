"""Packs arrays into fields of messages, and unpacks them. `field` is the field's path, with which
the error begins."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotkv_proto.errors import invalid

_INT32 = np.dtype("<i4")


def packed_int32s(values: ArrayLike) -> bytes:
    return np.ascontiguousarray(values, "<i4").tobytes()


def int32s(field: str, packed: bytes) -> NDArray[np.int64]:
    """Unpacks to int64. Raises INVALID_FIELD if the bytes are no multiple of 4."""
    if len(packed) % 4:
        raise invalid(f"{field} has {len(packed)} bytes; packed int32 take 4 each")
    return np.frombuffer(packed, _INT32).astype(np.int64)


def int64s(packed: bytes) -> NDArray[np.int64]:
    """Raises ValueError if the bytes are no multiple of 8."""
    return np.frombuffer(packed, "<i8").astype(np.int64)


def packed_float32s(values: NDArray[np.float32]) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()


def float32s(field: str, packed: bytes) -> NDArray[np.float32]:
    """Raises INVALID_FIELD if the bytes are no multiple of 4."""
    if len(packed) % 4:
        raise invalid(f"{field} has {len(packed)} bytes; packed float32 take 4 each")
    return np.frombuffer(packed, "<f4").astype(np.float32)
