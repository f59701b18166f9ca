"""`hotkv status` of several servers: a row per node, and their sum. Below: who does not answer."""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command import failures
from hotkv_client.command.options import credentials_of
from hotkv_client.command.tables import human_bytes, human_seconds, state_line, table
from hotkv_client.targets import admin_target
from hotkv_proto.command_line import counted
from hotkv_proto.errors import HotKVError

MOST_AT_ONCE = 16
SUMS = (
    "engine_count",
    "block_count",
    "host_used_byte_count",
    "host_capacity_byte_count",
    "below_used_byte_count",
    "prompt_token_count",
    "hit_token_count",
    "stored_byte_count",
    "loaded_byte_count",
    "evicted_block_count",
)
"""Added up in the row of sums."""


def targets_of(target: str) -> list[str]:
    """`A,B,C`, or `@FILE` with one server per line. Raises OSError if the file can't be read,
    ValueError if none is named."""
    if not target.startswith("@"):
        words, how = target.split(","), "write A,B,C"
    else:
        text = Path(target[1:]).read_text(errors="replace")
        words, how = [line.partition("#")[0] for line in text.splitlines()], "write one a line"
    found = [word.strip() for word in words if word.strip()]
    if not found:
        raise ValueError(f"{target.removeprefix('@')} names no server; {how}")
    return found


def status(targets: Sequence[str], connect: Callable[[str], AdminClient]) -> dict[str, Any]:
    """`nodes`, a row per server, and `sum`."""
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        nodes = list(pool.map(lambda target: _node(target, connect), targets))
    return {"nodes": nodes, "sum": {name: sum(one.get(name, 0) for one in nodes) for name in SUMS}}


def _node(target: str, connect: Callable[[str], AdminClient]) -> dict[str, Any]:
    """Figures, or `error`."""
    try:
        with connect(target) as client:
            return _row(target, client.info(), client.tiers(), client.sessions())
    except KeyError as error:
        text = failures.other_version(error)
    except HotKVError as error:
        text = failures.explained(error, admin_target(target))
    except (OSError, ValueError) as error:
        text = str(error)
    return {"target": target, "error": text}


def _row(
    target: str, info: dict[str, Any], tiers: list[dict[str, Any]], sessions: list[dict[str, Any]]
) -> dict[str, Any]:
    host = next(one for one in tiers if one["name"] == "host")
    # An older server may lack some counters.
    counters = info["counters"]
    return {
        "target": target,
        "error": "",
        "state": state_line(info),
        "version": info["version"],
        "uptime_s": info["uptime_s"],
        "engine_count": len({one["engine_id"] for one in sessions}),
        "block_count": host["block_count"],
        "host_used_byte_count": host["used_byte_count"],
        "host_capacity_byte_count": host["capacity_byte_count"],
        # Each node would count a shared tier.
        "below_used_byte_count": sum(
            one["used_byte_count"] for one in tiers if one["name"] == "disk"
        ),
        "prompt_token_count": counters.get("reported_prompt_tokens_total", 0),
        "hit_token_count": counters.get("reported_hit_tokens_total", 0),
        "stored_byte_count": counters.get("stored_bytes_total", 0),
        "loaded_byte_count": counters.get("loaded_bytes_total", 0),
        "evicted_block_count": counters.get("evicted_blocks_total", 0),
    }


def show(answer: dict[str, Any]) -> str:
    rows = [
        (
            one["target"],
            "no answer" if one["error"] else one["state"],
            human_seconds(one["uptime_s"]) if not one["error"] else "-",
            *_figures(one),
        )
        for one in answer["nodes"]
    ]
    num_absent = sum(bool(one["error"]) for one in answer["nodes"])
    missing = f"{num_absent} without answer" if num_absent else "all answer"
    rows.append((counted(len(answer["nodes"]), "node"), missing, "", *_figures(answer["sum"])))
    head = "node,state,up,engines,host,of,disk,blocks,hits,stored,loaded,evicted"
    why = [f"{one['target']}: {one['error']}" for one in answer["nodes"] if one["error"]]
    return "\n".join([table(head.split(","), rows), *([""] if why else []), *why])


def _figures(one: dict[str, Any]) -> tuple[str, ...]:
    if one.get("error"):
        return ("-",) * 9
    prompt_tokens = one["prompt_token_count"]
    return (
        str(one["engine_count"]),
        human_bytes(one["host_used_byte_count"]),
        human_bytes(one["host_capacity_byte_count"]),
        human_bytes(one["below_used_byte_count"]),
        str(one["block_count"]),
        f"{one['hit_token_count'] / prompt_tokens:.1%}" if prompt_tokens else "-",
        human_bytes(one["stored_byte_count"]),
        human_bytes(one["loaded_byte_count"]),
        f"{one['evicted_block_count']:.0f}",
    )


def main(options: argparse.Namespace) -> int:
    """Returns the command's exit status: 1 if a server does not answer."""
    try:
        credentials = credentials_of(options)
        answer = status(
            targets_of(options.target),
            lambda target: AdminClient(target, options.timeout_s, credentials),
        )
    except (ValueError, OSError) as error:
        return failures.wrong(error, as_json=options.json)
    print(json.dumps(answer, indent=2) if options.json else show(answer), flush=True)
    return 1 if any(one["error"] for one in answer["nodes"]) else 0
