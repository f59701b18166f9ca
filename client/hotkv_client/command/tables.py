"""Formats the answers of `AdminClient` as text."""

import datetime
import json
import re
from collections.abc import Sequence
from typing import Any

from hotkv_proto.command_line import columns, counted

NUMBER = re.compile(r"-?[\d,]+(\.\d+)?%?")


def human_bytes(count: float) -> str:
    """1536 as 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """3725 as 1h 2m."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    # Otherwise 119.6 s would be 1m 60s.
    seconds = round(seconds)
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60}s"
    return f"{seconds // 3600}h {seconds % 3600 // 60}m"


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of numbers are aligned right."""
    left = [
        i
        for i in range(len(headers))
        if not rows or not all(NUMBER.fullmatch(str(row[i])) for row in rows)
    ]
    return columns([headers, *([str(cell) for cell in row] for row in rows)], left)


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
    head = "device,name,uuid,pci,node,loaded,stored,pieces,failed,problem"
    parts = [
        f"arena registered with CUDA: {human_bytes(answer['registered_byte_count'])}, {state}; "
        f"allocations of engines open: {answer['open_allocation_count']}",
        table(head.split(","), rows),
        *(
            f"device {d['number']} {m['direction']}s by {m['replacement']}, because {m['method']} "
            "has failed"
            for d in answer["devices"]
            for m in d.get("demoted_methods", [])
        ),
    ]
    return "\n\n".join([*parts, *(speeds(d) for d in answer["devices"] if d["speeds"])])


def speeds(device: dict[str, Any]) -> str:
    """A row per direction and page size, a column per copy method. An asterisk marks the method
    that is used."""
    found = {
        (s["direction"], s["page_byte_count"], s["method"]): (
            f"{s['gb_per_s']:.1f}{'*' if s.get('is_chosen') else ''}"
        )
        for s in device["speeds"]
    }
    methods = list(dict.fromkeys(method for _, _, method in found))
    rows = [
        (
            direction,
            human_bytes(size),
            *(found.get((direction, size, method), "0.0") for method in methods),
        )
        for direction, size in sorted({key[:2] for key in found})
    ]
    return f"device {device['number']}, GB/s as measured:\n" + table(
        ("direction", "page", *methods), rows
    )


def show_sessions(answer: list[dict[str, Any]]) -> str:
    head = (
        "session,engine,role,model,door,key space,age,leases,transfers,memory,order,loaded,stored,"
        "prefill,client"
    )
    return table(
        head.split(","),
        [
            (
                s["session_number"],
                s["engine_name"],
                s["role"],
                s["model_name"],
                s["door"] or "-",
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
    return block_rows(answer["blocks"]) + (
        f"\nmore: --page {answer['next_page_token']}" if answer["next_page_token"] else ""
    )


def block_rows(listed: list[dict[str, Any]]) -> str:
    rows = [
        (
            b["block_hash"][:16],
            b["key_space_id"],
            b["model_name"],
            b["group_index"],
            b["depth"],
            b["state"],
            human_bytes(b["byte_count"]),
            human_bytes(b["sketch_byte_count"]) if b["sketch_byte_count"] else "-",
            b["pin_count"],
            human_seconds(b["idle_s"]),
            b["parent_hash"][:16] or "-",
        )
        for b in listed
    ]
    head = "hash,key space,model,group,depth,state,size,sketch,pins,idle,parent"
    return table(head.split(","), rows)


def show_evict(answer: dict[str, Any]) -> str:
    gone, kept = answer["evicted_block_count"], answer["kept_block_count"]
    if not answer["dry_run"]:
        return f"evicted {counted(gone, 'block')}, kept {kept} pinned or being written"
    size = human_bytes(answer["evicted_byte_count"])
    return (
        f"would evict {counted(gone, 'block')} ({size}) and keep {kept} pinned or being written; "
        "nothing was dropped"
    )


def show_export(answer: dict[str, Any]) -> str:
    return f"named {counted(answer['block_count'], 'block')} in {answer['file']}"


def show_fetched(answer: dict[str, Any]) -> str:
    text = (
        f"{counted(answer['fetched_block_count'], 'block')} promoted to host memory, "
        f"{answer['present_block_count']} there before, {answer['absent_block_count']} in no tier"
    )
    num_lower = answer["lower_block_count"]
    return f"{text}; no time or no room for {num_lower}" if num_lower else text


def show_flush(answer: dict[str, Any]) -> str:
    flushed = f"flushed {counted(answer['flushed_block_count'], 'block')}"
    if not (pending := answer["pending_tiers"]):
        return flushed
    return (
        f"{flushed}, but blocks of before may still be found in: {', '.join(pending)}\n"
        "They do not answer, and are told as soon as they do. Flush again then to be sure."
    )


def event_line(item: dict[str, Any]) -> str:
    if item["event"] == "lost":
        return f"{counted(item['count'], 'event')} lost: they came faster than they could be read"
    at = datetime.datetime.fromtimestamp(item["unix_time_ms"] / 1000).isoformat(" ", "milliseconds")
    head = f"{at}  key space {item['key_space_id']}  {item['event']}"
    if item["event"] == "cleared":
        return head
    head += f"  {item['tier']}" if item.get("tier") else ""
    blocks = (
        f"  group {item['group_index']}  {counted(item['block_count'], 'block')}, first "
        f"{item['hashes'][:16]}"
    )
    if item["event"] == "removed":
        return head + blocks
    return f"{head}{blocks}  depth {item['depth']}  tokens {len(item['token_ids']) or 'unknown'}"


def show_record(answer: dict[str, Any]) -> str:
    text = (
        f"recorded {counted(answer['request_count'], 'request')} with "
        f"{counted(answer['block_count'], 'block')} of {answer['block_token_count']} tokens, "
        f"{answer['unique_block_count']} of them different, in {human_seconds(answer['seconds'])}"
    )
    lost = (
        f"; {counted(answer['lost_request_count'], 'request')} lost: they came faster than they "
        "could be read"
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

    head = "engine,layer,selects,hits,recall,est. mass,selected,swapped,select us,faults"
    rows = [
        (
            row.get("engine_name", "total"),
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
    return table(head.split(","), rows)


def show_drain(answer: dict[str, Any]) -> str:
    if "waited_s" in answer:
        return f"the server has ended, after {human_seconds(answer['waited_s'])}"
    return (
        f"draining: {counted(answer['lease_count'], 'lease')} held, "
        f"{counted(answer['transfer_count'], 'transfer')} in flight"
    )


def show_resize(answer: dict[str, Any]) -> str:
    size, wanted = answer["arena_byte_count"], answer["wanted_byte_count"]
    lines = [f"the arena has {human_bytes(size)} now, and can grow to "
             f"{human_bytes(answer['most_byte_count'])}"]  # fmt: skip
    if moved := answer.get("moved_block_count", 0):
        lines.append(f"{counted(moved, 'block')} moved within it")
    if evicted := answer.get("evicted_block_count", 0):
        lines.append(f"{counted(evicted, 'block')} had no room any more, the coldest")
    if holders := answer.get("holders", ()):
        held = ", ".join(
            f"{one['name']} ({counted(one['block_count'], 'block')})" for one in holders
        )
        lines.append(
            f"not {human_bytes(wanted)}: blocks at its end are pinned by {held}; try again"
        )
    return "\n".join(lines)


def show_explain(answer: list[dict[str, Any]]) -> str:
    if not answer:
        return (
            "no key space of the server can answer: no engine has connected yet, or the hashes of "
            "its blocks do not follow from tokens: give block hashes (`hotkv blocks`)"
        )
    parts = []
    for space in answer:
        rows = [
            (
                b["group_index"],
                b["depth"],
                b["block_hash"][:16],
                b["verdict"],
                b["tier"] or "-",
                b["detail"],
            )
            for b in space["blocks"]
        ]
        loads = "".join(f"{load_line(load)}\n" for load in space["loads"])
        unused = ", which no connected engine uses" if space["is_unused"] else ""
        parts.append(
            f"{space_name(space)}{unused}: {space['summary']}\n{loads}"
            + table(("group", "depth", "hash", "verdict", "tier", "detail"), rows)
        )
    return "\n\n".join(parts)


def space_name(space: dict[str, Any]) -> str:
    model = space["model_name"]
    return f"key space {space['key_space_id']}" + (f" ({model})" if model else "")


def load_line(load: dict[str, Any]) -> str:
    """The cost of promoting a hit's blocks from a tier."""
    time = f"about {load['load_s'] * 1e3:.1f} ms" if load["load_s"] else "time not measured yet"
    return (
        f"from {load['tier']}: {counted(load['block_count'], 'block')}, "
        f"{human_bytes(load['byte_count'])}, "
        f"{time}"
    )


