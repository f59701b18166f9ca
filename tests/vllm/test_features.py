"""Features of vLLM beside hotkv, each in a real engine: what an engine that loads answers is what
the one that computed answered.

`plain` computes and stores. `sharing` has vLLM's own prefix cache off, so that whatever it need not
compute comes from hotkv.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.vllm.feature_runs import LENGTHS, TOLERANCE, Starter, requests, same
from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.runs import difference, prompts, settled, usable
from tests.vllm.tiny import BLOCK_TOKENS, engine_args, write_model
from tests.vllm.tokenizer import write_tokenizer
from tests.vllm.vision import IMAGE_TOKEN, write_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 128,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 1024,
    "num_mel_bins": 80,
    "max_source_positions": 100,
    "max_target_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}


@pytest.fixture
def start(shared_daemon: Daemon, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(shared_daemon, tmp_path)
    yield starter
    starter.stop()


@dataclass(frozen=True, slots=True)
class Pair:
    plain: EngineProcess
    sharing: EngineProcess

    def sample(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the answers of the engine that stores, and then of the one that loads."""
        cold = self.plain.ask("sample", **arguments)
        settled(self.plain)
        return cold, self.sharing.ask("sample", **arguments)


@pytest.fixture(scope="module")
def pair(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("features")
    starter = Starter(shared_daemon, folder)
    model = write_tokenizer(write_model(folder / "model"))
    yield Pair(
        starter(model, enable_prompt_embeds=True),
        starter(model, enable_prompt_embeds=True, enable_prefix_caching=False),
    )
    starter.stop()


def hits(batch: list[dict[str, Any]]) -> list[int]:
    return [usable(request["tokens"]) for request in batch]


def clean(engine: EngineProcess) -> bool:
    return (
        not {"failed_loads", "hook_errors", "refused_blocks", "short_grants"}
        & engine.ask("stats")["totals"].keys()
    )


def test_prefix_caching_off_still_hits(pair: Pair) -> None:
    batch = requests(31)
    cold, warm = pair.sample(requests=batch)
    again = pair.sharing.ask("sample", requests=batch)
    assert cold["cached"] == [0, 0, 0] and warm["cached"] == again["cached"] == hits(batch)
    assert same(cold, warm) and same(cold, again) and clean(pair.sharing)


def test_a_request_for_prompt_logprobs_reads_nothing(pair: Pair) -> None:
    """vLLM computes such prompts whole (`skip_reading_prefix_cache`), as it does with its own
    cache."""
    batch = requests(32)
    cold, warm = pair.sample(requests=batch, params={"prompt_logprobs": 1})
    assert warm["cached"] == [0, 0, 0] and same(cold, warm)
    for mine, theirs in zip(cold["prompt_logprobs"], warm["prompt_logprobs"], strict=True):
        assert len(mine) > 90 and mine == pytest.approx(theirs, abs=TOLERANCE)
    # What it computed serves others.
    assert pair.sharing.ask("sample", requests=batch)["cached"] == hits(batch)


def test_salts_keep_prompts_apart(pair: Pair) -> None:
    (one,) = requests(33, (300,))
    cold, warm = pair.sample(requests=[one | {"salt": "a"}])
    assert warm["cached"] == [288] and same(cold, warm)
    assert pair.sharing.ask("sample", requests=[one | {"salt": "b"}])["cached"] == [0]
    assert pair.sharing.ask("sample", requests=[one])["cached"] == [0]


def test_prompts_of_embeddings_meet_only_where_they_are_equal(pair: Pair) -> None:
    cold, warm = pair.sample(requests=[{"embeds": [1, 200]}])
    assert warm["cached"] == [192] and same(cold, warm)
    # To vLLM all embeddings have the same token ids.
    other = pair.sharing.ask("sample", requests=[{"embeds": [2, 200]}])
    assert other["cached"] == [0] and difference(cold, other) > 20 * TOLERANCE


def test_several_samples_and_beams(pair: Pair) -> None:
    batch = requests(34, (300,))
    cold, warm = pair.sample(requests=batch, params={"n": 3, "temperature": 1.0, "seed": 5})
    assert len(cold["tokens"]) == 3 and len({tuple(tokens) for tokens in cold["tokens"]}) == 3
    assert warm["cached"] == [288] and same(cold, warm)
    before = pair.sharing.ask("stats")["totals"]["hit_tokens"]
    beams = [
        engine.ask("beam", tokens=batch[0]["tokens"], width=3, max_tokens=4)
        for engine in (pair.plain, pair.sharing)
    ]
    assert beams[0]["tokens"] == beams[1]["tokens"] and beams[0]["scores"] == pytest.approx(
        beams[1]["scores"], abs=TOLERANCE
    )
    assert pair.sharing.ask("stats")["totals"]["hit_tokens"] - before >= 4 * 288


def test_structured_answers_and_stop_strings(pair: Pair) -> None:
    batch = requests(35, (200, 300))
    cold, warm = pair.sample(
        requests=batch, structured={"json": SCHEMA}, params={"max_tokens": 100}
    )
    assert [json.loads(text).keys() for text in cold["text"]] == [{"a"}, {"a"}]
    assert warm["cached"] == hits(batch) and warm["text"] == cold["text"] and same(cold, warm)
    chosen = [
        engine.ask("sample", requests=batch, structured={"choice": ["yes", "no"]})
        for engine in (pair.plain, pair.sharing)
    ]
    assert (
        chosen[0]["text"] == chosen[1]["text"]
        and set(chosen[0]["text"]) <= {"yes", "no"}
        and same(*chosen)
    )
    free = pair.plain.ask("sample", requests=batch, params={"max_tokens": 40})["text"][1]
    cold, warm = (
        e.ask("sample", requests=batch[1:], params={"max_tokens": 40, "stop": free[20:23]})
        for e in (pair.plain, pair.sharing)
    )
    assert warm["cached"] == [288] and same(cold, warm)
    assert (
        warm["finish"] == cold["finish"] == [["stop", free[20:23]]]
        and warm["text"][0] == free[: free.index(free[20:23])]
    )


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_drafters(start: Starter, tmp_path: Path, method: str) -> None:
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 1}
    model = write_model(tmp_path / "model", "two_windows" if method == "mtp" else "llama")
    if method == "mtp":
        config = model / "config.json"
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1})
        )
    else:
        speculative["model"] = str(write_model(tmp_path / "drafter", "eagle"))
    engine = start(model, speculative_config=speculative)
    batch = requests(36)
    cold = engine.ask("sample", requests=batch, params={"max_tokens": 40})
    assert clean(engine)
    settled(engine)
    engine.ask("reset")
    warm = engine.ask("sample", requests=batch, params={"max_tokens": 40})
    # A drafter's KV of a token depends on the token after it, so the last block is computed again.
    assert warm["cached"] == [
        max(0, length // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS) for length in LENGTHS
    ]
    assert same(cold, warm) and engine.ask("drafted")["tokens"] > 0 and clean(engine)


def test_asynchronous_scheduling_in_cpu_engines(tmp_path: Path) -> None:
    """vLLM itself turns it off there, and refuses it with ngram drafts; drafts with it run in
    `test_async_drafts`."""
    settings = engine_args(write_model(tmp_path / "model"), async_scheduling=True)
    assert EngineArgs(**settings).create_engine_config().scheduler_config.async_scheduling is False
    with pytest.raises(
        ValueError, match="async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU"
    ):
        EngineArgs(**settings, speculative_config=NGRAM).create_engine_config()


def test_vectors_of_a_decoder_are_equal_after_a_hit(start: Starter, tmp_path: Path) -> None:
    engine = start(
        write_tokenizer(write_model(tmp_path / "model")), runner="pooling", convert="embed"
    )
    batch = requests(37)
    cold = engine.ask("embed", requests=batch)
    until_s = time.monotonic() + 60
    while engine.ask("stats")["totals"].get("stored_blocks", 0) < 26 and time.monotonic() < until_s:
        engine.ask("embed", requests=requests(38, (5,)))
    engine.ask("reset")
    warm = engine.ask("embed", requests=batch)
    assert cold["cached"] == [0, 0, 0] and warm["cached"] == hits(batch) and clean(engine)
    for mine, theirs in zip(cold["vectors"], warm["vectors"], strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)


def test_encoders_have_nothing_to_share(start: Starter, tmp_path: Path) -> None:
    """An encoder attends to all of a text: hotkv is off in words, and the engine works."""
    model = write_model(tmp_path / "bert")
    (model / "config.json").write_text(json.dumps(BERT))
    engine = start(write_tokenizer(model), runner="pooling", max_model_len=512)
    assert engine.ask("embed", requests=requests(39, (100,)))["cached"] == [0]
    assert (
        "hotkv is off: vLLM itself forbids prefix caching: this pooling needs all tokens of a text "
        "at once (encoder_only attention, seq_pooling_type CLS, tok_pooling_type ALL)"
        in engine.log()
    )


def test_vllm_itself_refuses_encoder_decoders(start: Starter, tmp_path: Path) -> None:
    model = write_model(tmp_path / "whisper")
    (model / "config.json").write_text(json.dumps(WHISPER))
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "chunk_length": 2,
        "n_samples": 32000,
    }
    (model / "preprocessor_config.json").write_text(
        json.dumps(sound | {"nb_max_frames": 200, "processor_class": "WhisperProcessor"})
    )
    engine = start(write_tokenizer(model), max_model_len=256)
    with pytest.raises(
        AssertionError,
        match="Encoder-decoder models are not currently supported with KV connectors",
    ):
        engine.ready()


