"""`hotkv`: what the server holds and why a prompt missed, from the command line. Tables by default,
`--json` on every command."""

import argparse
import contextlib
import datetime
import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv.counters import SPARSE_COUNTERS, sparse_figures
from hotkv.errors import HotKVError
from hotkv_client import recorder
from hotkv_client.admin import DEFAULT_TARGET, AdminClient
from hotkv_client.types import Credentials

Command = Callable[[AdminClient, argparse.Namespace], Any]
LIVE = "live"
MAX_TOKEN_ID = (1 << 31) - 1
CREDENTIAL_FLAGS = {
    "tls_ca": "over TCP: PEM file of who signs the server's certificate",
    "tls_certificate": "over TCP: PEM file of this client's certificate",
    "tls_key": "over TCP: PEM file of its key",
    "tls_server_name": (
        "over TCP: name in the server's certificate where it is not the host of --target"
    ),
    "token_file": "over TCP: file with an admin's token",
}


def human_bytes(count: float) -> str:
    """1536 as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """3725 as 1h 2m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m {seconds % 60:.0f}s"
    return f"{seconds // 3600:.0f}h {seconds % 3600 // 60:.0f}m"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(len(header), *(len(row[i]) for row in cells), 0) if cells else len(header)
        for i, header in enumerate(headers)
    ]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(headers))
    ]
    lines = [
        [h.rjust(w) if r else h.ljust(w) for h, w, r in zip(headers, widths, right, strict=True)]
    ]
    lines += [
        [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        for row in cells
    ]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def status(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """State, tiers, key spaces and the hit rate."""
    return {
        **client.info(),
        "tiers": client.tiers(),
        "key_spaces": client.key_spaces(),
        "sessions": client.sessions(),
    }


def loop_line(counters: dict[str, Any], held_by: str) -> str:
    """How late the server's event loop has been in the last minute."""
    p50, p99, longest = (
        f"{counters[f'loop_lag_{name}_seconds'] * 1e3:.1f} ms" for name in ("p50", "p99", "longest")
    )
    return (
        f"event loop late by {p50} (p50), {p99} (p99), {longest} "
        f"(longest{', in ' + held_by if held_by else ''})"
    )


def show_status(answer: dict[str, Any], options: argparse.Namespace) -> str:
    counters = answer["counters"]
    acquired, missed = (
        counters.get("acquired_blocks_total", 0),
        counters.get("missed_blocks_total", 0),
    )
    rate = f"{acquired / (acquired + missed):.1%}" if acquired + missed else "-"
    moved = {name: human_bytes(counters[f"{name}_bytes_total"]) for name in ("stored", "loaded")}
    parts = [
        f"hotkv-server {answer['version']}  pid {answer['pid']}  {answer['state']}  "
        f"up {human_seconds(answer['uptime_s'])}  epoch {answer['epoch']:x}",
        f"sessions {len(answer['sessions'])}  stored {moved['stored']}  loaded {moved['loaded']} "
        f" leased blocks found {rate}  "
        f"evicted {counters['evicted_blocks_total']:.0f}  no space "
        f"{counters['no_space_blocks_total']:.0f}",
        *([gpu_line(answer["devices"])] if answer["devices"]["devices"] else []),
        loop_line(counters, answer["loop_held_by"]),
        "",
        table(
            ("tier", "used", "capacity", "share", "pinned", "representations", "blocks"),
            [
                (
                    t["name"],
                    human_bytes(t["used_byte_count"]),
                    human_bytes(t["capacity_byte_count"]),
                    f"{t['used_byte_count'] / max(1, t['capacity_byte_count']):.1%}",
                    human_bytes(t["pinned_byte_count"]),
                    human_bytes(t["representation_byte_count"]),
                    t["block_count"],
                )
                for t in answer["tiers"]
            ],
        ),
        "",
        table(
            ("key space", "model", "dtype", "groups", "blocks", "fingerprint"),
            [
                (
                    k["key_space_id"],
                    k["key_space"]["model"],
                    k["key_space"]["dtype"],
                    len(k["key_space"]["groups"]),
                    k["block_count"],
                    k["fingerprint"][:12],
                )
                for k in answer["key_spaces"]
            ],
        ),
    ]
    return "\n".join(parts)


def devices(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """GPUs: what was copied, how fast each way of copying was measured to be, how much of the arena
    they reach."""
    answer: dict[str, Any] = client.info()["devices"]
    return answer


def show_devices(answer: dict[str, Any], options: argparse.Namespace) -> str:
    if not answer["devices"]:
        return f"no devices: {answer['why_none']}"
    state = answer["registering_error"] or f"in {human_seconds(answer['registering_s'])}"
    rows = [
        (
            d["number"],
            d["name"],
            d["uuid"],
            d["pci_bus_id"],
            d["numa_node"] if d["numa_node"] >= 0 else "-",
            *(
                human_bytes(sum(c["byte_count"] for c in d["copies"] if c["direction"] == way))
                for way in ("load", "store")
            ),
            d["queued_piece_count"] + d["flying_piece_count"],
            d["failed_job_count"],
            d["problem"] or "-",
        )
        for d in answer["devices"]
    ]
    parts = [
        f"arena registered with CUDA: {human_bytes(answer['registered_byte_count'])}, {state}; "
        f"allocations of engines open: {answer['open_allocation_count']}",
        table(
            (
                "device",
                "name",
                "uuid",
                "pci",
                "node",
                "loaded",
                "stored",
                "pieces",
                "failed",
                "problem",
            ),
            rows,
        ),
    ]
    return "\n\n".join([*parts, *(speeds(d) for d in answer["devices"] if d["speeds"])])


def speeds(device: dict[str, Any]) -> str:
    """A device's measured speeds: a line for each direction and page size, a column for each
    method."""
    found = {
        (s["direction"], s["page_byte_count"], s["method"]): s["gb_per_s"] for s in device["speeds"]
    }
    methods = list(dict.fromkeys(method for _, _, method in found))
    rows = [
        (
            direction,
            human_bytes(size),
            *(f"{found.get((direction, size, method), 0.0):.1f}" for method in methods),
        )
        for direction, size in sorted({key[:2] for key in found})
    ]
    return f"device {device['number']}, GB/s as measured:\n" + table(
        ("direction", "page", *methods), rows
    )


def gpu_line(answer: dict[str, Any]) -> str:
    """GPUs in one line; `hotkv devices` says more."""
    problems = [d["problem"] for d in answer["devices"] if d["problem"]]
    why = f"  {answer['registering_error']}" if answer["registering_error"] else ""
    return (
        f"GPUs {len(answer['devices'])}  arena registered "
        f"{human_bytes(answer['registered_byte_count'])}{why}  "
    ) + ("; ".join(problems) or "all copy")


def ping(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Whether the server serves, for probes: exit status 0 if so, 1 if not."""
    return {"serving": client.ping(LIVE if options.live else "")}


def sessions(client: AdminClient, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Live sessions."""
    return client.sessions()


def show_sessions(answer: list[dict[str, Any]], options: argparse.Namespace) -> str:
    return table(
        (
            "session",
            "engine",
            "role",
            "key space",
            "age",
            "leases",
            "transfers",
            "memory",
            "order",
            "loaded",
            "stored",
            "client",
        ),
        [
            (
                s["session_number"],
                s["engine_id"],
                s["role"],
                s["key_space_id"],
                human_seconds(s["age_s"]),
                s["lease_count"],
                s["transfer_count"],
                human_bytes(s["memory_byte_count"]),
                s["device_order"] or "-",
                human_bytes(s["loaded_byte_count"]),
                human_bytes(s["stored_byte_count"]),
                s["client_name"],
            )
            for s in answer
        ],
    )


def blocks(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Blocks, a page at a time."""
    return client.blocks(options.key_space, options.limit, options.page)


def show_blocks(answer: dict[str, Any], options: argparse.Namespace) -> str:
    rows = [
        (
            b["block_hash"][:16],
            b["key_space_id"],
            b["group_index"],
            b["depth"],
            b["state"],
            human_bytes(b["byte_count"]),
            human_bytes(b["representation_byte_count"]) if b["representation_byte_count"] else "-",
            b["pin_count"],
            human_seconds(b["idle_s"]),
            b["parent_hash"][:16] or "-",
        )
        for b in answer["blocks"]
    ]
    text = table(
        (
            "hash",
            "key space",
            "group",
            "depth",
            "state",
            "size",
            "representation",
            "pins",
            "idle",
            "parent",
        ),
        rows,
    )
    return text + (
        f"\nmore: --page {answer['next_page_token']}" if answer["next_page_token"] else ""
    )


def evict(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Drops blocks that are not pinned."""
    packed = b"".join(parse_hash(h) for h in options.hashes)
    return client.evict(options.key_space, options.group, packed, everything=options.all)


def show_evict(answer: dict[str, Any], options: argparse.Namespace) -> str:
    return (
        f"evicted {answer['evicted_block_count']} blocks, kept {answer['kept_block_count']} "
        "that are pinned or being written"
    )


def flush(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Forgets a key space's blocks, also pinned ones."""
    return client.flush(options.key_space)


def show_flush(answer: dict[str, Any], options: argparse.Namespace) -> str:
    return f"flushed {answer['flushed_block_count']} blocks"


def events(client: AdminClient, options: argparse.Namespace) -> None:
    """Prints what is stored and removed, as it happens, until Ctrl-C."""
    shown = json.dumps if options.json else event_line
    with contextlib.suppress(KeyboardInterrupt):
        for items, lost in client.events(options.key_space, options.seconds):
            for item in [*items, *([{"event": "lost", "count": lost}] if lost else [])]:
                print(shown(item), flush=True)


def event_line(item: dict[str, Any]) -> str:
    """One event for people."""
    if item["event"] == "lost":
        return f"{item['count']} events lost: they came faster than they could be read"
    at = datetime.datetime.fromtimestamp(item["unix_time_ms"] / 1000).isoformat(" ", "milliseconds")
    head = f"{at}  key space {item['key_space_id']}  {item['event']}"
    if item["event"] == "cleared":
        return head
    blocks = (
        f"  group {item['group_index']}  {item['block_count']} blocks, first {item['hashes'][:16]}"
    )
    if item["event"] == "removed":
        return head + blocks
    return f"{head}{blocks}  depth {item['depth']}  tokens {len(item['token_ids']) or 'unknown'}"


def record(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Writes a trace of the requests that engines report, until Ctrl-C: hashes as numbers, no
    tokens."""
    return recorder.record(
        client,
        options.file,
        options.key_space,
        options.block_tokens,
        options.seconds,
        options.max_blocks,
    )


def show_record(answer: dict[str, Any], options: argparse.Namespace) -> str:
    text = (
        f"recorded {answer['request_count']} requests with {answer['block_count']} blocks of "
        f"{answer['block_token_count']} tokens, "
        f"{answer['unique_block_count']} of them different, in {human_seconds(answer['seconds'])}"
    )
    lost = (
        f"; {answer['lost_request_count']} requests lost: they came faster than they could be read"
        if answer["lost_request_count"]
        else ""
    )
    return text + lost + ("; stopped at --max-blocks" if answer["is_full"] else "")


def sparse(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Sparse decode, layer by layer: hot-set hits, recall, attention mass, blocks, bytes swapped,
    time to select."""
    rows = client.sparse_layers()
    total = {name: sum(row[name] for row in rows) for name in SPARSE_COUNTERS}
    return {"layers": rows, "total": {**total, **sparse_figures(total)}}


def show_sparse(answer: dict[str, Any], options: argparse.Namespace) -> str:
    if not answer["layers"]:
        return "no engine has reported sparse decode"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    def mean(value: float | None, scale: float = 1.0) -> str:
        return "-" if value is None else f"{value * scale:.1f}"

    columns = (
        "engine",
        "layer",
        "selects",
        "hits",
        "recall",
        "est. mass",
        "selected",
        "swapped",
        "select us",
        "faults",
    )
    rows = [
        (
            row.get("engine_id", "total"),
            row.get("layer_index", "all"),
            int(row["selects"]),
            share(row["hit_ratio"]),
            share(row["recall_ratio"]),
            share(row["mean_estimated_mass"]),
            mean(row["mean_selected_blocks"]),
            human_bytes(row["swap_bytes"]),
            mean(row["mean_select_s"], 1e6),
            int(row["faults"]),
        )
        for row in (*answer["layers"], answer["total"])
    ]
    return table(columns, rows)


def drain(client: AdminClient, options: argparse.Namespace) -> dict[str, Any]:
    """Takes no new work and stops when all has ended."""
    return client.drain(options.timeout)


def show_drain(answer: dict[str, Any], options: argparse.Namespace) -> str:
    return (
        f"draining: {answer['lease_count']} leases held, {answer['transfer_count']} transfers "
        "in flight"
    )


def explain(client: AdminClient, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each block of a prompt, would it hit, and why not."""
    hashes, token_ids = parse_prompt(options.prompt)
    return client.explain(options.key_space, hashes, token_ids)


def show_explain(answer: list[dict[str, Any]], options: argparse.Namespace) -> str:
    if not answer:
        return (
            "no key space of the server can answer: no engine has connected yet, or its hash "
            "algorithm needs --hashes"
        )
    parts = []
    for space in answer:
        rows = [
            (b["group_index"], b["depth"], b["block_hash"][:16], b["verdict"], b["detail"])
            for b in space["blocks"]
        ]
        parts.append(
            f"key space {space['key_space_id']}: {space['summary']}\n"
            + table(("group", "depth", "hash", "verdict", "detail"), rows)
        )
    return "\n\n".join(parts)


def parse_hash(text: str) -> bytes:
    """A block hash in hexadecimal. Raises ValueError."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no hexadecimal block hash") from error


def parse_prompt(words: Sequence[str]) -> tuple[bytes, bytes]:
    """(hashes, token ids) of a prompt given as numbers, hexadecimal hashes, or @FILE or - with
    either. Raises ValueError."""
    items: list[str] = []
    for word in words:
        text = word
        if word == "-":
            text = sys.stdin.read()
        elif word.startswith("@"):
            text = Path(word[1:]).read_text()
        items += text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    if not items:
        raise ValueError("the prompt is empty; give token ids or block hashes")
    if all(item.isdecimal() and int(item) <= MAX_TOKEN_ID for item in items):
        return b"", struct.pack(f"<{len(items)}i", *map(int, items))
    return b"".join(parse_hash(item) for item in items), b""


COMMANDS: dict[str, tuple[Command, Callable[[Any, argparse.Namespace], str]]] = {
    "status": (status, show_status),
    "devices": (devices, show_devices),
    "ping": (
        ping,
        lambda answer, options: (
            "serving" if answer["serving"] else "not serving; `hotkv status` says why"
        ),
    ),
    "sessions": (sessions, show_sessions),
    "blocks": (blocks, show_blocks),
    "evict": (evict, show_evict),
    "flush": (flush, show_flush),
    "events": (events, lambda answer, options: ""),
    "record": (record, show_record),
    "sparse": (sparse, show_sparse),
    "drain": (drain, show_drain),
    "explain": (explain, show_explain),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--target",
        default=os.environ.get("HOTKV_TARGET", DEFAULT_TARGET),
        help="server (default: $HOTKV_TARGET or %(default)s)",
    )
    for field, text in CREDENTIAL_FLAGS.items():
        common.add_argument(
            f"--{field.replace('_', '-')}",
            default="",
            metavar="NAME" if field == "tls_server_name" else "FILE",
            help=text,
        )
    common.add_argument(
        "--timeout-s",
        type=float,
        default=10.0,
        help="longest wait for an answer (default: %(default)s)",
    )
    common.add_argument("--json", action="store_true", help="print the answer as JSON")
    top = argparse.ArgumentParser(prog="hotkv", description="Inspect a hotkv-server.")
    subparsers = top.add_subparsers(dest="command", required=True)
    made = {
        name: subparsers.add_parser(name, parents=[common], help=(run.__doc__ or "").rstrip("."))
        for name, (run, _) in COMMANDS.items()
    }
    for name in ("blocks", "evict", "explain", "events"):
        made[name].add_argument(
            "--key-space", type=int, default=0, help="number of the key space (default: all)"
        )
    made["flush"].add_argument(
        "--key-space", type=int, required=True, help="number of the key space"
    )
    made["record"].add_argument("file", type=Path, help="file to write, in Mooncake's format")
    made["record"].add_argument(
        "--key-space", type=int, default=0, help="number of the key space (default: the only one)"
    )
    made["record"].add_argument(
        "--block-tokens",
        type=int,
        default=512,
        help="tokens in a block of the trace (default: %(default)s)",
    )
    made["record"].add_argument(
        "--max-blocks",
        type=int,
        default=20_000_000,
        help="stop after so many different blocks (default: %(default)s)",
    )
    for name in ("events", "record"):
        made[name].add_argument(
            "--seconds", type=float, default=0, help="stop after this time (default: at Ctrl-C)"
        )
    made["blocks"].add_argument(
        "--limit", type=int, default=50, help="most blocks to list (default: %(default)s)"
    )
    made["blocks"].add_argument("--page", default="", help="continue a listing")
    made["evict"].add_argument("hashes", nargs="*", help="block hashes in hexadecimal")
    made["evict"].add_argument(
        "--group", type=int, default=0, help="group of the hashes (default: %(default)s)"
    )
    made["evict"].add_argument(
        "--all", action="store_true", help="drop everything in the key space, or in all"
    )
    made["ping"].add_argument(
        "--live", action="store_true", help="whether it is in order, also while it drains"
    )
    made["drain"].add_argument(
        "--timeout",
        type=float,
        default=0,
        help="seconds to wait for work in flight (default: the server's)",
    )
    made["explain"].add_argument(
        "prompt",
        nargs="+",
        help="token ids, or block hashes in hexadecimal, or @FILE, or - for standard input",
    )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 where the server refused or is absent, 2 for bad
    input."""
    options = parser().parse_args(arguments)
    run, show = COMMANDS[options.command]
    try:
        credentials = Credentials(**{field: getattr(options, field) for field in CREDENTIAL_FLAGS})
        with AdminClient(options.target, options.timeout_s, credentials) as client:
            answer = run(client, options)
    except HotKVError as error:
        print(f"hotkv: {options.target}: {error.message}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"hotkv: {error}", file=sys.stderr)
        return 2
    if answer is not None:
        print(json.dumps(answer, indent=2) if options.json else show(answer, options))
    return 1 if options.command == "ping" and not answer["serving"] else 0


if __name__ == "__main__":
    sys.exit(main())
