"""vLLM's HTTP server by README's commands, killed and started again."""

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.command import cli
from hotkv_vllm.counter_help import every_counter, exported
from tests.support.waiting import wait_for
from tests.vllm import next_vllm
from tests.vllm.checkpoint import write_weights
from tests.vllm.http_server import HttpServer, readme_commands
from tests.vllm.processes import Daemon
from tests.vllm.runs import prompts, usable
from tests.vllm.tiny import BLOCK_TOKENS, write_model
from tests.vllm.tokenizer import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENT = {"startup_wait_s": 60.0, "lookup_timeout_s": 30.0, "load": "always"}
"""A tiny model computes as fast as a server loads."""
PROMPT, OTHER = prompts(21, (700, 333))
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
ASK = GREEDY | {"logprobs": 0, "return_token_ids": True}
CHAT = {
    "messages": [
        {"role": "system", "content": "You are brief. " * 20},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    **GREEDY,
}


@pytest.fixture
def serve(daemon: Daemon, tmp_path: Path) -> Iterator[Any]:
    """The first server gets JSON and HOTKV_TARGET, later ones dotted arguments."""
    model = write_weights(write_tokenizer(write_model(tmp_path / "model")))
    first, next_ones = readme_commands(model)
    place = first.index("--kv-transfer-config") + 1
    first[place] = json.dumps(
        json.loads(first[place]) | {"kv_connector_extra_config": {"hotkv": PATIENT}}
    )
    for name, value in ({"target": daemon.target} | PATIENT).items():
        prefix = "--kv-transfer-config.kv_connector_extra_config.hotkv"
        next_ones += [f"{prefix}.{name}", str(value)]
    made: list[HttpServer] = []

    def start(is_forked: bool = True, vllm: Path | None = None, **more: str) -> HttpServer:
        log = tmp_path / f"{len(made)}.log"
        command = next_ones if made else first
        environment = {"HOTKV_TARGET": "" if made else daemon.target} | more
        made.append(
            HttpServer(command, log, is_forked=is_forked, environment=environment, vllm=vllm)
        )
        return made[-1].ready()

    yield start
    for one in made:
        one.stop()
        print(one.log()[-4000:])


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def counted(server: HttpServer, name: str, value: int) -> dict[str, float]:
    """The counter may reach `value` after the answer."""
    wait_for(lambda: server.metrics()[name] >= value, name)
    found = server.metrics()
    assert found[name] == value
    return found


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins events into the form of a plain answer."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    probabilities = [value for one in choices for value in one["logprobs"]["token_logprobs"]]
    whole = {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"] or ()],
        "logprobs": {"token_logprobs": probabilities},
    }
    return {"choices": [whole], "usage": events[-1]["usage"]}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine, theirs = one["choices"][0], other["choices"][0]
    assert mine["text"] == theirs["text"] and mine["token_ids"] == theirs["token_ids"]
    expected = pytest.approx(theirs["logprobs"]["token_logprobs"], abs=1e-4)
    assert mine["logprobs"]["token_logprobs"] == expected


def explained(server: HttpServer, daemon: Daemon) -> int:
    """Blocks that would hit, by `hotkv explain`, for which vLLM tokenizes."""
    path, printed = server.log_path.with_name("chat.json"), io.StringIO()
    path.write_text(json.dumps(CHAT))
    engine = f"http://127.0.0.1:{server.port}"
    with contextlib.redirect_stdout(printed):
        asked = ["explain", "--chat", str(path), "--engine", engine, "--json"]
        assert cli.main([*asked, "--target", daemon.target]) == 0
    (space,) = json.loads(printed.getvalue())
    assert space["model_name"] == "tiny"
    return int(space["hit_token_count"]) // BLOCK_TOKENS


def proved(
    server: HttpServer, daemon: Daemon, prompt: list[int], *words: str
) -> tuple[int, dict[str, Any]]:
    """Exit status and answer of `hotkv prove` with a prompt that this engine loads for the first
    time."""
    path, printed = server.log_path.with_name("body.json"), io.StringIO()
    path.write_text(json.dumps({"model": "tiny", "prompt": prompt, **GREEDY, "stream": True}))
    with contextlib.redirect_stdout(printed):
        engine = ("--engine", f"http://127.0.0.1:{server.port}", "--body", str(path))
        status = cli.main(["prove", *words, *engine, "--json", "--target", daemon.target])
    told: dict[str, Any] = json.loads(printed.getvalue())
    return status, told


@pytest.mark.parametrize(
    ("is_forked", "vllm"),
    [
        pytest.param(True, None, id="forked"),
        pytest.param(False, None, id="as users do", marks=pytest.mark.campaign),
        pytest.param(True, next_vllm.FOLDER, id="newest vLLM", marks=next_vllm.MARKS),
    ],
)
def test_a_killed_server_finds_again_what_it_stored(
    serve: Any, daemon: Daemon, is_forked: bool, vllm: Path | None
) -> None:
    daemon.start()
    first = serve(is_forked, vllm)
    # Every counter is exported from the start, as 0.
    before = first.metrics()
    names = {name: f"vllm:hotkv_{exported(name)}_total" for name in every_counter()}
    assert {before.get(name) for name in names.values()} == {0.0}
    cold = first.post(COMPLETIONS, prompt=PROMPT, **ASK)
    streamed = joined(first.stream(COMPLETIONS, prompt=OTHER, **ASK))
    chat = first.post(CHATS, **CHAT)
    assert cached(cold) == cached(streamed) == cached(chat) == 0
    found = counted(first, "vllm:hotkv_miss_requests_total", 3)
    assert found["vllm:hotkv_hit_requests_total"] == 0
    queries = "vllm:external_prefix_cache_queries_total"
    assert found["vllm:external_prefix_cache_hits_total"] == 0 < found[queries]
    lengths = (len(PROMPT), len(OTHER), chat["usage"]["prompt_tokens"])
    # An answer's last token has no KV.
    num_blocks = sum((length + GREEDY["max_tokens"] - 1) // BLOCK_TOKENS for length in lengths)
    wait_for(lambda: len(daemon.admin("blocks", page_size=1000)["blocks"]) >= num_blocks)
    assert {row["model_name"] for row in daemon.admin("sessions")} == {"tiny"}
    assert explained(first, daemon) == chat["usage"]["prompt_tokens"] // BLOCK_TOKENS
    first.kill()

    server = serve(vllm=vllm)
    before = server.metrics()
    warm = server.post(COMPLETIONS, prompt=PROMPT, **ASK)
    assert cached(warm) == usable(PROMPT) and warm["usage"]["prompt_tokens"] == len(PROMPT)
    assert_same(warm, cold)
    after = counted(server, "vllm:hotkv_loads_total", 1)
    growth = {name: after[name] - before.get(name, 0.0) for name in after}
    hits = {
        growth["vllm:hotkv_hit_tokens_total"],
        growth["vllm:external_prefix_cache_hits_total"],
        growth["vllm:prompt_tokens_cached_by_source_total host"],
        growth["vllm:prompt_tokens_cached_total"],
        growth["vllm:prompt_tokens_by_source_total external_kv_transfer"],
    }
    assert hits == {usable(PROMPT)} and growth[queries] == len(PROMPT)
    assert growth["vllm:hotkv_loads_total"] == 1 and growth["vllm:hotkv_failed_loads_total"] == 0
    _, told = proved(server, daemon, OTHER, warm["id"])
    (block, *_), proof = told["request"]["blocks"], told["proof"]
    assert (block["origin"], block["tier"]) == ("stored", "host") and block["engine_name"]
    assert (proof["verdict"], proof["token_count"]) == ("equal", GREEDY["max_tokens"])
    assert proof["largest_difference"] < 1e-4
    sent = proof["again"]
    assert sent["prompt_token_count"] == len(OTHER) and not sent["device_hit_token_count"]
    assert sent["hit_token_count"] == usable(OTHER) and sent["outcome"] == "loaded"
    again = joined(server.stream(COMPLETIONS, prompt=OTHER, **ASK))
    whole = server.post(COMPLETIONS, prompt=OTHER, **ASK)
    for one in (again, whole):
        assert cached(one) == usable(OTHER)
        assert_same(one, streamed)
    events = server.stream(CHATS, **CHAT)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    said = "".join(delta.get("content") or "" for delta in deltas)
    assert said == chat["choices"][0]["message"]["content"]
    assert cached(events[-1]) == (lengths[2] - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def tried(daemon: Daemon, *words: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = cli.main(["try", "--tokens", "400", *words, "--target", daemon.target])
    return status, printed.getvalue()


def test_an_operator_tries_an_engine(serve: Any, daemon: Daemon) -> None:
    daemon.start()
    one = serve(VLLM_SERVER_DEV_MODE="1")
    first = f"http://127.0.0.1:{one.port}"
    status, said = tried(daemon, "--engine", first)
    assert status == 0 and "Yes: " in said and "all tokens are equal" in said, said
    status, said = tried(daemon, "--engine", first, "--json")
    made, device, ours = json.loads(said)["steps"]
    assert status == 0 and made["hit_token_count"] == 0
    assert device["device_hit_token_count"] == device["hit_token_count"] > 100
    assert ours["device_hit_token_count"] == 0 < ours["hit_token_count"]
    two = serve()
    second = f"http://127.0.0.1:{two.port}"
    status, said = tried(daemon, "--engine", second, "--second", first)
    assert status == 0 and "Yes: " in said, said
    status, said = tried(daemon, "--engine", second)
    assert status == 1 and "VLLM_SERVER_DEV_MODE=1" in said and "--second" in said


def test_wrong_bytes_are_proved(serve: Any, daemon: Daemon) -> None:
    """Nobody compares them with their checksums meanwhile."""
    daemon.flags = ["--integrity.scrub-bytes-per-s", "0"]
    daemon.start()
    first = serve()
    first.post(COMPLETIONS, prompt=PROMPT, **ASK)
    num_blocks = (len(PROMPT) + GREEDY["max_tokens"] - 1) // BLOCK_TOKENS
    wait_for(lambda: len(daemon.admin("blocks", page_size=1000)["blocks"]) >= num_blocks)
    first.kill()
    daemon.overwrite_arena()
    status, told = proved(serve(), daemon, PROMPT, "--noise", "0.001")
    assert (status, told["proof"]["verdict"]) == (1, "different")
    assert told["proof"]["again"]["hit_token_count"] == usable(PROMPT)
