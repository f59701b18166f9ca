"""`hotkv top` itself: readings, and what shows them, until the user has seen enough."""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from hotkv_client.admin import AdminClient
from hotkv_client.command.top import keys, plain
from hotkv_client.command.top.figures import Figures, figures_of
from hotkv_client.command.top.readings import Reading, read
from hotkv_proto.errors import HotKVError

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
POLL_S = 0.05
"""How soon an answer is looked for again while the server is asked."""


def run(client: AdminClient, interval_s: float, count: int, *, as_json: bool) -> None:
    """A screen on a terminal; lines into a pipe, with `count` and `as_json`. Raises HotKVError if
    the server does not answer, ValueError for what can't be meant."""
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ValueError(
            f"--interval {interval_s:g}: give {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds"
        )
    if count < 0:
        raise ValueError(f"--count {count}: give a number of readings, 0 for no end")
    if count or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        with contextlib.suppress(KeyboardInterrupt):
            show_lines(client, interval_s, count, as_json=as_json)
        return
    if importlib.util.find_spec("rich") is None:
        raise ValueError(
            "the screen of `hotkv top` is drawn by rich: pip install 'hotkv[cli]', or take text "
            "with --count"
        )
    show_screen(client, interval_s)


def show_lines(client: AdminClient, interval_s: float, count: int, *, as_json: bool) -> None:
    """Prints figures every `interval_s`, `count` times (0: until Ctrl-C). Raises HotKVError if the
    server does not answer."""
    first = True
    for figures in _figures(client, interval_s, count):
        if as_json:
            print(json.dumps(figures.as_json()), flush=True)
        else:
            shown = plain.text(figures, sorted(figures.engines, key=lambda e: e.name))
            print(("" if first else "\n") + shown, flush=True)
        first = False


def _figures(client: AdminClient, interval_s: float, count: int) -> Iterator[Figures]:
    """Figures over one interval each."""
    before, number = read(client), 0
    while not count or number < count:
        time.sleep(interval_s)
        after = read(client)
        yield figures_of(before, after)
        before, number = after, number + 1


def show_screen(client: AdminClient, interval_s: float) -> None:
    """Draws figures on the terminal until `q`. Raises HotKVError if the server does not answer at
    the start.

    A thread asks the server, so that keys work while it is slow to answer.
    """
    from rich.console import Console

    from hotkv_client.command.top import screen

    terminal, console, view = sys.stdin.fileno(), Console(), screen.View(interval_s)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys.raw(terminal),
        _Asking(client) as asking,
        contextlib.ExitStack() as shown,
    ):
        while (reading := asking.answer()) is None:
            if any(key in screen.QUIT for key in keys.pressed(terminal, POLL_S)):
                return
        figures = figures_of(None, reading)
        live = shown.enter_context(screen.screen(console))
        next_s = time.monotonic() + min(1.0, interval_s)
        while True:
            live.update(screen.draw(figures, view, console), refresh=True)
            wait_s = POLL_S if asking.is_asking else next_s - time.monotonic()
            for key in keys.pressed(terminal, wait_s):
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
    """One reading at a time, by a thread. The first is asked for at once. A thread that still waits
    at the end does so until the client's channel is closed."""

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
        """The reading that was asked for; None if it is not there yet. Raises HotKVError if there
        will be none."""
        if self._asked is None or not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        return asked.result()
