"""Lets a real Prometheus scrape a real server under traffic: every query of dashboard, rules and
alerts must run, name existing metrics, and return data. A disk tier and simulated devices fill
all panels."""

import contextlib
import json
import math
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demo.processes import runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadRun, RequestReport
from hotkv_client.command import cli
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.reports import Miss
from tests.deploy.prometheus_process import RULES, Prometheus
from tests.doubles.with_devices import FakeDevices
from tests.server.devices_support import DeviceEngine, DeviceServer, done
from tests.server.support import block_ids, hashes
from tests.support.daemons import quick_servers
from tests.support.ports import free_port
from tests.support.programs import program
from tests.support.waiting import wait_for
from tools import dashboard
from tools.metrics_reference import series

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")

FOLDER = RULES.parent
RULES_TEST = FOLDER / "hotkv.rules.test.yml"
CHAIN, LAYERS, PAGE_BYTES = 8, 2, 64 << 10
RETURNING = 24
"""Chains of 1 MiB that are requested repeatedly."""
SCRAPE_S = 0.5
READY = ("up", "hotkv_build_info", "hotkv_ready")
OTHERS = {"up", "ALERTS", "process_start_time_seconds", "process_cpu_seconds_total"}
"""Metrics that come from Prometheus or its client library, not from hotkv."""
NAME = re.compile(r"\b(?:\w+:)?(?:hotkv|process)_[\w:]+|\bup\b|\bALERTS\b")
LAYER = {"selects": 4.0, "context_blocks": 100.0, "attended_blocks": 20.0, "wanted_blocks": 10.0}
LAYER |= {"hit_blocks": 9.0, "recall_samples": 2.0, "recall": 1.5}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDS = [rule for rule in rules() if "record" in rule]
ALERTS = [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    """Without the dashboard's rows."""
    every = json.loads(dashboard.FILE.read_text())["panels"]
    nested = [panel for row in every for panel in row.get("panels", [])]
    return [panel for panel in [*every, *nested] if panel["type"] != "row"]


class Traffic:
    """Two simulated engines, one in host memory and one on a device, until stopped.

    Each turn stores a new chain and requests one of the `RETURNING`, which fit on the disk but
    not in host memory; one requested only once would be evicted early.
    """

    def __init__(self, target: str) -> None:
        self._engine = PagedEngine(
            target, layers=LAYERS, num_blocks=2 * CHAIN, page_bytes=PAGE_BYTES
        ).connect()
        self._device = DeviceEngine(target).connected()
        self._ended = threading.Event()
        self._chains: list[list[bytes]] = []
        self._pool = ThreadPoolExecutor(1)
        self._running = self._pool.submit(self._run)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._turn(hashes(CHAIN))

    def _turn(self, chain: list[bytes]) -> None:
        session, name, ids = self._engine.session, os.urandom(8).hex(), block_ids(CHAIN)
        session.store(name, name, [BlockRun(0, chain, ids)], 20).result(60)
        if len(self._chains) < RETURNING:
            self._chains.append(chain)
        self._chains.append(wanted := self._chains.pop(0))
        session.lookup([GroupHashes(0, wanted)]).result(60)
        if session.acquire(name, [GroupHashes(0, wanted)]).result(60).pinned[0].all():
            run = LoadRun(0, ids, block_ids(CHAIN, CHAIN))
            session.load(name, name, [run], 20).result(60)
        session.release(name)
        hit = RequestReport(wanted, 16 * CHAIN + 2, 32, 96, 0.0, saved_s=0.1, wait_s=0.01)
        missed = RequestReport(hashes(4), 70, 0, 0, 0.0, miss=Miss.ABSENT)
        session.report_requests([hit, missed], 0.0)
        session.report_sparse({}, {3: LAYER})
        done(self._device.store(chain[:4], block_ids(4))[1])

    def close(self) -> None:
        """Raises what ended the traffic early."""
        self._ended.set()
        self._pool.shutdown()
        self._device.close()
        self._engine.close()
        self._running.result()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program("prometheus")
    port = free_port()
    with quick_servers(), runtime_folder(256 << 20) as folder, contextlib.ExitStack() as stack:
        disk = ("--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "64MiB")
        flags = ("--http.port", str(port), *disk)
        server = stack.enter_context(DeviceServer(folder, FakeDevices(1, 5), *flags))
        server.wait_ready()
        made = Prometheus(tmp_path_factory.mktemp("prometheus"), port)
        stack.callback(made.close)
        stack.enter_context(contextlib.closing(Traffic(server.target)))
        # A rate needs two scrapes after the counter's change.
        wait_for(made.is_ready)
        wait_for(lambda: bool(made.values("hotkv_tier_promoted_blocks_total > 40")))
        time.sleep(4 * SCRAPE_S)
        yield made


def shown(expr: str, span: str = "10s") -> str:
    """The query with Grafana's variables replaced; `span`: the dashboard's time range."""
    values = {"$instance": ".*", "$__rate_interval": "5s", "$__range": span}
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr


def names_in(expr: str) -> set[str]:
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expr)))


