"""A server that tells which tasks and threads it has:
`python -m hotkv_server.testing.tasks_told FILE run FLAGS...`.

At SIGUSR1 it writes FILE anew: JSON with `tasks`, each task's `name`, `of` (the module of its
function) and whether Health `knows` it; the names of `threads`; the names of `parts` that Health
watches. All else is the real server.
"""

import asyncio
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from hotkv_server import cli, daemon
from hotkv_server.node.health import Health


def command(file: Path) -> list[str]:
    """The command of such a server, without its flags."""
    return [sys.executable, "-m", "hotkv_server.testing.tasks_told", str(file), "run"]


def _told(health: Health) -> dict[str, Any]:
    tasks = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        of = code.co_filename if code is not None else type(task.get_coro()).__module__
        name = task.get_name() if code is None else f"{task.get_name()} {code.co_qualname}"
        tasks.append({"name": name, "of": of, "knows": health.knows(task)})
    return {
        "tasks": tasks,
        "threads": [thread.name for thread in threading.enumerate()],
        "parts": list(health.by_component(0.0)),
    }


def tell_at_signal(file: Path) -> None:
    """Has this process's server tell, once it watches its parts."""
    watch_all = daemon.watch_all

    def watch(opened: daemon.Opened, *rest: Any) -> None:
        watch_all(opened, *rest)
        health = opened.node.health

        def tell() -> None:
            scratch = file.with_suffix(".new")
            scratch.write_text(json.dumps(_told(health)))
            scratch.replace(file)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)

    daemon.watch_all = watch  # type: ignore[assignment]


def main() -> int:
    """Runs such a server. Returns the exit status."""
    tell_at_signal(Path(sys.argv[1]))
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
