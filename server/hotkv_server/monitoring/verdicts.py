"""Judges a node in three sentences, for the status page and `hotkv status`: is it working, does
it pay, and what limits it.

Always true: a sentence is computed from those figures of `/api/v1/status` that stand beside it.
"No" means that `/readyz` says so too. Fewer than MIN_REQUESTS are not judged by. A sentence about
hits says whose they are.
"""

from typing import Any

from hotkv_proto.command_line import counted
from hotkv_server.node.capability import Figures

LATE_S = 0.25
"""99th percentile of the event loop's delays above which the level is "look": an engine's lookup
waits so long (`hotkv.lookup_timeout_s`)."""
MIN_REQUESTS = 20
WORTH_POINTS = 0.01
"""Memory is the limit if more of it would raise the hit rate by so much."""
NEAR_CEILING = 0.03
"""The prompts are the limit if an endless cache would hit at most so much more."""
WINDOWS = {"hour": "in the last hour", "all": "since the ledger began"}
MISSES = {
    "never_stored": "New text, which no cache has, or evicted too long ago to know.",
    "evicted": "Made room for others: memory or a tier may help, as far as is in reach.",
    "no_room": "Pinned, reserved or hotter blocks left its store no room.",
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
OF_MEMORY = ("evicted", "no_room")
GOOD, LOOK, BAD = "good", "look", "bad"


def checks(figures: Figures) -> list[Figures]:
    """`name` and `level` of six checks, and a `text` about the problem, if any."""
    lag_s, down = figures["loop"]["lag_p99_s"], _down(figures)
    failed = _savings(figures, "hour").get("total", {}).get("failed_load_count", 0)
    state, progress = figures["state"], figures["progress"]
    return [
        _check("server", LOOK if state == "ready" else BAD, _state(figures))
        if state != "ready" or progress
        else _check("server", GOOD),
        _check("sessions", GOOD if figures["session_count"] else LOOK, "no engine is connected"),
        _check("loop", LOOK if lag_s > LATE_S else GOOD, f"the event loop is late by {_ms(lag_s)}"),
        _check("devices", LOOK if figures["limits"] else GOOD, "; ".join(figures["limits"])),
        _check("tiers", LOOK if down else GOOD, f"down: {', '.join(down)}"),
        _check(
            "failed_loads",
            LOOK if failed else GOOD,
            f"{counted(failed, 'load')} failed in the last hour",
        ),
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
    problems = "; ".join(figures["problems"])
    return problems or figures["progress"] or f"the server is {figures['state']}"


def _savings(figures: Figures, window: str) -> Figures:
    found: Figures = figures.get("savings", {}).get(window, {})
    return found


def _works(figures: Figures) -> tuple[str, str]:
    found = checks(figures)
    for level, word in ((BAD, "No"), (LOOK, "Mostly")):
        texts = [one["text"] for one in found if one["level"] == level]
        if texts:
            return word, f": {'; '.join(texts)}."
    return "Yes", ", and nothing stands out."


def _pays(figures: Figures) -> tuple[str, str]:
    hour = _savings(figures, "hour").get("total", {})
    if _num_requests(hour) < MIN_REQUESTS:
        return _too_few(hour, "in the last hour")
    own = _own_hits(hour) / hour["prompt_token_count"]
    saved, waited = _seconds(hour["saved_s"]), _seconds(hour["waited_s"])
    if own <= 0:
        return "Not yet", f": in the last hour {_whose_hits(hour)}."
    if hour["saved_s"] > hour["waited_s"]:
        net = _seconds(hour["saved_s"] - hour["waited_s"])
        return "Yes", (
            f": hotkv had {own:.1%} of the prompts' tokens in the last hour, which saved {net} of "
            "prefill, net of waiting."
        )
    if hour["saved_s"] > 0:
        return "Not now", (
            f": requests waited {waited} in the last hour for hits of hotkv that saved {saved} of "
            "prefill."
        )
    return "Not known yet", (
        f": hotkv had {own:.1%} of the prompts' tokens in the last hour; no engine has measured "
        "the time that this saves."
    )


def judged_window(figures: Figures) -> str | None:
    """`hour` or `all`: from which savings the limit is judged. None if neither has enough."""
    for window in WINDOWS:
        found = _savings(figures, window)
        is_enough = _num_requests(found.get("total", {})) >= MIN_REQUESTS
        if is_enough and (window == "all" or found["outlook"]["prompt_token_count"]):
            return window
    return None


def _limits(figures: Figures) -> tuple[str, str]:
    window = judged_window(figures)
    if window is None:
        return _too_few(_savings(figures, "all").get("total", {}), WINDOWS["all"])
    judged, when = _savings(figures, window), WINDOWS[window]
    total, outlook = judged["total"], judged["outlook"]
    hits = _own_hits(total) + total["device_hit_token_count"]
    rate = hits / total["prompt_token_count"]
    ceiling = max(rate, outlook["ceiling_ratio"])
    more = f"{outlook['step_byte_count'] / 2**30:.1f} GiB more"
    points = f"{100 * outlook['gain_ratio']:.1f} points"
    if outlook["gain_ratio"] >= WORTH_POINTS:
        return "Memory", f": {more} would have brought {points} {when}."
    if ceiling - rate < NEAR_CEILING:
        return "The prompts", (
            f": {when} an endless cache would have hit {ceiling:.1%}; {_whose_hits(total)}."
        )
    missed = {name: count for name, count in total["misses"].items() if count > 0}
    if not missed:
        return "Nothing", " stands out."
    worst = max(missed, key=lambda why: missed[why])
    share = missed[worst] / total["prompt_token_count"]
    but = f" {more} would have brought only {points}." if worst in OF_MEMORY else ""
    return worst.replace("_", " ").capitalize(), (
        f": {share:.1%} of the prompts' tokens {when}. {MISSES.get(worst, '')}{but}"
    )


def _num_requests(total: Figures) -> int:
    return int(total.get("request_count", 0)) if total.get("prompt_token_count") else 0


def _too_few(total: Figures, when: str) -> tuple[str, str]:
    num_requests = _num_requests(total)
    if not num_requests:
        return "Not known yet", f": no request {when}."
    return "Not known yet", (
        f": {counted(num_requests, 'request')} {when}, and {MIN_REQUESTS} tell something. So far "
        f"{_whose_hits(total)}."
    )


def _whose_hits(total: Figures) -> str:
    prompt, own = total["prompt_token_count"], max(0, _own_hits(total))
    device = total["device_hit_token_count"]
    if not own:
        had = f" and the engines' own caches {device / prompt:.1%}" if device else ""
        return f"hotkv had none of the prompts' tokens{had}"
    return (
        f"hotkv had {own / prompt:.1%} of the prompts' tokens, the engines' own caches "
        f"{device / prompt:.1%}"
    )


def _own_hits(total: dict[str, Any]) -> int:
    return sum(map(int, total["hits"].values()))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