def test_every_query_names_metrics_that_exist() -> None:
    known = series() | OTHERS | {rule["record"] for rule in RECORDS}
    queries = [rule["expr"] for rule in rules()]
    queries += [target["expr"] for panel in panels() for target in panel["targets"]]
    for expr in queries:
        named = names_in(expr)
        assert named and named <= known, f"{named - known} in {expr}"


def test_the_server_exports_all_that_queries_may_name(prometheus: Prometheus) -> None:
    exported = set(prometheus.ask("label/__name__/values"))
    missing = series() - exported
    assert not missing, missing


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_has_data(prometheus: Prometheus, panel: dict[str, Any]) -> None:
    def has_data() -> bool:
        found = [prometheus.values(shown(target["expr"])) for target in panel["targets"]]
        return all(found) and any(not math.isnan(value) for values in found for value in values)

    wait_for(has_data)


def test_every_rule_is_evaluated_without_an_error(prometheus: Prometheus) -> None:
    wait_for(lambda: bool(prometheus.values(RECORDS[0]["record"])))
    found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    names = {rule["record"] for rule in RECORDS} | {rule["alert"] for rule in ALERTS}
    assert {rule["name"] for rule in found} == names
    for rule in found:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule
    # A scrape may fail on a busy machine.
    for rule in RECORDS:
        wait_for(lambda name=rule["record"]: prometheus.values(name), rule["record"])


def test_a_healthy_server_is_shown_as_one(prometheus: Prometheus) -> None:
    # A scrape may fail on a busy machine.
    wait_for(lambda: prometheus.values("hotkv_ready"))
    assert prometheus.values("min_over_time(hotkv_ready[1m])") == [1.0]
    assert prometheus.values("sum(max_over_time(hotkv_problem[1m]))") == [0.0]
    wait_for(lambda: prometheus.values(RECORDS[0]["record"]))
    (ratio,) = prometheus.values(f"last_over_time({RECORDS[0]['record']}[1m])")
    assert ratio == pytest.approx(96 / (16 * CHAIN + 2 + 70), rel=0.1)
    firing = prometheus.ask("query", query='ALERTS{alertstate="firing"}')["result"]
    assert not firing


def answer(expr: str, folder: Path, **values: str) -> str:
    """What promtool prints of an expression after 10 minutes. `values`: per series one value a
    minute, in promtool's notation."""
    asked = {"expr": expr, "eval_time": "10m", "exp_samples": [{"labels": "none", "value": 0}]}
    given = [{"series": series, "values": told} for series, told in values.items()]
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [asked]}]
    path = folder / "asked.yml"
    path.write_text(yaml.safe_dump({"tests": tests}))
    (got,) = re.findall(r"got: *(.*)", promtool("test", "rules", str(path), status=None))
    return str(got)