# ------------------------------------------------------------------------------------- hotkv status


def show_status(answer: dict[str, Any]) -> str:
    counters = answer["counters"]
    moved = {name: human_bytes(counters[f"{name}_bytes_total"]) for name in ("stored", "loaded")}
    parts = [
        *(f"{v['question']:<16} {v['word']}{v['text']}" for v in answer["verdicts"]),
        *([""] if answer["verdicts"] else []),
        f"hotkv-server {answer['version']}  pid {answer['pid']}  {state_line(answer)}  "
        f"up {human_seconds(answer['uptime_s'])}  epoch {answer['epoch']:x}",
        f"sessions {len(answer['sessions'])}  stored {moved['stored']}  loaded {moved['loaded']} "
        f" evicted {counters['evicted_blocks_total']:.0f}  no space "
        f"{counters['no_space_blocks_total']:.0f}",
        *([gpu_line(answer["devices"])] if answer["devices"]["devices"] else []),
        *residency_line(counters),
        loop_line(counters, answer["loop"]["held_by"]),
        "",
        table(
            (
                "tier",
                "used",
                "capacity",
                "share",
                "reserve",
                "unusable",
                "pinned",
                "sketches",
                "blocks",
            ),
            [
                (
                    t["name"],
                    human_bytes(t["used_byte_count"]),
                    human_bytes(t["capacity_byte_count"]),
                    f"{t['used_byte_count'] / max(1, t['capacity_byte_count']):.1%}",
                    human_bytes(t["reserve_byte_count"]),
                    human_bytes(t["unusable_byte_count"]),
                    human_bytes(t["pinned_byte_count"]),
                    human_bytes(t["sketch_byte_count"]),
                    t["block_count"],
                )
                for t in answer["tiers"]
                if t["name"] == "host"
            ],
        ),
        *tier_rows(answer["tiers"]),
        "",
        table(
            ("key space", "model", "dtype", "groups", "blocks", "fingerprint"),
            [
                (
                    k["key_space_id"],
                    k["model_name"],
                    k["dtype"],
                    k["group_count"],
                    k["block_count"],
                    k["fingerprint"][:12],
                )
                for k in answer["key_spaces"]
            ],
        ),
    ]
    return "\n".join(parts)


