"""Tests the status page's API: figures, access, odd requests. test_status_browser tests the
page."""

import asyncio
import base64
import dataclasses
import hashlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hotkv_server
from demo.processes import Server, runtime_folder
from hotkv_client import GroupHashes
from hotkv_client.admin import AdminClient
from hotkv_server.ledger import figures
from hotkv_server.ledger.history import NUM_SAMPLES, STEP_S, LiveHistory
from hotkv_server.monitoring import http_endpoint
from hotkv_server.monitoring.http_endpoint import HttpServer
from hotkv_server.monitoring.pages import routes
from hotkv_server.monitoring.pages.routes import MAX_KEPT, SavingsPage
from hotkv_server.node import survey
from hotkv_server.node.names import DisplayNames
from hotkv_server.node.node import Node
from tests.server.capable import capable
from tests.server.ledger_world import World
from tests.server.nodes import local_node
from tests.server.page_support import Answer, Traffic, get, settings_with_tenants, status_of
from tests.server.support import http_port
from tests.support.waiting import eventually, wait_for

PAGE = Path(hotkv_server.__file__).parent / "monitoring" / "pages" / "page.html"
MAX_PAGE_BYTES = 150_000
TOKEN, ADMIN = "a-viewers-token-0123", "an-admins-token-4567"


