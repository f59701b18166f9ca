"""How `hotkv` shows answers to people: tables and lines, from the plain values of `AdminClient`."""

import datetime
from collections.abc import Sequence
from typing import Any


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


def show_devices(answer: dict[str, Any]) -> str:
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


def show_sessions(answer: list[dict[str, Any]]) -> str:
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
            "prefill",
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
                f"{s['prefill_tokens_per_s']:.0f} tok/s" if s["prefill_tokens_per_s"] else "-",
                s["client_name"],
            )
            for s in answer
        ],
    )


def show_blocks(answer: dict[str, Any]) -> str:
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


def show_evict(answer: dict[str, Any]) -> str:
    return (
        f"evicted {answer['evicted_block_count']} blocks, kept {answer['kept_block_count']} "
        "that are pinned or being written"
    )


def show_export(answer: dict[str, Any]) -> str:
    return f"named {answer['block_count']} blocks in {answer['file']}"


def show_fetched(answer: dict[str, Any]) -> str:
    text = (
        f"{answer['fetched_block_count']} blocks came into host memory, "
        f"{answer['present_block_count']} were there, {answer['absent_block_count']} are nowhere"
    )
    num_lower = answer["lower_block_count"]
    return f"{text}; {num_lower} had no time or no room" if num_lower else text


def show_flush(answer: dict[str, Any]) -> str:
    flushed = f"flushed {answer['flushed_block_count']} blocks"
    if not (pending := answer.get("pending_tiers")):
        return flushed
    return (
        f"{flushed}, but blocks of before may still be found in: {', '.join(pending)}\n"
        "They do not answer, and are told as soon as they do. Flush again then to be sure."
    )


def event_line(item: dict[str, Any]) -> str:
    """One event for people."""
    if item["event"] == "lost":
        return f"{item['count']} events lost: they came faster than they could be read"
    at = datetime.datetime.fromtimestamp(item["unix_time_ms"] / 1000).isoformat(" ", "milliseconds")
    head = f"{at}  key space {item['key_space_id']}  {item['event']}"
    if item["event"] == "cleared":
        return head
    head += f"  {item['tier']}" if item.get("tier") else ""
    blocks = (
        f"  group {item['group_index']}  {item['block_count']} blocks, first {item['hashes'][:16]}"
    )
    if item["event"] == "removed":
        return head + blocks
    return f"{head}{blocks}  depth {item['depth']}  tokens {len(item['token_ids']) or 'unknown'}"


def show_record(answer: dict[str, Any]) -> str:
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


def show_sparse(answer: dict[str, Any]) -> str:
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


def show_drain(answer: dict[str, Any]) -> str:
    return (
        f"draining: {answer['lease_count']} leases held, {answer['transfer_count']} transfers "
        "in flight"
    )


def show_explain(answer: list[dict[str, Any]]) -> str:
    if not answer:
        return (
            "no key space of the server can answer: no engine has connected yet, or its hash "
            "algorithm needs --hashes"
        )
    parts = []
    for space in answer:
        rows = [
            (
                b["group_index"],
                b["depth"],
                b["block_hash"][:16],
                b["verdict"],
                b.get("tier") or "-",
                b["detail"],
            )
            for b in space["blocks"]
        ]
        loads = "".join(f"{load_line(load)}\n" for load in space.get("loads", ()))
        parts.append(
            f"key space {space['key_space_id']}: {space['summary']}\n{loads}"
            + table(("group", "depth", "hash", "verdict", "tier", "detail"), rows)
        )
    return "\n\n".join(parts)


def load_line(load: dict[str, Any]) -> str:
    """What it takes to bring blocks of a hit up from a tier."""
    time = f"about {load['load_s'] * 1e3:.1f} ms" if load["load_s"] else "time not measured yet"
    return (
        f"from {load['tier']}: {load['block_count']} blocks, {human_bytes(load['byte_count'])}, "
        f"{time}"
    )
