"""How `hotkv hints` and `hotkv explain --session` show what routers have asked."""

from typing import Any

from hotkv_client.command.tables import human_bytes, human_seconds, show_explain, table

HEADERS = (
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
    """The latest outcomes, and what each tenant has."""
    lines = [
        f"{tenant['tenant'] or 'no tenant'}: {tenant['session_count']} sessions "
        f"({human_bytes(tenant['session_byte_count'])} of hashes), "
        f"{tenant['outcome_count']} outcomes"
        for tenant in answer["tenants"]
    ]
    if not answer["outcomes"]:
        return "\n".join([*lines, "no hints"])
    return "\n".join([*lines, "", show_outcomes(answer["outcomes"])])


def show_outcomes(outcomes: list[dict[str, Any]]) -> str:
    """A row for each action."""
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
    return table(HEADERS, rows)


def show_session(sessions: list[dict[str, Any]]) -> str:
    """Where the blocks of the sessions of a name lie, and what was asked for them."""
    if not sessions:
        return "no request has named this session of late"
    parts = []
    for one in sessions:
        idle = f", last request {human_seconds(one['idle_s'])} ago" if one["key_spaces"] else ""
        parts.append(f"tenant {one['tenant'] or '-'}{idle}")
        if one["key_spaces"]:
            parts.append(show_explain(one["key_spaces"]))
        if one["outcomes"]:
            parts.append(show_outcomes(one["outcomes"]))
    return "\n\n".join(parts)
