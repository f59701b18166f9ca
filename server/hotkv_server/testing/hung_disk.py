"""A server whose disk hangs in a chosen call:
`python -m hotkv_server.testing.hung_disk FOLDER SIGNS run FLAGS...`.

While a file `SIGNS/CALL` exists, each such call on a file below FOLDER hangs, whatever thread makes
it; a file `SIGNS/CALL.met` says that one has. CALLS has their names. All else is the real server.
So that a hang shows within seconds, the timer writes notes every second, Health calls a part stuck
after STALLED_S, and a stop waits CLOSE_WAIT_S for the disk.
"""

import builtins
import functools
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotkv_server import cli
from hotkv_server.node import health, node, persistence
from hotkv_server.tiers.disk.block_io import FileIO
from hotkv_server.tiers.disk.tier import DiskTier
from hotkv_server.tiers.drive import records as lower

LOOK_S = 0.05
STALLED_S, CLOSE_WAIT_S = 1.5, 1.0
CALLS = {
    "open": ("open",),
    "pread": ("pread", "preadv", "read"),
    "pwrite": ("pwrite", "pwritev", "write"),
    "fsync": ("fsync", "fdatasync"),
    "fallocate": ("posix_fallocate", "ftruncate", "truncate"),
    "rename": ("rename", "replace"),
    "stat": ("stat", "lstat", "fstat", "statvfs", "fstatvfs"),
    "unlink": ("unlink", "remove"),
}
"""Functions of `os` by the name of their call."""


def command(folder: Path, signs: Path) -> list[str]:
    """The command of such a server, without its flags."""
    module = "hotkv_server.testing.hung_disk"
    return [sys.executable, "-m", module, str(folder), str(signs), "run"]


def make_hang(folder: Path, signs: Path) -> None:
    """Makes this process's disk hang in the calls that `signs` names, below `folder`."""
    real_exists, real_readlink, real_open = os.path.exists, os.readlink, os.open
    access = os.access
    root = str(folder)

    def is_below(file: Any) -> bool:
        try:
            path = real_readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            return os.fsdecode(path).startswith(root)
        except (OSError, TypeError):
            return False

    def hang(call: str, file: Any) -> None:
        sign = f"{signs}/{call}"
        if not access(sign, os.F_OK) or not is_below(file):
            return
        os.close(real_open(f"{sign}.met", os.O_CREAT | os.O_WRONLY, 0o600))
        while access(sign, os.F_OK):
            time.sleep(LOOK_S)

    def hanging(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(file: Any, *arguments: Any, **named: Any) -> Any:
            hang(call, file)
            return function(file, *arguments, **named)

        return called

    assert real_exists(signs), f"{signs} is missing"
    for call, names in CALLS.items():
        for name in names:
            setattr(os, name, hanging(call, getattr(os, name)))
    io.open = builtins.open = hanging("open", builtins.open)
    for call, method in (("pread", "read_many"), ("pwrite", "write_many")):
        _hang_blocks(call, method, hang)


def _hang_blocks(call: str, method: str, hang: Callable[[str, Any], None]) -> None:
    """The kernels that move blocks call the C library, past `os`."""
    move = getattr(FileIO, method)

    def hung(self: FileIO, *arguments: Any) -> Any:
        hang(call, self._fd)
        return move(self, *arguments)

    setattr(FileIO, method, hung)


def main() -> int:
    """Runs such a server. Returns the exit status."""
    persistence.USE_PARTS = 5
    lower.CLOSE_WAIT_S = CLOSE_WAIT_S
    assert DiskTier.__init__.__kwdefaults__ is not None
    DiskTier.__init__.__kwdefaults__["close_wait_s"] = CLOSE_WAIT_S
    node.STALLED_TIMER_S = health.STALLED_S = STALLED_S
    make_hang(Path(sys.argv[1]), Path(sys.argv[2]))
    return cli.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
