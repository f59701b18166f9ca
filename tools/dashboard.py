"""Writes deploy/grafana/hotkv.json, Grafana's dashboard. Its rows ask in order: does hotkv work,
does it save time, what limits it.

`python -m tools.dashboard` writes it; `--check` fails if it is out of date. Queries name only
the server's metrics, so no recording rules are needed; `tests/deploy/test_prometheus.py` runs
each against a live Prometheus.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------- What Grafana reads
# Rows and panels of a dashboard, and their form in the JSON that Grafana reads.

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The Prometheus that the user has selected."""
WIDTH, HEIGHT, SMALL_HEIGHT = 24, 8, 4
GREEN, RED = "green", "red"


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: PromQL by the name of the line.
    unit: as Grafana names it.
    kind: `stat` or `timeseries`.
    width: of WIDTH.
    steps: colours, and the value from which each is used.
    """

    title: str
    text: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    steps: tuple[tuple[float | None, str], ...] = ()
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """title: a question. `is_folded`: hidden until opened."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = False


def _field_config(panel: Panel) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for value, colour in panel.steps]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": GREEN, "value": None}]},
    }
    if panel.kind == "stat":
        del defaults["min"]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 30 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {"defaults": defaults, "overrides": []}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "colorMode": "value" if panel.steps else "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "value",
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    height = SMALL_HEIGHT if panel.kind == "stat" else HEIGHT
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": height},
        "fieldConfig": _field_config(panel),
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expr,
                "legendFormat": name or "__auto",
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for at, (name, expr) in enumerate(panel.queries.items())
        ],
    }


def panels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """From left to right and from top to bottom."""
    made: list[dict[str, Any]] = []
    y, number = 0, 1
    for row in rows:
        head: dict[str, Any] = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.is_folded,
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            "panels": [],
        }
        made.append(head)
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + tallest
                tallest = 0
            drawn = _panel(panel, number, x, y)
            (head["panels"] if row.is_folded else made).append(drawn)
            number, x = number + 1, x + panel.width
            tallest = max(tallest, int(drawn["gridPos"]["h"]))
        y += tallest
    return made


# ------------------------------------------------------------------------------------ The dashboard

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "hotkv.json"
ON = '{instance=~"$instance"}'
"""Label matchers of the servers that the user has selected."""
INSTANCES = "label_values(hotkv_build_info, instance)"


def stat(title: str, text: str, expr: str, unit: str = "short", **more: Any) -> Panel:
    """A panel with a single number."""
    return Panel(title, text, {"": expr}, unit, kind="stat", **{"width": 4, **more})


def metric(name: str, matchers: str = "") -> str:
    """Of the selected servers. `matchers`: such as `tier="disk"`."""
    more = f", {matchers}" if matchers else ""
    return f'hotkv_{name}{{instance=~"$instance"{more}}}'


def rate(name: str, matchers: str = "") -> str:
    """A counter's growth per second."""
    return f"rate({metric(name, matchers)}[$__rate_interval])"


def total(name: str, by: str = "") -> str:
    """A counter's growth per second, summed over all servers, or by labels."""
    return f"sum by ({by}) ({rate(name)})" if by else f"sum({rate(name)})"


def share(part: str, whole: str, by: str = "") -> str:
    """Growth of `part` over growth of `whole`."""
    return f"{total(part, by)} / {total(whole, by)}"


def level(name: str) -> str:
    """A gauge's sum over all servers."""
    return f"sum({metric(name)})"


def most(name: str) -> str:
    """A gauge's maximum over all servers."""
    return f"max({metric(name)})"


def grown(name: str) -> str:
    """A counter's growth over the displayed range."""
    return f"sum(increase({metric(name)}[$__range]))"


