"""The ledger as plain figures, for JSON and metrics. Field names are those of the wire."""

from typing import Any

from hotkv_server.ledger.book.columns import Usage
from hotkv_server.ledger.drive import LiveLedger, Savings

RECENT_S = 3600.0
"""The outlook of metrics is that of the last hour."""


def savings_figures(found: Savings) -> dict[str, Any]:
    """All of it, for JSON."""
    outlook = found.outlook
    return {
        "rows": [
            {
                "tenant": account.tenant,
                "model": account.model,
                "key_space": account.key_space,
                "engine_id": account.engine_id,
                **_usage(usage),
            }
            for account, usage in found.rows
        ],
        "total": _usage(found.total),
        "outlook": {
            "prompt_token_count": outlook.prompt_tokens,
            "ceiling_ratio": outlook.ceiling_ratio,
            "step_byte_count": outlook.step_bytes,
            "gain_ratio": outlook.gain_ratio,
            "gib_gain_ratio": outlook.gib_gain_ratio,
        },
        "began_unix_time_ms": int(found.began_unix_s * 1000),
        "folded_row_count": found.num_folded,
        "arena_byte_count": found.capacity_bytes,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "request_count": usage.requests,
        "prompt_token_count": usage.prompt_tokens,
        "device_hit_token_count": usage.device_hit_tokens,
        "hits": dict(usage.hit_tokens),
        "misses": {why.name.lower(): count for why, count in usage.missed_tokens.items() if count},
        "saved_s": usage.saved_s,
        "waited_s": usage.waited_s,
        "failed_load_count": usage.failed_loads,
        "loaded_byte_count": usage.loaded_bytes,
        "stored_byte_count": usage.stored_bytes,
    }


def counters(ledger: LiveLedger) -> dict[str, float]:
    """Counters by their metric names, without the `hotkv_` prefix."""
    return {
        "ledger_folded_rows_total": float(ledger.num_folded),
        "ledger_lost_reports_total": float(ledger.num_lost),
    }


def gauges(ledger: LiveLedger) -> dict[str, float]:
    """Gauges by their metric names, without the `hotkv_` prefix."""
    outlook = ledger.outlook(RECENT_S)
    return {
        "ledger_rows": float(len(ledger.accounts)),
        "ledger_ceiling_ratio": outlook.ceiling_ratio,
        "ledger_next_gib_ratio": outlook.gib_gain_ratio,
    }
