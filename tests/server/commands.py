"""Runs `hotkv` in the test process."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hotkv_client.command import cli
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto.keys import token_block_hashes

HOTKV = (sys.executable, "-m", "hotkv_client.command.cli")
TOKENS = list(range(100, 100 + 3 * 16 + 4))
"""Three blocks and four tokens."""
Run = Callable[..., tuple[int, str, str]]
"""(Exit status, output, errors) of a command."""


def runner(capsys: pytest.CaptureFixture[str], target: str) -> Run:
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
    """An HTTP server that answers like an engine.

    answer: (status, body) of `/tokenize`.
    models: body of `/v1/models`, which needs the API `key`.
    asked: path and body of the last request.
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

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def tokenizer_url() -> Iterator[str]:
    """The address of a `Tokenizer` that answers each prompt with TOKENS."""
    told = {"count": len(TOKENS), "tokens": TOKENS, "token_strs": None}
    Tokenizer.answer = (200, json.dumps(told))
    with ThreadingHTTPServer(("127.0.0.1", 0), Tokenizer) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()
