"""Makes docs/images again: the status page and the documentation's site in a browser, light and
dark, and `hotkv top` in a terminal, of a real server with two vLLM engines of SmolLM2.

`python -m tools.pictures [--minutes 6] [--folder docs/images]`. Needs Debian's chromium and
`make setup`. The engines' conversations share a system prompt; a small arena over a disk tier
gives hits, misses and evictions. At the end all processes have ended.
"""

import argparse
import contextlib
import html
import io
import os
import pty
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from demo import prompts
from demo.processes import (
    ROOT,
    ChildError,
    Engine,
    EngineSettings,
    Server,
    ends_cleanly,
    prepare_model,
    runtime_folder,
)
from tests.server.support import http_port

IMAGES = ROOT / "docs" / "images"
SITE = ROOT / "site" / "index.html"
ARENA, DISK = "192MiB", "512MiB"
WIDTH, HEIGHT = 1200, 960
COLORS = 96
CALM, CALM_S = "Is it working?   Yes", 120.0
"""How `hotkv status` begins without problems, and seconds to wait for it."""
SYSTEM_TOKENS, TURN_TOKENS, MAX_TOKENS = 512, 130, 2200
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Two engines share a small machine."""
SMALL = {
    "served_model_name": "SmolLM2-135M-Instruct",
    "max_model_len": 2560,
    "kv_cache_memory_bytes": 64 << 20,
}
"""One long conversation fits; the others hit in the server."""
COLUMNS, LINES = 100, 24
CELL = (8.4, 18.0)
"""A character's width and height in pixels."""
TERMINAL = {
    "default": "#d6dde4",
    "black": "#3b4650",
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#d6dde4",
}
BACKGROUND = "#10161c"
HAS_RATES = re.compile(r"prompts [1-9][\d,]* tokens/s")


class Conversations(threading.Thread):
    """Sends turns of `count` conversations in random order, until stopped; one that is too long
    starts again."""

    def __init__(self, engine: Engine, model: Path, seed: int, count: int) -> None:
        super().__init__(daemon=True)
        self._engine, self._model, self._count = engine, model, count
        self._chance = random.Random(seed)
        self._system = prompts.token_ids(model, 1, SYSTEM_TOKENS)
        self._number = seed * 1000
        self._texts = [list(self._system) for _ in range(count)]
        self.over = threading.Event()
        self.problem: ChildError | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self._turn(self._chance.randrange(self._count))
                self.over.wait(self._chance.random())
        except ChildError as error:
            self.problem = error

    def _turn(self, at: int) -> None:
        self._number += 1
        if len(self._texts[at]) > MAX_TOKENS:
            self._texts[at] = list(self._system)
        said = prompts.token_ids(self._model, self._number, TURN_TOKENS)
        self._texts[at] += said
        self._texts[at] += self._engine.generate(self._texts[at], 8).token_ids


@contextlib.contextmanager
def traffic(server: Server, model: Path, folder: Path) -> Iterator[list[Conversations]]:
    """Engines get the last core for themselves: vLLM's processes wait by sched_yield, for which
    the kernel let the server wait 0.2 s and more."""
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        settings = EngineSettings(
            str(model), server.target, engine_args=SMALL, environment=ONE_THREAD
        )
        os.sched_setaffinity(0, {max(cores)})
        engines = [
            stack.enter_context(Engine(name, settings, folder)) for name in ("chat", "agents")
        ]
        os.sched_setaffinity(0, cores - {max(cores)} or cores)
        for engine in engines:
            engine.wait_ready()
        talks = [Conversations(engine, model, seed, 4) for seed, engine in enumerate(engines, 1)]
        for one in talks:
            one.start()
        try:
            yield talks
        finally:
            for one in talks:
                one.over.set()
            for one in talks:
                one.join(60)