def state_line(info: dict[str, Any]) -> str:
    """Problems; without any, the state, what is limited, and the progress of the start."""
    problems = "; ".join(info["problems"])

    limits = info.get("limits", [])
    return problems or "; ".join(filter(None, (info["state"], *limits, info["progress"])))


def tier_rows(tiers: list[dict[str, Any]]) -> list[str]:
    """Tiers below host memory with their problems; empty without such."""
    rows = []
    for tier in tiers:
        does = tier.get("activity") or {}
        if tier["name"] == "host" or not does:
            continue
        asked, left = does["asked_block_count"], does["budget_left_byte_count"]
        capacity = tier["capacity_byte_count"]
        rows.append(
            (
                tier["name"],
                "up" if does["is_up"] else "DOWN",
                "-" if does["is_shared"] else human_bytes(tier["used_byte_count"]),
                human_bytes(capacity) if capacity else "-",
                f"{does['hit_block_count'] / asked:.1%}" if asked else "-",
                human_bytes(does["written_byte_count"]),
                human_bytes(does["read_byte_count"]),
                f"{does['read_p50_s'] * 1e3:.1f}" if does["read_count"] else "-",
                f"{does['read_p99_s'] * 1e3:.1f}" if does["read_count"] else "-",
                human_bytes(does["queued_byte_count"]),
                does["waiting_block_count"],
                does["lost_block_count"],
                does["failed_block_count"],
                human_bytes(left) if does["budget_byte_count"] else "no limit",
            )
        )
    head = (
        "tier,state,used,capacity,hits,in,out,p50 ms,p99 ms,queued,waiting,lost,failed,budget left"
    )
    problems = [
        f"{tier['name']}: {tier['activity']['problem']}"
        for tier in tiers
        if (tier.get("activity") or {}).get("problem")
    ]
    return ["", table(head.split(","), rows), *problems] if rows else []


