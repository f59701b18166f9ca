"""Converts the ledger's values into figures for operators, the status page and metrics."""

import time

import numpy as np
from numpy.typing import NDArray

from hotkv_server.ledger.book.accounts import HIT, Usage
from hotkv_server.ledger.drive import LiveLedger, Savings
from hotkv_server.ledger.history import EVICTED, LAG, STEP_S, LiveHistory
from hotkv_server.node.capability import Figures, Samples
from hotkv_server.node.names import DisplayNames

RECENT_S = 3600.0
"""Window of the status page, and of the forecast in the metrics."""
DEVICE = "device"
"""The engine's own memory, where tiers are listed by name."""


def savings_figures(found: Savings, names: DisplayNames) -> Figures:
    outlook = found.outlook
    return {
        "rows": [
            {
                "tenant": account.tenant,
                "model": account.model,
                "model_name": names.model(account.key_space, account.model, account.engine_id),
                "key_space": account.key_space,
                "engine_id": account.engine_id,
                "engine_name": names.engine(account.engine_id),
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


def _usage(usage: Usage) -> Figures:
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


def status(
    ledger: LiveLedger, history: LiveHistory, names: DisplayNames, *, has_names: bool
) -> Figures:
    """Values that are callables may be called later, on any thread.

    has_names: include a row per account in the last hour's savings.
    """
    now_s, now_unix_s = time.monotonic(), time.time()
    samples, sample_age_s = history.samples(now_s)
    minutes = history.minutes()
    return {
        "savings": {
            "hour": savings_figures(ledger.savings(RECENT_S, has_rows=has_names), names),
            "all": savings_figures(ledger.savings(has_rows=False), names),
        },
        "history": lambda: {
            "step_s": STEP_S,
            "end_unix_time_ms": int((now_unix_s - sample_age_s) * 1000),
            **_series(samples),
        },
        "minutes": lambda: {
            "step_s": 60.0,
            "end_unix_time_ms": -(-int(now_unix_s * 1000) // 60_000) * 60_000,
            **_series(minutes),
        },
    }


def _series(samples: dict[str, NDArray[np.float64]]) -> Figures:
    whole = {name: values.astype(np.int64).tolist() for name, values in samples.items()}
    figures: Figures = {
        "prompt_token_counts": whole["prompt_tokens"],
        "hit_token_counts": {
            DEVICE: whole["device_hit_tokens"],
            **{
                name.removeprefix(HIT): values
                for name, values in whole.items()
                if name.startswith(HIT)
            },
        },
        "loaded_byte_counts": whole["loaded_bytes"],
        "stored_byte_counts": whole["stored_bytes"],
    }
    if LAG in samples:
        figures["evicted_block_counts"] = whole[EVICTED]
        figures["loop_lag_s"] = samples[LAG].round(6).tolist()
    return figures


def tokens(ledger: LiveLedger) -> list[Samples]:
    """Tokens hit by tier and missed by reason, since the server's start."""
    grown = ledger.grown
    hits = {DEVICE: grown.device_hit_tokens, **grown.hit_tokens}
    return [
        Samples(
            "ledger_hit_tokens_total",
            "counter",
            [((tier,), float(count)) for tier, count in hits.items()],
        ),
        Samples(
            "ledger_missed_tokens_total",
            "counter",
            [((why.name.lower(),), float(count)) for why, count in grown.missed_tokens.items()],
        ),
    ]
