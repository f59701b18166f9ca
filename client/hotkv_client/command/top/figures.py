"""Readings and figures of `hotkv top`.

`read` asks a server; `figures_of` is pure.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hotkv_client.admin import AdminClient
from hotkv_client.command.savings_tables import total
from hotkv_client.command.tables import state_line
from hotkv_proto.command_line import counted
from hotkv_proto.sparse_counters import SPARSE_COUNTERS, sparse_figures

# ----------------------------------------------------------------------------------------- readings


RECENT_S = 600.0
"""Covered by `recent_hit_ratio`, `ceiling_ratio`, `misses`, `saved_s` and `waited_s`, called
*recent* here."""
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """Several answers of `AdminClient` at about the same time.

    at_s: monotonic, when `info` arrived.
    layers: of sparse decode, by engine and layer.
    ledger: since the server began.
    recent: the same over RECENT_S.
    """

    at_s: float
    info: Answer
    tiers: list[Answer]
    sessions: list[Answer]
    layers: list[Answer]
    ledger: Answer
    recent: Answer


def read(client: AdminClient) -> Reading:
    """Raises HotKVError if the server refuses or does not answer."""
    info = client.info()
    return Reading(
        at_s=time.monotonic(),
        info=info,
        tiers=client.tiers(),
        sessions=client.sessions(),
        layers=client.sparse_layers(),
        ledger=client.savings(),
        recent=client.savings(RECENT_S),
    )


# -------------------------------------------------------------------------------------------- rates


HOST = "host"
JITTER_S = 1.0
"""Tolerance of `is_same_server` for delayed answers."""
LATE_S = 0.25
"""Delay of the event loop beyond which lookups of engines are given up."""
TROUBLES = {
    "no_space_blocks_total": "blocks found no room: the arena is full of pinned blocks",
    "refused_total": "requests were refused: `hotkv status`, or the logs, name the reason",
    "events_lost_total": "events were lost: a reader is too slow",
    "ledger_lost_reports_total": "reports were not counted: the ledger is behind",
}
"""Counters that should not grow, and the warning if they do."""


@dataclass(frozen=True, slots=True)
class TierRates:
    """Between two readings.

    capacity_bytes: 0: unknown.
    hit_ratio: share of the prompt tokens; None without prompts.
    """

    name: str
    state: str
    used_bytes: int
    capacity_bytes: int
    hit_ratio: float | None
    read_bytes_per_s: float
    written_bytes_per_s: float
    problem: str


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Between two readings, summed over the engine's sessions.

    name, model: as shown.
    hit_ratio, recent_hit_ratio: shares of the prompt tokens; None without prompts.
    saved_s, waited_s: prefill that hits saved, and waits for the cache, recently.
    hot_set_hit_ratio: share of the selected blocks that were on the device, without those always
        selected; None without selections.
    """

    engine_id: str
    name: str
    model: str
    num_sessions: int
    num_leases: int
    num_transfers: int
    prompt_tokens_per_s: float
    hit_ratio: float | None
    recent_hit_ratio: float | None
    loaded_bytes_per_s: float
    stored_bytes_per_s: float
    misses: dict[str, int]
    """Missed tokens by reason, most frequent first."""
    saved_s: float
    waited_s: float
    selects_per_s: float
    """Selections of sparse decode, over all layers."""
    hot_set_hit_ratio: float | None
    swap_bytes_per_s: float
    weights: "Weights"
    """With which `ModelRates` weights means."""

    @property
    def key(self) -> str:
        return self.engine_id


@dataclass(frozen=True, slots=True)
class Weights:
    """The denominators of an engine's ratios."""

    prompt_tokens: float
    recent_prompt_tokens: float
    selects: float


