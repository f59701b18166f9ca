"""Tests the figures of `bench.gpu.rivals` and `bench.gpu.chat`, and the settings of their
engines."""

import json
from pathlib import Path

import pytest

from bench.gpu.chat import Held, some
from bench.gpu.facts import told
from bench.gpu.random_weights import PLUGIN
from bench.gpu.rivals import CPU, GPU, KINDS, Found, Setup, Turn, arguments_of, figures_of, row
from bench.load.conversations import Shape
from demo.processes import Answer


def answer(first_s: float, tokens: tuple[int, ...], hit_tokens: int = 0) -> Answer:
    """10 ms per token."""
    total_s = first_s + 0.01 * (len(tokens) - 1)
    return Answer(first_s, total_s, hit_tokens, tokens, tuple({} for _ in tokens), "")


def turns(first_s: float, hit_s: float, tokens: tuple[int, ...] = (1, 2, 3, 4)) -> list[Turn]:
    return [Turn(answer(first_s, (1, 2, 3, 4)), answer(hit_s, tokens, 64))]


def test_figures_compare_own_with_its_rivals() -> None:
    found = Found(
        {
            "4k": {
                "none": turns(1.0, 1.0),
                "native": turns(1.0, 0.2),
                "own": turns(1.005, 0.1),
                "pegaflow": turns(1.0, 0.4),
            }
        },
        {"4k": {"pegaflow": turns(1.0, 0.2)}},
    )
    figures = {figure.name: figure for figure in figures_of(found)}
    assert figures["4k: first token, own / none"].measured == pytest.approx(1.005)
    assert figures["4k: first token, own / none"].met and figures["4k: hit, own / native"].met
    assert figures["4k: hit, own / native"].measured == pytest.approx(0.5)
    assert figures["4k: hit, own / pegaflow"].measured == pytest.approx(0.5)
    assert figures["4k: time a token, own / none"].measured == pytest.approx(1.0)
    assert figures["4k: own, ms a token"].measured == pytest.approx(10.0)


def test_rows_show_the_first_token_that_differs() -> None:
    shown = row("4k", "own", turns(1.0, 0.1, (1, 2, 9, 4)), turns(1.0, 1.0))
    assert shown == ("4k", "own", "1.000", "0.1000", 64, "10.00", "0.50", "1.00")
    assert row("4k", "none", turns(1.0, 1.0), turns(1.0, 1.0))[3] == ""


@pytest.mark.parametrize("place", [CPU, GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_have_the_same_settings_but_for_the_cache(
    tmp_path: Path, place: object, kind: str
) -> None:
    setup = Setup(place, 1000, tmp_path, "unix:/s", {})  # type: ignore[arg-type]
    arguments, environment = arguments_of(setup, KINDS[kind](setup))
    usual, _ = arguments_of(setup, KINDS["none"](setup))
    changed = {name for name, value in arguments.items() if usual.get(name) != value}
    allowed = {
        "resident": {"max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"},
        "locks": {"block_size"},
        "sleeping": {"enable_sleep_mode"},
    }.get(kind, set())
    assert changed <= {"kv_transfer_config", "attention_backend"} | allowed
    assert json.loads(json.dumps(arguments)) == arguments
    plugins = environment["VLLM_PLUGINS"].split(",")
    assert plugins[0] == PLUGIN and len(plugins) <= 2
    assert (tmp_path / "plugins/hotkv_bench-1.dist-info/entry_points.txt").exists()


def test_conversations_are_counted() -> None:
    assert len(some(1, Shape())) >= 16
    held = Held(2.0, [(0.1, 100, 0, 8), (0.3, 300, 200, 8)], [0.01] * 99 + [0.5])
    assert held.hit_share == 0.5 and held.cells()[0] == "1.00"
    measured = {figure.name: figure.measured for figure in held.figures("own")}
    assert measured["chat: own, time a token p99 ms"] == pytest.approx(500.0)


def test_facts_are_told_in_a_line() -> None:
    method = {"0 load": "batch", "0 store": "memcpy"}
    found = {"commit": "abc", "method": method, "order": ["flags"], "ping_us": 61.4}
    assert told(found) == (
        "commit abc; method 0 load: batch, 0 store: memcpy; order flags; ping 61 us"
    )
