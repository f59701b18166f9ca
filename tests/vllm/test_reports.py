"""Reports to the server: hits in the engine's own cache, retention, token ids."""

from typing import Any

import pytest

from hotkv_client.types import BlockRun
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.messages.fields import MAX_IDENTIFIER
from tests.vllm.harness import prompt
from tests.vllm.lora_manager import lora, with_adapters
from tests.vllm.oracle import reports_to
from tests.vllm.specs import HYBRIDS, hybrid_model
from tests.vllm.tiny import BLOCK_TOKENS

PROMPT = prompt(1, 200)


def stored(server: Any) -> list[BlockRun]:
    return [run for kind, runs in server.calls if kind == "store" for run in runs]


def test_each_request_is_reported_once_with_its_hits(engine: Any, server: Any) -> None:
    server.up = False
    one = engine(max_tokens_per_step=1024)
    # Without a server reports are dropped.
    one.generate("unheard", prompt(9, 50), 2)
    server.come_back()
    one.generate("cold", PROMPT, 40)
    one.generate("local", PROMPT, 40)
    one.generate("longer", PROMPT + prompt(7, 50), 2)
    engine().generate("elsewhere", PROMPT, 2)
    hits = [(r.prompt_tokens, r.device_hit_tokens, r.hit_tokens) for r in reports_to(server)]
    assert hits == [(200, 0, 0), (200, 192, 192), (250, 192, 192), (200, 0, 192)]
    request = one.requests["longer"]
    assert list(reports_to(server)[2].hashes) == list(request.block_hashes[: 250 // BLOCK_TOKENS])
    assert all(r.age_s >= 0 and r.retention == NO_RETENTION for r in reports_to(server))
    assert one.counters["reported_requests"] == 3
    # One message a step.
    server.calls.clear()
    for index in range(4):
        one.add(f"r{index}", prompt(index, 100))
    one.run()
    assert server.count("report_requests") == 1 and len(reports_to(server)) == 4


def test_reports_have_an_id_that_the_server_accepts(engine: Any, server: Any) -> None:
    """Clients choose a part of it."""
    one = engine()
    long = "x" * (MAX_IDENTIFIER + 1)
    for name in ("chatcmpl-1-0-ab", "a\nb\x1b[1m", long):
        one.generate(name, PROMPT, 2)
    one.generate("short\n", prompt(3, 5), 2)
    told = ["chatcmpl-1-0-ab", "ab[1m", long[:-1], "short"]
    assert [report.request_id for report in reports_to(server)] == told


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
def test_hints_go_with_report_and_every_store(engine: Any, server: Any, pipelined: bool) -> None:
    """Also blocks that fill during decode."""
    one = engine(pipelined=pipelined, max_tokens_per_step=1024)
    hints = {"hotkv.priority": 3, "hotkv.ttl_s": 60, "hotkv.pin": True}
    transfer = {"do_remote_decode": True, "remote_host": "x", **hints}
    one.add("a", prompt(1, 60), 37, transfer=transfer)
    one.add("b", prompt(2, 60), 37)
    one.run()
    one.generate("end", prompt(3, 10), 2)
    retention = Retention(3, 60.0, True)
    assert (reports_to(server)[0].prompt_tokens, reports_to(server)[0].retention) == (60, retention)
    stores: dict[Retention, set[bytes]] = {}
    for kind, runs in server.retentions:
        stores.setdefault(kind, set()).update(one for run in runs for one in run.hashes)
    assert stores == {
        kind: set(one.requests[name].block_hashes[:3])
        for kind, name in ((retention, "a"), (NO_RETENTION, "b"))
    }
    assert {block_hash for _, _, block_hash in server.blocks} == set().union(*stores.values())


@pytest.mark.parametrize("model", HYBRIDS)
def test_stores_carry_exactly_the_tokens_of_their_blocks(
    engine: Any, server: Any, model: Any
) -> None:
    """Windows skip blocks, and block sizes differ."""
    server.wants_token_ids = True
    one = engine(specs=model(), max_tokens_per_step=96)
    tokens = prompt(1, 420)
    answer, _ = one.generate("a", tokens, 100)
    one.generate("b", prompt(2, 10), 2)
    groups = one.connector._scheduler.cache.finder.groups
    seen = set()
    for run in stored(server):
        size = groups.specs[run.group_index].block_tokens
        hashes = list(groups.hashes(one.requests["a"], run.group_index))
        first = hashes.index(run.hashes[0])
        end = first + len(run.hashes)
        assert hashes[first:end] == list(run.hashes) and run.depth == first
        assert list(run.token_ids) == (tokens + answer)[first * size : end * size]
        seen.add(run.group_index)
    assert seen == set(range(len(groups.specs)))


@pytest.mark.parametrize("wanted", [True, False])
def test_stores_say_hashed_extras_if_tokens_wanted(engine: Any, server: Any, wanted: bool) -> None:
    """vLLM hashes the salt into the first block; routers need all that is hashed."""
    server.wants_token_ids = wanted
    one = engine(specs=hybrid_model())
    one.add("salted", PROMPT, 2, cache_salt="mine")
    one.run()
    assert stored(server)
    for run in stored(server):
        assert bool(len(run.token_ids)) == wanted
        is_salted = wanted and run.depth == 0
        salted = [("mine",), *[None] * (len(run.hashes) - 1)]
        assert list(run.extra_keys) == (salted if is_salted else [])


@pytest.mark.parametrize("length", [1, MAX_IDENTIFIER, MAX_IDENTIFIER + 1])
def test_stores_name_the_adapter_whose_kv_they_have(engine: Any, server: Any, length: int) -> None:
    """Else routers take its blocks for the plain model's. Too long a name: no token ids."""
    server.wants_token_ids = True
    one = engine(specs=hybrid_model())
    with_adapters(one, {"/a": 1})
    name = "a" * length
    one.add("adapted", PROMPT, 2, lora_request=lora(1, name))
    one.run()
    assert stored(server)
    for run in stored(server):
        keys = [(name,)] * len(run.hashes)
        is_named = length <= MAX_IDENTIFIER
        assert run.lora_name == (name if is_named else "")
        assert bool(len(run.token_ids)) == is_named
        assert list(run.extra_keys) == (keys if is_named else [])
