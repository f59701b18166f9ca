"""Tests what `hotkv try` compares, and how it empties an engine's own cache.
tests/vllm/test_http.py has the whole."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hotkv_client.command import trial
from hotkv_client.command.proving import Token

BUSY, DONE = (200, '{"success": false}'), (200, '{"success": true}')
ABSENT = (404, '{"detail": "Not Found"}')


class Resetting(BaseHTTPRequestHandler):
    """answers: (status, body) of each reset, the last one for ever."""

    answers: list[tuple[int, str]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Resetting) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()
        thread.join()


@pytest.mark.parametrize("answers", [[DONE], [BUSY, DONE], [(200, "")]])
def test_an_engine_resets(url: str, answers: list[tuple[int, str]]) -> None:
    Resetting.answers = list(answers)
    assert trial._forget(url) == ""
    assert len(Resetting.answers) == 1, "a busy engine is asked again"


@pytest.mark.parametrize(
    ("answer", "said"), [(BUSY, "because requests run"), (ABSENT, "VLLM_SERVER_DEV_MODE=1")]
)
def test_an_engine_refuses(
    url: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str], said: str
) -> None:
    monkeypatch.setattr(trial, "RESET_S", 0.0)
    Resetting.answers = [answer]
    told = trial._forget(url)
    assert said in told and "--second" in told


@pytest.mark.parametrize(
    ("own_hit", "logprobs", "works"),
    [
        (
            384,
            (-0.5, -0.9, -0.9),
            True,
        ),  # As the engine's own hit: the whole prompt rounds otherwise.
        (384, (-0.5, -0.5, -0.9), False),
        (0, (-0.5, -0.5, -0.9), True),  # Only the whole prompt is there to compare with.
        (0, (-0.5, -0.9, -1.2), False),
    ],
)
def test_a_hit_is_compared_with_one_as_long(
    own_hit: int, logprobs: tuple[float, ...], works: bool
) -> None:
    hits = (0, 0), (own_hit, own_hit), (0, 384)
    steps = [
        trial.Asked(
            name,
            "",
            1.0,
            {"prompt_token_count": 500, "device_hit_token_count": device, "hit_token_count": hit,
             "outcome": ""},
            [Token("a", logprob, {"a": logprob})],
        )
        for name, (device, hit), logprob in zip(trial.MADE, hits, logprobs, strict=True)
    ]  # fmt: skip
    assert trial._told("m", steps, "")["works"] == works
