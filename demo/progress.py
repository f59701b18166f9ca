"""Steps of a demo, with their times."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

BEGIN_S = time.monotonic()


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Prints the step and its time; on a terminal, while it runs."""
    begin_s = time.monotonic()
    done = threading.Event()
    lively = sys.stdout.isatty()
    carriage_return = "\r" if lively else ""

    def show(end: str) -> None:
        print(
            f"{carriage_return}[{time.monotonic() - BEGIN_S:5.1f} s] {what} … "
            f"{time.monotonic() - begin_s:.1f} s",
            end=end,
            flush=True,
        )

    def tick() -> None:
        while not done.wait(0.2):
            show("")

    ticker = threading.Thread(target=tick, daemon=True)
    if lively:
        ticker.start()
    try:
        yield
    finally:
        done.set()
        if lively:
            ticker.join()
        show("\n")