@dataclass(frozen=True, slots=True)
class ModelRates:
    """Sums over a model's engines, and means weighted by `Weights`."""

    name: str
    num_engines: int
    num_transfers: int
    prompt_tokens_per_s: float
    hit_ratio: float | None
    recent_hit_ratio: float | None
    loaded_bytes_per_s: float
    stored_bytes_per_s: float
    selects_per_s: float
    hot_set_hit_ratio: float | None
    swap_bytes_per_s: float

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Figures:
    """A server's figures between two readings. Ratios are shares of the prompt tokens; None without
    prompts.

    ceiling_ratio: of a cache without a size limit, recently.
    lag_p99_s, lag_longest_s: delay of callbacks in the event loop.
    """

    version: str
    state: str
    uptime_s: float
    has_rates: bool
    """False for the first reading and after a restart: all rates are 0."""
    hit_ratio: float | None
    recent_hit_ratio: float | None
    ceiling_ratio: float | None
    prompt_tokens_per_s: float
    loaded_bytes_per_s: float
    stored_bytes_per_s: float
    evicted_blocks_per_s: float
    lag_p99_s: float
    lag_longest_s: float
    saved_s: float
    """Prefill that hits saved recently."""
    waited_s: float
    """Waits for the cache, recently."""
    tiers: list[TierRates] = field(default_factory=list)
    engines: list[EngineRates] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Between:
    """Growth of counters between two readings; 0 for the first, and after a restart, when
    counters begin at 0 again."""

    def __init__(self, before: Reading | None, after: Reading) -> None:
        known = before is not None and is_same_server(before, after)
        self.before = before if known else None
        self.after = after
        self.seconds = after.at_s - before.at_s if known and before is not None else 0.0

    def per_s(self, now: float, then: float) -> float:
        return max(0.0, now - then) / self.seconds if self.seconds > 0 else 0.0

    def counter(self, name: str) -> float:
        """0 for a counter that the server lacks."""
        if self.before is None:
            return 0.0
        now, then = (r.info["counters"].get(name, 0.0) for r in (self.after, self.before))
        return max(0.0, float(now - then))

    def rate(self, name: str) -> float:
        return self.counter(name) / self.seconds if self.seconds > 0 else 0.0

    def ledger(self, engine: str | None = None) -> dict[str, Any]:
        """Growth of each count, at least 0: a count decreases if a load fails after its hit was
        counted.

        engine: None: all.
        """
        now = _of(self.after.ledger, engine)
        then = now if self.before is None else _of(self.before.ledger, engine)
        return {
            name: (
                {key: max(0, count - then[name].get(key, 0)) for key, count in value.items()}
                if isinstance(value, Mapping)
                else max(0, value - then[name])
            )
            for name, value in now.items()
        }


def is_same_server(before: Reading, after: Reading) -> bool:
    """Not restarted in between. Compares uptimes too: in a container the process id may stay the
    same."""
    aged_s = after.info["uptime_s"] - before.info["uptime_s"]
    return bool(
        before.info["pid"] == after.info["pid"] and aged_s > after.at_s - before.at_s - JITTER_S
    )


def figures_of(before: Reading | None, after: Reading) -> Figures:
    """Rates are since `before`."""
    between = _Between(before, after)
    grown, recent = between.ledger(), _of(after.recent, None)
    outlook, counters = after.recent["outlook"], after.info["counters"]
    return Figures(
        version=after.info["version"],
        state=state_line(after.info),
        uptime_s=after.info["uptime_s"],
        has_rates=between.before is not None,
        hit_ratio=_hit_ratio(grown),
        recent_hit_ratio=_hit_ratio(recent),
        ceiling_ratio=outlook["ceiling_ratio"] if outlook["prompt_token_count"] else None,
        prompt_tokens_per_s=between.per_s(grown["prompt_token_count"], 0),
        loaded_bytes_per_s=between.rate("loaded_bytes_total"),
        stored_bytes_per_s=between.rate("stored_bytes_total"),
        evicted_blocks_per_s=between.rate("evicted_blocks_total"),
        lag_p99_s=counters["loop_lag_p99_seconds"],
        lag_longest_s=counters["loop_lag_longest_seconds"],
        saved_s=recent["saved_s"],
        waited_s=recent["waited_s"],
        tiers=_tiers(between, grown),
        engines=_engines(between),
        warnings=list(_warnings(between, grown)),
    )


def _of(savings: Mapping[str, Any], engine: str | None) -> dict[str, Any]:
    """engine: None: all."""
    return total(row for row in savings["rows"] if engine in (None, row["engine_id"]))


def _hit_ratio(sums: Mapping[str, Any]) -> float | None:
    prompt = sums["prompt_token_count"]
    hit = sums["device_hit_token_count"] + sum(sums["hits"].values())
    return hit / prompt if prompt else None