def residency_line(counters: dict[str, Any]) -> list[str]:
    """Empty without residencies, engines that wait for one, or pinned blocks of an earlier
    server."""
    names = ("residencies", "residencies_waiting", "residency_grace_bytes")
    if not any(counters.get(name) for name in names):
        return []
    pinned, promised, bound, grace = (
        counters[f"residency_{name}_bytes"] for name in ("pinned", "promised", "bound", "grace")
    )
    waiting = counters["residencies_waiting"]
    return [
        f"residencies {counters['residencies']:.0f}  pinned {human_bytes(pinned)}  promised "
        f"{human_bytes(promised)}  of at most {human_bytes(bound)}"
        + (f"  engines that wait {waiting:.0f}" if waiting else "")
        + (f"  kept after the restart {human_bytes(grace)}" if grace else "")
    ]


def gpu_line(answer: dict[str, Any]) -> str:
    """`hotkv devices` shows more."""
    problems = [d["problem"] for d in answer["devices"] if d["problem"]]
    why = f"  {answer['registering_error']}" if answer["registering_error"] else ""
    return (
        f"GPUs {len(answer['devices'])}  arena registered "
        f"{human_bytes(answer['registered_byte_count'])}{why}  "
    ) + ("; ".join(problems) or "all copy")


def loop_line(counters: dict[str, Any], held_by: str) -> str:
    """How late callbacks of the event loop ran in the last minute.

    held_by: what ran during the longest delay, if known.
    """
    p50, p99, longest = (
        f"{counters[f'loop_lag_{name}_seconds'] * 1e3:.1f} ms" for name in ("p50", "p99", "longest")
    )
    return (
        f"event loop late by {p50} (p50), {p99} (p99), {longest} "
        f"(longest{', in ' + held_by if held_by else ''})"
    )


# --------------------------------------------------------------------------------------- hotkv slow


