"""Splits lists that are too large for one message into parts, and joins the answers to the parts.

Always true: a part has at most PART_BYTES of hashes or messages, so a message with the part is
small enough for gRPC. A part has at most PART_BLOCKS hashes, the most that the server accepts in a
call. The parts keep the order of the lists.
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
    """Splits lists of hashes into parts, and returns at least one part.

    A part has at most PART_BYTES of hashes and at most PART_BLOCKS hashes. A list that does not fit
    into a part continues in the next part.

    hash_bytes: length of each hash.
    """
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
    """Joins the answers to the parts of `split_groups`. Returns one mask for each list of `groups`.
    A mask has a flag for each hash of its list: True if the block is ready.

    groups: the lists that `split_groups` has split.
    answers: the answer to each part, in order: one mask for each list of that part.
    """
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
    """Yields the messages in parts of at most `most_bytes` and at most MAX_REPORTS messages. A
    message of more than `most_bytes` makes a part of its own.

    num_bytes: returns the size of a message.
    """
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
    """Returns a future that resolves when all `futures` have resolved.

    The result of the returned future is `join(results)`, with the results of all `futures` in
    order. If some of `futures` failed, the returned future fails with the exception of the first of
    them, in the order of `futures`.
    """
    whole: Future[R] = Future()
    # Marks the future as running, so that the caller can't cancel it: resolving a cancelled future
    # raises an exception.
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
