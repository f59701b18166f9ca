"""Splits lists that are too large for one message, and joins the answers.

Always true: a part has at most PART_BYTES of hashes or messages, and PART_BLOCKS hashes, the
most that the server accepts in a call. Parts keep the order.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from hotkv_client.types import BoolMask, GroupHashes
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.messages.cache import MAX_LOADED_BLOCKS
from hotkv_proto.messages.report_messages import MAX_REPORTS
from hotkv_proto.versions import MAX_MESSAGE_BYTES

PART_BYTES = MAX_MESSAGE_BYTES - (256 << 10)
PART_BLOCKS = MAX_LOADED_BLOCKS
T = TypeVar("T")
R = TypeVar("R")


def split_groups(groups: Sequence[GroupHashes], hash_bytes: int) -> list[list[GroupHashes]]:
    """Returns at least one part. A list that does not fit continues in the next part."""
    most = left = min(PART_BYTES // hash_bytes, PART_BLOCKS)
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
    """One mask per list of `groups`, from the answers to the parts of `split_groups`, in order."""
    pieces = iter([mask for answer in answers for mask in answer])
    joined = []
    for group in groups:
        found = [next(pieces)]
        while sum(map(len, found)) < len(group.hashes):
            found.append(next(pieces))
        joined.append(np.concatenate(found))
    return tuple(joined)


def split_messages(
    messages: Iterable[T], num_bytes: Callable[[T], int], most_bytes: int
) -> Iterator[list[T]]:
    """Parts of at most `most_bytes` and MAX_REPORTS messages. A larger message is a part of its
    own."""
    part: list[T] = []
    size = 0
    for message in messages:
        one = num_bytes(message)
        if part and (size + one > most_bytes or len(part) == MAX_REPORTS):
            yield part
            part, size = [], 0
        part.append(message)
        size += one
    if part:
        yield part


def joined(futures: "Sequence[Future[T]]", join: Callable[[list[T]], R]) -> "Future[R]":
    """A future of `join(results)`, in order. If some fail, it fails with the first one's
    exception."""
    whole: Future[R] = Future()
    # A running future can't be cancelled: resolving a cancelled one raises.
    whole.set_running_or_notify_cancel()
    left, lock = len(futures), threading.Lock()

    def ended(future: "Future[T]") -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            result = join([one.result() for one in futures])
        except HotKVError as error:
            whole.set_exception(error)
        except Exception as error:  # noqa: BLE001 The edge of the client's stream: every answer ends its call.
            why = f"the answers can't be joined: {type(error).__name__}: {error}"
            whole.set_exception(HotKVError(Reason.INTERNAL, why))
        else:
            whole.set_result(result)

    for future in futures:
        future.add_done_callback(ended)
    return whole
