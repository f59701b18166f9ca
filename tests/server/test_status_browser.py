"""The status page in Debian's Chromium: what it shows is what the API says, under live traffic; it
is readable at both widths, dark and light, works by keyboard, and says when the server is gone.

HOTKV_SCREENSHOTS names a folder for screenshots; without it they go to pytest's own.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Server, runtime_folder
from tests.server.page_support import Traffic
from tests.server.support import http_port
from tests.support.programs import program

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `dev` has playwright")

WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 375, "height": 760}
TIMEOUT_MS = 20_000
TOKEN = "a-viewers-token-0123"
HOSTILE = '<img src=x onerror="window.broken = 1">'
PROBE = Path(__file__).with_name("page_probe.js")
SLABS = ("--arena.slab-bytes", "64KiB")


@dataclass
class Watched:
    """A page, and what was wrong with it."""

    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of /api/v1/status, by their time."""

    def until(self, expression: str) -> None:
        """Waits until an expression is true. Playwright's own wait needs `eval` in the page, which
        its policy forbids."""
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, f"never came about: {expression}"
            self.page.wait_for_timeout(50)

    def gather(self, beyond: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is shown, later than `beyond`, and the answer that it was made of."""
        self.until(f"Number(document.body.dataset.shown) > {beyond}")
        found = self.page.evaluate("probe.gather()")
        while found["shown"] not in self.answers:
            self.page.wait_for_timeout(20)
        return found, self.answers[found["shown"]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(128 << 20) as folder, Server(folder, "32MiB", *SLABS) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = program("chromium")
    with sync_api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=str(path), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Opens pages, in a context of its own each."""
    with contextlib.ExitStack() as stack:

        def go(server: Server, viewport: Any = WIDE, scheme: str = "light") -> Watched:
            context = browser.new_context(viewport=viewport, color_scheme=scheme)
            stack.callback(context.close)
            context.set_default_timeout(TIMEOUT_MS)
            page = context.new_page()
            one = Watched(page, f"http://127.0.0.1:{http_port(server)}/")
            page.on("console", lambda m: m.type == "error" and one.wrong.append(m.text))
            page.on("pageerror", lambda error: one.wrong.append(str(error)))
            page.on("dialog", lambda dialog: one.wrong.append("a dialog"))
            page.expose_function("violated", lambda text: one.wrong.append(text))
            page.add_init_script(path=str(PROBE))
            page.add_init_script(
                "addEventListener('securitypolicyviolation', "
                "e => violated(`${e.violatedDirective} ${e.blockedURI}`))"
            )

            def note(answer: Any) -> None:
                if answer.url.endswith("/api/v1/status") and answer.status == 200:
                    figures = answer.json()
                    one.answers[figures["unix_time_ms"]] = figures

            page.on("response", note)
            page.goto(one.url)
            return one

        yield go


@pytest.fixture(scope="module")
def traffic(server: Server) -> Iterator[list[Traffic]]:
    """Two engines that go on storing and loading; one has names that a page must not take for
    markup."""
    engines = [Traffic(server.target, "llama-8b", "engine-a", num_blocks=256)]
    engines.append(Traffic(server.target, HOSTILE, HOSTILE[:40], page_bytes=8192))
    layers = {n: {"selects": 10 + n, "wanted_blocks": 8, "hit_blocks": 6} for n in range(4)}
    engines[0].engine.session.report_sparse({}, layers)
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.05):
            engines[0].prompt(40, loads=24, device=4)
            engines[1].prompt(8, loads=2, device=0)

    for _ in range(20):
        engines[0].prompt(60, loads=30, device=5)
    running = threading.Thread(target=run)
    running.start()
    yield engines
    ended.set()
    running.join()
    for one in engines:
        one.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("HOTKV_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_what_is_shown_is_what_the_api_says(
    server: Server, traffic: list[Traffic], visit: Callable[..., Watched]
) -> None:
    one, at = visit(server), 0
    for _ in range(2):
        shown, said = one.gather(at)
        at = shown["shown"]
        hour = said["savings"]["hour"]
        total, outlook = hour["total"], hour["outlook"]
        assert shown["state"] == "✓ ready" and shown["host"] == said["host"]
        assert float(shown["prompts"]) == total["prompt_token_count"] > 0
        hits = sum(total["hits"].values()) + total["device_hit_token_count"]
        rate = hits / total["prompt_token_count"]
        assert float(shown["rate"]) == pytest.approx(rate)
        assert shown["rateText"] == f"{100 * rate:.1f} %"
        assert float(shown["saved"]) == pytest.approx(total["saved_s"] - total["waited_s"])
        moved = float(shown["loaded"]), float(shown["stored"])
        assert moved == (total["loaded_byte_count"], total["stored_byte_count"])
        raw = shown["raw"]
        assert raw["state"] == "ready" and int(raw["session_count"]) == said["session_count"] == 2
        assert float(raw["loop.lag_p99_s"]) == said["loop"]["lag_p99_s"]
        assert float(raw["ceiling_ratio"]) == outlook["ceiling_ratio"]
        assert float(raw["gain_ratio"]) == outlook["gain_ratio"]
        assert shown["misses"] == total["misses"]
        raws = {name: [[cell[1] for cell in row] for row in shown[name]] for name in TABLES}
        for name, (rows, fields) in TABLES.items():
            told = rows(said)
            assert len(raws[name]) == len(told) > 0, name
            for cells, row in zip(raws[name], told, strict=True):
                numbers = [float(cell) for cell in cells if cell is not None]
                assert numbers == [row[each] for each in fields], (name, row)
        named = {cell[0] for row in shown["sessions"] for cell in row}
        assert {"engine-a", "llama-8b", HOSTILE, HOSTILE[:40]} <= named
    assert one.page.evaluate("window.broken === undefined") and not one.wrong


