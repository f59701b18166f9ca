"""What the connector tells the server beside blocks: hits in the engine's own cache, how long to
keep a request's blocks, token ids."""

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_client.types import BlockRun, RequestReport
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_vllm.hints.requests import HintReader
from hotkv_vllm.stats import HotKVStats
from tests.vllm.harness import prompt
from tests.vllm.specs import HYBRIDS, hybrid_model
from tests.vllm.tiny import BLOCK_TOKENS

PROMPT = prompt(1, 200)


def reports(server: Any) -> list[RequestReport]:
    return [report for kind, batch in server.calls if kind == "report_requests" for report in batch]


def stored(server: Any) -> list[BlockRun]:
    return [run for kind, runs in server.calls if kind == "store" for run in runs]


# ------------------------------------------------------------------------------------------ reports


def test_each_request_is_reported_once_with_its_hits(engine: Any, server: Any) -> None:
    one = engine()
    one.generate("cold", PROMPT, 40)
    one.generate("local", PROMPT, 40)
    one.generate("longer", PROMPT + prompt(7, 50), 2)
    engine().generate("elsewhere", PROMPT, 2)
    hits = [(r.prompt_tokens, r.device_hit_tokens, r.hit_tokens) for r in reports(server)]
    assert hits == [(200, 0, 0), (200, 192, 192), (250, 192, 192), (200, 0, 192)]
    request = one.requests["longer"]
    assert list(reports(server)[2].hashes) == list(request.block_hashes[: 250 // BLOCK_TOKENS])
    assert all(r.age_s >= 0 and r.retention == NO_RETENTION for r in reports(server))
    assert one.counters["reported_requests"] == 3


def test_requests_of_a_step_are_reported_in_one_message(engine: Any, server: Any) -> None:
    one = engine(max_tokens_per_step=1024)
    for index in range(4):
        one.add(f"r{index}", prompt(index, 100))
    one.run()
    assert server.count("report_requests") == 1 and len(reports(server)) == 4


@pytest.mark.parametrize("load", ["auto", "always"])
def test_the_engines_prefill_speed_goes_with_the_reports(
    engine: Any, server: Any, load: str
) -> None:
    one = engine(max_tokens_per_step=1024, extra={"load": load})
    one.generate("first", prompt(1, 500), 2)
    assert server.prefill_tokens_per_s == 0
    one.generate("second", prompt(2, 500), 2)
    assert (server.prefill_tokens_per_s > 0) == (load == "auto")


def test_decode_steps_report_nothing(engine: Any, server: Any) -> None:
    one = engine()
    one.add("a", PROMPT, 30)
    for _ in range(5):
        one.step()
    server.calls.clear()
    one.run()
    assert server.count("report_requests") == 0


def test_a_preempted_request_is_not_reported_again(engine: Any, server: Any) -> None:
    one = engine(blocks=20)
    for index, name in enumerate("abc"):
        one.add(name, prompt(index, 120), 120)
    one.run()
    assert one.preemptions > 0 and len(reports(server)) == 3


def test_a_failed_load_is_not_reported_twice(engine: Any, server: Any) -> None:
    engine().generate("a", PROMPT, 2)
    server.calls.clear()
    server.fail_loads = True
    engine().generate("b", PROMPT, 2)
    assert server.count("load") == 1 and len(reports(server)) == 1


def test_without_a_server_nothing_is_kept_to_be_reported(engine: Any, server: Any) -> None:
    server.up = False
    one = engine()
    one.generate("a", PROMPT, 2)
    server.come_back()
    one.generate("b", prompt(2, 50), 2)
    assert [r.prompt_tokens for r in reports(server)] == [50]


# -------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_hints_go_with_the_report_and_with_every_store(
    engine: Any, server: Any, pipelined: bool
) -> None:
    """Also with blocks that fill while decoding, and with the last one."""
    one = engine(pipelined=pipelined, max_tokens_per_step=1024)
    hints = {"hotkv.priority": 3, "hotkv.ttl_s": 60, "hotkv.pin": True}
    one.add(
        "a", prompt(1, 60), 37, transfer={"do_remote_decode": True, "remote_host": "x", **hints}
    )
    one.add("b", prompt(2, 60), 37)
    one.run()
    one.generate("end", prompt(3, 10), 2)
    assert {r.prompt_tokens: r.retention for r in reports(server)[:1]} == {
        60: Retention(3, 60.0, True)
    }
    stores: dict[Retention, set[bytes]] = {}
    for retention, runs in server.retentions:
        stores.setdefault(retention, set()).update(
            block_hash for run in runs for block_hash in run.hashes
        )
    expected = {
        kind: set(one.requests[name].block_hashes[:3])
        for kind, name in ((Retention(3, 60.0, True), "a"), (NO_RETENTION, "b"))
    }
    assert stores == expected and {block_hash for _, _, block_hash in server.blocks} == expected[
        NO_RETENTION
    ].union(*expected.values())


@pytest.mark.parametrize(
    ("params", "expected", "said"),
    [
        ({"hotkv.priority": 9}, NO_RETENTION, ["hotkv.priority = 9", "-8 to 8"]),
        ({"hotkv.priority": True}, NO_RETENTION, ["hotkv.priority = True", "whole number"]),
        (
            {"hotkv.priority": "high", "hotkv.ttl_s": 5},
            Retention(0, 5.0),
            ["hotkv.priority = 'high'"],
        ),
        ({"hotkv.ttl_s": -1}, NO_RETENTION, ["hotkv.ttl_s = -1", "0 to 86400"]),
        ({"hotkv.ttl_s": float("nan")}, NO_RETENTION, ["hotkv.ttl_s = nan"]),
        ({"hotkv.ttl_s": [1], "hotkv.priority": -2}, Retention(-2), ["hotkv.ttl_s = [1]"]),
        (
            {"hotkv.pin": 1, "hotkv.ttl_s": 5},
            Retention(0, 5.0),
            ["hotkv.pin = 1", "true and false"],
        ),
        ({"hotkv.pin": True}, NO_RETENTION, ["hotkv.pin", "needs hotkv.ttl_s"]),
        (
            {"hotkv.priorty": 2},
            NO_RETENTION,
            ["hotkv.priorty", "there is no such hint", "hotkv.priority"],
        ),
    ],
)
def test_a_wrong_hint_is_left_out_and_the_log_says_why(
    engine: Any,
    server: Any,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
    expected: Retention,
    said: list[str],
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("vllm.hotkv"),
        "warning",
        lambda text, *values: lines.append(text % values),
    )
    one = engine()
    one.add("a", PROMPT, 3, transfer=params)
    one.add("b", prompt(2, 40), 3, transfer=params)
    one.run()
    assert len(one.outputs["a"]) == 3 and [r.retention for r in reports(server)] == [expected] * 2
    assert len(lines) == 1 and all(text in lines[0] for text in said), lines
    assert one.counters["wrong_hints"] == 2


NAMES = st.sampled_from(["hotkv.priority", "hotkv.ttl_s", "hotkv.pin", "hotkv.x", "remote_host"])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(st.one_of(st.none(), st.text(), st.dictionaries(st.one_of(st.integers(), NAMES), VALUES)))
def test_no_hint_breaks_a_request(params: Any) -> None:
    assert isinstance(HintReader(HotKVStats()).read(params, 0.0), Retention)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("model", HYBRIDS)
def test_stores_carry_exactly_the_tokens_of_their_blocks(
    engine: Any, server: Any, model: Any
) -> None:
    """Window groups have holes, groups have blocks of different sizes."""
    server.wants_token_ids = True
    one = engine(specs=model(), max_tokens_per_step=96)
    tokens = prompt(1, 420)
    answer, _ = one.generate("a", tokens, 100)
    one.generate("b", prompt(2, 10), 2)
    specs = one.connector._scheduler.cache.finder.groups.specs
    hashes = [
        list(one.connector._scheduler.cache.finder.groups.hashes(one.requests["a"], index))
        for index in range(len(specs))
    ]
    seen = set()
    for run in stored(server):
        size = specs[run.group_index].block_tokens
        first = hashes[run.group_index].index(run.hashes[0])
        assert (
            hashes[run.group_index][first : first + len(run.hashes)] == list(run.hashes)
            and run.depth == first
        )
        assert (
            list(run.token_ids)
            == (tokens + answer)[first * size : (first + len(run.hashes)) * size]
        )
        seen.add(run.group_index)
    assert seen == set(range(len(specs)))


def test_stores_say_what_else_is_hashed(engine: Any, server: Any) -> None:
    """A salt is hashed into the first block; a router that knew only the tokens would match prompts
    that can't hit."""
    server.wants_token_ids = True
    one = engine(specs=hybrid_model())
    one.add("salted", PROMPT, 2, cache_salt="mine")
    one.run()
    runs = stored(server)
    assert runs and all(
        list(run.extra_keys)
        == ([("mine",), *[None] * (len(run.hashes) - 1)] if run.depth == 0 else [])
        for run in runs
    )


def test_tokens_stay_here_where_nobody_wants_them(engine: Any, server: Any) -> None:
    engine(specs=hybrid_model()).generate("a", PROMPT, 2)
    assert stored(server) and not any(len(run.token_ids) for run in stored(server))
