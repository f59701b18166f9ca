"""Tests the sentences at the head of `hotkv status`."""

import copy
import itertools
import json
from typing import Any

import pytest

from demo.processes import Server
from hotkv_client.command.tables import show_status
from hotkv_server.ledger.book.accounts import REASONS
from hotkv_server.monitoring.verdicts import (
    MIN_REQUESTS,
    MISSES,
    checks,
    judged_window,
    verdicts,
)

TOTAL = {
    "request_count": 40,
    "prompt_token_count": 1000,
    "device_hit_token_count": 100,
    "hits": {"host": 300, "disk": 100},
    "misses": {"evicted": 200, "never_stored": 299, "partial_block": 1},
    "saved_s": 70.0,
    "waited_s": 10.0,
    "failed_load_count": 0,
}
OUTLOOK = {
    "prompt_token_count": 1000,
    "gain_ratio": 0.001,
    "ceiling_ratio": 0.9,
    "step_byte_count": 2 << 30,
}
FIGURES: dict[str, Any] = {
    "state": "ready",
    "problems": [],
    "limits": [],
    "progress": "",
    "session_count": 2,
    "loop": {"lag_p99_s": 0.001},
    "tiers": [{"name": "host"}, {"name": "valkey", "activity": {"is_up": True}}],
    "savings": {
        "hour": {"total": TOTAL, "outlook": OUTLOOK},
        "all": {"total": {**TOTAL}, "outlook": {**OUTLOOK}},
    },
}


def test_each_reason_of_a_miss_has_a_sentence() -> None:
    assert set(MISSES) == {reason.name.lower() for reason in REASONS}


def changed(**changes: Any) -> dict[str, Any]:
    """FIGURES with changes, by path such as `loop__lag_p99_s`."""
    figures = copy.deepcopy(FIGURES)
    for path, value in changes.items():
        *way, last = path.split("__")
        place = figures
        for name in way:
            place = place[int(name)] if name.isdigit() else place[name]
        place[int(last) if last.isdigit() else last] = value
    return figures


def said(**changes: Any) -> list[str]:
    """The sentences for FIGURES with changes."""
    return [one["word"] + one["text"] for one in verdicts(changed(**changes))]


def said_of_hour(**changes: Any) -> list[str]:
    """As `said`, with changes to the last hour's savings."""
    return said(**{f"savings__hour__{path}": value for path, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Yes, and nothing stands out."),
        ({"session_count": 0}, "Mostly: no engine is connected."),
        ({"loop__lag_p99_s": 0.25}, "Yes, and nothing stands out."),
        ({"loop__lag_p99_s": 0.3}, "Mostly: the event loop is late by 300 ms."),
        ({"state": "draining"}, "No: the server is draining."),
        ({"progress": "bringing the arena in"}, "Mostly: bringing the arena in."),
        ({"state": "unhealthy", "problems": ["a hung disk"]}, "No: a hung disk."),
        ({"limits": ["device 3 is lost: 700"]}, "Mostly: device 3 is lost: 700."),
        ({"tiers__1__activity__is_up": False}, "Mostly: down: valkey."),
        (
            {"savings__hour__total__failed_load_count": 1, "session_count": 0},
            "Mostly: no engine is connected; 1 load failed in the last hour.",
        ),
    ],
)
def test_is_it_working(changes: dict[str, Any], sentence: str) -> None:
    assert said(**changes)[0] == sentence


HAD = "hotkv had 40.0% of the prompts' tokens in the last hour"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, f"Yes: {HAD}, which saved 60.0 s of prefill, net of waiting."),
        (
            {"total__saved_s": 1210.0},
            f"Yes: {HAD}, which saved 20 min of prefill, net of waiting.",
        ),
        (
            {"total__saved_s": 7210.0},
            f"Yes: {HAD}, which saved 2.0 h of prefill, net of waiting.",
        ),
        (
            {"total__saved_s": 0.0},
            f"Not known yet: {HAD}; no engine has measured the time that this saves.",
        ),
        (
            {"total__saved_s": 4.0},
            "Not now: requests waited 10.0 s in the last hour for hits of hotkv that saved 4.0 s "
            "of prefill.",
        ),
        (
            {"total__hits": {"host": 0, "disk": 0}},
            "Not yet: in the last hour hotkv had none of the prompts' tokens and the engines' own "
            "caches 10.0%.",
        ),
        (
            {"total__request_count": 1},
            "Not known yet: 1 request in the last hour, and 20 tell something. So far hotkv had "
            "40.0% of the prompts' tokens, the engines' own caches 10.0%.",
        ),
        ({"total__prompt_token_count": 0}, "Not known yet: no request in the last hour."),
    ],
)
def test_does_it_pay(changes: dict[str, Any], sentence: str) -> None:
    assert said_of_hour(**changes)[1] == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "Never stored: 29.9% of the prompts' tokens in the last hour. "
            f"{MISSES['never_stored']}",
        ),
        (
            {"total__misses": {"evicted": 200}},
            f"Evicted: 20.0% of the prompts' tokens in the last hour. {MISSES['evicted']} 2.0 GiB "
            "more would have brought only 0.1 points.",
        ),
        (
            {"outlook__gain_ratio": 0.0123},
            "Memory: 2.0 GiB more would have brought 1.2 points in the last hour.",
        ),
        (
            {"outlook__ceiling_ratio": 0.52},
            "The prompts: in the last hour an endless cache would have hit 52.0%; hotkv had 40.0% "
            "of the prompts' tokens, the engines' own caches 10.0%.",
        ),
        ({"total__misses": {"evicted": 0}}, "Nothing stands out."),
        (
            {"total__request_count": 19},
            "Never stored: 29.9% of the prompts' tokens since the ledger began. "
            f"{MISSES['never_stored']}",
        ),
    ],
)
def test_what_limits_it(changes: dict[str, Any], sentence: str) -> None:
    assert said_of_hour(**changes)[2] == sentence


