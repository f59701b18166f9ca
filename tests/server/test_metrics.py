"""Every metric has a HELP text, whichever policy evicts, and no text is left over."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from hotkv.counters import SPARSE_COUNTERS
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.values import CoreConfig
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.metric_help import HELP, SPARSE_LAYER_HELP
from hotkv_server.metrics import NodeCollector, in_seconds
from hotkv_server.runtime.node import Node


class NoCopies:
    num_queued = 0


async def read(folder: Path, policy: str) -> list[Metric]:
    memory = NodeMemory.open(folder / policy, 1 << 20, 1 << 16, 64, 1, prefault=False)
    copies: Any = NoCopies()
    core = CacheCore(CoreConfig(1 << 20, 1 << 16, 64), memory.table, POLICIES[policy](64))
    collector = NodeCollector(Node(core, memory, copies))
    await collector.read()
    memory.remove()
    return collector.collect()


@pytest.fixture
def metrics(tmp_path: Path) -> list[Metric]:
    return [metric for policy in POLICIES for metric in asyncio.run(read(tmp_path, policy))]


def test_every_metric_has_a_text_and_no_text_is_left_over(metrics: list[Metric]) -> None:
    names = {
        metric.name.removeprefix("hotkv_") + "_total" * (metric.type == "counter")
        for metric in metrics
    }
    of_layers = {f"sparse_layer_{in_seconds(name)}_total" for name in SPARSE_COUNTERS}
    assert names - of_layers == set(HELP)
    assert set(SPARSE_LAYER_HELP) == set(SPARSE_COUNTERS)


def test_names_are_as_prometheus_has_them(metrics: list[Metric]) -> None:
    """Units in full, at the end; nothing counted under two names."""
    for metric in metrics:
        assert not metric.name.endswith(("_s", "_ms")), metric.name
    names = {metric.name for metric in metrics}
    assert {"hotkv_eviction_half_life_seconds", "hotkv_sparse_layer_build_seconds"} <= names
    (refused,) = {name for name in names if name.startswith("hotkv_refused")}
    samples = [s for metric in metrics if metric.name == refused for s in metric.samples]
    assert samples and all(set(sample.labels) == {"reason"} for sample in samples)


def test_texts_are_sentences(metrics: list[Metric]) -> None:
    for metric in metrics:
        text = metric.documentation
        assert re.match(r"[A-Z0-9].*[.]$", text) and "\n" not in text, f"{metric.name}: {text!r}"
        assert len(text.split()) > 1 and "  " not in text, f"{metric.name}: {text!r}"


def test_texts_name_metrics_that_exist() -> None:
    names = {name.removesuffix("_total") for name in HELP} | set(SPARSE_LAYER_HELP)
    for name, text in {**HELP, **SPARSE_LAYER_HELP}.items():
        mentioned = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)) - {"leases.held_share"}
        settings = set(re.findall(r"\b[a-z]+\.([a-z_]+)", text))
        assert mentioned - settings <= names, f"{name}: {mentioned - settings - names}"
