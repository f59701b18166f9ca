"""Groups and formats the ledger for `hotkv savings`."""

from collections.abc import Iterable
from typing import Any

from hotkv_client.command.tables import human_bytes, human_seconds, table
from hotkv_proto.command_line import counted

GROUPS = ("tenant", "model", "engine")
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_SINCE_S = 8 * 86_400
NAMES = {"tenant": ("tenant",), "model": ("tenant", "model"), "engine": ("model", "engine")}
"""Columns that together name a row, by grouping."""
SHOWN = {"tenant": "tenant", "model": "model_name", "engine": "engine_name"}
"""The ledger's field for each of these columns."""
FIELDS = {
    "tenant": ("tenant",),
    "model": ("tenant", "model_name", "model"),
    "engine": ("model_name", "model", "engine_name", "engine_id"),
}
"""Fields that together name a row in JSON."""
SUMS = (
    "request_count",
    "prompt_token_count",
    "device_hit_token_count",
    "saved_s",
    "waited_s",
    "failed_load_count",
    "loaded_byte_count",
    "stored_byte_count",
)


def seconds(text: str) -> float:
    """Reads 90s, 30m, 1h or 7d; empty: 0. Raises ValueError for another text, or above
    MAX_SINCE_S."""
    if not text:
        return 0.0
    unit = UNITS_S.get(text[-1], 0)
    number = text[:-1] if unit else text
    try:
        found = float(number) * (unit or 1)
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_SINCE_S:
        raise ValueError(
            f"--since {text}: give a time such as 90s, 30m, 1h or 7d, at most 8d; or leave it out "
            "for all"
        )
    return found


def total(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    listed = list(rows)
    return {
        **{name: sum(row[name] for row in listed) for name in SUMS},
        **{
            name: {
                key: sum(row[name].get(key, 0) for row in listed)
                for key in dict.fromkeys(key for row in listed for key in row[name])
            }
            for name in ("hits", "misses")
        },
    }


def grouped(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Sums rows with equal names, in the order of their first. The server lists the last used
    first, and a joined row has its ids.

    by: `tenant`; `model` (and tenant); `engine` (and model).
    """
    groups = dict[tuple[str, ...], list[dict[str, Any]]]()
    for row in rows:
        groups.setdefault(_names(row, by), []).append(row)
    return [
        {**{field: group[0][field] for field in FIELDS[by]}, **total(group)}
        for group in groups.values()
    ]


def _names(row: dict[str, Any], by: str) -> tuple[str, ...]:
    return tuple(row[SHOWN[name]] for name in NAMES[by])


def show_savings(answer: dict[str, Any]) -> str:
    if not answer["rows"]:
        return "no engine has reported a request in this time"
    by, whole = answer["by"], answer["total"]
    rows = [_row(row, [name or "-" for name in _names(row, by)], whole) for row in answer["rows"]]
    if len(rows) > 1:
        rows.append(_row(whole, ["total", *[""] * (len(NAMES[by]) - 1)], whole))
    headers = (
        *NAMES[by],
        "requests",
        "prompt tokens",
        "device",
        *whole["hits"],
        "missed",
        "saved",
        "waited",
        "net",
        "loaded",
        "stored",
    )
    parts = [table(headers, rows), "", _misses(whole), *_outlook(answer)]
    if answer["folded_row_count"]:
        parts.append(
            f"{counted(answer['folded_row_count'], 'row')} joined under `others`: there were too "
            "many"
        )
    return "\n".join(parts)


def _row(row: dict[str, Any], names: list[str], whole: dict[str, Any]) -> tuple[object, ...]:
    prompt = row["prompt_token_count"]

    def share(tokens: int) -> str:
        return f"{tokens / prompt:.1%}" if prompt else "-"

    net_s = row["saved_s"] - row["waited_s"]
    return (
        *names,
        row["request_count"],
        prompt,
        share(row["device_hit_token_count"]),
        *(share(row["hits"].get(tier, 0)) for tier in whole["hits"]),
        share(sum(row["misses"].values())),
        human_seconds(row["saved_s"]),
        human_seconds(row["waited_s"]),
        ("-" if net_s < 0 else "") + human_seconds(abs(net_s)),
        human_bytes(row["loaded_byte_count"]),
        human_bytes(row["stored_byte_count"]),
    )


def _misses(whole: dict[str, Any]) -> str:
    """Most frequent reason first."""
    prompt = whole["prompt_token_count"]
    reasons = sorted(whole["misses"].items(), key=lambda one: -one[1])
    shares = [f"{why.replace('_', ' ')} {count / prompt:.1%}" for why, count in reasons if count]
    failed = whole["failed_load_count"]
    return (
        f"missed: {', '.join(shares) or 'nothing'}"
        + f"; {counted(failed, 'load')} failed" * bool(failed)
        if prompt
        else "no prompt was reported"
    )


def _outlook(answer: dict[str, Any]) -> list[str]:
    """Hit rate of an unlimited cache, and gain of more memory."""
    outlook, whole = answer["outlook"], answer["total"]
    if not outlook["prompt_token_count"]:
        return []
    hit = whole["device_hit_token_count"] + sum(whole["hits"].values())
    step, gain = outlook["step_byte_count"], outlook["gain_ratio"]
    return [
        f"hit: {hit / max(1, whole['prompt_token_count']):.1%}; an endless cache would hit "
        f"{outlook['ceiling_ratio']:.1%}",
        f"the next {human_bytes(step)} beyond {human_bytes(answer['arena_byte_count'])} would "
        f"bring {100 * gain:.1f} points",
    ]
