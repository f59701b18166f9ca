"""`hotkv top` itself: readings, and what shows them, until the user has seen enough."""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator

from hotkv.errors import HotKVError
from hotkv_client.admin import AdminClient
from hotkv_client.top import keys, plain
from hotkv_client.top.figures import Figures, figures_of
from hotkv_client.top.readings import Reading, read

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0


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
    the start."""
    from rich.console import Console

    from hotkv_client.top import screen

    terminal, view = sys.stdin.fileno(), screen.View(interval_s)
    before: Reading | None = None
    reading = read(client)
    figures = figures_of(None, reading)
    next_s = time.monotonic() + min(1.0, interval_s)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys.raw(terminal),
        screen.screen(Console()) as live,
    ):
        while True:
            live.update(screen.draw(figures, view), refresh=True)
            for key in keys.pressed(terminal, next_s - time.monotonic()):
                if not view.press(key, figures.engines):
                    return
            if time.monotonic() < next_s:
                continue
            next_s = time.monotonic() + view.interval_s
            if view.paused:
                continue
            try:
                before, reading = reading, read(client)
            except HotKVError as error:
                view.problem = error.message
                continue
            view.problem = ""
            figures = figures_of(before, reading)
            view.remember(figures)
