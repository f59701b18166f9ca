"""Formats `hotkv top` as lines of text, for pipes and files."""

from collections.abc import Sequence

from hotkv_client.command.tables import human_bytes, human_seconds, table
from hotkv_client.command.top.figures import EngineRates, Figures, ModelRates, TierRates

TIER_HEADERS = ("tier", "state", "used", "capacity", "hits", "out/s", "in/s")
ENGINE_HEADERS = (
    "engine", "model", "tokens/s", "hits", "10 min", "loaded/s", "stored/s", "leases", "transfers",
)  # fmt: skip
SPARSE_HEADERS = ("engine", "selections/s", "hot set", "swapped/s")


def ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def per_s(num_bytes: float) -> str:
    return f"{human_bytes(num_bytes)}/s" if num_bytes else "-"


def head(figures: Figures) -> list[str]:
    """Two lines about the whole server."""
    return [
        f"hotkv-server {figures.version}  {figures.state}  up {human_seconds(figures.uptime_s)}  "
        f"event loop late by {figures.lag_p99_s * 1e3:.1f} ms (p99), "
        f"{figures.lag_longest_s * 1e3:.1f} ms (longest)",
        f"hits {ratio(figures.hit_ratio)} now, {ratio(figures.recent_hit_ratio)} in 10 minutes, of "
        f"{ratio(figures.ceiling_ratio)} in reach  saved {human_seconds(figures.saved_s)}, waited "
        f"{human_seconds(figures.waited_s)} in 10 minutes",
    ]


def flow(figures: Figures) -> str:
    """Per second."""
    return (
        f"prompts {figures.prompt_tokens_per_s:,.0f} tokens/s  loaded "
        f"{per_s(figures.loaded_bytes_per_s)}  stored {per_s(figures.stored_bytes_per_s)}  evicted "
        f"{figures.evicted_blocks_per_s:,.0f} blocks/s"
    )


def tier_row(tier: TierRates) -> tuple[str, ...]:
    return (
        tier.name,
        tier.state,
        human_bytes(tier.used_bytes),
        human_bytes(tier.capacity_bytes) if tier.capacity_bytes else "-",
        ratio(tier.hit_ratio),
        per_s(tier.read_bytes_per_s),
        per_s(tier.written_bytes_per_s),
    )


def engine_row(engine: EngineRates) -> tuple[str, ...]:
    return (
        engine.name,
        engine.model or "-",
        f"{engine.prompt_tokens_per_s:,.0f}",
        ratio(engine.hit_ratio),
        ratio(engine.recent_hit_ratio),
        per_s(engine.loaded_bytes_per_s),
        per_s(engine.stored_bytes_per_s),
        str(engine.num_leases),
        str(engine.num_transfers),
    )


def sparse_row(engine: EngineRates | ModelRates) -> tuple[str, ...]:
    return (
        engine.name,
        f"{engine.selects_per_s:,.0f}",
        ratio(engine.hot_set_hit_ratio),
        per_s(engine.swap_bytes_per_s),
    )


def misses(engine: EngineRates) -> str:
    """Shares of the reasons, recently."""
    all_missed = sum(engine.misses.values())
    shares = (f"{why.replace('_', ' ')} {n / all_missed:.0%}" for why, n in engine.misses.items())
    return ", ".join(shares) if all_missed else "nothing missed"


def text(figures: Figures, engines: Sequence[EngineRates]) -> str:
    """engines: in the order of printing."""
    deciding = [engine for engine in engines if engine.selects_per_s]
    parts = [
        *head(figures),
        flow(figures),
        *(f"! {warning}" for warning in figures.warnings),
        "",
        table(TIER_HEADERS, [tier_row(tier) for tier in figures.tiers]),
        "",
        table(ENGINE_HEADERS, [engine_row(engine) for engine in engines])
        if engines
        else "no engine is connected",
    ]
    if deciding:
        parts += ["", table(SPARSE_HEADERS, [sparse_row(engine) for engine in deciding])]
    return "\n".join(parts)
