"""Tests the sentences at the head of `hotkv status`."""

import copy
import json
from typing import Any

import pytest

from demo.processes import Server
from hotkv_client.command.tables import show_status
from hotkv_server.ledger.book.accounts import REASONS
from hotkv_server.monitoring.verdicts import MISSES, checks, verdicts

TOTAL = {
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


def said(**changes: Any) -> list[str]:
    """The sentences for FIGURES with changes, by path such as `loop__lag_p99_s`."""
    figures = copy.deepcopy(FIGURES)
    for path, value in changes.items():
        *way, last = path.split("__")
        place = figures
        for name in way:
            place = place[int(name)] if name.isdigit() else place[name]
        place[int(last) if last.isdigit() else last] = value
    return [one["word"] + one["text"] for one in verdicts(figures)]


def said_of_hour(**changes: Any) -> list[str]:
    """As `said`, with changes to the last hour's savings."""
    return said(**{f"savings__hour__{path}": value for path, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Yes, and nothing stands out."),
        ({"session_count": 0}, "Mostly: no engine is connected."),
        ({"loop__lag_p99_s": 0.02}, "Yes, and nothing stands out."),
        ({"loop__lag_p99_s": 0.1}, "Mostly: the event loop is late by 100 ms."),
        ({"loop__lag_p99_s": 0.05}, "Mostly: the event loop is late by 50 ms."),
        ({"loop__lag_p99_s": 0.2, "session_count": 0}, "No: the event loop is late by 200 ms."),
        ({"state": "draining"}, "Mostly: the server is draining."),
        ({"progress": "bringing the arena in"}, "Mostly: bringing the arena in."),
        ({"state": "unhealthy"}, "No: the server is unhealthy."),
        ({"limits": ["device 3 is lost: 700"]}, "Mostly: device 3 is lost: 700."),
        ({"tiers__1__activity__is_up": False}, "No: down: valkey."),
        (
            {"savings__hour__total__failed_load_count": 3, "session_count": 0},
            "Mostly: no engine is connected; 3 loads failed in the last hour.",
        ),
    ],
)
def test_is_it_working(changes: dict[str, Any], sentence: str) -> None:
    assert said(**changes)[0] == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "Yes: 60.0 s of prefill saved in the last hour."),
        ({"total__saved_s": 10.5}, "Yes: 0.5 s of prefill saved in the last hour."),
        ({"total__saved_s": 1210.0}, "Yes: 20 min of prefill saved in the last hour."),
        ({"total__saved_s": 7210.0}, "Yes: 2.0 h of prefill saved in the last hour."),
        (
            {"total__saved_s": 0.0},
            "Not yet: engines hit, but have not measured that it saves time.",
        ),
        (
            {"total__saved_s": 4.0},
            "No: requests waited 10.0 s in the last hour for hits that saved 4.0 s of prefill.",
        ),
        ({"total__hits": {"host": 0, "disk": 0}}, "No: nothing was hit in the last hour."),
        ({"total__prompt_token_count": 0}, "Not known: no prompts in the last hour."),
    ],
)
def test_does_it_pay(changes: dict[str, Any], sentence: str) -> None:
    assert said_of_hour(**changes)[1] == sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, f"Never stored: {MISSES['never_stored']}"),
        ({"outlook__gain_ratio": 0.0123}, "Memory: 2.0 GiB more would bring 1.2 points."),
        (
            {"outlook__ceiling_ratio": 0.52},
            "The prompts: even an endless cache would hit only 52%.",
        ),
        ({"outlook__ceiling_ratio": 0.1}, "The prompts: even an endless cache would hit only 50%."),
        ({"total__misses": {"evicted": 0}}, "Nothing stands out."),
        (
            {"outlook__prompt_token_count": 0, "total__misses": {}},
            f"Never stored: {MISSES['never_stored']}",
        ),
        ({"total__prompt_token_count": 0}, "Not known: no prompts to judge by."),
    ],
)
def test_what_limits_it(changes: dict[str, Any], sentence: str) -> None:
    assert said_of_hour(**changes)[2] == sentence


def test_without_a_ledger_only_the_first_is_known() -> None:
    figures = {name: value for name, value in FIGURES.items() if name != "savings"}
    assert [one["word"] for one in verdicts(figures)] == ["Yes", "Not known", "Not known"]
    assert {one["level"] for one in checks(figures)} == {"good"}


def test_the_command_opens_with_them(server: Server) -> None:
    answer = json.loads(server.cli("status", "--json"))
    lines = show_status(answer).splitlines()
    for line, one in zip(lines, answer["verdicts"], strict=False):
        assert line == f"{one['question']:<16} {one['word']}{one['text']}"
    assert lines[0].startswith("Is it working?") and lines[3] == ""
    assert server.cli("status").startswith("Is it working?")
