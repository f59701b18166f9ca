"""Runs `hotkv` commands in the test process. `Tokenizer` replaces the engine that tokenizes prompts
for them."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hotkv_client.command import cli
from hotkv_client.testing import PagedEngine
from hotkv_proto.keys import token_block_hashes

HOTKV = (sys.executable, "-m", "hotkv_client.command.cli")
"""The command as a child process."""
TOKENS = list(range(100, 100 + 3 * 16 + 4))
"""A prompt of three blocks and four tokens."""
Run = Callable[..., tuple[int, str, str]]
"""Runs a command; returns its exit status, its output, and its errors."""


def runner(capsys: pytest.CaptureFixture[str], target: str) -> Run:
    """Returns a function that runs `hotkv` commands against a server."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["--target", target, *words])
        except SystemExit as end:
            status = int(str(end.code))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def prompt_hashes(engine: PagedEngine, tokens: list[int] = TOKENS) -> list[bytes]:
    space = engine.key_space
    return token_block_hashes(
        tokens, space.hash_block_tokens, space.hash_algorithm, space.hash_seed
    )


class Tokenizer(BaseHTTPRequestHandler):
    """An HTTP server that answers `/tokenize` and `/v1/models` like an engine.

    answer: HTTP status and body with which it answers `/tokenize`.
    models: body with which it answers `/v1/models`.
    key: API key that a request for `/v1/models` must have.
    asked: path and body of the last request that it received.
    """

    answer: tuple[int, str] = (200, "")
    models = json.dumps({"data": [{"id": "tiny"}, {"id": "tuned", "parent": "tiny"}]})
    key = ""
    asked: tuple[str, dict[str, Any]] = ("", {})

    def do_GET(self) -> None:
        is_admitted = self.headers["Authorization"] == f"Bearer {self.key}"
        known = 200 if is_admitted else 401
        self.send_response(known if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(self.models.encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked = (self.path, json.loads(body))
        status, text = self.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Discards the access log."""


@pytest.fixture
def tokenizer_url() -> Iterator[str]:
    """Starts a `Tokenizer` that answers each prompt with TOKENS. Yields its address."""
    told = {"count": len(TOKENS), "tokens": TOKENS, "token_strs": None}
    Tokenizer.answer = (200, json.dumps(told))
    with ThreadingHTTPServer(("127.0.0.1", 0), Tokenizer) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()
