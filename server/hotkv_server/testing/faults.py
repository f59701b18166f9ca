"""A server in which a function breaks on demand, for tests of health.

`python -m hotkv_server.testing.faults POINT HOW FILE run ...` is `hotkv-server run ...`, in which
the function at POINT does HOW from the moment that FILE exists: `assert` (an invariant breaks),
`die` (its thread or task ends), `hang` (it never returns). A point is `module:Class.name`, or the
name of one in `crashing.POINTS`.
"""

import functools
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotkv_server.testing.crashing import POINTS

HANG_S = 3600.0


class Death(BaseException):
    """Ends a thread or task: nothing is meant to catch it."""


def _do(how: str, point: str) -> None:
    if how == "assert":
        raise AssertionError(f"injected at {point}")
    if how == "die":
        raise Death(point)
    time.sleep(HANG_S)


def arm(point: str, how: str, trigger: Path) -> None:
    """Arms the fault. Raises ValueError for an unknown HOW."""
    if how not in ("assert", "die", "hang"):
        raise ValueError(f"HOW is {how!r}; allowed are assert, die and hang")
    module_name, _, path = POINTS.get(point, point).partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function: Callable[..., Any] = vars(owner)[name]

    @functools.wraps(function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if trigger.exists():
            _do(how, point)
        return function(*args, **kwargs)

    setattr(owner, name, faulty)


def main() -> int:
    """Arms the fault that the command line names, and runs the server."""
    from hotkv_server.cli import main as run

    point, how, trigger, *arguments = sys.argv[1:]
    arm(point, how, Path(trigger))
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
