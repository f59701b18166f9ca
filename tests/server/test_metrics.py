"""Tests Prometheus metrics, their HELP texts, and docs/monitoring_api.md."""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_server.monitoring.metric_help import HELP, LABEL_HELP, LABELS, SPARSE_LAYER_HELP
from hotkv_server.monitoring.metrics import in_seconds
from hotkv_server.monitoring.topics import all_topics
from hotkv_server.node.capability import Topic, tell
from hotkv_server.settings import Settings
from hotkv_server.startup.capabilities import attach_all
from hotkv_server.startup.running_settings import RunningSettings
from hotkv_vllm.counter_help import every_counter, exported
from tests.server.nodes import local_node
from tests.support.programs import program
from tools.metrics_reference import NoCopies, families

PAGE = Path(__file__).resolve().parents[2] / "docs" / "monitoring_api.md"
ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|(.*)\|$", re.MULTILINE)


@pytest.fixture(scope="module")
def metrics() -> dict[str, Metric]:
    """By name without `hotkv_`, as HELP texts are."""
    return {
        one.name.removeprefix("hotkv_") + "_total" * (one.type == "counter"): one
        for one in families().values()
    }


def lint(metrics: list[Metric]) -> str:
    """What promtool prints; "" without a fault."""
    registry = CollectorRegistry()
    registry.register(type("Fixed", (Collector,), {"collect": lambda self: metrics})())
    command = [str(program("promtool")), "check", "metrics"]
    done = subprocess.run(command, input=generate_latest(registry), capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert bool(done.returncode) == bool(said)
    return said


def test_promtool_finds_no_fault(metrics: dict[str, Metric]) -> None:
    """promtool rejects the colon of the connector's `vllm:`."""
    engines: list[Metric] = [
        CounterMetricFamily(f"vllm_hotkv_{exported(name)}", text, 1.0)
        for name, text in every_counter().items()
    ]
    assert lint([*metrics.values(), *engines]) == ""
    assert "base unit" in lint([CounterMetricFamily("hotkv_wait_milliseconds", "Some.", 1.0)])


def test_metrics_and_labels_have_exactly_their_texts(
    metrics: dict[str, Metric],
) -> None:
    of_layers = {f"sparse_layer_{in_seconds(name)}_total" for name in SPARSE_COUNTERS}
    exported = metrics.keys() - of_layers
    lacking, left_over = sorted(exported - set(HELP)), sorted(set(HELP) - exported)
    assert not lacking, f"HELP_BY_TOPIC (monitoring/metric_help.py) needs a text for {lacking}"
    assert not left_over, f"HELP_BY_TOPIC describes metrics that do not exist: {left_over}"
    assert set(SPARSE_LAYER_HELP) == set(SPARSE_COUNTERS)
    named = {label for labels in LABELS.values() for label in labels} | {"layer"}
    assert named == set(LABEL_HELP) and set(LABELS) <= set(HELP)
    for name, metric in metrics.items():
        for sample in metric.samples:
            labels = set(sample.labels) - ({"le"} if metric.type == "histogram" else set())
            assert labels == set(LABELS.get(name, ())), name


def test_texts_name_metrics_that_exist() -> None:
    names = {name.removesuffix("_total") for name in HELP} | set(SPARSE_LAYER_HELP)
    for name, text in {**HELP, **SPARSE_LAYER_HELP}.items():
        mentioned = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)) - {"leases.held_share"}
        settings = set(re.findall(r"\b[a-z]+\.([a-z_]+)", text))
        assert mentioned - settings <= names, f"{name}: {mentioned - settings - names}"


# Topics


@pytest.fixture
def topics(tmp_path: Path) -> Iterator[dict[str, Topic]]:
    copies: Any = NoCopies()
    with local_node(tmp_path, copies=copies) as node:
        settings = Settings.model_validate({"arena": {"dir": tmp_path}})
        attach_all(settings, node)
        node.topics["config"] = RunningSettings(settings).topic()
        yield all_topics(node)


def told(topics: dict[str, Topic], name: str, **filters: str) -> dict[str, Any]:
    return asyncio.run(tell(topics, name, filters))


def test_page_has_every_topic_filter_and_field(topics: dict[str, Topic]) -> None:
    rows = {name: (filters, fields) for name, filters, fields in ROW.findall(PAGE.read_text())}
    listed = {
        name: [one for one in re.findall(r"`(\w+)`", filters) if one != "no"]
        for name, (filters, _) in rows.items()
    }
    given = told(topics, "")["topics"]
    wrong = [name for name in listed | given if listed.get(name) != given.get(name)]
    assert not wrong, f"docs/monitoring_api.md needs a row with the filters of each topic: {wrong}"
    for name in topics:
        answer = told(topics, name)
        orjson.dumps(answer)
        missing = [field for field in answer if f"`{field}`" not in rows[name][1]]
        assert not missing, f"the row of {name} in docs/monitoring_api.md lacks fields: {missing}"
