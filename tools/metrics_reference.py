"""Writes docs/metrics.md, the reference of all metrics, from the code that exports them.

`python -m tools.metrics_reference` writes it; `--check` fails if it is out of date.
"""

import argparse
import asyncio
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from hotkv_proto.sparse_counters import SPARSE_COUNTERS
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.room.policies.hotness import Hotness
from hotkv_server.cache.values import CoreConfig
from hotkv_server.memory.arena import NodeMemory
from hotkv_server.monitoring.metric_help import HELP_BY_TOPIC, LABEL_HELP, LABELS, SPARSE_LAYER_HELP
from hotkv_server.monitoring.metrics import NodeCollector, in_seconds
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings
from hotkv_server.startup.capabilities import attach_all
from hotkv_vllm.counter_help import every_counter, exported

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
LAYER_TOPIC = "Sparse decode, by layer"
HEAD = """# Metrics

The metrics of `hotkv-server` at `http://127.0.0.1:9433/metrics` (`http.host`, `http.port`), and the
counters that the connector adds to vLLM's. Terms are in [words.md](words.md); rules, alerts and a
dashboard in [operations.md](operations.md#prometheus-and-grafana).

- Names that end with `_total` are counters; they begin at 0 with each server. A histogram NAME has
  `NAME_bucket`, `NAME_sum` and `NAME_count`. All others are gauges.
- Units are in the names: `_seconds`, `_bytes`, `_ratio` (0 to 1). Labels stand in braces.
- A node has some 350 samples, and 20 more for each layer with sparse decode.
- The policy decides which `hotkv_eviction_*` exist ([eviction.md](eviction.md)).
- With more than a million entries, `hotkv_ready_blocks`, `hotkv_arena_pinned_bytes`,
  `hotkv_sketch_bytes` and `hotkv_unverified_blocks` lag by one scrape.
"""
LAYERS = """
Counters with the label `layer`, summed over all engines: `hotkv_sparse_layer_NAME_total`. Each
engine has them summed over its layers: `vllm:hotkv_sparse_NAME_total`. The ratios are in
[sparse.md](sparse.md#the-metrics).

"""
ENGINES = """
## In vLLM's metrics

The counters of `HotKVConnector` are in each engine's `/metrics`, with vLLM's prefix and labels.
[operations.md](operations.md#when-a-hit-is-left) explains some. Those of sparse decode are
[above](#sparse-decode-by-layer).

"""


class NoCopies:
    """A copy engine that copies nothing."""

    num_queued, num_lanes, busy_s = 0, 1, 0.0


async def _read(folder: Path) -> list[Metric]:
    memory = NodeMemory.open(folder, 1 << 20, 1 << 16, 64, 1, prefault=False)
    try:
        copies: Any = NoCopies()
        core = CacheCore(CoreConfig(1 << 20, 1 << 16, 64), memory.table, Hotness(64))
        node = Node(core, memory, copies)
        attach_all(Settings.model_validate({"arena": {"dir": folder}}), node)
        collector = NodeCollector(node)
        await collector.read()
        return collector.collect()
    finally:
        memory.remove()


def families() -> dict[str, Metric]:
    """By full name; the node has no tiers and devices, so these have no samples."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = asyncio.run(_read(Path(folder) / "arena"))
    return {metric.name + "_total" * (metric.type == "counter"): metric for metric in metrics}


def series() -> set[str]:
    """As queries name them; a histogram has three."""
    names = set[str]()
    for name, metric in families().items():
        parts = ("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",)
        names.update(name + part for part in parts)
    return names


def _rows(found: Mapping[str, Metric], texts: Mapping[str, str]) -> Iterator[str]:
    for name, text in texts.items():
        labels = f"{{{', '.join(LABELS[name])}}}" if name in LABELS else ""
        kind = " (histogram)" if found[f"hotkv_{name}"].type == "histogram" else ""
        yield item(f"hotkv_{name}{labels}", text, kind)


def item(name: str, text: str, kind: str = "") -> str:
    told = textwrap.fill(
        f"- `{name}`{kind}: {text}",
        100,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return told + "\n"


def page() -> str:
    found = families()
    parts = [HEAD]
    for topic, texts in HELP_BY_TOPIC.items():
        parts += [f"\n## {topic}\n\n", *_rows(found, texts)]
    parts += [f"\n## {LAYER_TOPIC}\n", LAYERS]
    parts += [item(in_seconds(name), SPARSE_LAYER_HELP[name]) for name in SPARSE_COUNTERS]
    parts.append("\n## Labels\n\n")
    parts += [item(name, text) for name, text in sorted(LABEL_HELP.items())]
    by_layer = {f"sparse_{name}" for name in SPARSE_COUNTERS}
    parts.append(ENGINES)
    parts += [
        item(f"vllm:hotkv_{exported(name)}_total", text)
        for name, text in every_counter().items()
        if name not in by_layer
    ]
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/metrics.md.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the page is out of date"
    )
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print("docs/metrics.md is out of date: python -m tools.metrics_reference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
