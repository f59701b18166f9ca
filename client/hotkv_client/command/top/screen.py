"""Draws `hotkv top` on a terminal with rich. Needs the extra `cli`.

Always true: every line fits a terminal of at least 80 columns. A long name loses its beginning,
because names of pods and models differ at their ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hotkv_client.command.tables import human_bytes, human_seconds
from hotkv_client.command.top import plain
from hotkv_client.command.top.figures import EngineRates, Figures, ModelRates, TierRates, by_model

HEIGHTS = " ▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉█"
FULL, EMPTY = "█", "░"
BAR_WIDTH, TIER_BAR_WIDTH, HEAD_BAR_WIDTH = 10, 8, 30
MAX_HISTORY = 60
WIDE = 110
"""Least columns of a terminal at which rows show more figures."""
FIGURES_WIDTH, WIDE_FIGURES_WIDTH = 63, 76
"""Columns of a row's figures without its name, on a narrow and on a WIDE terminal."""
ENGINES_WIDTH = 9
"""Of the column with a model's number of engines."""
MIN_NAME, MAX_NAME = 12, 40
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
QUIT = ("q", "ctrl-c")
KEYS = "q quit  ? help  / filter  ↑↓ ⏎ into  esc back  s sort  m models"
HELP = (
    ("q", "quit"),
    ("?", "this help, and back"),
    ("↑ ↓  k j", "choose a row"),
    ("enter", "the engines of a model, or all figures of an engine"),
    ("esc", "back"),
    ("/", "only rows whose engine or model has the text; esc: all"),
    ("m", "rows by model, or by engine"),
    ("s", "sort by bytes loaded, bytes stored, hits, tokens or name"),
    ("p", "pause"),
    ("+ -", "twice or half the time between two readings"),
    ("", ""),
    ("hits", "share of the prompts' tokens that hit, on the device or here"),
    ("10 min", "the same for the last ten minutes"),
    ("in reach", "what an endless cache would hit"),
    ("tokens/s", "tokens of prompts"),
    ("loaded/s", "bytes copied to engines; stored/s: from engines"),
    ("saved", "prefill that hits avoided; waited: for lookups and loads"),
)
SORTS = {
    "loaded": lambda one: -one.loaded_bytes_per_s,
    "stored": lambda one: -one.stored_bytes_per_s,
    "hits": lambda one: -(one.recent_hit_ratio or 0.0),
    "tokens": lambda one: -one.prompt_tokens_per_s,
    "name": lambda one: one.name,
}
"""Sort keys of rows, by the name shown."""
MAX_FILTER = 40
ALSO = {"k": "up", "j": "down"}
"""Letters that move the cursor, unless they are typed."""
MODEL, ENGINE = "model", "engine"
UP = "up"
RowRates = ModelRates | EngineRates


@dataclass
class View:
    """What keys change.

    interval_s: between two readings.
    sort: a key of `SORTS`.
    rows: MODEL or ENGINE: what has a row.
    model: only this model's engines; empty: all.
    filter: only rows whose engine or model contains it, in any case; empty: all.
    typing: keys are characters of the filter, until enter.
    chosen: key of the row under the cursor.
    inside: only the chosen engine, with details.
    paused: keeps the last reading on the screen.
    helps: shows the help of the keys.
    problem: why the last reading failed.
    hit_ratios: of the last readings, oldest first.
    """

    interval_s: float
    sort: str = "loaded"
    rows: str = MODEL
    model: str = ""
    filter: str = ""
    typing: bool = False
    chosen: str = ""
    inside: bool = False
    paused: bool = False
    helps: bool = False
    problem: str = ""
    hit_ratios: list[float | None] = field(default_factory=list)

    def remember(self, figures: Figures) -> None:
        self.hit_ratios = [*self.hit_ratios, figures.hit_ratio][-MAX_HISTORY:]

    def listed(self, engines: Sequence[EngineRates]) -> list[RowRates]:
        """Rows in the chosen order, then by name."""
        text = self.filter.lower()
        engines = [one for one in engines if text in f"{one.name}\n{one.model}".lower()]
        rows: list[RowRates] = [one for one in engines if self.model in ("", one.model)]
        if self.rows == MODEL and not self.model:
            rows = list(by_model(engines))
        return sorted(sorted(rows, key=SORTS["name"]), key=SORTS[self.sort])

    def press(self, key: str, engines: Sequence[EngineRates]) -> bool:
        """False if the program should end."""
        if self.typing and key != "ctrl-c":
            self._type(key)
            return True
        key = ALSO.get(key, key)
        rows = self.listed(engines)
        keys = [one.key for one in rows]
        at = keys.index(self.chosen) if self.chosen in keys else 0
        if key in QUIT:
            return False
        if key == "?" or self.helps:
            self.helps = key == "?" and not self.helps
        elif key == "/":
            self.typing, self.inside = True, False
        elif key == "s":
            words = list(SORTS)
            self.sort = words[(words.index(self.sort) + 1) % len(words)]
        elif key in ("up", "down") and keys:
            self.chosen = keys[max(0, min(len(keys) - 1, at + (1 if key == "down" else -1)))]
        elif key == "enter" and rows:
            self._enter(rows[at], engines)
        elif key == "escape" and self.filter and not (self.inside or self.model):
            self.filter = ""
        elif key == "escape":
            self._back(len(rows))
        elif key == "m":
            self.rows = ENGINE if self.rows == MODEL else MODEL
            self.model, self.inside = "", False
        elif key == "p":
            self.paused = not self.paused
        elif key in ("+", "-"):
            wanted_s = self.interval_s * (2 if key == "+" else 0.5)
            self.interval_s = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, wanted_s))
        return True

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        else:
            is_letter = len(key) == 1 and key.isprintable()
            self.filter = (self.filter + key * is_letter)[:MAX_FILTER]

    def _enter(self, row: RowRates, engines: Sequence[EngineRates]) -> None:
        """A model's engines, or an engine's details, also of a model's single engine."""
        if isinstance(row, EngineRates):
            self.chosen, self.inside = row.key, True
            return
        own = [one for one in engines if one.model == row.name]
        self.model, self.chosen, self.inside = row.name, own[0].key, len(own) == 1

    def _back(self, num_rows: int) -> None:
        """Goes from an engine's details to the list of engines, then to the models; skips a list
        of one engine."""
        if self.inside:
            self.inside = False
            if self.rows == ENGINE or num_rows > 1:
                return
        if self.model:
            self.chosen, self.model = self.model, ""