@pytest.fixture
def traffic(server: Server) -> Iterator[Callable[..., Traffic]]:
    made: list[Traffic] = []

    def make(model: str) -> Traffic:
        made.append(Traffic(server.target, model, f"{model}-engine"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def settled(server: Server) -> dict[str, Any]:
    """The status, once blocks were counted anew."""
    status_of(server)
    time.sleep(survey.FRESH_S)
    wait_for(lambda: status_of(server)["survey_age_s"] == 0.0)
    return status_of(server)


# The figures of other views


def test_it_says_what_the_admin_api_says(server: Server, traffic: Callable[..., Traffic]) -> None:
    one = traffic("page-same")
    blocks, session = one.prompt(20), one.engine.session
    session.report_sparse({}, {3: {"selects": 4, "wanted_blocks": 8, "hit_blocks": 6}})
    session.acquire("page-same-lease", [GroupHashes(0, blocks[:6])], 60).result(60)
    status = settled(server)
    text = get(http_port(server), "/api/v1/status").text
    assert not any(block.hex()[:12] in text or block[::-1].hex()[:12] in text for block in blocks)
    with AdminClient(server.target) as admin:
        tiers = admin.tiers()
        sessions = {row["session_number"]: row for row in admin.sessions()}
        spaces = {row["key_space_id"]: row for row in admin.key_spaces()}
    assert (status["state"], status["problems"], status["has_names"]) == ("ready", [], True)
    (host,) = status["tiers"]
    # The reserve empties soon after the last store.
    assert 0 <= host.pop("reserve_byte_count") <= host["capacity_byte_count"]
    assert host.items() <= tiers[0].items()
    assert host["block_count"] >= 20 and host["pinned_byte_count"] == 6 * 8192
    assert status["counters"]["stored_blocks_total"] >= 20 and status["lease_count"] == 1
    assert status["session_count"] == len(status["sessions"]) == len(sessions)
    same = ("engine_id", "role", "key_space_id", "client_name", "loaded_byte_count")
    for row in status["sessions"]:
        assert [row[name] for name in same] == [sessions[row["session_number"]][n] for n in same]
    assert status["key_space_count"] == len(status["key_spaces"]) == len(spaces)
    for row in status["key_spaces"]:
        assert row.items() <= spaces[row["key_space_id"]].items()
    (layer,) = [row for row in status["sparse_layers"] if row["layer_index"] == 3]
    assert (layer["selects"], layer["hit_ratio"]) == (4, 0.75)
    # The sizes must add up to the arena's.
    arena = status["arena"]
    assert arena["slabs_per_cell"] == 1
    assert arena["slab_count"] * arena["slab_byte_count"] >= host["capacity_byte_count"]
    used = sum(arena["used_ratios"]) * arena["slab_byte_count"]
    assert used == pytest.approx(host["used_byte_count"], rel=0.01)
    lent = [at for at in arena["slot_size_indexes"] if at >= 0]
    assert len(lent) == sum(row["slab_count"] for row in host["slab_classes"])
    assert set(arena["slot_byte_counts"]) == {r["slot_byte_count"] for r in host["slab_classes"]}
    ages = [age for age in arena["idle_s"] if age is not None]
    assert 0 < len(ages) <= len(lent) and min(ages) < 60
    session.release("page-same-lease")


def test_savings_are_those_of_the_ledger(server: Server, traffic: Callable[..., Traffic]) -> None:
    one = traffic("page-savings")
    one.prompt()
    one.prompt(4, loads=2, device=0)
    status = status_of(server)
    hour, minutes, total = (
        status["savings"]["hour"],
        status["minutes"],
        status["savings"]["all"]["total"],
    )

    def is_told() -> bool:
        """The API's answers are cached, and may be older."""
        told = get(http_port(server), "/api/v1/savings?since_s=3600").figures
        return bool((hour["total"], hour["rows"]) == (told["total"], told["rows"]))

    wait_for(is_told)
    (row,) = [r for r in hour["rows"] if r["model"] == "page-savings"]
    assert (row["request_count"], row["prompt_token_count"]) == (2, 12 * 16 + 6)
    assert row["hits"]["host"] == 6 * 16 and row["device_hit_token_count"] == 16
    # The minutes are those of two hours.
    assert minutes["step_s"] == 60 and len(minutes["prompt_token_counts"]) == 120
    assert sum(minutes["prompt_token_counts"]) == total["prompt_token_count"]
    assert sum(minutes["hit_token_counts"]["host"]) == total["hits"]["host"]
    assert sum(minutes["hit_token_counts"]["device"]) == total["device_hit_token_count"]
    assert sum(minutes["loaded_byte_counts"]) == total["loaded_byte_count"]


# History


def test_samples_are_what_was_counted_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world, lag = World(), SimpleNamespace(longest_s=lambda seconds: 0.25)
    history = LiveHistory(world.core, world.ledger, lag)
    # Intervals have STEP_S; the node starts a second into one.
    began_s = (history.history.number + 1) * STEP_S + 1.0
    world.report(num_blocks=2, hit_tokens=16)
    history.turn(began_s + STEP_S)
    world.core.counters.evicted_blocks += 7
    world.report(num_blocks=3)
    history.turn(began_s + 2 * STEP_S)
    history.turn(began_s + 2 * STEP_S + 0.2)
    # A hang of two intervals, which have no samples.
    world.report(num_blocks=4)
    history.turn(began_s + 5 * STEP_S)
    samples, age_s = history.samples(began_s + 5 * STEP_S)
    assert samples["prompt_tokens"].tolist() == [33, 49, 0, 0, 65]
    assert samples["hit_tokens/host"].tolist() == [16, 0, 0, 0, 0]
    assert samples["evicted_blocks"].tolist() == [0, 7, 0, 0, 0]
    assert samples["loop_lag_s"].tolist() == [0.25, 0.25, 0, 0, 0.25]
    assert age_s == 1.0
    clock = SimpleNamespace(monotonic=lambda: began_s + 5 * STEP_S, time=lambda: 1_000_030.5)
    monkeypatch.setattr(figures, "time", clock)
    status = figures.status(world.ledger, history, DisplayNames(), has_names=False)
    assert status["history"]()["end_unix_time_ms"] == 1_000_029_500
    assert status["history"]()["evicted_block_counts"] == [0, 7, 0, 0, 0]
    assert status["minutes"]()["end_unix_time_ms"] == 1_000_080_000, "the present minute's end"
    total = status["savings"]["all"]
    assert total["rows"] == [] and total["total"]["prompt_token_count"] == 147
    assert total["began_unix_time_ms"] == world.ledger.accounts.began_minute * 60_000
    for later in range(6, NUM_SAMPLES + 20):
        history.turn(began_s + later * STEP_S)
    assert {len(values) for values in history.samples(0.0)[0].values()} == {NUM_SAMPLES}


# Bounds


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with local_node(tmp_path, copies=SimpleNamespace(num_queued=0, busy_s=0.0)) as made:
        yield capable(made)


async def test_however_many_ask_for_savings_the_node_rests() -> None:
    """That is less than 6 % of its time. An answer is at most a second old."""
    spent_s, now_s, ages = 0.0, 1000.0, list[int]()

    async def read(since_s: float, has_names: bool) -> dict[str, Any]:
        nonlocal spent_s, now_s
        spent_s, now_s = spent_s + 0.01, now_s + 0.01
        return {}

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    page = SavingsPage(read, lambda: now_s, sleep)
    for number in range(2000):
        windows = (0, 3600, 3599, number * 60 % 7000)
        replies = await asyncio.gather(*(page.reply(one, has_names=True) for one in windows))
        ages.append(int(replies[1].headers["Age"]))
        now_s += 0.001
    assert spent_s / (now_s - 1000.0) < 0.06
    # At most four windows wait, each for 0.2 s.
    assert max(ages) <= 1 and len(page._made) <= MAX_KEPT


async def test_answer_that_cant_be_made_is_logged(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "read_status", lambda one, has_names: 1 / 0)
    http = HttpServer("127.0.0.1", 0, node)
    answer = await asyncio.to_thread(get, http.port, "/api/v1/status")
    assert answer.status == 500 and "log" in answer.text and "loop" not in answer.text
    http.close()
    (record,) = [
        one for one in caplog.records if one.name == "hotkv_server.monitoring.http_endpoint"
    ]
    assert record.exc_info and record.exc_info[0] is ZeroDivisionError


# The page's file and headers


def test_page_is_one_small_self_contained_file(server: Server) -> None:
    answer, content = get(http_port(server)), PAGE.read_bytes()
    assert answer.status == 200 and answer.body == content
    assert len(content) <= MAX_PAGE_BYTES
    text = content.decode()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["X-Frame-Options"] == "DENY"
    policy = dict(
        one.split(" ", 1) for one in answer.headers["Content-Security-Policy"].split("; ")
    )
    for tag in ("script", "style"):
        (element,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(element.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    nothing = ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types")
    some = {"connect-src": "'self'", "img-src": "data:", "require-trusted-types-for": "'script'"}
    assert policy == dict.fromkeys(nothing, "'none'") | some
    private = {
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Access-Control-Allow-Origin": None,
    }
    for path in ("/", "/api/v1/status", "/api/v1/savings"):
        headers = get(http_port(server), path).headers
        assert {name: headers[name] for name in private} == private
    # Nothing from other hosts, no markup from text, no inline styles or handlers.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert not re.search(r'<[^>]+ (style|on\w+)="', text)


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/?a=b", "GET", 200),
        ("/api/v1/status?x=%00&since_s=-1", "GET", 200),
        *[(f"/api/v1/savings?since_s={wrong}", "GET", 400) for wrong in ("x", "-1", "nan", "inf")],
        *[(f"/api/v{path}", "GET", 404) for path in ("1/", "1/status/", "1/statusx", "2/status")],
        *[(path, "GET", 404) for path in ("//", "/index.html", "/../etc/passwd")],
        ("/", "POST", 405),
        ("/api/v1/status", "DELETE", 405),
    ],
)
def test_odd_requests(server: Server, path: str, method: str, status: int) -> None:
    assert get(http_port(server), path, method=method).status == status


# Access


@dataclasses.dataclass(frozen=True)
class Far:
    """A server with two tenants, whose page other machines may see."""

    server: Server
    token: Path
    config: Path

    def get(self, path: str, token: str = "", **headers: str) -> Answer:
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        return get(http_port(self.server), path, **shown, **headers)

    def asked(self, token: str) -> int:
        return self.get("/api/v1/status", token).status


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("far")
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    config = settings_with_tenants(folder, ADMIN, "blue", "red", token_file=token)
    flags = ("--config", str(config))
    with runtime_folder(64 << 20) as runtime, Server(runtime, "16MiB", *flags) as running:
        running.wait_ready()
        for tenant in ("blue", "red"):
            one = Traffic(running.target, f"{tenant}-model", f"{tenant}-engine", tenant=tenant)
            one.prompt()
            one.close()
        yield Far(running, token, config)


def test_beyond_this_machine_a_token_is_needed(far: Far) -> None:
    for path in ("/", "/api/v1/status", "/api/v1/savings", "/api/v1/nothing"):
        for token in ("", "wrong"):
            answer = far.get(path, token)
            assert answer.status == 401 and "http.token_file" in answer.text
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="hotkv"'
            assert TOKEN not in answer.text and "blue" not in answer.text
    for path in ("/livez", "/readyz", "/metrics"):
        assert far.get(path).status == 200
    assert far.get("/", TOKEN, Host="hotkv.example").body == PAGE.read_bytes()
    assert far.get("/api/v1/nothing", TOKEN).status == 404
    # A browser gets the page, which asks for the token.
    form = far.get("/", Accept="text/html,*/*;q=0.8")
    assert (form.status, form.body) == (401, PAGE.read_bytes())
    assert far.get("/api/v1/status", Accept="text/html").body != PAGE.read_bytes()


def test_tenants_are_named_to_admins_alone(far: Far) -> None:
    viewer, admin = (far.get("/api/v1/status", token).figures for token in (TOKEN, ADMIN))
    savings = [far.get("/api/v1/savings", token).figures["rows"] for token in (TOKEN, ADMIN)]
    assert (viewer["has_names"], admin["has_names"]) == (False, True)
    assert not re.search(r"blue|red-|\bred\b|PagedEngine", repr(viewer))
    assert viewer["savings"]["hour"]["total"]["request_count"] == 2
    hour = viewer["savings"]["hour"]["rows"]
    assert viewer["sessions"] == viewer["key_spaces"] == hour == savings[0] == []
    for rows in (admin["key_spaces"], admin["savings"]["hour"]["rows"], savings[1]):
        assert {row["tenant"] for row in rows} == {"blue", "red"}
    shown = far.get("/metrics").text
    assert "blue" not in shown and "engine" not in re.sub(r"# .*", "", shown)


def test_a_token_that_changes_or_goes_is_followed(far: Far) -> None:
    other, log = "another-token-0123456", far.server.log
    try:
        far.token.write_text(other)
        assert (far.asked(TOKEN), far.asked(other)) == (401, 200)
        far.token.write_text("")
        assert far.asked(other) == far.asked("") == 503
        assert far.asked(ADMIN) == 200, "an admin's token is not in that file"
        assert far.get("/livez").status == 200
        wait_for(lambda: "http.token_file can't be used" in log.read_text())
        assert log.read_text().count("http.token_file can't be used") == 1
    finally:
        far.token.write_text(TOKEN)
    assert far.asked(TOKEN) == 200
    # An admin's new token counts only after a reload.
    old, digest = far.config.read_text(), hashlib.sha256(other.encode()).hexdigest()
    far.config.write_text(old.replace(hashlib.sha256(ADMIN.encode()).hexdigest(), digest))
    try:
        assert far.asked(other) == 401
        os.kill(far.server.pid, signal.SIGHUP)
        wait_for(lambda: far.asked(other) == 200)
        assert far.asked(ADMIN) == 401
    finally:
        far.config.write_text(old)
        os.kill(far.server.pid, signal.SIGHUP)
    wait_for(lambda: far.asked(ADMIN) == 200)


def test_hung_token_disk_stops_no_probe(far: Far) -> None:
    """Reading the FIFO hangs until the test writes it."""
    far.token.unlink()
    os.mkfifo(far.token, 0o600)
    with futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(far.asked, TOKEN)
        with far.token.open("w") as late:  # Waits until the server has opened the FIFO.
            far.token.unlink()
            far.token.touch(0o600)
            far.token.write_text(TOKEN)
            assert far.get("/livez").status == 200
            assert (far.asked(TOKEN), far.asked(ADMIN)) == (503, 200)
            late.write(TOKEN)
        assert asking.result() in (200, 503)
    wait_for(lambda: far.asked(TOKEN) == 200)


@pytest.mark.parametrize(("host", "num_kept"), [("0.0.0.0", 0), ("127.0.0.1", 1000)])
async def test_unauthorised_clients_body_is_not_kept(node: Node, host: str, num_kept: int) -> None:
    http = HttpServer(host, 0, node)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    head = "POST /api/v1/check_blocks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n"
    writer.write(head.encode() + bytes(1000))
    waiting = http._waiting[http_endpoint.QueueKind.QUESTION]
    await eventually(lambda: len(waiting) == 1, "the request does not come")
    (connection,) = waiting
    await asyncio.sleep(0.1)
    assert len(connection._body) == num_kept
    # The whole request must still be answered.
    writer.write(bytes(1000))
    status = await asyncio.wait_for(reader.readline(), 30)
    assert status.split()[1] == (b"400" if num_kept else b"403")
    writer.close()
    http.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_nothing_is_shown_elsewhere_without_a_token(node: Node, host: str) -> None:
    """Health is shown. `::` accepts IPv4 too."""
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("no such addresses here")
    http = HttpServer(host, 0, node)
    for path, status in (("/", 403), ("/api/v1/status", 403), ("/livez", 200)):
        answer = await asyncio.to_thread(get, http.port, path)
        assert answer.status == status, path
        assert ("http.token_file" in answer.text) == (status == 403)
    http.close()