TABLES: dict[str, tuple[Callable[[dict[str, Any]], list[dict[str, Any]]], tuple[str, ...]]] = {
    "tiers": (
        lambda said: said["tiers"],
        ("used_byte_count", "capacity_byte_count", "pinned_byte_count", "block_count"),
    ),
    "engines": (
        lambda said: said["savings"]["hour"]["rows"],
        ("request_count", "prompt_token_count", "loaded_byte_count", "stored_byte_count"),
    ),
    "sessions": (
        lambda said: said["sessions"],
        ("session_number", "loaded_byte_count", "stored_byte_count"),
    ),
    "spaces": (lambda said: said["key_spaces"], ("key_space_id", "block_count")),
    "sizes": (
        lambda said: said["tiers"][0]["slab_classes"],
        ("slot_byte_count", "slab_count", "slot_count", "used_slot_count"),
    ),
    "sparse": (lambda said: said["sparse_layers"], ("layer_index", "selects", "hit_ratio")),
}


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable_wide_and_narrow_dark_and_light(
    server: Server,
    traffic: list[Traffic],
    visit: Callable[..., Watched],
    screenshots: Path,
    viewport: Any,
    scheme: str,
) -> None:
    one = visit(server, viewport, scheme)
    one.gather()
    # A sample has come, so that the charts have something to draw.
    one.until("document.querySelectorAll('#hits path[d^=M]').length > 1")
    one.page.screenshot(
        path=str(screenshots / f"status-{viewport['width']}-{scheme}.png"), full_page=True
    )
    page = one.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls aside"
    assert not page.evaluate("probe.poor()")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 22, 28)"
    assert dark == (scheme == "dark")
    # The switch: system, then the other scheme too.
    for theme, is_dark in (("light", False), ("dark", True)):
        page.click("#theme")
        assert page.inner_text("#theme") == f"Theme: {theme}"
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(16, 22, 28)") == is_dark and not page.evaluate("probe.poor()")
    page.reload()
    assert page.inner_text("#theme") == "Theme: dark", "it is remembered"
    assert not one.wrong


