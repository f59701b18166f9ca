"""What a report says of a server beside figures: for each device and direction the copy method that
moved most bytes, the sessions' order marks, the round trip of a ping, and the commit."""

import json
import os
import subprocess
from typing import Any

from bench.report import median
from demo.processes import ROOT, Server
from hotkv_client.paged_engine import PagedEngine

PINGS = 50


def commit() -> str:
    """HOTKV_COMMIT, for a copy of the tree without its history."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return os.environ.get("HOTKV_COMMIT") or found.stdout.strip() or "unknown"


def facts(server: Server) -> dict[str, Any]:
    """Call it while the measured sessions are open."""
    devices = json.loads(server.cli("devices", "--json"))
    sessions = json.loads(server.cli("sessions", "--json"))
    orders = {one["device_order"] for one in sessions} - {""}
    return {
        "commit": commit(),
        "method": {
            f"{device['number']} {way}": _most_used(device["copies"], way)
            for device in devices["devices"]
            for way in ("load", "store")
        },
        "order": sorted(orders),
        "ping_us": ping_us(server.target),
    }


def _most_used(copies: list[dict[str, Any]], way: str) -> str:
    moved = {one["method"]: one["byte_count"] for one in copies if one["direction"] == way}
    return max(moved, key=lambda method: moved[method], default="none")


def ping_us(target: str) -> float:
    """Median."""
    session = PagedEngine(target, layers=1, num_blocks=1, page_bytes=4096).connect().session
    try:
        return 1e6 * median([session.ping(10.0) for _ in range(PINGS)])
    finally:
        session.close()


def told(found: dict[str, Any]) -> str:
    methods = ", ".join(f"{way}: {method}" for way, method in found["method"].items())
    order = ", ".join(found["order"]) or "none"
    return (
        f"commit {found['commit']}; method {methods or 'none'}; order {order}; "
        f"ping {found['ping_us']:.0f} us"
    )
