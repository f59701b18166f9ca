"""How `hotkv status` shows a server: lines on its state, tiers and key spaces."""

from typing import Any

from hotkv_client.command.tables import human_bytes, human_seconds, table


def show_status(answer: dict[str, Any]) -> str:
    counters = answer["counters"]
    acquired, missed = (
        counters.get("acquired_blocks_total", 0),
        counters.get("missed_blocks_total", 0),
    )
    rate = f"{acquired / (acquired + missed):.1%}" if acquired + missed else "-"
    moved = {name: human_bytes(counters[f"{name}_bytes_total"]) for name in ("stored", "loaded")}
    parts = [
        f"hotkv-server {answer['version']}  pid {answer['pid']}  {state_line(answer)}  "
        f"up {human_seconds(answer['uptime_s'])}  epoch {answer['epoch']:x}",
        f"sessions {len(answer['sessions'])}  stored {moved['stored']}  loaded {moved['loaded']} "
        f" leased blocks found {rate}  "
        f"evicted {counters['evicted_blocks_total']:.0f}  no space "
        f"{counters['no_space_blocks_total']:.0f}",
        *([gpu_line(answer["devices"])] if answer["devices"]["devices"] else []),
        *residency_line(counters),
        loop_line(counters, answer["loop"]["held_by"]),
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
                    k["model"],
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
    """What keeps the server from serving, that it drains, or what its start still does."""
    problems = "; ".join(info["problems"])
    return problems or "; ".join(filter(None, (info["state"], info["progress"])))


def tier_rows(tiers: list[dict[str, Any]]) -> list[str]:
    """A row for each tier below host memory: what it holds, how it answers; nothing without one."""
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
    """One line on residencies; none if there are and were none."""
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
    """GPUs in one line; `hotkv devices` says more."""
    problems = [d["problem"] for d in answer["devices"] if d["problem"]]
    why = f"  {answer['registering_error']}" if answer["registering_error"] else ""
    return (
        f"GPUs {len(answer['devices'])}  arena registered "
        f"{human_bytes(answer['registered_byte_count'])}{why}  "
    ) + ("; ".join(problems) or "all copy")


def loop_line(counters: dict[str, Any], held_by: str) -> str:
    """One line: the lateness of the server's event loop in the last minute."""
    p50, p99, longest = (
        f"{counters[f'loop_lag_{name}_seconds'] * 1e3:.1f} ms" for name in ("p50", "p99", "longest")
    )
    return (
        f"event loop late by {p50} (p50), {p99} (p99), {longest} "
        f"(longest{', in ' + held_by if held_by else ''})"
    )