def test_all_can_be_done_by_keyboard(
    server: Server, traffic: list[Traffic], visit: Callable[..., Watched]
) -> None:
    one = visit(server)
    page, seen = one.page, list[dict[str, Any]]()
    one.gather()
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate("probe.focused()")
        if focused["tag"] == "BODY" or (seen and focused == seen[0]):
            break
        seen.append(focused)
    order = [f["id"] or f["name"] for f in seen]
    assert order[:3] == ["Skip to the figures", "pause", "theme"]
    wanted = ["pause", "theme", "r60", "hits", "bytes", "evicted", "arena"]
    assert [name for name in order if name in wanted] == wanted
    for focused in seen:
        assert focused["name"], f"{focused} has no name"
        assert focused["outline"] != "none" and focused["width"] >= 2, f"{focused} can't be seen"
    # A chart is read point by point, and the range is chosen, by arrows.
    page.focus("#hits")
    assert page.inner_text("#hits-out").startswith(("Latest", "No samples"))
    page.keyboard.press("ArrowLeft")
    assert not page.inner_text("#hits-out").startswith("Latest")
    page.focus("#arena")
    for pressed, said in (
        ("Home", "Slab 0:"),
        ("ArrowRight", "Slab 1:"),
        ("ArrowRight", "Slab 2:"),
        ("ArrowLeft", "Slab 1:"),
        ("End", "Slab 511:"),
        ("ArrowRight", "Slab 511:"),
        ("Escape", "512 cells"),
    ):
        page.keyboard.press(pressed)
        assert page.inner_text("#arena-out").startswith(said)
    page.focus("#r60")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("#r120")
    page.focus("#pause")
    page.keyboard.press("Enter")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    assert "paused" in page.inner_text("#age")
    page.keyboard.press("Space")
    assert page.get_attribute("#pause", "aria-pressed") == "false"
    # Every table says what it is and what its columns are.
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every(t => t.caption && t.caption.textContent && "
        "[...t.querySelectorAll('th')].every(th => th.scope))"
    )
    assert page.evaluate(
        "['h1', 'header', 'main'].every(n => document.querySelectorAll(n).length === 1)"
    )
    assert not one.wrong


@pytest.mark.long
def test_an_hour_that_only_has_the_failed_load_of_a_hit_shows_no_rate_below_zero(
    server: Server, traffic: list[Traffic], visit: Callable[..., Watched]
) -> None:
    """The hit was an hour and a minute ago, and is taken back now."""
    one = visit(server)
    one.gather()

    def alter(route: Any) -> None:
        figures = route.fetch().json()
        hour = figures["savings"]["hour"]
        for usage in (hour["total"], *hour["rows"]):
            usage["hits"] = {"host": -usage["prompt_token_count"]}
        hour["total"]["device_hit_token_count"] = 0
        route.fulfill(json=figures)

    one.page.route("**/api/v1/status", alter)
    one.until("document.getElementById('rate-hour').dataset.raw <= 0")
    assert one.page.inner_text("#rate-hour") == "0.0 %"
    figures = one.page.inner_text("#engines") + one.page.inner_text("#rate-hour-note")
    assert not re.search(r"-\d", figures.replace("engine-a", "").replace("llama-8b", "")), figures


@pytest.mark.long
def test_it_says_when_the_server_is_gone(visit: Callable[..., Watched], screenshots: Path) -> None:
    with runtime_folder(64 << 20) as folder:
        with Server(folder, "16MiB", *SLABS) as running:
            running.wait_ready()
            one = visit(running)
            one.gather()
            assert one.page.is_hidden("#gone") and not one.wrong
            assert "no engine is connected" in one.page.inner_text("#checks")
            one.page.screenshot(path=str(screenshots / "status-empty.png"), full_page=True)
        one.page.wait_for_selector("#gone", state="visible")
    assert "the server is gone" in one.page.inner_text("#gone")
    assert one.page.inner_text("#state") == "✕ stale"
    assert one.page.get_attribute("#figures", "class") == "stale"
    assert one.page.get_attribute("#gone", "role") == "alert"
    one.page.screenshot(path=str(screenshots / "status-gone.png"))