# Verdict x state x figures


STATES: dict[str, dict[str, Any]] = {
    "ready": {},
    "filling": {"progress": "bringing the arena in: 1 of 2 MiB (50%)"},
    "late": {"loop__lag_p99_s": 2.0},
    "tier down": {"tiers__1__activity__is_up": False},
    "no engine": {"session_count": 0},
    "draining": {"state": "draining"},
    "unhealthy": {"state": "unhealthy", "problems": ["a hung disk"]},
}
PROBED = {"draining", "unhealthy"}
"""States in which /readyz fails."""


def with_traffic(requests: int, own: int, device: int, saved_s: float, waited_s: float) -> Any:
    misses = {"never_stored": 1000 - own - device}
    return {
        **TOTAL, "request_count": requests, "prompt_token_count": 1000 if requests else 0,
        "hits": {"host": own, "disk": 0}, "device_hit_token_count": device,
        "misses": misses if requests else {}, "saved_s": saved_s, "waited_s": waited_s,
    }  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("requests", [0, 2, MIN_REQUESTS - 1, MIN_REQUESTS, 5000])
def test_no_verdict_contradicts_a_figure(state: str, requests: int) -> None:
    for own, device, saved_s, waited_s, gain, ceiling in itertools.product(
        (0, 1, 300), (0, 452), (0.0, 4.0), (0.0, 9.0), (0.0, 0.02), (0.1, 0.9)
    ):
        total = with_traffic(requests, own, device, saved_s, waited_s)
        outlook = {**OUTLOOK, "gain_ratio": gain, "ceiling_ratio": ceiling}
        savings = {"total": total, "outlook": outlook}
        figures = changed(**STATES[state], savings={"hour": savings, "all": savings})
        works, pays, limits = verdicts(figures)
        is_enough = requests >= MIN_REQUESTS
        assert (works["word"] == "No") == (state in PROBED)
        assert (works["word"] == "Yes") == (state == "ready")
        assert "No" not in (pays["word"], limits["word"])
        assert (pays["word"] == "Yes") == (is_enough and own > 0 and saved_s > waited_s)
        assert (limits["word"] == "Not known yet") == (not is_enough)
        assert is_enough or pays["word"] == "Not known yet"
        assert ("none of the prompts" in pays["text"]) == (requests > 0 and not own)
        assert not requests or "hotkv" in pays["text"], "it says whose hits it means"
        if "engines' own" in pays["text"]:
            assert f"{device / 1000:.1%}" in pays["text"]
        if is_enough:
            rate = (own + device) / 1000
            expected = "Memory" if gain else "The prompts"
            assert limits["word"] == (expected if gain or ceiling - rate < 0.03 else "Never stored")
        assert judged_window(figures) == ("hour" if is_enough else None)


def test_the_limit_is_judged_from_the_shown_window() -> None:
    few = with_traffic(3, 0, 0, 0.0, 0.0)
    figures = changed(savings__hour__total=few)
    assert (
        judged_window(figures) == "all" and "since the ledger began" in verdicts(figures)[2]["text"]
    )
    figures = changed(savings__hour__outlook__prompt_token_count=0)
    assert judged_window(figures) == "all", "the forecast has nothing of the hour yet"


def test_probes_and_verdict_agree(server: Server) -> None:
    word = json.loads(server.cli("status", "--json"))["verdicts"][0]["word"]
    assert server.cli("ping") == "serving\n" and word != "No"


def test_without_a_ledger_only_the_first_is_known() -> None:
    figures = {name: value for name, value in FIGURES.items() if name != "savings"}
    assert [one["word"] for one in verdicts(figures)] == ["Yes", "Not known yet", "Not known yet"]
    assert {one["level"] for one in checks(figures)} == {"good"}


def test_the_command_opens_with_them(server: Server) -> None:
    answer = json.loads(server.cli("status", "--json"))
    lines = show_status(answer).splitlines()
    for line, one in zip(lines, answer["verdicts"], strict=False):
        assert line == f"{one['question']:<16} {one['word']}{one['text']}"
    assert lines[0].startswith("Is it working?") and lines[3] == ""
    assert server.cli("status").startswith("Is it working?")