def test_ready_share_counts_servers_that_are_down(tmp_path: Path) -> None:
    (panel,) = [panel for panel in panels() if panel["title"] == "Ready"]
    up, down = dict.fromkeys(READY, "1x10"), dict.fromkeys(READY, "1x3 stale")
    down["up"] = "1x3 0x6"
    series = {
        f'{name}{{instance="{node}", job="hotkv"}}': told
        for node, values in (("a", up), ("b", down))
        for name, told in values.items()
    }
    series['up{instance="c", job="another"}'] = "0x10"
    expr = shown(panel["targets"][0]["expr"], "3h")
    assert answer(expr, tmp_path, **series) == "{} 5E-01"


def test_a_node_without_prompts_has_no_hit_ratio(tmp_path: Path) -> None:
    """A division by zero shows as NaN in Grafana."""
    for panel in panels():
        expr = shown(panel["targets"][0]["expr"], "10m")
        if panel["type"] == "stat" and "/" in expr:
            zeros = {f'{name}{{instance="a"}}': "0x10" for name in names_in(expr)}
            assert answer(expr, tmp_path, **zeros) == "nil", panel["title"]


def test_dashboard_has_its_variables_and_panel_places() -> None:
    made = json.loads(dashboard.FILE.read_text())
    assert [one["name"] for one in made["templating"]["list"]] == ["datasource", "instance"]
    taken = set[tuple[int, int]]()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24 and panel["description"].endswith(".")
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    every = [one for row in made["panels"] for one in (row, *row.get("panels", []))]
    assert len({panel["id"] for panel in every}) == len(every)


def promtool(*arguments: str, status: int | None = 0) -> str:
    command = [str(program("promtool")), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert status in (None, ended.returncode), said
    return said


def test_promtool_checks_and_tests_the_rules() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES_TEST))
    promtool("check", "config", "--syntax-only", str(FOLDER / "prometheus.yml"))


def test_alerts_fire_whatever_labels_prometheus_adds(tmp_path: Path) -> None:
    """The Prometheus operator adds `pod` and others."""
    text = RULES_TEST.read_text()
    cases = yaml.safe_load(text)["tests"]
    # YAML would read promtool's `0x10` as a number.
    texts = yaml.load(text, yaml.BaseLoader)["tests"]
    for case, as_text in zip(cases, texts, strict=True):
        case["input_series"] = [
            {**one, "series": one["series"].replace("{", '{pod="hotkv-x", ', 1)}
            for one in as_text["input_series"]
        ]
        case.pop("alert_rule_test", None)
        queries = case.pop("promql_expr_test", [])
        case["promql_expr_test"] = [one for one in queries if "ALERTS" in one["expr"]]
    (path := tmp_path / "labelled.yml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases})
    )
    promtool("test", "rules", str(path))


def test_every_alert_is_tested_and_advises() -> None:
    tested = set(re.findall(r"\bHotKV\w+", RULES_TEST.read_text()))
    assert tested == {rule["alert"] for rule in ALERTS}
    commands = set(cli.parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    for rule in ALERTS:
        said = rule["annotations"]
        assert set(said) == {"summary", "description", "command", "runbook_url"}, rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        words = said["command"].split()
        assert words[0] != "hotkv" or words[1] in commands, said["command"]
        assert words[0] in {"hotkv", "hotkv-server", "systemctl", "journalctl"}


def test_every_alert_leads_to_its_row_of_trouble() -> None:
    page = Path(__file__).parents[2] / "docs" / "trouble.md"
    rows = dict(
        re.findall(r'^\| <a name="(\w+)"></a>`(\w+)` \| .{10,} \|$', page.read_text(), re.M)
    )
    assert {rule["annotations"]["runbook_url"]: rule["alert"] for rule in ALERTS} == {
        f"docs/trouble.md#{anchor}": alert for anchor, alert in rows.items()
    }
