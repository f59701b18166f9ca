"""Figures about hints for operators."""

import time

from hotkv_server.hints.book.outcomes import HintBook, HintOutcome
from hotkv_server.hints.book.sessions import SessionReceipt
from hotkv_server.node.capability import Figures, Filters

DEFAULT_PAGE, MAX_PAGE = 100, 1000


def hints(book: HintBook, filters: Filters) -> Figures:
    """Latest outcomes in order of arrival, totals per tenant, and the session if `filters` names
    one."""
    now_s, most = time.monotonic(), filters.page_size(DEFAULT_PAGE, MAX_PAGE)
    message, session = filters.text("message_id"), filters.text("session_id")
    tenants = [one for one in book.all() if filters.text("tenant") in ("", one[0])]
    found = [
        (one.came_s, name, one)
        for name, tenant in tenants
        for one in tenant.outcomes.values()
        if message in ("", one.message_id) and session in ("", one.session_id)
    ]
    found.sort(key=lambda row: row[:2])
    known = ((name, tenant, tenant.sessions.get(session)) for name, tenant in tenants)
    return {
        "outcomes": [_outcome(one, name, now_s) for _, name, one in found[-most:]],
        "tenants": [
            {
                "tenant": name,
                "session_count": len(tenant.sessions),
                "session_byte_count": tenant.sessions.num_bytes,
                "outcome_count": len(tenant.outcomes),
            }
            for name, tenant in tenants
        ],
        "sessions": [
            {
                "tenant": name,
                "idle_s": now_s - one.used_s,
                "expected_pause_s": tenant.sessions.returns.expected_s(one.gaps),
                **_receipt(one.receipt),
            }
            for name, tenant, one in known
            if one is not None
        ],
    }


def _receipt(one: SessionReceipt) -> Figures:
    return {
        "request_count": one.num_requests,
        "prompt_token_count": one.prompt_tokens,
        "device_hit_token_count": one.device_hit_tokens,
        "hit_token_count": one.hit_tokens,
        "saved_s": one.saved_s,
    }


def _outcome(one: HintOutcome, tenant: str, now_s: float) -> Figures:
    return {
        "message_id": one.message_id,
        "action_id": one.action_id,
        "action_type": one.kind,
        "session_id": one.session_id,
        "status": one.status.value,
        "reason": one.reason,
        "block_count": one.num_blocks,
        "done_block_count": one.num_done,
        "reused_block_count": one.reused_blocks,
        "saved_s": one.saved_s,
        "age_s": max(0.0, now_s - one.came_s),
        "sequence": one.sequence,
        "tenant": tenant,
    }
