"""vLLM's HTTP server with its development endpoints: pause, sleep and reset answer 200 with and without a hotkv-server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.processes import Daemon
from tests.vllm.tiny import BLOCK_TOKENS, engine_args, transfer_config, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [3 + place * 37 % 1000 for place in range(300)]
HIT_TOKENS = 288


class HttpEngine:
    """`python -m vllm.entrypoints.openai.api_server` over the tiny model, tokens in and out."""

    def __init__(self, folder: Path, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
        given = engine_args(write_model(folder / "model"), blocks=64, max_model_len=1024)
        given |= {
            "port": self._url.rpartition(":")[2],
            "host": "127.0.0.1",
            "kv_transfer_config": transfer_config(target=target, lookup_timeout_s=3.0),
        }
        given |= {"enable_prompt_tokens_details": True, "disable_uvicorn_access_log": True, "enable_scale_out": True}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in given.items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                command += [option] if value else []
            else:
                command += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)

    def wait(self, timeout_s: float = 480.0) -> None:
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            try:
                if self.call("/health", method="GET")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError("vLLM did not answer")

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Status, and the answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text, status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
        return status, json.loads(text) if text.startswith(b"{") else text

    def generate(self) -> Any:
        """The answer's tokens, and how many of the prompt's came out of a cache."""
        parameters = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
        status, answer = self.call("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": parameters})
        assert status == 200, answer
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


@pytest.fixture
def folder() -> Iterator[Path]:
    # A short path: a Unix socket's name has at most 107 bytes.
    made = Path(tempfile.mkdtemp(prefix="hotkv-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def daemon(folder: Path) -> Iterator[Daemon]:
    one = Daemon(folder / "run")
    yield one
    one.stop()


@pytest.fixture
def engine(folder: Path, daemon: Daemon) -> Iterator[HttpEngine]:
    one = HttpEngine(folder, daemon.target)
    yield one
    one.stop()


def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    last_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < last_s
        time.sleep(0.05)


def pauses(engine: HttpEngine) -> Iterator[str]:
    """Pauses and wakes the engine in each way, after which it has forgotten its own cache."""
    for way, back in (
        ("/pause", "/resume"),
        ("/pause?mode=wait", "/resume"),
        ("/pause?mode=keep", "/resume"),
        ("/sleep?level=1", "/wake_up"),
    ):
        assert engine.call(way)[0] == 200, f"{way}: {engine.log.read_text()[-3000:]}"
        assert engine.call(back)[0] == 200
        yield way


def test_pause_sleep_and_reset(engine: HttpEngine, daemon: Daemon) -> None:
    daemon.start()
    engine.wait()
    until(lambda: len(daemon.admin("sessions")) == 2)
    tokens, cached = engine.generate()
    assert cached == 0
    until(lambda: len(daemon.admin("blocks")["blocks"]) == HIT_TOKENS // BLOCK_TOKENS)
    for way in pauses(engine):
        assert engine.generate() == (tokens, HIT_TOKENS), way
    # What somebody asks for empties the shared cache.
    assert engine.call("/reset_prefix_cache?reset_external=true") == (200, {"success": True})
    assert engine.generate() == (tokens, 0)
    until(lambda: len(daemon.admin("blocks")["blocks"]) == HIT_TOKENS // BLOCK_TOKENS)
    assert engine.call("/reset_prefix_cache") == (200, {"success": True})
    assert engine.generate() == (tokens, HIT_TOKENS)

    daemon.kill()
    for way in pauses(engine):
        assert engine.generate() == (tokens, 0), f"{way} without a server"
    assert engine.call("/reset_prefix_cache?reset_external=true") == (200, {"success": True})
    assert engine.generate() == (tokens, 0)
