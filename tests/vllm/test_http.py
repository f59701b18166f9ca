"""vLLM's HTTP server with the command of README: what its users get back, and see in its metrics,
before and after a kill -9."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hotkv_vllm.stats import COUNTERS, exported
from tests.vllm.checkpoint import write_weights
from tests.vllm.http_server import HttpServer, readme_command
from tests.vllm.processes import Daemon
from tests.vllm.runs import prompts, usable
from tests.vllm.tiny import write_model
from tests.vllm.tokenizer import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT, OTHER = prompts(21, (700, 333))
ASK = {
    "max_tokens": 12,
    "temperature": 0,
    "logprobs": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
CHAT = [
    {"role": "system", "content": "You are brief. " * 20},
    {"role": "user", "content": "Why is the sky blue?"},
]


class Cold:
    """What the first server answered, and its metrics, before it was killed."""

    def __init__(self, server: HttpServer, daemon: Daemon) -> None:
        self.at_first = server.metrics()
        self.answer = server.post("/v1/completions", prompt=PROMPT, **ASK)
        self.streamed = server.stream("/v1/completions", prompt=OTHER, **ASK)
        self.chat = server.post(
            "/v1/chat/completions", messages=CHAT, max_tokens=12, temperature=0, ignore_eos=True
        )
        self.metrics = server.metrics()
        stored = (
            sum(usable(p) // 32 for p in (PROMPT, OTHER))
            + self.chat["usage"]["prompt_tokens"] // 32
        )
        until_s = time.monotonic() + 60
        while (
            len(daemon.admin("blocks", page_size=1000)["blocks"]) < stored
            and time.monotonic() < until_s
        ):
            time.sleep(0.05)
        self.sessions = len(daemon.admin("sessions"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="forked"),
        pytest.param(False, id="as users do", marks=pytest.mark.long),
    ],
)
def servers(
    shared_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[tuple[Cold, HttpServer]]:
    """What a server that was killed said, and the one that was started after it."""
    folder = tmp_path_factory.mktemp("http")
    shared_daemon.admin("evict", everything=True)
    command = readme_command(write_weights(write_tokenizer(write_model(folder / "model"))))
    target = {"HOTKV_TARGET": shared_daemon.target}
    first = HttpServer(command, folder / "first.log", is_forked=request.param, environment=target)
    try:
        cold = Cold(first.ready(), shared_daemon)
    finally:
        first.kill()
    second = HttpServer(command, folder / "second.log", is_forked=True, environment=target)
    try:
        yield cold, second.ready()
    finally:
        second.stop()


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [float(value) for value in answer["choices"][0]["logprobs"]["token_logprobs"]]


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a streamed completion as it would have come in one piece."""
    choices = [event["choices"][0] for event in events if event["choices"]]
    whole = {
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"] or ()],
        "logprobs": {
            "token_logprobs": [
                value for choice in choices for value in choice["logprobs"]["token_logprobs"]
            ]
        },
    }
    return {"choices": [whole], "usage": events[-1]["usage"]}


def test_a_killed_server_finds_again_what_it_stored(servers: tuple[Cold, HttpServer]) -> None:
    cold, server = servers
    assert cold.sessions == 2 and cached(cold.answer) == 0
    before = server.metrics()
    warm = server.post("/v1/completions", prompt=PROMPT, **ASK)
    assert cached(warm) == usable(PROMPT) and warm["usage"]["prompt_tokens"] == len(PROMPT)
    assert warm["choices"][0]["token_ids"] == cold.answer["choices"][0]["token_ids"]
    assert logprobs(warm) == pytest.approx(logprobs(cold.answer), abs=1e-4)
    after = server.metrics()
    growth = {name: after[name] - before.get(name, 0.0) for name in after}
    assert (
        growth["vllm:hotkv_hit_tokens_total"]
        == growth["vllm:external_prefix_cache_hits_total"]
        == usable(PROMPT)
    )
    assert growth["vllm:external_prefix_cache_queries_total"] == len(PROMPT)
    assert (
        growth["vllm:prompt_tokens_cached_by_source_total host"]
        == growth["vllm:prompt_tokens_cached_total"]
        == usable(PROMPT)
    )
    assert growth["vllm:prompt_tokens_by_source_total external_kv_transfer"] == usable(PROMPT)
    assert growth["vllm:hotkv_loads_total"] == 1 and growth["vllm:hotkv_failed_loads_total"] == 0


def test_streamed_and_whole_answers_are_equal(servers: tuple[Cold, HttpServer]) -> None:
    cold, server = servers
    before, streamed = (
        joined(cold.streamed),
        joined(server.stream("/v1/completions", prompt=OTHER, **ASK)),
    )
    whole = server.post("/v1/completions", prompt=OTHER, **ASK)
    assert (cached(before), cached(streamed), cached(whole)) == (0, usable(OTHER), usable(OTHER))
    for one in (streamed, whole):
        assert one["choices"][0]["text"] == before["choices"][0]["text"]
        assert one["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
        assert logprobs(one) == pytest.approx(logprobs(before), abs=1e-4)


def test_a_chat_goes_on_after_the_kill(servers: tuple[Cold, HttpServer]) -> None:
    cold, server = servers
    events = server.stream(
        "/v1/chat/completions", messages=CHAT, max_tokens=12, temperature=0, ignore_eos=True
    )
    said = "".join(
        event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]
    )
    assert said == cold.chat["choices"][0]["message"]["content"]
    assert cached(cold.chat) == 0 and cached(events[-1]) == usable(
        [0] * cold.chat["usage"]["prompt_tokens"]
    )


def test_counters_are_there_before_they_grow(servers: tuple[Cold, HttpServer]) -> None:
    cold, _ = servers
    assert {
        name: cold.at_first.get(f"vllm:hotkv_{exported(name)}_total") for name in COUNTERS
    } == dict.fromkeys(COUNTERS, 0.0)
    assert (
        cold.metrics["vllm:hotkv_miss_requests_total"] == 3
        and cold.metrics["vllm:hotkv_hit_requests_total"] == 0
    )
    assert (
        cold.metrics["vllm:external_prefix_cache_hits_total"]
        == 0
        < cold.metrics["vllm:external_prefix_cache_queries_total"]
    )
