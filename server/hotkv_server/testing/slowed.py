"""A server that is slow while a file exists: `python -m hotkv_server.testing.slowed FILE TIMES
WAIT_S run FLAGS...`.

Each copy then takes `TIMES` as long, and each lookup and lease `WAIT_S` more. All else is the real
server.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotkv_server import cli
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.wire import calls


def command(file: Path, times: float, wait_s: float) -> list[str]:
    """The command of such a server, without its flags."""
    module = "hotkv_server.testing.slowed"
    return [sys.executable, "-m", module, str(file), str(times), str(wait_s), "run"]


def slow_down(file: Path, times: float, wait_s: float) -> None:
    """Makes this process's server slow while the file exists."""
    copy = HostCopyEngine._copy

    def slow_copy(self: HostCopyEngine, *arguments: Any, **named: Any) -> None:
        began_s = time.perf_counter()
        copy(self, *arguments, **named)
        if file.exists():
            time.sleep((times - 1) * (time.perf_counter() - began_s))

    def later(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            return asyncio.create_task(wait(arguments)) if file.exists() else call(*arguments)

        async def wait(arguments: tuple[Any, ...]) -> Any:
            await asyncio.sleep(wait_s)
            answered = call(*arguments)
            return await answered if isinstance(answered, asyncio.Task) else answered

        return answer

    HostCopyEngine._copy = slow_copy  # type: ignore[method-assign]
    for name in ("lookup", "acquire"):
        setattr(calls, name, later(getattr(calls, name)))


if __name__ == "__main__":
    slow_down(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    sys.exit(cli.main(sys.argv[4:]))
