"""Converts and checks fields that many messages have. `field` is the field's path, with which
the error begins."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from numpy.typing import ArrayLike, NDArray

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid

_INT32 = np.dtype("<i4")
MAX_IDENTIFIER = 256
MAX_LISTS = 1024
"""Runs, or lists of hashes, of a call. A run of a store takes about 0.1 ms of the event loop."""


def identifier(field: str, text: str) -> str:
    """Raises TOO_LARGE beyond MAX_IDENTIFIER characters."""
    if len(text) > MAX_IDENTIFIER:
        raise HotKVError(Reason.TOO_LARGE, f"{field} is longer than {MAX_IDENTIFIER} characters")
    return text


def name(field: str, text: str) -> str:
    """An identifier that may be logged. Raises INVALID_FIELD for characters that could fake a
    log line."""
    check_printable(field, text)
    return identifier(field, text)


def check_printable(field: str, text: str) -> None:
    if not text.isprintable():
        raise invalid(
            f"{field} is {text[:MAX_IDENTIFIER]!r}; only printable characters are allowed"
        )


def check_lists(field: str, messages: Sequence[object]) -> None:
    """Raises TOO_LARGE."""
    check_most(MAX_LISTS, len(messages), field + " has {} entries", ": join neighbours")


def seconds(field: str, milliseconds: int) -> float:
    """Raises INVALID_FIELD if negative."""
    if milliseconds < 0:
        raise invalid(
            f"{field} is {milliseconds}; durations are not negative, and 0 asks for the default"
        )
    return min(milliseconds, 1 << 40) / 1000


def whole_ms(duration_s: float) -> int:
    """Durations above 0 become at least 1, because 0 means unset."""
    return int(duration_s * 1000) or int(duration_s > 0)


def rate(field: str, value: float) -> float:
    """0 means unknown. Raises INVALID_FIELD if negative or not finite."""
    if not 0 <= value < math.inf:
        raise invalid(f"{field} is {value}; use a finite number from 0, 0 for unknown")
    return value


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


@cache
def enum_word(kind: EnumDescriptor, number: int) -> str:
    """The word that people see: "never stored" for BLOCK_VERDICT_NEVER_STORED. Raises KeyError
    for an unknown number."""
    names = kind.values_by_number
    prefix = str(names[0].name).removesuffix("UNSPECIFIED")
    word = str(names[number].name).removeprefix(prefix).removesuffix("UNSPECIFIED")
    return word.lower().replace("_", " ")
