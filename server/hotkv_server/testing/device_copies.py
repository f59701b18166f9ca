"""Copies of a made-up device: checked when they are given, done step by step when their turn comes.

Always true: a copy looks at its ranges again when it runs, since memory may have gone meanwhile: a
real device does not survive that, and neither does this one.
"""

import ctypes
import random
from collections.abc import Iterator

import numpy as np

from hotkv_server.device.runtime import DeviceError
from hotkv_server.testing.device_memory import bytes_at
from hotkv_server.testing.device_ranges import Ranges

Work = Iterator[bool]
"""What a stream does, step by step: yields True after a step, False if it can't go on yet."""
Copy = tuple[int, int, int]
"""Destination, source, number of bytes."""


class Copies:
    """See the module. The caller holds the runtime's lock, also when work runs."""

    def __init__(self, ranges: Ranges, dice: random.Random) -> None:
        self._ranges = ranges
        self._dice = dice

    def check(self, device: int, copies: list[Copy], what: str, *, may_be_pageable: bool) -> bool:
        """Returns True if any of the ranges is not registered. Raises DeviceError as the call
        would."""
        pageable = False
        for dst, src, count in copies:
            (_, to), (_, from_) = (
                self._ranges.copy_range(device, dst, count, what),
                self._ranges.copy_range(device, src, count, what),
            )
            pageable = pageable or to is None or from_ is None
            if to is not None and to.read_only:
                raise DeviceError(
                    f"fake device {device}: {what}: invalid argument: writes to memory "
                    "registered as read-only"
                )
        if pageable and not may_be_pageable:
            raise DeviceError(
                f"fake device {device}: {what}: invalid argument: host memory that is not "
                "registered"
            )
        return pageable

    def move(
        self,
        device: int,
        copies: list[Copy],
        what: str,
        *,
        by_kernel: bool = False,
        pageable: bool = False,
    ) -> Work:
        """Moves bytes, in one to three steps."""
        num_steps, version, real = self._dice.randint(1, 3), -1, copies
        for step in range(num_steps):
            if version != self._ranges.version:
                version = self._ranges.version
                real = [
                    self._resolve_by_kernel(device, copy)
                    if by_kernel
                    else self._resolve(device, copy, what, pageable=pageable)
                    for copy in copies
                ]
            for to, from_, count in real:
                begin, end = count * step // num_steps, count * (step + 1) // num_steps
                ctypes.memmove(to + begin, from_ + begin, end - begin)
            if step < num_steps - 1:
                yield True

    def move_by_table(self, device: int, table: int, num_copies: int, max_bytes: int) -> Work:
        """Moves bytes as a kernel that reads int64 [3, num_copies] at `table`, in any order."""
        real = self._ranges.kernel_range(device, table, 24 * num_copies, writes=False)
        rows = bytes_at(real, 24 * num_copies).view(np.int64).reshape(3, num_copies).copy()
        copies = list(zip(*rows.tolist(), strict=True))
        if any(count > max_bytes for _, _, count in copies):
            raise DeviceError(
                f"fake device {device}: copy_kernel: max_bytes is {max_bytes}, and a copy is longer"
            )
        self._dice.shuffle(copies)
        yield from self.move(device, copies, "copy_kernel", by_kernel=True)

    def _resolve_by_kernel(self, device: int, copy: Copy) -> Copy:
        dst, src, count = copy
        return (
            self._ranges.kernel_range(device, dst, count, writes=True),
            self._ranges.kernel_range(device, src, count, writes=False),
            count,
        )

    def _resolve(self, device: int, copy: Copy, what: str, *, pageable: bool) -> Copy:
        """The copy between the places where its bytes lie."""
        dst, src, count = copy
        (to, to_memory), (from_, from_memory) = (
            self._ranges.copy_range(device, dst, count, what),
            self._ranges.copy_range(device, src, count, what),
        )
        if not pageable and (to_memory is None or from_memory is None):
            raise DeviceError(f"{what} of memory that has been unregistered meanwhile")
        return to, from_, count
