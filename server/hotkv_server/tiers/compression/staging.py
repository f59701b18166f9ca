"""The staging memory of a compressed tier: what is stored, or was read and is not decoded yet."""

import bisect
import os

from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.memory.mapping import FileMapping

HUGE_S = 0.5
"""How long the start tries to get huge pages; the rest is prefaulted in small ones."""


def open_staging(num_bytes: int) -> FileMapping:
    """Memory of so many bytes, prefaulted, in huge pages as far as the kernel gives them. Raises
    OSError if memory is short; ValueError if `num_bytes` is no multiple of SLOT_ALIGN."""
    if num_bytes <= 0 or num_bytes % SLOT_ALIGN:
        raise ValueError(f"{num_bytes} bytes are no multiple of {SLOT_ALIGN}")
    fd = os.memfd_create("hotkv-staging", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    memory = FileMapping(fd, num_bytes, "staging", exclusive=True)
    try:
        memory.make_huge(0, HUGE_S)
        memory.populate()
    except BaseException:
        memory.close()
        raise
    return memory


class Extents:
    """Which bytes of the staging memory are free: runs that do not touch, in their order.

    Always true: an extent overlaps no other that was taken and not given back. Not thread-safe.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)]

    def __repr__(self) -> str:
        return f"Extents({self.free_bytes} of {self.num_bytes} bytes free, {len(self._free)} runs)"

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        return sum(end - begin for begin, end in self._free)

    def take(self, num_bytes: int) -> int | None:
        """Where the first free run begins that is long enough, whose beginning is the caller's from
        now on. None if there is none."""
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                left = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                self._free[number : number + 1] = left
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        """Gives an extent back."""
        end = begin + num_bytes
        number = bisect.bisect(self._free, (begin, end))
        after = number
        if number and self._free[number - 1][1] == begin:
            number -= 1
            begin = self._free[number][0]
        if after < len(self._free) and self._free[after][0] == end:
            end = self._free[after][1]
            after += 1
        self._free[number:after] = [(begin, end)]

    def check_invariants(self) -> None:
        """Raises AssertionError if free runs overlap, touch, or lie outside."""
        ends = [0 if not number else self._free[number - 1][1] for number in range(len(self._free))]
        for number, (begin, end) in enumerate(self._free):
            assert begin < end <= self.num_bytes, "a free run lies outside"
            assert begin > ends[number] or not number, "free runs overlap or touch"