def photograph(url: str, folder: Path) -> None:
    """Of the status page and, if `make docs` has built it, the site's first page."""
    from playwright.sync_api import ViewportSize, sync_playwright

    with sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = ViewportSize(width=WIDTH, height=HEIGHT)
        for name, is_dark in (("status_page", False), ("status_page_dark", True)):
            scheme: Literal["light", "dark"] = "dark" if is_dark else "light"
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            page.goto(url)
            deadline_s = time.monotonic() + 30
            while not page.evaluate("Number(document.body.dataset.shown) > 0"):
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the page shows no figures")
                page.wait_for_timeout(100)
            page.get_by_text("15 min", exact=True).first.click()
            page.mouse.move(0, 0)
            save(page.screenshot(), folder / f"{name}.png")
            if SITE.is_file():
                page.goto(SITE.as_uri())
                save(page.screenshot(), folder / f"{name.replace('status_page', 'docs')}.png")
        browser.close()


def save(picture: bytes, path: Path) -> None:
    """A small palette takes a third of the bytes."""
    from PIL import Image

    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def terminal(server: Server, seconds: float) -> Any:
    """The screen (pyte) of `hotkv top`, a second after its first rate of prompt tokens, or after
    `seconds`."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    pid, descriptor = pty.fork()
    if not pid:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
        command = [sys.executable, "-m", "hotkv_client.command.cli", "--target", server.target]
        os.execv(sys.executable, [*command, "top", "--interval", "5"])
    end_s = time.monotonic() + seconds
    has_rates = False
    while time.monotonic() < end_s:
        if select.select([descriptor], [], [], 0.1)[0]:
            stream.feed(os.read(descriptor, 1 << 16))
        if not has_rates and HAS_RATES.search("\n".join(screen.display)):
            # The rest of the screen arrives.
            has_rates, end_s = True, time.monotonic() + 1.0
    os.kill(pid, signal.SIGTERM)
    os.close(descriptor)
    os.waitpid(pid, 0)
    return screen


def as_svg(screen: Any) -> str:
    """Each run of one style is a text element, as wide as in the terminal with any font. Without
    empty lines at the end."""
    width, height = CELL
    num_lines = max(row for row, line in enumerate(screen.display, 1) if line.strip())
    size = f"{screen.columns * width + 16:.0f} {num_lines * height + 16:.0f}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>',
    ]
    for row in range(num_lines):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        column = 0
        for style, run in groupby(cells, key=lambda cell: (cell.fg, cell.bg, cell.bold)):
            text = "".join(cell.data for cell in run)
            parts += _run(text, style, 8 + column * width, 8 + row * height)
            column += len(text)
    return "\n".join([*parts, "</svg>\n"])


def _run(text: str, style: tuple[str, str, bool], x: float, y: float) -> Iterator[str]:
    front, back, is_bold = style
    width, height = len(text) * CELL[0], CELL[1]
    if back != "default":
        fill = _color(back)
        yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"/>'
    if not text.strip():
        return
    weight = ' font-weight="bold"' if is_bold else ""
    yield (
        f'<text x="{x:.1f}" y="{y + 13:.1f}" textLength="{width:.1f}" fill="{_color(front)}"'
        f'{weight} xml:space="preserve">{html.escape(text)}</text>'
    )


def _color(name: str) -> str:
    plain = name.removeprefix("bright")
    return TERMINAL.get(plain) or f"#{plain}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures of docs/images again.")
    parser.add_argument("--minutes", type=float, default=6.0, help="of traffic (default: 6)")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    tier = ("--tiers.disk.bytes", DISK, "--tiers.disk.path")
    with (
        ends_cleanly(),
        runtime_folder(1 << 30) as shared,
        tempfile.TemporaryDirectory(prefix="hotkv-pictures-") as disk,
        Server(shared, ARENA, *tier, disk) as server,
    ):
        server.wait_ready()
        with traffic(server, prepare_model(), shared) as talks:
            end_s = time.monotonic() + given.minutes * 60
            while time.monotonic() < end_s:
                for one in talks:
                    if one.problem is not None:
                        raise one.problem
                time.sleep(1.0)
            end_s = time.monotonic() + CALM_S
            while time.monotonic() < end_s and not server.cli("status").startswith(CALM):
                time.sleep(1.0)
            photograph(f"http://127.0.0.1:{http_port(server)}/", given.folder)
            (given.folder / "top.svg").write_text(as_svg(terminal(server, 90.0)))
    for path in sorted(given.folder.iterdir()):
        print(f"{path}: {path.stat().st_size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
