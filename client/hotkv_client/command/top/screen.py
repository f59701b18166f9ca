"""Draws `hotkv top` on a terminal with rich. Needs the extra `cli`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hotkv_client.command.tables import human_seconds
from hotkv_client.command.top import plain
from hotkv_client.command.top.figures import EngineRates, Figures

BARS = " ▁▂▃▄▅▆▇█"
MAX_HISTORY = 60
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
QUIT = ("q", "ctrl-c")
HELP = "q quit  s sort  ↑↓ choose  ⏎ one engine  esc all  p pause  +- interval"
SORTS = {
    "loaded": lambda engine: -engine.loaded_bytes_per_s,
    "stored": lambda engine: -engine.stored_bytes_per_s,
    "hits": lambda engine: -(engine.recent_hit_ratio or 0.0),
    "tokens": lambda engine: -engine.prompt_tokens_per_s,
    "name": lambda engine: engine.name,
}
"""Sort orders of engines, by the word that the screen shows."""


@dataclass
class View:
    """The user's view.

    chosen: id of the engine under the cursor.
    inside: show only the chosen engine.
    """

    interval_s: float
    sort: str = "loaded"
    chosen: str = ""
    inside: bool = False
    paused: bool = False
    problem: str = ""
    hit_ratios: list[float | None] = field(default_factory=list)

    def remember(self, figures: Figures) -> None:
        """Adds a hit rate to the history."""
        self.hit_ratios = [*self.hit_ratios, figures.hit_ratio][-MAX_HISTORY:]

    def sorted(self, engines: Sequence[EngineRates]) -> list[EngineRates]:
        """Returns the engines in the chosen order; equal engines by name."""
        return sorted(sorted(engines, key=SORTS["name"]), key=SORTS[self.sort])

    def press(self, key: str, engines: Sequence[EngineRates]) -> bool:
        """Applies a key. Returns False to quit."""
        ids = [engine.engine_id for engine in self.sorted(engines)]
        at = ids.index(self.chosen) if self.chosen in ids else 0
        if key in QUIT:
            return False
        if key == "s":
            words = list(SORTS)
            self.sort = words[(words.index(self.sort) + 1) % len(words)]
        elif key in ("up", "down") and ids:
            self.chosen = ids[max(0, min(len(ids) - 1, at + (1 if key == "down" else -1)))]
        elif key == "enter" and ids:
            self.chosen = ids[at]
            self.inside = True
        elif key == "escape":
            self.inside = False
        elif key == "p":
            self.paused = not self.paused
        elif key in ("+", "-"):
            wanted_s = self.interval_s * (2 if key == "+" else 0.5)
            self.interval_s = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, wanted_s))
        return True


def sparkline(ratios: Sequence[float | None]) -> str:
    """Returns a bar for each ratio, as high as the ratio; a blank if there was no prompt."""
    return "".join(
        BARS[0] if ratio is None else BARS[1 + round(7 * min(1.0, max(0.0, ratio)))]
        for ratio in ratios
    )


def draw(figures: Figures, view: View, console: Console) -> RenderableType:
    """Draws the whole screen. Of many engines it shows those around the chosen engine that fit."""
    engines = view.sorted(figures.engines)
    inside = next((e for e in engines if view.inside and e.engine_id == view.chosen), None)
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in plain.head(figures)]
    lines.append(Text(plain.flow(figures), no_wrap=True, overflow="ellipsis"))
    if any(ratio is not None for ratio in view.hit_ratios):
        lines.append(Text("hits ").append(sparkline(view.hit_ratios), style="green"))
    warnings = [*([view.problem] if view.problem else []), *figures.warnings]
    top = Group(
        Panel(Group(*lines), title="hotkv", border_style="red" if warnings else "green"),
        *(Text(f"! {warning}", style="bold red") for warning in warnings),
        *([_table(plain.TIER_HEADERS, map(plain.tier_row, figures.tiers))] if not inside else []),
    )
    room = console.height - len(console.render_lines(top)) - 1
    at = next((at for at, one in enumerate(engines) if one.engine_id == view.chosen), 0)
    shown = _window(engines, at, room)
    parts = [_one(inside)] if inside else _all(engines[shown], at - shown.start)
    state = f"every {view.interval_s:g} s, by {view.sort}" + ("  PAUSED" if view.paused else "")
    if not inside and shown.stop - shown.start < len(engines):
        state += f"  engines {shown.start + 1} to {shown.stop} of {len(engines)}"
    keys = Text(f"{state}   {HELP}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(top, *parts, keys)


def screen(console: Console) -> Live:
    """Returns a screen that draws only on request and restores the terminal at its end."""
    return Live(console=console, screen=True, auto_refresh=False)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], chosen: int = -1) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, header in enumerate(headers):
        made.add_column(header, justify="left" if at < 2 else "right", no_wrap=True)
    for at, row in enumerate(rows):
        made.add_row(*map(Text, row), style="reverse" if at == chosen else "")
    return made


def _window(engines: Sequence[EngineRates], chosen: int, room: int) -> slice:
    """Returns the range of engines that fit into `room` lines, including the chosen engine."""
    for count in range(min(len(engines), room), 1, -1):
        start = max(0, min(chosen - count // 2, len(engines) - count))
        if _height(engines[start : start + count]) <= room:
            return slice(start, start + count)
    return slice(chosen, min(chosen + 1, len(engines)))


def _height(engines: Sequence[EngineRates]) -> int:
    """Returns the lines of `_all`: a blank line, headers, and a second table if engines select."""
    deciding = sum(1 for engine in engines if engine.selects_per_s)
    return 2 + len(engines) + (2 + deciding if deciding else 0)


def _all(engines: Sequence[EngineRates], chosen: int) -> list[RenderableType]:
    if not engines:
        return [Text("no engine is connected")]
    rows = [plain.engine_row(engine) for engine in engines]
    parts: list[RenderableType] = [Text(), _table(plain.ENGINE_HEADERS, rows, chosen)]
    deciding = [plain.sparse_row(engine) for engine in engines if engine.selects_per_s]
    return [*parts, Text(), _table(plain.SPARSE_HEADERS, deciding)] if deciding else parts


def _one(engine: EngineRates) -> Panel:
    """Draws an engine, with the reasons of its misses."""
    pairs = [
        *zip(plain.ENGINE_HEADERS[1:], plain.engine_row(engine)[1:], strict=True),
        ("sessions", str(engine.num_sessions)),
        ("saved, 10 min", human_seconds(engine.saved_s)),
        ("waited, 10 min", human_seconds(engine.waited_s)),
        ("missed, 10 min", plain.misses(engine)),
        *zip(plain.SPARSE_HEADERS[1:], plain.sparse_row(engine)[1:], strict=True),
    ]
    made = Table(box=None, show_header=False, pad_edge=False)
    for name, value in pairs:
        made.add_row(Text(name, style="bold"), Text(value))
    return Panel(made, title=Text(f"engine {engine.name}"))