def test_a_token_is_entered_once(
    visit: Callable[..., Watched], screenshots: Path, tmp_path: Path
) -> None:
    token, config = tmp_path / "token", tmp_path / "hotkv.toml"
    token.touch(0o600)
    token.write_text(TOKEN)
    digest = hashlib.sha256(b"another").hexdigest()
    config.write_text(
        f'[http]\nhost = "0.0.0.0"\ntoken_file = "{token}"\n[security]\n'
        f'admin_token_sha256 = ["{digest}"]\n'
        f'[[security.tenants]]\nname = "blue"\nuids = [{os.getuid()}]\n'
    )
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--config", str(config), *SLABS) as running,
    ):
        running.wait_ready()
        one = visit(running)
        page = one.page
        page.wait_for_selector("#ask", state="visible")
        assert page.is_hidden("#figures")
        assert page.evaluate("document.activeElement.id") == "token"
        page.screenshot(path=str(screenshots / "status-token.png"))
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        one.until("document.getElementById('ask-error').textContent !== ''")
        assert "does not know" in page.inner_text("#ask-error")
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        one.gather()
        assert page.is_hidden("#ask") and page.is_visible("#figures")
        assert page.is_visible("#no-names") and not page.is_visible("#sessions")
        page.reload()
        one.gather()
        assert page.is_hidden("#ask") and TOKEN not in page.url
        page.click("#forget")
        assert page.is_visible("#ask") and page.input_value("#token") == ""
        page.reload()
        page.wait_for_selector("#ask", state="visible")
    assert all("401" in wrong for wrong in one.wrong), one.wrong


def test_no_answer_closes_the_form_of_the_token(
    visit: Callable[..., Watched], tmp_path: Path
) -> None:
    """Neither one that was under way when the form opened, nor a refresh that was due then."""
    digest, config = hashlib.sha256(TOKEN.encode()).hexdigest(), tmp_path / "hotkv.toml"
    config.write_text(
        f'[security]\nadmin_token_sha256 = ["{digest}"]\n'
        f'[[security.tenants]]\nname = "blue"\nuids = [{os.getuid()}]\n'
    )
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--config", str(config), *SLABS) as running,
    ):
        running.wait_ready()
        one = visit(running)
        page, held = one.page, list[Any]()
        one.gather()
        page.click("#pause")
        page.clock.install()
        # The answer comes when the form is open.
        page.route("**/api/v1/status", lambda route: held.append(route), times=1)
        page.click("#pause")
        while not held:
            page.wait_for_timeout(20)
        page.click("#give")
        page.keyboard.type(TOKEN[:8])
        with page.expect_event("requestfinished"):
            held.pop().continue_()
        page.wait_for_timeout(50)
        assert page.is_visible("#ask") and page.input_value("#token") == TOKEN[:8]
        # It opens between two refreshes.
        page.click("#back")
        one.until("!document.getElementById('figures').hidden")
        page.click("#give")
        page.keyboard.type(TOKEN[:8])
        page.on("request", lambda request: held.append(request))
        page.clock.run_for(20_000)
        page.wait_for_timeout(50)
        assert not held and page.is_visible("#ask")
        page.keyboard.type(TOKEN[8:])
        page.keyboard.press("Enter")
        one.until("document.getElementById('no-names').hidden")
        assert page.is_hidden("#ask") and page.is_visible("#sessions")
        page.clock.run_for(6_000)
        one.until("document.getElementById('age').textContent !== ''")
        assert len(held) >= 2, "it is asked again and again"
    assert not one.wrong