def sparkline(ratios: Sequence[float | None]) -> str:
    """A bar per ratio; blank for None."""
    return "".join(
        HEIGHTS[0] if ratio is None else HEIGHTS[1 + round(7 * min(1.0, max(0.0, ratio)))]
        for ratio in ratios
    )


def bar(ratio: float | None, width: int) -> str:
    """Horizontal, to an eighth of a column."""
    eighths = round(8 * width * min(1.0, max(0.0, ratio or 0.0)))
    part = EIGHTHS[eighths % 8] if eighths % 8 else ""
    return (FULL * (eighths // 8) + part).ljust(width, EMPTY)


def shortened(text: str, width: int) -> str:
    """Cuts off the beginning."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


# ------------------------------------------------------------------------------------------ drawing


def draw(figures: Figures, view: View, console: Console) -> RenderableType:
    """The whole screen, if necessary with only the rows around the chosen one."""
    if view.helps:
        return Group(_help(), Text("any key: back   q quit", style="dim"))
    rows = view.listed(figures.engines)
    inside = next((one for one in rows if view.inside and one.key == view.chosen), None)
    warnings = [*([view.problem] if view.problem else []), *figures.warnings]
    tiers: list[RenderableType] = [] if inside else [Text(), _tiers(figures.tiers)]
    top = Group(
        *_head(figures, view),
        *(Text(f"! {warning}", style="bold red") for warning in warnings),
        *tiers,
    )
    room = console.height - len(console.render_lines(top)) - 1
    at = next((at for at, one in enumerate(rows) if one.key == view.chosen), 0)
    shown = _window(rows, at, room)
    if isinstance(inside, EngineRates):
        parts: list[RenderableType] = [_one(inside)]
    else:
        parts = _all(rows[shown], at - shown.start, view, console.width)
    state = f"by {view.sort}" + ("  PAUSED" if view.paused else "")
    if not inside and shown.stop - shown.start < len(rows):
        state += f"  {shown.start + 1}-{shown.stop} of {len(rows)}"
    if view.typing:
        keys = _line(("/" + view.filter, "bold"), "▏  ", ("⏎ keep  esc all", "dim"))
    else:
        only = f"/{view.filter}  " * bool(view.filter)
        keys = Text(f"{only}{state}  {KEYS}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(top, *parts, keys)


def screen(console: Console) -> Live:
    """Draws only on request, and restores the terminal when closed."""
    return Live(console=console, screen=True, auto_refresh=False)


def _line(*parts: tuple[str, str] | str) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _head(figures: Figures, view: View) -> list[Text]:
    """Lines about the whole server."""
    fine = figures.state == "ready" and not view.problem
    lines = [
        _line(
            (f"hotkv {figures.version}", "bold"),
            "  ",
            (figures.state, "bold green" if fine else "bold red"),
            f"  up {human_seconds(figures.uptime_s)}  loop late {figures.lag_p99_s * 1e3:.1f} ms"
            f"  every {view.interval_s:g} s",
        ),
        _line(
            "hits     ",
            (bar(figures.hit_ratio, HEAD_BAR_WIDTH), "green"),
            f" {_percent(figures.hit_ratio)} now, {_percent(figures.recent_hit_ratio)} in 10 min, "
            f"{_percent(figures.ceiling_ratio)} in reach",
        ),
        _line(
            f"prompts  {figures.prompt_tokens_per_s:,.0f} tokens/s  loaded "
            f"{plain.per_s(figures.loaded_bytes_per_s)}  stored "
            f"{plain.per_s(figures.stored_bytes_per_s)}  evicted "
            f"{figures.evicted_blocks_per_s:,.0f}/s"
        ),
        _line(
            f"saved    {human_seconds(figures.saved_s)} in 10 min, waited "
            f"{human_seconds(figures.waited_s)}"
        ),
    ]
    if any(ratio is not None for ratio in view.hit_ratios):
        lines.append(_line("history  ", (sparkline(view.hit_ratios), "green")))
    return lines


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _short(num_bytes: float) -> str:
    return human_bytes(num_bytes) if num_bytes else "-"


def _tiers(tiers: Sequence[TierRates]) -> Table:
    def row(tier: TierRates) -> tuple[str, ...]:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else None
        of = f" of {human_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else ""
        return (
            shortened(tier.name, MIN_NAME),
            bar(share, TIER_BAR_WIDTH) if tier.state == UP else tier.state,
            f"{human_bytes(tier.used_bytes)}{of}",
            _percent(tier.hit_ratio),
            _short(tier.read_bytes_per_s),
            _short(tier.written_bytes_per_s),
        )

    headers = ("tier", "used", "", "hits", "out/s", "in/s")
    return _table(headers, map(row, tiers), num_left=3)


def _table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], num_left: int, chosen: int = -1
) -> Table:
    """The first `num_left` columns are aligned left."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for at, header in enumerate(headers):
        made.add_column(header, justify="left" if at < num_left else "right", no_wrap=True)
    for at, row in enumerate(rows):
        made.add_row(*map(Text, row), style="reverse" if at == chosen else "")
    return made


def _window(rows: Sequence[RowRates], chosen: int, room: int) -> slice:
    """Rows that fit into `room` lines, around the chosen one."""
    for count in range(min(len(rows), room), 1, -1):
        start = max(0, min(chosen - count // 2, len(rows) - count))
        if _height(rows[start : start + count]) <= room:
            return slice(start, start + count)
    return slice(chosen, min(chosen + 1, len(rows)))


def _height(rows: Sequence[RowRates]) -> int:
    """Lines that `_all` draws: blank, headers and rows, and a second table if engines make
    selections."""
    deciding = sum(1 for one in rows if one.selects_per_s)
    return 2 + len(rows) + (2 + deciding if deciding else 0)


def _all(rows: Sequence[RowRates], chosen: int, view: View, width: int) -> list[RenderableType]:
    if not rows:
        of_model = f" of {view.model}" if view.model else ""
        fits = f"fits /{view.filter}" if view.filter else "is connected"
        return [Text(f"no engine{of_model} {fits}")]
    is_wide, of_models = width >= WIDE, isinstance(rows[0], ModelRates)
    room = width - (WIDE_FIGURES_WIDTH if is_wide else FIGURES_WIDTH)
    if is_wide:
        room = room - ENGINES_WIDTH if of_models else room // 2
    name_width = max(MIN_NAME, min(MAX_NAME, room))
    first, second = ("model", "engines") if of_models else ("engine", "model")
    headers = (
        first,
        *([second] if is_wide else []),
        *("hits", "", "10 min", "tokens/s", "loaded/s", "stored/s"),
        *(["transfers"] if is_wide else []),
    )

    def row(one: RowRates) -> list[str]:
        other = str(one.num_engines) if isinstance(one, ModelRates) else one.model
        return [
            shortened(one.name or "-", name_width),
            *([shortened(other, name_width)] if is_wide else []),
            bar(one.hit_ratio, BAR_WIDTH),
            _percent(one.hit_ratio),
            _percent(one.recent_hit_ratio),
            f"{one.prompt_tokens_per_s:,.0f}",
            _short(one.loaded_bytes_per_s),
            _short(one.stored_bytes_per_s),
            *([str(one.num_transfers)] if is_wide else []),
        ]

    num_left = 3 if is_wide else 2
    parts: list[RenderableType] = [Text(), _table(headers, map(row, rows), num_left, chosen)]
    deciding = [
        (shortened(one.name or "-", name_width), *plain.sparse_row(one)[1:])
        for one in rows
        if one.selects_per_s
    ]
    if not deciding:
        return parts
    sparse = (first, *plain.SPARSE_HEADERS[1:])
    return [*parts, Text(), _table(sparse, deciding, 1)]


def _one(engine: EngineRates) -> Panel:
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


def _help() -> Panel:
    made = Table(box=None, show_header=False, pad_edge=False)
    for key, text in HELP:
        made.add_row(Text(key, style="bold"), Text(text))
    return Panel(made, title="hotkv top")
