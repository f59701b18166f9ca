"""Rows and panels of a dashboard, and the JSON that Grafana reads of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The Prometheus that is chosen."""
WIDTH, HEIGHT, SMALL_HEIGHT = 24, 8, 4
GREEN, RED = "green", "red"


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `text` explains it in one breath. `queries`: PromQL by the name of their lines.
    `unit` as Grafana names it. `kind`: `stat` or `timeseries`. `width` of WIDTH. `steps`: from
    which value on which colour. `stacked`: areas above each other."""

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
    """Panels under a question. `is_folded`: shown when it is opened."""

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
    """Rows and panels, from left to right and from top to bottom."""
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
