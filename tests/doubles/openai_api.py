"""An engine's OpenAI API that gives the answers a test has written."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Likely = Sequence[tuple[str, float]]
"""A token with its logprob, then other likely ones."""


class OpenAIApi:
    """url: as of `--engine`.
    as_sent, salted: tokens of the answer to a request without, and with, `cache_salt`.
    failure: status and body of every answer, if set.
    on_request: called with `X-Request-Id` before the answer, and True if the request has a salt.
    asked: path and body of each request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.as_sent: Sequence[Likely] = ()
        self.salted: Sequence[Likely] = ()
        self.failure: tuple[int, str] | None = None
        self.on_request: Callable[[str, bool], None] = lambda name, is_salted: None
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def answer(self, path: str, body: dict[str, Any], name: str) -> tuple[int, str]:
        self.asked.append((path, body))
        if self.failure is not None:
            return self.failure
        is_salted = "cache_salt" in body
        self.on_request(name, is_salted)
        tokens = self.salted if is_salted else self.as_sent
        logprobs = _chat(tokens) if "messages" in body else _completion(tokens)
        return 200, json.dumps({"id": name, "choices": [{"index": 0, "logprobs": logprobs}]})


def _chat(tokens: Sequence[Likely]) -> dict[str, Any]:
    def one(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob}

    return {
        "content": [
            {**one(*likely[0]), "top_logprobs": [one(*pair) for pair in likely]}
            for likely in tokens
        ]
    }


def _completion(tokens: Sequence[Likely]) -> dict[str, Any]:
    return {
        "tokens": [likely[0][0] for likely in tokens],
        "token_logprobs": [likely[0][1] for likely in tokens],
        "top_logprobs": [dict(likely) for likely in tokens],
    }


@contextlib.contextmanager
def serving() -> Iterator[OpenAIApi]:
    made = OpenAIApi()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = made.answer(self.path, body, self.headers["X-Request-Id"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        made.url = f"http://127.0.0.1:{served.server_port}"
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            served.shutdown()
            thread.join()
