"""Converts and checks fields that many messages have. `field` is the field's path, with which
the error begins."""

import math
from collections.abc import Sequence
from functools import cache

from google.protobuf.descriptor import EnumDescriptor

from hotkv_proto.errors import HotKVError, Reason, check_most, invalid

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


@cache
def enum_word(kind: EnumDescriptor, number: int) -> str:
    """The word that people see: "never stored" for BLOCK_VERDICT_NEVER_STORED. Raises KeyError
    for an unknown number."""
    names = kind.values_by_number
    prefix = str(names[0].name).removesuffix("UNSPECIFIED")
    word = str(names[number].name).removeprefix(prefix).removesuffix("UNSPECIFIED")
    return word.lower().replace("_", " ")
