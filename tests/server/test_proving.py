"""Tests how `hotkv prove` compares answers, with a double of an engine's API and a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client import RequestReport
from hotkv_client.paged_engine import PagedEngine
from tests.doubles.openai_api import Likely, OpenAIApi, serving
from tests.server.commands import runner
from tests.server.places import Place, place, store
from tests.server.support import hashes

__all__ = ["place"]

SURE: Likely = (("a", -0.01), ("b", -5.0))
CLOSE: Likely = (("a", -0.7), ("b", -0.8))
OTHER: Likely = (("b", -0.65), ("a", -0.75))
"""A tie with CLOSE."""
WRONG: Likely = (("c", -0.1), ("d", -3.0))
CHAT = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8}


class Desk:
    """`hotkv prove` for a request of three blocks, two of which hit. Replays report themselves.

    hits: tokens that hit in a replay: on the device, and with hotkv's, as sent and salted.
    """

    def __init__(
        self, place: Place, api: OpenAIApi, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert place.server is not None
        self.api, self.prompt = api, hashes(3)
        self.engine: PagedEngine = place.connect()
        store(self.engine, self.prompt)
        self._run = runner(capsys, place.server.target)
        self._body = folder / "body.json"
        self.hits = {False: (16, 48), True: (0, 0)}
        self.tokens = 50
        api.on_request = self._report
        self._report("asked", False)

    def _report(self, name: str, is_salted: bool) -> None:
        on_device, hit = self.hits[is_salted]
        one = RequestReport(
            hashes(3) if is_salted else self.prompt, self.tokens, on_device, hit, 0.0,
            request_id=f"chatcmpl-{name}-0f",
        )  # fmt: skip
        self.engine.session.report_requests([one], 0.0)
        self.engine.session.ping(10)

    def prove(self, *words: str, body: Any = CHAT) -> tuple[int, str, str]:
        self._body.write_text(body if isinstance(body, str) else json.dumps(body))
        flags = ["--engine", self.api.url, "--body", str(self._body)]
        return self._run("prove", *flags, *words)


@pytest.fixture
def desk(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Desk]:
    place.start()
    with serving() as api:
        yield Desk(place, api, tmp_path, capsys)


@pytest.mark.parametrize("body", [CHAT, {"prompt": "Why?", "max_tokens": 8}])
@pytest.mark.parametrize(
    ("as_sent", "salted", "status", "verdict", "position"),
    [
        ([SURE, SURE], [SURE, SURE], 0, "equal", None),
        ([SURE, (("a", -0.2),)], [SURE, SURE], 0, "equal", None),
        ([SURE, CLOSE, SURE], [SURE, OTHER, WRONG], 0, "tie", 1),
        ([SURE, CLOSE], [SURE, WRONG], 1, "different", 1),
        ([SURE, SURE], [SURE, OTHER], 1, "different", 1),
        ([(("a", -0.01), ("b", -0.02)), SURE], [WRONG, SURE], 1, "different", 0),
        ([SURE, CLOSE], [SURE, SURE], 1, "different", 1),
        ([SURE, SURE], [SURE], 1, "different", 1),
    ],
)
def test_answers_are_compared_to_their_first_difference(
    desk: Desk, body: Any, as_sent: list[Likely], salted: list[Likely], status: int,
    verdict: str, position: int | None,
) -> None:  # fmt: skip
    desk.api.as_sent, desk.api.salted = as_sent, salted
    told, shown, errors = desk.prove("--json", body=body)
    assert told == status, errors
    proof = json.loads(shown)["proof"]
    assert (proof["verdict"], proof["position"]) == (verdict, position)
    told, shown, _ = desk.prove(body=body)
    assert told == status and verdict in shown
    assert position is None or f"at token {position}" in shown


def test_noise_is_what_the_caller_says(desk: Desk) -> None:
    desk.api.as_sent, desk.api.salted = [CLOSE], [OTHER]
    assert desk.prove()[0] == 0
    assert desk.prove("--noise", "0.05")[0] == 1
    desk.api.salted = [WRONG]
    assert desk.prove("--noise", "1000")[0] == 1, "a token that is not likely is never a tie"


def test_the_body_is_sent_greedily_twice(desk: Desk) -> None:
    desk.api.as_sent = desk.api.salted = [SURE]
    body = CHAT | {
        "model": "m", "temperature": 0.9, "stream": True, "stream_options": {}, "n": 4,
        "max_completion_tokens": 5, "max_tokens": 9, "stop": ["."],
    }  # fmt: skip
    assert desk.prove(body=body)[0] == 0
    (path, first), (_, second) = desk.api.asked
    assert path == "/v1/chat/completions"
    assert first == {
        "messages": CHAT["messages"], "model": "m", "stop": ["."], "temperature": 0, "n": 1,
        "stream": False, "max_tokens": 5, "return_tokens_as_token_ids": True,
        "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip
    assert len(second.pop("cache_salt")) == 32 and second == first
    assert desk.prove(body={"prompt": [1, 2, 3]})[0] == 0
    path, last = desk.api.asked[-1]
    assert path == "/v1/completions" and last["max_tokens"] == 256 and last["logprobs"] == 5


def test_the_comparison_says_what_it_covers(desk: Desk) -> None:
    desk.api.as_sent = desk.api.salted = [SURE]
    shown = desk.prove("asked")[1]
    assert "2 blocks stored by engine" in shown
    assert "16 tokens of 50 in the engine's own cache, 32 in hotkv (loaded)" in shown
    assert "2 of the request's 2 blocks were loaded again, with the same checksum" in shown
    assert "another body" not in shown
    desk.hits[False], desk.tokens = (48, 48), 60
    shown = desk.prove("asked")[1]
    assert "no block of hotkv was loaded" in shown and "another body?" in shown
    assert "0 of the request's 2 blocks were loaded again" in shown
    desk.hits[False] = (0, 0)
    assert "nothing hit" in desk.prove()[1]
    desk.hits[True] = (16, 16)
    status, _, errors = desk.prove()
    assert status == 2 and "can't compute without a cache" in errors


def test_errors_are_in_words(desk: Desk) -> None:
    def refused(*words: str, body: Any = CHAT) -> str:
        status, _, errors = desk.prove(*words, body=body)
        assert status == 2
        return errors

    assert "no request is known as nobody" in refused("nobody")
    assert "not JSON" in refused(body="{")
    assert "with messages or prompt" in refused(body=[])
    assert "has 2 prompts" in refused(body={"prompt": ["a", "b"]})
    assert "beam search" in refused(body=CHAT | {"use_beam_search": True})
    desk.api.failure = 400, json.dumps({"error": {"message": "max_logprobs is 0"}})
    assert "/v1/chat/completions answers 400: max_logprobs is 0" in refused()
    desk.api.failure = 401, ""
    assert "set VLLM_API_KEY" in refused()
    for answer in ("[]", "{}", '{"choices": [{"logprobs": null}]}', '{"choices": []}'):
        desk.api.failure = 200, answer
        assert "no logprobs of one choice" in refused()
    desk.api.failure, desk.api.as_sent = None, []
    assert "the answer has no token" in refused()
    desk.api.url = "nowhere"
    assert "give a URL" in refused()


def test_an_engine_of_another_server_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotkv_client.command.proving.REPORT_S", 0.1)
    desk.api.as_sent = desk.api.salted = [SURE]
    desk.api.on_request = lambda name, is_salted: None
    status, shown, _ = desk.prove()
    assert status == 0 and "is it another server's?" in shown
