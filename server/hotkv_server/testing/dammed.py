"""A server whose arena fills as fast as a test lets it: `python -m hotkv_server.testing.dammed DAM
run FLAGS...`.

`DAM` is a file with a number of bytes. The start prefaults one piece of the arena; a later piece
that ends beyond that number waits until it is larger. If the file says `short`, the kernel refuses
the next piece. All else is the real server.
"""

import errno
import os
import sys
import time
from pathlib import Path

from hotkv_server.memory import arena
from hotkv_server.memory.filling import Filling

LOOK_S = 0.01


def build(dam: Path) -> None:
    """Puts the dam in place."""
    bring_in_next = Filling._bring_in_next
    arena.FIRST_FILL_S, arena.FIRST_FILL_BYTES = 0.0, 0

    def dammed(filling: Filling, start: int, length: int) -> None:
        while filling._thread is not None and not filling._stop.is_set():
            said = dam.read_text().strip()
            if said == "short":
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            if start + length <= int(said or 0):
                break
            time.sleep(LOOK_S)
        bring_in_next(filling, start, length)

    Filling._bring_in_next = dammed  # type: ignore[method-assign, assignment]


def main() -> int:
    """As `hotkv-server`, behind a dam."""
    from hotkv_server.cli import main as run

    build(Path(sys.argv[1]))
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
