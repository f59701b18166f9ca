"""vLLM's features in real engines."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.feature_runs import LENGTHS, Starter, clean, pooled, requests
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import NOISE, difference, prompts, same, settled, usable
from tests.vllm.tiny import BLOCK_TOKENS, write_model
from tests.vllm.tokenizer import write_tokenizer
from tests.vllm.vision import IMAGE_TOKEN, write_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}


@dataclass(frozen=True, slots=True)
class Pair:
    """All hits of `sharing` are hotkv's."""

    plain: EngineProcess
    sharing: EngineProcess

    def sample(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Answers of the engine that stores and of the one that loads."""
        cold = self.plain.ask("sample", **arguments)
        settled(self.plain)
        return cold, self.sharing.ask("sample", **arguments)


@pytest.fixture(scope="module")
def pair(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    starter = Starter(shared_daemon, tmp_path_factory.mktemp("features"))
    model = write_tokenizer(write_model(starter.folder / "model"))
    settings = ({}, {"enable_prefix_caching": False})
    yield Pair(*(starter(model, enable_prompt_embeds=True, **more) for more in settings))
    starter.stop()


def hits(batch: list[dict[str, Any]]) -> list[int]:
    return [usable(request["tokens"]) for request in batch]


def test_prefix_caching_off_and_salts(pair: Pair) -> None:
    batch = requests(31)
    cold, warm = pair.sample(requests=batch)
    again = pair.sharing.ask("sample", requests=batch)
    assert cold["cached"] == [0, 0, 0] and warm["cached"] == again["cached"] == hits(batch)
    assert same(cold, warm) and same(cold, again)
    (one,) = requests(33, (300,))
    cold, warm = pair.sample(requests=[one | {"salt": "a"}])
    assert warm["cached"] == [288] and same(cold, warm)
    assert pair.sharing.ask("sample", requests=[one | {"salt": "b"}, one])["cached"] == [0, 0]
    assert clean(pair.sharing)


def test_a_request_for_prompt_logprobs_reads_nothing(pair: Pair) -> None:
    """vLLM wants to compute the whole prompt (`skip_reading_prefix_cache`)."""
    batch = requests(32)
    cold, warm = pair.sample(requests=batch, params={"prompt_logprobs": 1})
    assert warm["cached"] == [0, 0, 0] and same(cold, warm)
    for mine, theirs in zip(cold["prompt_logprobs"], warm["prompt_logprobs"], strict=True):
        assert len(mine) > 90 and mine == pytest.approx(theirs, abs=NOISE)
    assert pair.sharing.ask("sample", requests=batch)["cached"] == hits(batch)


def test_prompts_of_equal_embeddings_alone_meet(pair: Pair) -> None:
    cold, warm = pair.sample(requests=[{"embeds": [1, 200]}])
    assert warm["cached"] == [192] and same(cold, warm)
    # vLLM gives all embeddings the same token ids.
    other = pair.sharing.ask("sample", requests=[{"embeds": [2, 200]}])
    assert other["cached"] == [0] and difference(cold, other) > 20 * NOISE


def test_samples_beams_structured_answers_and_stop_strings(pair: Pair) -> None:
    batch = requests(34, (300,))
    cold, warm = pair.sample(requests=batch, params={"n": 3, "temperature": 1.0, "seed": 5})
    assert len({tuple(tokens) for tokens in cold["tokens"]}) == 3
    assert warm["cached"] == [288] and same(cold, warm)
    mine, theirs = (
        engine.ask("beam", tokens=batch[0]["tokens"], width=3, max_tokens=4)
        for engine in (pair.plain, pair.sharing)
    )
    assert mine["tokens"] == theirs["tokens"]
    assert mine["scores"] == pytest.approx(theirs["scores"], abs=NOISE)
    params = {"max_tokens": 100}
    cold, warm = pair.sample(requests=batch, structured={"json": SCHEMA}, params=params)
    assert json.loads(cold["text"][0]).keys() == {"a"} and same(cold, warm)
    cold, warm = pair.sample(requests=batch, structured={"choice": ["yes", "no"]})
    assert cold["text"][0] in ("yes", "no") and same(cold, warm)
    (free,) = pair.plain.ask("sample", requests=batch, params={"max_tokens": 40})["text"]
    params = {"max_tokens": 40, "stop": free[20:23]}
    cold, warm = pair.sample(requests=batch, params=params)
    assert warm["text"] == [free[: free.index(free[20:23])]] and same(cold, warm)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_drafters_last_block_is_computed_again(
    start: Starter, tmp_path: Path, method: str
) -> None:
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 1}
    more: dict[str, Any] = {"speculative_config": speculative}
    if method == "mtp":
        more["hf_overrides"] = {"num_nextn_predict_layers": 1}
    else:
        speculative["model"] = str(write_model(tmp_path / "drafter", "eagle"))
    engine = start("two_windows" if method == "mtp" else "llama", **more)
    batch = requests(36)
    cold = engine.ask("sample", requests=batch, params={"max_tokens": 40})
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("sample", requests=batch, params={"max_tokens": 40})
    # A drafter's KV depends on the next token, so a hit's last block is computed again.
    assert warm["cached"] == [length // BLOCK_TOKENS * BLOCK_TOKENS - 32 for length in LENGTHS]
    assert same(cold, warm) and engine.ask("drafted")["tokens"] > 0 and clean(engine)


def test_decoder_vectors_equal_after_a_hit(start: Starter, tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model"))
    engine = start(model, runner="pooling", convert="embed")
    batch = requests(37)
    cold = pooled(engine, "embed", batch)
    engine.ask("reset")
    warm = engine.ask("embed", requests=batch)
    assert cold["cached"] == [0, 0, 0] and warm["cached"] == hits(batch) and clean(engine)
    for mine, theirs in zip(cold["vectors"], warm["vectors"], strict=True):
        assert mine == pytest.approx(theirs, abs=NOISE)


def picture(seed: int) -> dict[str, Any]:
    (tokens,) = prompts(40, (200,))
    return {"tokens": [*tokens[:40], IMAGE_TOKEN, *tokens[40:]], "images": [seed]}


def test_pictures_meet_only_where_they_are_equal(start: Starter, tmp_path: Path) -> None:
    engine = start(write_vision_model(tmp_path / "model"))
    cold = [engine.ask("sample", requests=[picture(seed)]) for seed in (1, 2)]
    # Both share the block of text before the picture.
    assert [answer["cached"] for answer in cold] == [[0], [32]]
    assert difference(*cold) > 20 * NOISE
    settled(engine)
    engine.ask("reset")
    warm = [engine.ask("sample", requests=[picture(seed)]) for seed in (1, 2)]
    assert [answer["cached"] for answer in warm] == [[192], [192]]
    assert all(same(*both) for both in zip(cold, warm, strict=True))
    assert engine.ask("stats")["totals"]["loads"] == 2 and clean(engine)
