"""Judges a node in three sentences, for the status page and `hotkv status`: is it working, does
it pay, and what limits it. Computed only from the figures of `/api/v1/status`."""

from typing import Any

from hotkv_server.node.capability import Figures

LATE_S, VERY_LATE_S = 0.02, 0.1
"""99th percentile of the event loop's delays, above which the level is "look", and "bad"."""
WORTH_POINTS = 0.01
"""Memory is the limit if more of it would raise the hit rate by so much."""
NEAR_CEILING = 0.03
"""The prompts are the limit if an endless cache would hit at most so much more."""
MISSES = {
    "never_stored": "New text, or evicted long ago: nothing to gain but by more memory.",
    "evicted": "Made room for others: more memory or a tier helps.",
    "no_room": "Pinned, reserved or hotter blocks left its store no room: more memory helps.",
    "removed": "Dropped by a call, a flush or a reset, or damaged: see the log.",
    "left_below": "On a tier, but computing was sooner, or the tier was down.",
    "in_flight": "Was still being written when the engine asked.",
    "refused": "The server refused a lookup or lease: leases.unadmitted_share.",
    "computed_sooner": "The engine computes it sooner than the server brings it.",
    "no_server": "The engine or a worker had lost its server.",
    "not_asked": "The request or the engine rules loading out.",
    "late": "The server did not answer in time: see the event loop.",
    "failed_load": "The load of a hit failed: see the logs.",
    "partial_block": "Behind the last full block: no cache of blocks can have it.",
    "unknown": "Reported by an engine of an older version.",
}
"""What each miss reason means, for the status page."""
GOOD, LOOK, BAD = "good", "look", "bad"


def checks(figures: Figures) -> list[Figures]:
    """`name` and `level` of six checks, and a `text` about the problem, if any."""
    lag_s, down = figures["loop"]["lag_p99_s"], _down(figures)
    failed = _hour(figures).get("failed_load_count", 0)
    state, progress = figures["state"], figures["progress"]
    return [
        _check("server", LOOK if state in ("ready", "draining") else BAD, _state(figures))
        if state != "ready" or progress
        else _check("server", GOOD),
        _check("sessions", GOOD if figures["session_count"] else LOOK, "no engine is connected"),
        _check(
            "loop",
            BAD if lag_s > VERY_LATE_S else LOOK if lag_s > LATE_S else GOOD,
            f"the event loop is late by {1e3 * lag_s:.0f} ms",
        ),
        _check("devices", LOOK if figures["limits"] else GOOD, "; ".join(figures["limits"])),
        _check("tiers", BAD if down else GOOD, f"down: {', '.join(down)}"),
        _check("failed_loads", LOOK if failed else GOOD, f"{failed} loads failed in the last hour"),
    ]


def verdicts(figures: Figures) -> list[Figures]:
    """`question`, `word` (the short answer) and `text` (the rest of the sentence)."""
    return [
        _verdict("Is it working?", *_works(figures)),
        _verdict("Does it pay?", *_pays(figures)),
        _verdict("What limits it?", *_limits(figures)),
    ]


def _check(name: str, level: str, text: str = "") -> Figures:
    return {"name": name, "level": level, "text": "" if level == GOOD else text}


def _verdict(question: str, word: str, text: str) -> Figures:
    return {"question": question, "word": word, "text": text}


def _down(figures: Figures) -> list[str]:
    return [
        row["name"]
        for row in figures["tiers"]
        if row.get("activity") and not row["activity"]["is_up"]
    ]


def _state(figures: Figures) -> str:
    return figures["progress"] or f"the server is {figures['state']}"


def _savings(figures: Figures, window: str) -> Figures:
    found: Figures = figures.get("savings", {}).get(window, {})
    return found


def _hour(figures: Figures) -> Figures:
    total: Figures = _savings(figures, "hour").get("total", {})
    return total


def _works(figures: Figures) -> tuple[str, str]:
    found = checks(figures)
    for level, word in ((BAD, "No"), (LOOK, "Mostly")):
        texts = [one["text"] for one in found if one["level"] == level]
        if texts:
            return word, f": {'; '.join(texts)}."
    return "Yes", ", and nothing stands out."


def _pays(figures: Figures) -> tuple[str, str]:
    hour = _hour(figures)
    if not hour.get("prompt_token_count"):
        return "Not known", ": no prompts in the last hour."
    net_s = hour["saved_s"] - hour["waited_s"]
    if not _own_hits(hour):
        return "No", ": nothing was hit in the last hour."
    if net_s > 0:
        return "Yes", f": {_seconds(net_s)} of prefill saved in the last hour."
    if hour["saved_s"] > 0:
        waited, saved = _seconds(hour["waited_s"]), _seconds(hour["saved_s"])
        return "No", (
            f": requests waited {waited} in the last hour for hits that saved {saved} of prefill."
        )
    return "Not yet", ": engines hit, but have not measured that it saves time."


def _limits(figures: Figures) -> tuple[str, str]:
    hour, whole = _savings(figures, "hour"), _savings(figures, "all")
    judged = hour if hour and hour["outlook"]["prompt_token_count"] else whole
    total = judged.get("total", {})
    if not total.get("prompt_token_count"):
        return "Not known", ": no prompts to judge by."
    outlook = judged["outlook"]
    hits = _own_hits(total) + total["device_hit_token_count"]
    rate = hits / total["prompt_token_count"]
    ceiling = max(rate, outlook["ceiling_ratio"])
    if outlook["gain_ratio"] >= WORTH_POINTS:
        more = f"{outlook['step_byte_count'] / 2**30:.1f} GiB more"
        return "Memory", f": {more} would bring {100 * outlook['gain_ratio']:.1f} points."
    if ceiling - rate < NEAR_CEILING:
        return "The prompts", f": even an endless cache would hit only {ceiling:.0%}."
    missed = total["misses"]
    if not any(missed.values()):
        return "Nothing", " stands out."
    worst = max(missed, key=lambda why: missed[why])
    return worst.replace("_", " ").capitalize(), f": {MISSES.get(worst, '')}"


def _own_hits(total: dict[str, Any]) -> int:
    return sum(map(int, total["hits"].values()))


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