def picture(tokens: list[int], seed: int) -> dict[str, Any]:
    """Returns a picture behind 40 tokens of text."""
    return {"tokens": [*tokens[:40], IMAGE_TOKEN, *tokens[40:]], "images": [seed]}


def test_pictures_meet_only_where_they_are_equal(start: Starter, tmp_path: Path) -> None:
    engine = start(write_vision_model(tmp_path / "model"))
    (tokens,) = prompts(40, (200,))
    batch = [picture(tokens, seed) for seed in (1, 2)]
    cold = [engine.ask("sample", requests=[request]) for request in batch]
    # Before the picture both are the same block.
    assert [answer["cached"] for answer in cold] == [[0], [32]] and difference(
        *cold
    ) > 20 * TOLERANCE
    settled(engine)
    engine.ask("reset")
    warm = [engine.ask("sample", requests=[request]) for request in batch]
    assert [answer["cached"] for answer in warm] == [[192], [192]] and all(
        same(*both) for both in zip(cold, warm, strict=True)
    )
    assert engine.ask("stats")["totals"]["loads"] == 2 and clean(engine)


@pytest.mark.long
def test_pictures_that_vllm_names_by_a_counter_are_not_shared(
    start: Starter, tmp_path: Path
) -> None:
    """Another engine's first picture would bear the same name as this one's."""
    engine = start(
        write_vision_model(tmp_path / "model"), mm_processor_cache_gb=0, enable_prefix_caching=False
    )
    (tokens,) = prompts(40, (200,))
    engine.ask("sample", requests=[picture(tokens, 1)])
    assert (
        "stored_blocks" not in settled(engine)
        and "requests with images or other media do not use the shared cache" in engine.log()
    )
    text = requests(41, (200,))
    engine.ask("sample", requests=text)
    settled(engine)
    assert engine.ask("sample", requests=text)["cached"] == [192] and clean(engine)


@pytest.mark.parametrize("pipelined", [False, True])
def test_urgent_requests_preempt_others(engine: Any, server: Any, pipelined: bool) -> None:
    """Priority scheduling, with the model that checks every value: low ones lose their blocks to
    urgent ones that hit."""
    from tests.vllm.harness import prompt

    filled, _ = engine(blocks=64).generate("first", prompt(1, 200), 30)
    one = engine(blocks=20, pipelined=pipelined, scheduling_policy="priority")
    for index in range(3):
        one.add(f"low{index}", prompt(2 + index, 60), 140, priority=5)
    for _ in range(8):
        one.step()
    one.add("urgent", prompt(1, 200), 30, priority=0)
    one.run()
    assert one.preemptions > 0 and one.outputs["urgent"] == filled and one.external["urgent"] == 192
    assert (
        all(len(one.outputs[f"low{index}"]) == 140 for index in range(3))
        and "hook_errors" not in one.counters
    )
    one.drop_local()
    assert all(
        one.generate(f"again{index}", prompt(2 + index, 60), 140)[0] == one.outputs[f"low{index}"]
        for index in range(3)
    )
