"""Keys of a terminal, one at a time, without waiting for a line."""

import contextlib
import os
import select
import termios
import tty
from collections.abc import Iterator

NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x03": "ctrl-c",
    "k": "up",
    "j": "down",
}
"""What terminals send, by the name that views use; another key has its own character."""
MAX_BYTES = 64


def named(sent: str) -> list[str]:
    """The keys of what a terminal has sent; sequences that mean nothing here are passed over."""
    keys = []
    while sent:
        length = 3 if sent[:2] in ("\x1b[", "\x1bO") else 1
        one, sent = sent[:length], sent[length:]
        if len(one) == 1 or one in NAMES:
            keys.append(NAMES.get(one, one))
    return keys


@contextlib.contextmanager
def raw(terminal: int) -> Iterator[None]:
    """Keys come at once and are not echoed; the terminal is as it was afterwards."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def pressed(terminal: int, seconds: float) -> list[str]:
    """The keys of the next so many seconds: returns with the first. `q` if the terminal is gone."""
    if not select.select([terminal], [], [], max(0.0, seconds))[0]:
        return []
    sent = os.read(terminal, MAX_BYTES)
    return named(sent.decode(errors="replace")) if sent else ["q"]
