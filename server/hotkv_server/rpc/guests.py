"""Calls that may last without being anybody's: those that watch health, or read reflection, and sessions that have not said who they are.

Always true: a new one is taken, whoever holds how many; where there are too many the one that has lasted longest ends for it. So nobody
keeps others out by holding calls open.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from hotkv.errors import HotKVError, Reason


class Guests:
    """At most `most` calls at a time. Event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Oldest first; True for one that has been told to go.
        self._calls: dict[asyncio.Task[object], bool] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return f"Guests({len(self._calls)}/{self._most})"

    @contextmanager
    def stay(self) -> Iterator[None]:
        """Counts the task that runs this; raises OVERLOADED in it, wherever it waits, when another one needs its place."""
        task = asyncio.current_task()
        assert task is not None, "only a task can be told to go"
        staying = [call for call, is_told in self._calls.items() if not is_told]
        if len(staying) >= self._most:
            self._calls[staying[0]] = True
            staying[0].cancel()
        self._calls[task] = False
        try:
            yield
        except asyncio.CancelledError:
            if not self._calls[task]:
                raise
            raise HotKVError(Reason.OVERLOADED, "this call was open longest of all that wait without a session; open it again") from None
        finally:
            del self._calls[task]
