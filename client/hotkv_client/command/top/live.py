"""Runs `hotkv top`: takes readings and shows them until the user quits."""

import contextlib
import importlib.util
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from hotkv_client.admin import AdminClient
from hotkv_client.command.top import plain
from hotkv_client.command.top.figures import Reading, figures_of, read
from hotkv_proto import extras
from hotkv_proto.errors import HotKVError

# ----------------------------------------------------------------------------- keys of the terminal


NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
    "\x03": "ctrl-c",
}
"""By the characters that terminals send. Other keys are named by their character."""
MAX_BYTES = 64


def named_keys(sent: str) -> list[str]:
    """Ignores unknown escape sequences."""
    keys = []
    while sent:
        length = 3 if sent[:2] in ("\x1b[", "\x1bO") else 1
        one, sent = sent[:length], sent[length:]
        if len(one) == 1 or one in NAMES:
            keys.append(NAMES.get(one, one))
    return keys


@contextlib.contextmanager
def raw_keys(terminal: int) -> Iterator[None]:
    """Each key is read at once and not echoed, until the end of the `with` block."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def pressed_keys(terminal: int, seconds: float) -> list[str]:
    """Waits up to `seconds`. `q` if the terminal is closed."""
    if not select.select([terminal], [], [], max(0.0, seconds))[0]:
        return []
    sent = os.read(terminal, MAX_BYTES)
    return named_keys(sent.decode(errors="replace")) if sent else ["q"]


# -------------------------------------------------------------------------- views that are repeated

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
POLL_S = 0.05
"""How often `show_screen` looks for the answer."""


def run(client: AdminClient, interval_s: float, count: int, *, as_json: bool) -> None:
    """A screen, or lines if the output is a pipe, the terminal can't move its cursor, or `count`
    or `as_json` is set. Raises HotKVError if the server does not answer, ValueError for invalid
    options."""
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ValueError(
            f"--interval {interval_s:g}: give {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds"
        )
    if count < 0:
        raise ValueError(f"--count {count}: give a number of readings, 0 for no end")
    # Otherwise rich draws nothing.
    can_draw = os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    has_screen = sys.stdin.isatty() and sys.stdout.isatty() and can_draw
    if count or as_json or not has_screen:
        with contextlib.suppress(KeyboardInterrupt):
            show_lines(client, interval_s, count, as_json=as_json)
        return
    if importlib.util.find_spec("rich") is None:
        raise ValueError(
            f"the screen of `hotkv top` is drawn by rich: {extras.advice('cli')}, or take text "
            "with --count"
        )
    show_screen(client, interval_s)


def show_lines(client: AdminClient, interval_s: float, count: int, *, as_json: bool) -> None:
    """Prints figures every `interval_s`, `count` times (0: until Ctrl-C), with rates of the last
    interval. Raises HotKVError if the server does not answer."""
    before, number = read(client), 0
    while not count or number < count:
        time.sleep(interval_s)
        after = read(client)
        figures = figures_of(before, after)
        if as_json:
            print(json.dumps(figures.as_json()), flush=True)
        else:
            shown = plain.text(figures, sorted(figures.engines, key=lambda e: e.name))
            print(("\n" if number else "") + shown, flush=True)
        before, number = after, number + 1


def show_screen(client: AdminClient, interval_s: float) -> None:
    """Draws until the user presses `q`. A thread asks the server, so that keys work meanwhile.
    Raises HotKVError if the server does not answer the first time."""
    from rich.console import Console

    from hotkv_client.command.top import screen

    terminal, console, view = sys.stdin.fileno(), Console(), screen.View(interval_s)
    with (
        contextlib.suppress(KeyboardInterrupt),
        raw_keys(terminal),
        _Asking(client) as asking,
        contextlib.ExitStack() as shown,
    ):
        while (reading := asking.answer()) is None:
            if any(key in screen.QUIT for key in pressed_keys(terminal, POLL_S)):
                return
        figures = figures_of(None, reading)
        live = shown.enter_context(screen.screen(console))
        next_s = time.monotonic() + min(1.0, interval_s)
        while True:
            live.update(screen.draw(figures, view, console), refresh=True)
            wait_s = POLL_S if asking.is_asking else next_s - time.monotonic()
            for key in pressed_keys(terminal, wait_s):
                if not view.press(key, figures.engines):
                    return
            if not asking.is_asking:
                if time.monotonic() < next_s:
                    continue
                next_s = time.monotonic() + view.interval_s
                if view.paused:
                    continue
                asking.ask()
            try:
                after = asking.answer()
            except HotKVError as error:
                view.problem = error.message
                continue
            if after is None:
                continue
            view.problem = ""
            figures, reading = figures_of(reading, after), after
            view.remember(figures)


class _Asking:
    """Takes readings in a thread, one at a time, the first at once. The end of the `with` block
    does not wait: a reading in progress ends when the client's channel is closed."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client
        self._thread = ThreadPoolExecutor(1, "hotkv-top")
        self._asked: Future[Reading] | None = None
        self.ask()

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False)

    @property
    def is_asking(self) -> bool:
        return self._asked is not None

    def ask(self) -> None:
        self._asked = self._thread.submit(read, self._client)

    def answer(self) -> Reading | None:
        """None until the reading has arrived. Raises HotKVError if it failed."""
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        return asked.result()