def show_slow(answer: dict[str, Any]) -> str:
    """In milliseconds."""
    requests = [
        (
            human_seconds(one["age_s"]),
            one["engine_name"],
            one["model_name"] or "-",
            *(_ms(one[f"{name}_s"]) for name in ("took", "lookup", "load", "saved")),
            one["prompt_token_count"],
            one["hit_token_count"],
            "load failed" if one["failed"] else "-",
        )
        for one in answer["requests"]
    ]
    transfers = [
        (
            human_seconds(one["age_s"]),
            one["engine_name"],
            one["direction"],
            human_bytes(one["byte_count"]),
            *(_ms(one[f"{name}_s"]) for name in ("took", "room", "ready", "queue", "copy")),
            one["outcome"],
        )
        for one in answer["transfers"]
    ]
    of_requests = "ended,engine,model,waited ms,lookup,load,saved,tokens,hit,problem"
    of_transfers = "ended,engine,transfer,size,took ms,room,ready,queue,copy,outcome"
    parts = [
        "requests that waited longest for the cache:",
        table(of_requests.split(","), requests) if requests else "no request has waited",
        "",
        "transfers that took longest:",
        table(of_transfers.split(","), transfers) if transfers else "no transfer has ended",
    ]
    return "\n".join(parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


# ------------------------------------------------------------------------------------- hotkv config


def show_config(answer: dict[str, Any]) -> str:
    if not answer["settings"]:
        return "all settings are defaults"
    rows = [
        (one["name"], setting_text(one["name"], one["value"]), _origin(one))
        for one in answer["settings"]
    ]
    shown = table(("setting", "value", "from"), rows)
    if waiting := ", ".join(answer["waiting"]):
        shown += f"\n\nchanged since, and wait for a restart: {waiting}"
    return shown


def setting_text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("bytes") and isinstance(value, int) and value >= 1024:
        return human_bytes(value)
    return value or '""' if isinstance(value, str) else json.dumps(value)


def _origin(setting: dict[str, Any]) -> str:
    named = {"environment": setting["variable"], "flag": setting["flag"]}
    return " ".join(filter(None, (setting["origin"], named.get(setting["origin"], ""))))


# -------------------------------------------------------------------------------- hotkv residencies


def show_residencies(answer: dict[str, Any]) -> str:
    """Shows also the limit of their total size, and the last refusal of each engine that waits."""
    rows = [
        (
            r["engine_name"],
            r["residency_id"],
            r["key_space_id"],
            r["model_name"],
            human_seconds(r["age_s"]),
            f"{r['block_count']} of {r['reserved_block_count']}",
            human_bytes(r["pinned_byte_count"]),
            human_bytes(r["promised_byte_count"]),
        )
        for r in answer["residencies"]
    ]
    grace = answer["grace_byte_count"]
    parts = [
        f"{counted(answer['residency_count'], 'residency', 'residencies')}  pinned "
        f"{human_bytes(answer['pinned_byte_count'])}  promised "
        f"{human_bytes(answer['promised_byte_count'])}  of at most "
        f"{human_bytes(answer['bound_byte_count'])}"
        + (
            f"  kept after the restart {human_bytes(grace)}, for {human_seconds(answer['grace_s'])}"
            if grace
            else ""
        )
    ]
    if rows:
        head = "engine,residency,key space,model,age,blocks,pinned,promised"
        parts += ["", table(head.split(","), rows)]
    for r in answer["refusals"]:
        parts += [
            "",
            f"engine {r['engine_name']} waits with {r['residency_id']}, refused "
            f"{counted(r['attempt_count'], 'time')}, last {human_seconds(r['age_s'])} ago: "
            f"{human_bytes(r['asked_byte_count'])} asked, "
            f"{human_bytes(r['available_byte_count'])} available. {r['message']}",
        ]
    return "\n".join(parts)


# ------------------------------------------------------------- hotkv hints, hotkv explain --session


HINT_HEADERS = (
    "age",
    "message",
    "action",
    "type",
    "session",
    "status",
    "blocks",
    "reused",
    "saved",
    "reason",
)


def show_hints(answer: dict[str, Any]) -> str:
    lines = [
        f"{tenant['tenant'] or 'no tenant'}: {counted(tenant['session_count'], 'session')} "
        f"({human_bytes(tenant['session_byte_count'])} of hashes), "
        f"{counted(tenant['outcome_count'], 'outcome')}"
        for tenant in answer["tenants"]
    ]
    if not answer["outcomes"]:
        return "\n".join([*lines, "no hints"])
    return "\n".join([*lines, "", show_outcomes(answer["outcomes"])])


def show_outcomes(outcomes: list[dict[str, Any]]) -> str:
    rows = [
        (
            human_seconds(one["age_s"]),
            one["message_id"][:24] or "-",
            one["action_id"][:24],
            one["action_type"] or "-",
            one["session_id"][:24] or "-",
            one["status"],
            f"{one['done_block_count']} of {one['block_count']}",
            one["reused_block_count"],
            f"{one['saved_s']:.2f}s",
            one["reason"] or "-",
        )
        for one in outcomes
    ]
    return table(HINT_HEADERS, rows)


def show_session(sessions: list[dict[str, Any]]) -> str:
    """Shows totals of each session's requests, places of its blocks, and hints that named it."""
    if not sessions:
        return "no request has named this session of late"
    parts = []
    for one in sessions:
        idle = f", last request {human_seconds(one['idle_s'])} ago" if one["key_spaces"] else ""
        parts.append("\n".join([f"tenant {one['tenant'] or '-'}{idle}", *_receipt(one)]))
        if one["key_spaces"]:
            parts.append(show_explain(one["key_spaces"]))
        if one["outcomes"]:
            parts.append(show_outcomes(one["outcomes"]))
    return "\n\n".join(parts)


def _receipt(session: dict[str, Any]) -> list[str]:
    """A line with the totals, or empty if the server knows no request: only hints named the
    session, or it was released."""
    tokens = session.get("prompt_token_count", 0)
    if not tokens:
        return []
    device, hits = session["device_hit_token_count"], session["hit_token_count"]
    return [
        f"{counted(session['request_count'], 'request')} of {counted(tokens, 'prompt token')}: "
        f"{device / tokens:.1%} hit in the engine, {(hits - device) / tokens:.1%} here, "
        f"{session['saved_s']:.2f}s of prefill saved"
    ]
