"""Splits what is too large for one message, and joins the answers.

Always true: a part has at most PART_BYTES of hashes or of messages, so it fits a message with all
that stands beside them; parts are in the order of the whole.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from hotkv_client.types import BoolMask, GroupHashes
from hotkv_proto.versions import MAX_MESSAGE_BYTES

PART_BYTES = MAX_MESSAGE_BYTES - (256 << 10)
T = TypeVar("T")
R = TypeVar("R")


def split_groups(groups: Sequence[GroupHashes], hash_bytes: int) -> list[list[GroupHashes]]:
    """The lists in parts of at most PART_BYTES; a list that does not fit goes on in the next part.
    One part at least."""
    most, left = PART_BYTES // hash_bytes, PART_BYTES // hash_bytes
    parts: list[list[GroupHashes]] = [[]]
    for group in groups:
        at = 0
        while True:
            count = min(left, len(group.hashes) - at)
            parts[-1].append(GroupHashes(group.group_index, group.hashes[at : at + count]))
            at, left = at + count, left - count
            if at == len(group.hashes):
                break
            parts.append([])
            left = most
    return parts


def join_masks(
    groups: Sequence[GroupHashes], answers: Sequence[Sequence[BoolMask]]
) -> tuple[BoolMask, ...]:
    """The masks of whole lists from those of the parts of `split_groups`."""
    pieces = iter([mask for answer in answers for mask in answer])
    joined = []
    for group in groups:
        found = [next(pieces)]
        while sum(map(len, found)) < len(group.hashes):
            found.append(next(pieces))
        joined.append(np.concatenate(found))
    return tuple(joined)


def split_messages(messages: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Messages in parts of at most PART_BYTES together, or one that has more."""
    part: list[T] = []
    size = 0
    for message in messages:
        one = num_bytes(message)
        if part and size + one > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(message)
        size += one
    if part:
        yield part


def joined(futures: "Sequence[Future[T]]", join: Callable[[list[T]], R]) -> "Future[R]":
    """A future of what `join` makes of all results, in their order, or of the first exception."""
    whole: Future[R] = Future()
    left, lock = len(futures), threading.Lock()

    def ended(future: "Future[T]") -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        for one in futures:
            if (error := one.exception()) is not None:
                whole.set_exception(error)
                return
        whole.set_result(join([one.result() for one in futures]))

    for future in futures:
        future.add_done_callback(ended)
    return whole
