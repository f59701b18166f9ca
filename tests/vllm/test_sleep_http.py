"""vLLM's HTTP server with its development endpoints: pause, sleep and reset answer 200 with and
without a hotkv-server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from tests.vllm.http_server import HttpServer
from tests.vllm.processes import Daemon
from tests.vllm.tiny import BLOCK_TOKENS, engine_args, transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [3 + place * 37 % 1000 for place in range(300)]
HIT_TOKENS = 288


def command(model: Path, target: str) -> list[str]:
    """Returns the API server over the tiny model, tokens in and out."""
    given = engine_args(model, blocks=64, max_model_len=1024)
    given |= {
        "kv_transfer_config": transfer_config(
            target=target, lookup_timeout_s=3.0, startup_wait_s=20.0
        )
    }
    given |= {
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "enable_scale_out": True,
    }
    words = ["vllm.entrypoints.openai.api_server"]
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def generate(engine: HttpServer) -> Any:
    """Returns the answer's tokens, and how many of the prompt's came out of a cache."""
    parameters = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    status, answer = engine.call(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": parameters}
    )
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


@pytest.fixture
def engine(tmp_path: Path, daemon: Daemon) -> Iterator[HttpServer]:
    words = command(write_model(tmp_path / "model"), daemon.start().target)
    one = HttpServer(
        words, tmp_path / "log", is_forked=True, environment={"VLLM_SERVER_DEV_MODE": "1"}
    )
    yield one
    one.stop()


def pauses(engine: HttpServer) -> Iterator[str]:
    """Pauses and wakes the engine in each way, after which it has forgotten its own cache."""
    for way, back in (
        ("/pause", "/resume"),
        ("/pause?mode=wait", "/resume"),
        ("/pause?mode=keep", "/resume"),
        ("/sleep?level=1", "/wake_up"),
    ):
        assert engine.call(way)[0] == 200, f"{way}: {engine.log()[-3000:]}"
        assert engine.call(back)[0] == 200
        yield way


@pytest.mark.long
def test_pause_sleep_and_reset(engine: HttpServer, daemon: Daemon) -> None:
    engine.ready()
    wait_for(lambda: len(daemon.admin("sessions")) == 2)
    tokens, cached = generate(engine)
    assert cached == 0
    wait_for(lambda: len(daemon.admin("blocks")["blocks"]) == HIT_TOKENS // BLOCK_TOKENS)
    for way in pauses(engine):
        assert generate(engine) == (tokens, HIT_TOKENS), way
    # What somebody asks for empties the shared cache.
    assert engine.call("/reset_prefix_cache?reset_external=true") == (200, {"success": True})
    assert generate(engine) == (tokens, 0)
    wait_for(lambda: len(daemon.admin("blocks")["blocks"]) == HIT_TOKENS // BLOCK_TOKENS)
    assert engine.call("/reset_prefix_cache") == (200, {"success": True})
    assert generate(engine) == (tokens, HIT_TOKENS)

    daemon.kill()
    for way in pauses(engine):
        assert generate(engine) == (tokens, 0), f"{way} without a server"
    assert engine.call("/reset_prefix_cache?reset_external=true") == (200, {"success": True})
    assert generate(engine) == (tokens, 0)