def _activity(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reads and writes of a tier; empty for host memory."""
    return {} if tier.get("name") == HOST else tier.get("activity") or {}


def _tiers(between: _Between, grown: Mapping[str, Any]) -> list[TierRates]:
    earlier = {t["name"]: t for t in between.before.tiers} if between.before else {}
    prompt = grown["prompt_token_count"]

    def one(tier: Mapping[str, Any]) -> TierRates:
        does = _activity(tier)
        then = _activity(earlier.get(tier["name"], {})) or does
        if does:
            state = "up" if does["is_up"] else "DOWN"
            read, written = (
                between.per_s(does[name], then[name])
                for name in ("read_byte_count", "written_byte_count")
            )
        else:
            state = "up"
            read, written = between.rate("loaded_bytes_total"), between.rate("stored_bytes_total")
        return TierRates(
            name=tier["name"],
            state=state,
            used_bytes=tier["used_byte_count"],
            capacity_bytes=tier["capacity_byte_count"],
            hit_ratio=grown["hits"].get(tier["name"], 0) / prompt if prompt > 0 else None,
            read_bytes_per_s=read,
            written_bytes_per_s=written,
            problem=does.get("problem", ""),
        )

    return [one(tier) for tier in between.after.tiers]


def by_model(engines: Iterable[EngineRates]) -> list[ModelRates]:
    """Ordered by the models' first engines."""
    groups: dict[str, list[EngineRates]] = {}
    for one in engines:
        groups.setdefault(one.model, []).append(one)
    return [_model(name, group) for name, group in groups.items()]


def _model(name: str, engines: list[EngineRates]) -> ModelRates:
    def mean(ratio: str, weight: str) -> float | None:
        pairs = [
            (getattr(one, ratio), getattr(one.weights, weight))
            for one in engines
            if getattr(one, ratio) is not None
        ]
        whole = sum(tokens for _, tokens in pairs)
        return sum(share * tokens for share, tokens in pairs) / whole if whole else None

    def total(field_name: str) -> float:
        return sum(float(getattr(one, field_name)) for one in engines)

    return ModelRates(
        name=name,
        num_engines=len(engines),
        num_transfers=sum(one.num_transfers for one in engines),
        prompt_tokens_per_s=total("prompt_tokens_per_s"),
        hit_ratio=mean("hit_ratio", "prompt_tokens"),
        recent_hit_ratio=mean("recent_hit_ratio", "recent_prompt_tokens"),
        loaded_bytes_per_s=total("loaded_bytes_per_s"),
        stored_bytes_per_s=total("stored_bytes_per_s"),
        selects_per_s=total("selects_per_s"),
        hot_set_hit_ratio=mean("hot_set_hit_ratio", "selects"),
        swap_bytes_per_s=total("swap_bytes_per_s"),
    )


def _engines(between: _Between) -> list[EngineRates]:
    """Engines with a session, in the order in which they connected."""
    found = dict.fromkeys(s["engine_id"] for s in between.after.sessions if s["role"] != "tool")
    return [_engine(between, engine_id) for engine_id in found]


def _engine(between: _Between, engine_id: str) -> EngineRates:
    def sessions(reading: Reading | None) -> list[dict[str, Any]]:
        return [s for s in reading.sessions if s["engine_id"] == engine_id] if reading else []

    def grew(field_name: str) -> float:
        """A session that began after the earlier reading adds its whole count."""
        then = {s["session_number"]: s[field_name] for s in sessions(between.before)}
        return sum(float(s[field_name] - then.get(s["session_number"], 0)) for s in now)

    now = sessions(between.after)
    grown, recent = between.ledger(engine_id), _of(between.after.recent, engine_id)
    sparse = _sparse_growth(between, engine_id)
    derived = sparse_figures(sparse)
    has = between.seconds > 0
    return EngineRates(
        engine_id=engine_id,
        name=now[0]["engine_name"],
        model=now[0]["model_name"],
        num_sessions=len(now),
        num_leases=max((s["lease_count"] for s in now), default=0),
        num_transfers=sum(s["transfer_count"] for s in now),
        prompt_tokens_per_s=between.per_s(grown["prompt_token_count"], 0),
        hit_ratio=_hit_ratio(grown),
        recent_hit_ratio=_hit_ratio(recent),
        loaded_bytes_per_s=between.per_s(grew("loaded_byte_count"), 0) if has else 0.0,
        stored_bytes_per_s=between.per_s(grew("stored_byte_count"), 0) if has else 0.0,
        misses=dict(sorted(recent["misses"].items(), key=lambda one: -one[1])),
        saved_s=recent["saved_s"],
        waited_s=recent["waited_s"],
        selects_per_s=between.per_s(sparse["selects"], 0),
        hot_set_hit_ratio=derived["hit_ratio"],
        swap_bytes_per_s=between.per_s(sparse["swap_bytes"], 0),
        weights=Weights(
            grown["prompt_token_count"], recent["prompt_token_count"], sparse["selects"]
        ),
    )


def _sparse_growth(between: _Between, engine: str) -> dict[str, float]:
    """Over the engine's layers."""

    def sums(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        own = [row for row in rows if row["engine_id"] == engine]
        return {name: sum(row[name] for row in own) for name in SPARSE_COUNTERS}

    now = sums(between.after.layers)
    then = sums(between.before.layers) if between.before else now
    # Counters of an engine that has connected again begin at 0.
    return {name: max(0.0, now[name] - then[name]) for name in SPARSE_COUNTERS}


def _warnings(between: _Between, grown: Mapping[str, Any]) -> Iterable[str]:
    """What needs attention."""
    info, counters = between.after.info, between.after.info["counters"]
    if info["state"] != "ready":
        yield f"the server is not serving: {state_line(info)}"
    lag = counters["loop_lag_p99_seconds"]
    if lag > LATE_S:
        held = f", in {info['loop']['held_by']}" if info["loop"]["held_by"] else ""
        yield f"the event loop is {lag * 1e3:.0f} ms late{held}"
    for tier in between.after.tiers:
        does = _activity(tier)
        if does and (does["problem"] or not does["is_up"]):
            yield f"{tier['name']}: {does['problem'] or 'down'}"
    for device in info["devices"]["devices"]:
        if device["problem"]:
            yield device["problem"]
    if grown["failed_load_count"] > 0:
        failed = counted(grown["failed_load_count"], "load")
        yield f"{failed} failed; requests computed their tokens instead"
    for name, text in TROUBLES.items():
        count = between.counter(name)
        if count:
            yield f"{count:.0f} {text}"
