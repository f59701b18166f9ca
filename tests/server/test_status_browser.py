"""Tests the status page in Chromium: figures, widths, themes, keyboard, tokens, and a server
that is gone."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from demo.processes import Server, runtime_folder
from tests.server.page_support import Traffic, settings_with_tenants
from tests.server.support import http_port
from tests.support.programs import program

sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `dev` has playwright")

WIDE, NARROW = {"width": 1440, "height": 1000}, {"width": 375, "height": 760}
TIMEOUT_MS = 20_000
TOKEN, ADMIN = "a viewers' token 0123", "an-admins-token-4567"
HOSTILE = '<img src=x onerror="window.broken = 1">'
PROBE = Path(__file__).with_name("page_probe.js")
DARK = "rgb(16, 22, 28)"


@dataclass
class Watched:
    page: Any
    url: str
    wrong: list[str] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Answers of /api/v1/status, by `unix_time_ms`."""

    def until(self, expression: str) -> None:
        """Playwright's own wait needs `eval`, which the page forbids."""
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline_s, f"never came about: {expression}"
            self.page.wait_for_timeout(50)

    def gather(self, beyond: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Figures later than `beyond`, and the API's answer that they come from."""
        self.until(f"Number(document.body.dataset.shown) > {beyond}")
        found = self.page.evaluate("probe.gather()")
        while found["shown"] not in self.answers:
            self.page.wait_for_timeout(20)
        return found, self.answers[found["shown"]]

    @property
    def is_dark(self) -> bool:
        shown = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return bool(shown == DARK)


Visit = Callable[..., Watched]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(128 << 20) as folder, Server(folder, "32MiB") as running:
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
def visit(browser: Any) -> Iterator[Visit]:
    """Opens the page in a new browser context."""
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
def traffic(server: Server) -> Iterator[None]:
    """Two engines at work, one of them with names like HTML."""
    with contextlib.ExitStack() as stack:
        one = Traffic(server.target, "llama-8b", "engine-a", num_blocks=256)
        stack.callback(one.close)
        hostile = Traffic(server.target, HOSTILE, HOSTILE[:40], page_bytes=8192)
        stack.callback(hostile.close)
        layers = {n: {"selects": 10 + n, "wanted_blocks": 8, "hit_blocks": 6} for n in range(4)}
        one.engine.session.report_sparse({}, layers)
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(0.05):
                one.prompt(40, loads=24, device=4)
                hostile.prompt(8, loads=2, device=0)

        for _ in range(20):
            one.prompt(60, loads=30, device=5)
        running = threading.Thread(target=run)
        running.start()
        yield
        ended.set()
        running.join()


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


@pytest.mark.usefixtures("traffic")
def test_what_is_shown_is_what_the_api_says(server: Server, visit: Visit) -> None:
    one, at = visit(server), 0
    for _ in range(2):
        shown, said = one.gather(at)
        at, raw, hour = shown["shown"], shown["raw"], said["savings"]["hour"]
        total, outlook = hour["total"], hour["outlook"]
        assert shown["state"] == "✓ ready" and shown["host"] == said["host"]
        hits = sum(total["hits"].values()) + total["device_hit_token_count"]
        rate = hits / total["prompt_token_count"]
        assert shown["rateText"] == f"{100 * rate:.1f} %"
        figures = {
            "rate": pytest.approx(rate),
            "prompts": total["prompt_token_count"],
            "saved": pytest.approx(total["saved_s"] - total["waited_s"]),
            "loaded": total["loaded_byte_count"],
            "stored": total["stored_byte_count"],
        }
        assert {name: float(shown[name]) for name in figures} == figures
        assert raw["state"] == "ready" and int(raw["session_count"]) == said["session_count"] == 2
        assert float(raw["loop.lag_p99_s"]) == said["loop"]["lag_p99_s"]
        outlooks = ("ceiling_ratio", "gain_ratio")
        assert [float(raw[name]) for name in outlooks] == [outlook[name] for name in outlooks]
        assert shown["misses"] == total["misses"]
        for name, (rows, fields) in TABLES.items():
            numbers = [[float(raw) for _, raw in row if raw is not None] for row in shown[name]]
            assert numbers == [[row[each] for each in fields] for row in rows(said)] != [], name
        named = {text for row in shown["sessions"] for text, _ in row}
        assert {"engine-a", "llama-8b", HOSTILE, HOSTILE[:40]} <= named
    # Only a hit was taken back: the rate is 0, not below.
    one.page.route("**/api/v1/status", only_taken_back)
    one.until("document.getElementById('rate-hour').dataset.raw <= 0")
    assert one.page.inner_text("#rate-hour") == "0.0 %"
    assert one.page.evaluate("window.broken === undefined") and not one.wrong


def only_taken_back(route: Any) -> None:
    figures = route.fetch().json()
    total = figures["savings"]["hour"]["total"]
    total.update(hits={"host": -total["prompt_token_count"]}, device_hit_token_count=0)
    route.fulfill(json=figures)


@pytest.mark.usefixtures("traffic")
@pytest.mark.parametrize(
    ("viewport", "scheme"), [(WIDE, "dark"), (NARROW, "light")], ids=["wide", "narrow"]
)
def test_page_is_readable_wide_narrow_and_dark(
    server: Server, visit: Visit, viewport: dict[str, int], scheme: str
) -> None:
    one = visit(server, viewport, scheme)
    page = one.page
    one.gather()
    # Waits for a sample, so that the charts are not empty.
    one.until("document.querySelectorAll('#hits path[d^=M]').length > 1")
    assert page.is_hidden("#connect")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls aside"
    assert not page.evaluate("probe.poor()")
    assert one.is_dark == (scheme == "dark")
    for theme in ("light", "dark"):
        page.click("#theme")
        assert page.inner_text("#theme") == f"Theme: {theme}"
        assert one.is_dark == (theme == "dark") and not page.evaluate("probe.poor()")
    page.reload()
    assert page.inner_text("#theme") == "Theme: dark", "it is remembered"
    assert not one.wrong


KEYS_OF_ARENA = (
    ("Home", "Slab 0:"),
    ("ArrowRight", "Slab 1:"),
    ("ArrowLeft", "Slab 0:"),
    ("End", "Slab 511:"),
    ("ArrowRight", "Slab 511:"),
    ("Escape", "512 cells"),
)


@pytest.mark.usefixtures("traffic")
def test_all_can_be_done_by_keyboard(server: Server, visit: Visit) -> None:
    one = visit(server)
    page, seen = one.page, list[dict[str, Any]]()
    one.gather()
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate("probe.focused()")
        if focused["tag"] == "BODY" or (seen and focused == seen[0]):
            break
        seen.append(focused)
        assert focused["name"], f"{focused} has no name"
        assert focused["outline"] != "none" and focused["width"] >= 2, f"{focused} can't be seen"
    order = [f["id"] or f["name"] for f in seen]
    assert order[:3] == ["Skip to the figures", "pause", "theme"]
    wanted = ["pause", "theme", "r60", "hits", "bytes", "evicted", "arena"]
    assert [name for name in order if name in wanted] == wanted
    # Arrows move through a chart's points, and choose its range.
    page.focus("#hits")
    assert page.inner_text("#hits-out").startswith(("Latest", "No samples"))
    page.keyboard.press("ArrowLeft")
    assert not page.inner_text("#hits-out").startswith("Latest")
    page.focus("#arena")
    for pressed, said in KEYS_OF_ARENA:
        page.keyboard.press(pressed)
        assert page.inner_text("#arena-out").startswith(said)
    page.focus("#r60")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("#r120")
    page.focus("#pause")
    for pressed, is_paused in (("Enter", "true"), ("Space", "false")):
        page.keyboard.press(pressed)
        assert page.get_attribute("#pause", "aria-pressed") == is_paused
        assert is_paused == "false" or "paused" in page.inner_text("#age")
    # Every table has a caption and column headings.
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every(t => t.caption && t.caption.textContent && "
        "[...t.querySelectorAll('th')].every(th => th.scope))"
    )
    assert page.evaluate(
        "['h1', 'header', 'main'].every(n => document.querySelectorAll(n).length === 1)"
    )
    assert not one.wrong


@pytest.mark.long
def test_it_says_when_the_server_is_gone(visit: Visit) -> None:
    with runtime_folder(64 << 20) as folder:
        with Server(folder, "16MiB") as running:
            running.wait_ready()
            one = visit(running)
            one.gather()
            page = one.page
            assert page.is_hidden("#gone") and not one.wrong
            assert "no engine is connected" in page.inner_text("#checks")
            # How to connect one, and what proves it. Axes of zeros have no scale.
            assert "hotkv try --engine" in page.inner_text("#connect")
            one.until("document.querySelectorAll('#bytes line.rule').length === 1")
            assert "host memory is 0.0 % full" in page.inner_text("#reach-pairs")
        page.wait_for_selector("#gone", state="visible")
    assert "the server is gone" in page.inner_text("#gone")
    assert page.inner_text("#state") == "✕ stale"
    assert page.get_attribute("#figures", "class") == "stale"
    assert page.get_attribute("#gone", "role") == "alert"


def test_tokens_are_entered_once(visit: Visit, tmp_path: Path) -> None:
    """Refreshes and late answers must not close an open form."""
    viewers = tmp_path / "token"
    viewers.touch(0o600)
    viewers.write_text(TOKEN)
    config = settings_with_tenants(tmp_path, ADMIN, "blue", token_file=viewers)
    with (
        runtime_folder(64 << 20) as folder,
        Server(folder, "16MiB", "--config", str(config)) as running,
    ):
        running.wait_ready()
        one = visit(running)
        page, held = one.page, list[Any]()
        page.wait_for_selector("#ask", state="visible")
        assert page.is_hidden("#figures")
        assert page.evaluate("document.activeElement.id") == "token"
        page.keyboard.type("wrong\n")
        one.until("document.getElementById('ask-error').textContent !== ''")
        page.keyboard.type(TOKEN + "\n")
        one.gather()
        assert page.is_hidden("#ask") and page.is_visible("#figures")
        assert page.is_visible("#no-names") and not page.is_visible("#sessions")
        page.reload()
        one.gather()
        assert page.is_hidden("#ask") and TOKEN not in page.url
        # The form opens while an answer is on its way.
        page.click("#pause")
        page.clock.install()
        page.route("**/api/v1/status", lambda route: held.append(route), times=1)
        page.click("#pause")
        while not held:
            page.wait_for_timeout(20)
        page.click("#give")
        page.keyboard.type(ADMIN[:8])
        with page.expect_event("requestfinished"):
            held.pop().continue_()
        page.wait_for_timeout(50)
        assert page.is_visible("#ask") and page.input_value("#token") == ADMIN[:8]
        # The form opens between two refreshes.
        page.click("#back")
        one.until(
            "!document.getElementById('ask').hidden && document.getElementById('back').hidden"
        )
        page.keyboard.type(TOKEN + "\n")
        one.until("!document.getElementById('figures').hidden")
        page.click("#give")
        page.keyboard.type(ADMIN[:8])
        page.on("request", lambda request: held.append(request))
        page.clock.run_for(20_000)
        page.wait_for_timeout(50)
        assert not held and page.is_visible("#ask")
        page.keyboard.type(ADMIN[8:] + "\n")
        one.until("document.getElementById('no-names').hidden")
        assert page.is_hidden("#ask") and page.is_visible("#sessions")
        page.clock.run_for(6_000)
        one.until("document.getElementById('age').textContent !== ''")
        assert len(held) >= 2, "it is asked again and again"
        page.click("#forget")
        assert page.is_visible("#ask") and page.input_value("#token") == ""
        page.reload()
        page.wait_for_selector("#ask", state="visible")
    assert all("401" in wrong for wrong in one.wrong), one.wrong
    # While the form is open, the page sends only tokens.
    page.keyboard.type(TOKEN + "\n")
    one.until("document.getElementById('gone-text').textContent.endsWith('again later.')")
    assert "the server is gone" in page.inner_text("#gone") and page.is_visible("#ask")
