"""Checks that nothing calls CUDA's driver on an event loop, where a call that waits would delay
every session."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from hotkv_server.device.runtime import DeviceRuntime
from hotkv_server.device.start import CudaPart


class OffLoop:
    """A `DeviceRuntime` whose methods raise AssertionError on the thread of a running event loop.

    `runtime`: does the work.
    `is_on`: if False, the thread does not matter.
    """

    def __init__(self, runtime: DeviceRuntime, *, is_on: bool = True) -> None:
        self._runtime = runtime
        self.is_on = is_on

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.is_on and asyncio._get_running_loop() is not None:
            raise AssertionError(f"{name} was called on the event loop")
        return getattr(self._runtime, name)(*arguments)


def while_serving(runtime: DeviceRuntime) -> OffLoop:
    """Is on while the server of this process serves: before and after, no session waits for the
    loop, and the server calls the driver on it."""
    guarded = OffLoop(runtime, is_on=False)
    start, close = CudaPart.start, CudaPart.close

    def starting(part: CudaPart) -> None:
        guarded.is_on = True
        start(part)

    def closing(part: CudaPart) -> None:
        guarded.is_on = False
        close(part)

    patched: Any = CudaPart
    patched.start, patched.close = starting, closing
    return guarded
