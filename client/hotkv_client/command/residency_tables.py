"""How `hotkv residencies` shows what requests keep in the arena, and who waits for room."""

from typing import Any

from hotkv_client.command.tables import human_bytes, human_seconds, table


def show_residencies(answer: dict[str, Any]) -> str:
    """Residencies, the bound, and the last refusal of each engine that waits."""
    rows = [
        (
            r["engine_id"],
            r["residency_id"],
            r["key_space_id"],
            human_seconds(r["age_s"]),
            f"{r['block_count']} of {r['reserved_block_count']}",
            human_bytes(r["pinned_byte_count"]),
            human_bytes(r["promised_byte_count"]),
        )
        for r in answer["residencies"]
    ]
    grace = answer["grace_byte_count"]
    parts = [
        f"{answer['residency_count']} residencies  pinned "
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
        headers = ("engine", "residency", "key space", "age", "blocks", "pinned", "promised")
        parts += ["", table(headers, rows)]
    for r in answer["refusals"]:
        parts += [
            "",
            f"engine {r['engine_id']} waits with {r['residency_id']}, refused "
            f"{r['attempt_count']} times, last {human_seconds(r['age_s'])} ago: "
            f"{human_bytes(r['asked_byte_count'])} asked, "
            f"{human_bytes(r['available_byte_count'])} available. {r['message']}",
        ]
    return "\n".join(parts)