def quantile(share: float, name: str, by: str = "") -> str:
    """Of a histogram, over all servers."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) ({rate(f'{name}_bucket')}))"


def times(title: str, text: str, name: str) -> Panel:
    """A panel with median and 99th percentile of a histogram."""
    queries = {"median": quantile(0.5, name), "99 %": quantile(0.99, name)}
    return Panel(title, text, queries, "s")


DOWN = (
    f"0 * (up{ON} and on (instance, job) last_over_time({metric('build_info')}[$__range])) "
    "unless on (instance, job) " + metric("ready")
)
"""0 for each server that answered in the displayed range and does not now."""
NOT_DONE = (
    f"sum by (direction, outcome) ({rate('transfers_total', 'outcome!=' + json.dumps('done'))})"
)
WORKING = Row(
    "Is it working?",
    (
        stat(
            "Ready",
            "Share of servers that accept work. A server that is down, drains or has a problem "
            "does not; `hotkv status` says why.",
            f"avg({metric('ready')} or {DOWN})",
            "percentunit",
            steps=((None, RED), (1, GREEN)),
        ),
        stat("Servers", "Servers that Prometheus reaches.", f"count({metric('build_info')})"),
        stat(
            "Problems",
            "Parts of servers with a problem: `/readyz` and `hotkv status` name it.",
            level("problem"),
            steps=((None, GREEN), (1, RED)),
        ),
        stat(
            "Alerts",
            "Alerts of hotkv.rules.yml that fire.",
            'count(ALERTS{alertname=~"HotKV.*", alertstate="firing", instance=~"$instance"})'
            " or vector(0)",
            steps=((None, GREEN), (1, RED)),
        ),
        stat(
            "Sessions",
            "Sessions of engines; one for the scheduler and each worker.",
            level("sessions"),
        ),
        stat(
            "Oldest server up for",
            "Time since the start of the oldest server. Restarts keep the cache.",
            f"max(time() - (process_start_time_seconds{ON} and on (instance, job) "
            f"{metric('build_info')}))",
            "s",
        ),
        Panel(
            "Problems by part",
            "1 while a part of a server has a problem. If the part is a tier, the server "
            "continues to serve.",
            {"{{instance}} {{component}}": f"max by (instance, component) ({metric('problem')})"},
            width=12,
        ),
        Panel(
            "Refusals by reason",
            "Refused calls per second. `overloaded` means that clients have reached a bound; most "
            "other reasons are mistakes of a client.",
            {"{{reason}}": f"topk(5, {total('refused_total', 'reason')})"},
            "cps",
            width=6,
        ),
        Panel(
            "Transfers that were not done",
            "Loads and stores that failed or that engines cancelled. The log has the reason of "
            "each failure.",
            {"{{direction}} {{outcome}}": NOT_DONE},
            "cps",
            width=6,
        ),
        Panel(
            "Damaged and lost",
            "Blocks whose bytes had changed, and blocks that a tier could not return undamaged. "
            "All should stay at 0.",
            {
                "memory": total("condemned_blocks_total"),
                "disk": total("tier_lost_blocks_total"),
                "shared tiers": total("shared_corrupt_blocks_total"),
            },
            "cps",
            width=12,
        ),
        Panel(
            "Event loop",
            "Delay of the event loop, for which all calls of all engines wait.",
            {"median": most("loop_lag_p50_seconds"), "99 %": most("loop_lag_p99_seconds")},
            "s",
            width=12,
        ),
    ),
)

PAYS = Row(
    "Does it pay?",
    (
        stat(
            "Hit ratio",
            "Share of prompt tokens that engines did not compute: they were in the engine's own "
            "device cache, or loaded from hotkv.",
            f"{grown('reported_hit_tokens_total')} / ({grown('reported_prompt_tokens_total')} > 0)",
            "percentunit",
        ),
        stat(
            "Reachable",
            "Share of the last hour's prompt tokens that an endless cache would have hit.",
            most("ledger_ceiling_ratio"),
            "percentunit",
        ),
        stat(
            "The next GiB",
            "Points of hit ratio that one more GiB would add; `hotkv savings` has details.",
            most("ledger_next_gib_ratio"),
            "percentunit",
        ),
        stat(
            "Saved",
            "Seconds of prefill that hits saved in the time shown, less the seconds that requests "
            "waited for hotkv.",
            f"{grown('ledger_saved_seconds_total')} - {grown('ledger_taken_back_seconds_total')}"
            f" - {grown('ledger_waited_seconds_total')}",
            "s",
        ),
        stat(
            "Requests",
            "Requests that engines scheduled.",
            total("reported_requests_total"),
            "reqps",
        ),
        stat(
            "Prompt tokens",
            "Prompt tokens of the requests that engines scheduled.",
            total("reported_prompt_tokens_total"),
            "cps",
        ),
        Panel(
            "Hit ratio",
            "Share of all prompt tokens that hit, and the share that an endless cache would hit.",
            {
                "hit": share("reported_hit_tokens_total", "reported_prompt_tokens_total"),
                "engine's own memory": share(
                    "reported_device_hit_tokens_total", "reported_prompt_tokens_total"
                ),
                "endless cache": most("ledger_ceiling_ratio"),
            },
            "percentunit",
        ),
        Panel(
            "Where hits came from",
            "Prompt tokens per second that hit, by tier; device is the engine's own memory.",
            {"{{tier}}": total("ledger_hit_tokens_total", "tier")},
            "cps",
            stacked=True,
        ),
        Panel(
            "Why the others missed",
            "Prompt tokens per second that engines computed, by reason. If many are `evicted`, "
            "more memory or a tier helps. `never_stored` tokens are new to the cache; "
            "`partial_block` tokens are always computed.",
            {"{{reason}}": total("ledger_missed_tokens_total", "reason")},
            "cps",
            stacked=True,
        ),
        Panel(
            "Saved and waited",
            "Seconds of prefill that hits save per second, and seconds that requests wait per "
            "second for lookups, leases and loads. If requests wait nearly as long as hits save, "
            "see the last rows.",
            {
                "saved": f"{total('ledger_saved_seconds_total')} - "
                f"{total('ledger_taken_back_seconds_total')}",
                "waited": total("ledger_waited_seconds_total"),
            },
            "s",
            width=12,
        ),
        Panel(
            "Loaded and stored",
            "Bytes that the server copied to and from engines' memory.",
            {"loaded": total("loaded_bytes_total"), "stored": total("stored_bytes_total")},
            "Bps",
            width=12,
        ),
    ),
)

LIMITS = Row(
    "What limits it? Memory",
    (
        Panel(
            "Arena",
            "Used bytes near the capacity are normal: the cache keeps blocks as long as it can. "
            "Pinned bytes near the capacity are a problem.",
            {
                "capacity": level("arena_capacity_bytes"),
                "used": level("arena_used_bytes"),
                "pinned": level("arena_pinned_bytes"),
                "kept because requests asked": level("held_bytes"),
            },
            "bytes",
        ),
        Panel(
            "Age at eviction",
            "Time between the last use of a block and its eviction. If it is shorter than the "
            "pause between turns of a session, the arena is too small.",
            {
                "10 %": quantile(0.1, "eviction_age_seconds"),
                "median": quantile(0.5, "eviction_age_seconds"),
            },
            "s",
        ),
        Panel(
            "Evicted and refused blocks",
            "Blocks per second. `no space`: blocks refused because all other blocks were pinned, "
            "held or guaranteed to other tenants.",
            {"evicted": total("evicted_blocks_total"), "no space": total("no_space_blocks_total")},
            "cps",
        ),
        Panel(
            "Division of the arena",
            "Share of the slabs' memory that has no block (fragmentation), and share that is "
            "assigned to slot sizes which do not need it (imbalance).",
            {
                "fragmentation": most("arena_fragmentation_ratio"),
                "imbalance": most("arena_imbalance_ratio"),
            },
            "percentunit",
        ),
        Panel(
            "Requests that live in the arena",
            "Bytes that residencies pin and reserve, and their limit.",
            {
                "pinned": level("residency_pinned_bytes"),
                "promised": level("residency_promised_bytes"),
                "most": level("residency_bound_bytes"),
            },
            "bytes",
        ),
        Panel(
            "Engines that wait for room",
            "Engines whose last residency was refused: `hotkv residencies` shows how much room "
            "they requested.",
            {"waiting": level("residencies_waiting")},
        ),
    ),
)

SPEED = Row(
    "What limits it? Speed",
    (
        times("Loads", "Time from an engine's call to the end of the load.", "load_seconds"),
        times("Stores", "Time of a store, from when it has room to its end.", "store_seconds"),
        times("Leases", "Time of read leases, including reads from tiers.", "lease_seconds"),
        times(
            "Lookups by call",
            "Time of lookups by call. Engines on the node usually look up in shared memory, "
            "without a call.",
            "lookup_seconds",
        ),
        times(
            "Waiting to be copied",
            "Time until a copy thread or a device begins to copy. If it grows, copies are the "
            "bottleneck.",
            "copy_wait_seconds",
        ),
        Panel(
            "Copy threads busy",
            "Share of the time in which copy threads copy. Near 100 %: memory bandwidth or "
            "`copy.threads` is the limit.",
            {
                "{{instance}}": f"sum by (instance) ({rate('copy_busy_seconds_total')}) / "
                f"sum by (instance) ({metric('copy_threads')})"
            },
            "percentunit",
        ),
        Panel(
            "Sizes of loads",
            "Median and 99th percentile of the bytes of a load.",
            {"median": quantile(0.5, "load_bytes"), "99 %": quantile(0.99, "load_bytes")},
            "bytes",
        ),
        Panel(
            "Queues",
            "Transfers in flight, pieces that wait for a copy thread, and notices of the slowest "
            "session.",
            {
                "transfers": level("transfers_in_flight"),
                "pieces": level("copy_pieces_queued"),
                "notices": most("notices_queued"),
            },
        ),
        Panel(
            "Processors",
            "Processors that the server keeps busy, copy threads included.",
            {
                "processors": f"sum(rate(process_cpu_seconds_total{ON}[$__rate_interval]) and on "
                f"(instance, job) {metric('build_info')})"
            },
        ),
    ),
)

TIERS = Row(
    "What limits it? Tiers",
    (
        Panel(
            "Found in tiers",
            "Share of the blocks missing in host memory that each kind of tier had.",
            {
                "disk": share("tier_hit_blocks_total", "tier_asked_blocks_total"),
                "shared": share("shared_hit_blocks_total", "shared_asked_blocks_total"),
            },
            "percentunit",
        ),
        Panel(
            "Reads from tiers, 99 %",
            "99th percentile of the time of a read, which fetches all blocks of a lease from a "
            "tier.",
            {"{{tier}}": quantile(0.99, "tier_read_seconds", "tier")},
            "s",
        ),
        Panel(
            "Bytes read and written",
            "Bytes read from and written to the disk and the tiers that nodes share.",
            {
                "disk read": total("tier_read_bytes_total"),
                "disk written": total("tier_written_bytes_total"),
                "shared read": total("shared_read_bytes_total"),
                "shared written": total("shared_written_bytes_total"),
            },
            "Bps",
        ),
        Panel(
            "Disk",
            "Used bytes, capacity, and the bytes left of the write budget of 24 hours.",
            {
                "capacity": level("tier_capacity_bytes"),
                "used": level("tier_used_bytes"),
                "left of the budget": level("tier_budget_left_bytes"),
            },
            "bytes",
        ),
        Panel(
            "Blocks that wait to be written",
            "If it stays high, the tier is slower than the engines store.",
            {"disk": level("tier_waiting_blocks"), "shared": level("shared_waiting_blocks")},
        ),
        Panel(
            "Left in tiers",
            "Blocks per second that stay in a tier because engines compute them sooner.",
            {"disk": total("tier_left_blocks_total"), "shared": total("shared_left_blocks_total")},
            "cps",
        ),
    ),
)

DEVICES = Row(
    "GPUs",
    (
        Panel(
            "Copied by GPUs",
            "Bytes by direction and copy method. Many bytes of `pageable` mean that the arena is "
            "not pinned.",
            {"{{direction}} {{method}}": total("device_copied_bytes_total", "direction, method")},
            "Bps",
        ),
        Panel(
            "GPUs' copy engines busy",
            "Share of the time in which a GPU has pieces to copy, by direction.",
            {
                "{{instance}} {{device}} {{direction}}": total(
                    "device_busy_seconds_total", "instance, device, direction"
                )
            },
            "percentunit",
        ),
        Panel(
            "Usable GPUs",
            "GPUs that the server can use. A lost GPU is usable again after a restart: see `hotkv "
            "devices`.",
            {"usable": level("device_usable")},
        ),
    ),
    is_folded=True,
)

SPARSE = Row(
    "Sparse decode",
    (
        Panel(
            "Hot sets: hit ratio by layer",
            "If it falls, hot sets are too small.",
            {
                "{{layer}}": share(
                    "sparse_layer_hit_blocks_total", "sparse_layer_wanted_blocks_total", "layer"
                )
            },
            "percentunit",
        ),
        Panel(
            "Recall by layer",
            "Share of the best blocks (by exact attention) to which steps attended, measured on "
            "sampled selections.",
            {
                "{{layer}}": share(
                    "sparse_layer_recall_total", "sparse_layer_recall_samples_total", "layer"
                )
            },
            "percentunit",
        ),
        Panel(
            "Share of the context that is read",
            "Share of the context's blocks to which steps attend.",
            {
                "attended": share(
                    "sparse_layer_attended_blocks_total", "sparse_layer_context_blocks_total"
                )
            },
            "percentunit",
        ),
    ),
    is_folded=True,
)
NODES = Row(
    "Nodes",
    (
        Panel(
            "Hit by node",
            "Share of prompt tokens that hit on each node. If a node is far below the others, the "
            "router sends it prompts whose blocks other nodes have.",
            {
                "{{instance}}": share(
                    "reported_hit_tokens_total", "reported_prompt_tokens_total", "instance"
                )
            },
            "percentunit",
        ),
        Panel(
            "Used by node",
            "Share of the arena that holds blocks.",
            {
                "{{instance}}": f"sum by (instance) ({metric('arena_used_bytes')}) / "
                f"sum by (instance) ({metric('arena_capacity_bytes')})"
            },
            "percentunit",
        ),
        Panel(
            "Loaded by node",
            "Bytes a second that engines load.",
            {"{{instance}}": total("loaded_bytes_total", "instance")},
            "Bps",
        ),
        Panel(
            "Evicted by node",
            "Blocks a second.",
            {"{{instance}}": total("evicted_blocks_total", "instance")},
            "cps",
        ),
        Panel(
            "Sessions by node",
            "Each engine has one for its scheduler and one for each worker.",
            {"{{instance}}": f"sum by (instance) ({metric('sessions')})"},
        ),
        Panel(
            "Event loop by node",
            "99th percentile of the event loop's delay.",
            {"{{instance}}": f"max by (instance) ({metric('loop_lag_p99_seconds')})"},
            "s",
        ),
    ),
    is_folded=True,
)

ROWS = (WORKING, PAYS, LIMITS, SPEED, TIERS, NODES, DEVICES, SPARSE)


def dashboard() -> dict[str, Any]:
    return {
        "uid": "hotkv",
        "title": "hotkv",
        "description": "Is it working, does it pay, what limits it. Made by tools/dashboard.py.",
        "tags": ["hotkv", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "node",
                    "type": "query",
                    "datasource": SOURCE,
                    "definition": INSTANCES,
                    "query": {"query": INSTANCES, "refId": "instance"},
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "refresh": 2,
                    "sort": 1,
                    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
                },
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels(ROWS),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write deploy/grafana/hotkv.json.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if the file is out of date"
    )
    if not parser.parse_args().check:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text())
    elif not FILE.exists() or FILE.read_text() != text():
        print("deploy/grafana/hotkv.json is out of date: python -m tools.dashboard")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
