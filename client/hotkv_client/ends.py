"""The page of ends: shared memory in which the server writes which transfers are done, before it
answers (`LoadRequest.end_index`). A word is used again only after the answer."""

import mmap
import os
from concurrent.futures import Future
from typing import Any

import numpy as np

from hotkv_proto.layout import DONE_FLAG, END_WORDS


class Ends:
    """For one connection, so that no earlier server writes to it; under its lock."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.fd = os.memfd_create("hotkv-ends", os.MFD_CLOEXEC)
        os.truncate(self.fd, 8 * END_WORDS)
        self._words = np.frombuffer(mmap.mmap(self.fd, 8 * END_WORDS), np.uint64)
        self._free = list(range(END_WORDS - 1, 0, -1))

    def __repr__(self) -> str:
        return f"Ends({len(self._free)}/{END_WORDS - 1} words free)"

    def take(self) -> int:
        """A cleared word; 0 if all are in use."""
        if not self._free:
            return 0
        index = self._free.pop()
        self._words[index] = 0
        return index

    def done_bytes(self, index: int) -> int | None:
        """What the transfer has copied; None if it is not known to be done."""
        word = int(self._words[index])
        return word - DONE_FLAG if word else None

    def give_back(self, index: int) -> None:
        """The server has answered. Ignores 0."""
        if index:
            self._free.append(index)

    def close(self) -> None:
        os.close(self.fd)


class TransferFuture(Future[Any]):
    """`done` sees the word of its transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.look = _nothing
        """Resolves it if its word says so."""

    def done(self) -> bool:
        if not super().done():
            self.look()
        return super().done()

    def set_result(self, result: Any) -> None:
        # `look` keeps the connection with all that it maps.
        self.look = _nothing
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        self.look = _nothing
        super().set_exception(exception)


def _nothing() -> None: ...
