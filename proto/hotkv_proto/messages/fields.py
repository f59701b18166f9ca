"""Converts and checks fields that many messages have: ids and names, durations, rates, packed
numbers, enums.

In all functions `field` is the path of the field in its message. The error for a wrong value begins
with this path.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from google.protobuf.descriptor import EnumDescriptor
from numpy.typing import ArrayLike, NDArray

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid

MAX_IDENTIFIER = 256
MAX_LISTS = 1024
"""Largest number of runs (consecutive blocks of a group), or of lists of hashes, in a call. To
process a run of a store takes about 0.1 ms of the server's event loop."""


def identifier(field: str, text: str) -> str:
    """Returns an id or name unchanged. Raises TOO_LARGE if it has more than MAX_IDENTIFIER
    characters: the server stores it and repeats it in messages. `field`: path of the field, for the
    error."""
    if len(text) > MAX_IDENTIFIER:
        raise HotKVError(Reason.TOO_LARGE, f"{field} is longer than {MAX_IDENTIFIER} characters")
    return text


def name(field: str, text: str) -> str:
    """Returns an identifier unchanged, after checking that it may be logged. Raises TOO_LARGE if it
    is too long. Raises INVALID_FIELD if it has characters that can't be printed, because such
    characters could fake a log line. `field`: path of the field, for the error."""
    check_printable(field, text)
    return identifier(field, text)


def check_printable(field: str, text: str) -> None:
    """Raises INVALID_FIELD if a text has characters that can't be printed."""
    if not text.isprintable():
        raise invalid(
            f"{field} is {text[:MAX_IDENTIFIER]!r}; only printable characters are allowed"
        )


def check_lists(field: str, messages: Sequence[object]) -> None:
    """Raises TOO_LARGE for more than MAX_LISTS entries."""
    check_most(MAX_LISTS, len(messages), field + " has {} entries", ": join neighbours")


def seconds(field: str, milliseconds: int) -> float:
    """Converts the milliseconds of a message's field to seconds. Raises INVALID_FIELD if they are
    negative. `field`: path of the field, for the error."""
    if milliseconds < 0:
        raise invalid(
            f"{field} is {milliseconds}; durations are not negative, and 0 asks for the default"
        )
    return min(milliseconds, 1 << 40) / 1000


def whole_ms(duration_s: float) -> int:
    """Converts a duration to whole milliseconds. A duration above 0 becomes at least 1, because 0
    means unset."""
    return int(duration_s * 1000) or int(duration_s > 0)


def rate(field: str, value: float) -> float:
    """Returns a rate per second (`value`) unchanged; 0 means unknown. Raises INVALID_FIELD if it is
    negative or not finite. `field`: path of the field, for the error."""
    if not 0 <= value < math.inf:
        raise invalid(f"{field} is {value}; use a finite number from 0, 0 for unknown")
    return value


def packed_int32s(values: ArrayLike) -> bytes:
    """Packs integers as little-endian int32."""
    return np.ascontiguousarray(values, "<i4").tobytes()


def int32s(field: str, packed: bytes) -> NDArray[np.int64]:
    """Unpacks bytes with little-endian int32 to an int64 array. Raises INVALID_FIELD if the number
    of bytes is not a multiple of 4. `field`: path of the field, for the error."""
    if len(packed) % 4:
        raise invalid(f"{field} has {len(packed)} bytes; packed int32 take 4 each")
    return np.frombuffer(packed, "<i4").astype(np.int64)


def int64s(packed: bytes) -> NDArray[np.int64]:
    """Unpacks bytes with little-endian int64 to an array. Raises ValueError if the number of bytes
    is not a multiple of 8."""
    return np.frombuffer(packed, "<i8").astype(np.int64)


def packed_float32s(values: NDArray[np.float32]) -> bytes:
    """Packs numbers as little-endian float32."""
    return np.ascontiguousarray(values, "<f4").tobytes()


def float32s(field: str, packed: bytes) -> NDArray[np.float32]:
    """Unpacks bytes with little-endian float32 to an array. Raises INVALID_FIELD if the number of
    bytes is not a multiple of 4. `field`: path of the field, for the error."""
    if len(packed) % 4:
        raise invalid(f"{field} has {len(packed)} bytes; packed float32 take 4 each")
    return np.frombuffer(packed, "<f4").astype(np.float32)


@cache
def enum_word(kind: EnumDescriptor, number: int) -> str:
    """Returns the words that people see for a number of an enum: "never stored" for
    BLOCK_VERDICT_NEVER_STORED, empty for the unspecified value. Raises KeyError for an unknown
    number."""
    names = kind.values_by_number
    prefix = str(names[0].name).removesuffix("UNSPECIFIED")
    word = str(names[number].name).removeprefix(prefix).removesuffix("UNSPECIFIED")
    return word.lower().replace("_", " ")
