"""Calibration on tiny models in real vLLM, against transformers' keys."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotkv_sparse.axes import run_channels
from hotkv_sparse.centre import FIRST_TOKENS, MIN_TOKENS, TOKEN_FORMATS
from hotkv_sparse.centre_file import read_centres
from hotkv_sparse.vllm.calibrate import (
    QUERY_EVERY_TOKENS,
    Recorder,
    calibrate,
    contexts_of,
    default_text,
    main,
)
from tests.vllm.nursery import nursery

VOCAB = 128
NUM_TOKENS = 1500
"""Not a whole number of blocks."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}


def tokenizer() -> Any:
    """The word `w<id>` is the token `id`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    names = [*special, *(f"w{index}" for index in range(len(special), VOCAB))]
    words = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def text(seed: int, num_tokens: int) -> str:
    dice = np.random.default_rng(seed)
    return " ".join(f"w{index}" for index in dice.integers(3, VOCAB, num_tokens))


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def run(log: Path, *arguments: str) -> tuple[int, str]:
    """In a child of the nursery. Exit status and output."""
    with log.open("wb") as output:
        child = nursery().fork_module(
            "hotkv_sparse.vllm.calibrate", arguments, output, {"VLLM_CPU_KVCACHE_SPACE": "1"}
        )
        status = json.loads(child.stdout.read())["status"]
    return status, log.read_text(errors="replace")


@pytest.mark.long
@pytest.mark.slow
@torch.inference_mode()
def test_centres_are_the_means_of_keys_after_rope(tmp_path: Path) -> None:
    """With a bias on the keys, means are not near 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)).float()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.normal_(std=2.0)
    files = []
    for seed, length in enumerate((NUM_TOKENS, 2000)):
        files.append(tmp_path / f"{seed}.txt")
        files[-1].write_text(text(seed, length))
    output = tmp_path / "centres.npz"
    flags = f"--model {saved(model, tmp_path / 'tiny')} --output {output} --dtype float32"
    arguments = [*flags.split(), "--tokens", "1800", "--texts", *map(str, files)]
    status, printed = run(tmp_path / "log", *arguments)
    assert status == 0, printed
    found = read_centres(output)
    assert found.model == "tiny" and sorted(found.layers) == [0, 1, 2]
    assert found.num_tokens == NUM_TOKENS + 1800 - 2 * FIRST_TOKENS
    keys: list[list[torch.Tensor]] = [[], [], []]
    for file in files:
        tokens = torch.tensor([tokenizer().encode(file.read_text())[:1800]])
        for layer, cached in enumerate(model(tokens, use_cache=True).past_key_values.layers):
            keys[layer].append(cached.keys[0, :, FIRST_TOKENS:])
    for layer in range(3):
        np.testing.assert_allclose(
            found.mu(layer), torch.cat(keys[layer], dim=1).mean(dim=1), atol=2e-3
        )
        assert set(found.layers[layer].bias) == set(TOKEN_FORMATS)
        # It does not depend on queries.
        axes, mu = found.axes(layer), found.mu(layer)
        assert axes is not None and mu is not None and axes.into.shape == (2, 32, 32)
        y = (torch.cat(keys[layer], dim=1).numpy() - mu[:, None]) @ axes.into
        fine, coarse = run_channels(32)
        for place, part in enumerate((y[..., :fine], y[..., fine : fine + coarse])):
            rms = np.sqrt((part**2).mean(axis=(1, 2)))
            np.testing.assert_allclose(rms, axes.rms[:, place], rtol=1e-2)


@pytest.mark.slow
def test_models_without_full_attention_are_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = saved(
        MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=96)), tmp_path / "windows"
    )
    (tmp_path / "a.txt").write_text(text(0, NUM_TOKENS))
    given = f"--model {folder} --output {tmp_path}/a.npz --texts {tmp_path}/a.txt"
    status, printed = run(tmp_path / "log", *given.split())
    assert status == 2 and "has no layer of plain full attention" in printed
    assert not (tmp_path / "a.npz").exists()


def test_recorders_keep_a_context_that_comes_in_chunks() -> None:
    class Metadata:
        num_actual_tokens = 0

    passed = []
    recorder = Recorder(lambda *arguments, **named: passed.append((arguments, named)), 2, 4, 8, 0.5)
    for _ in range(2):
        keys, queries = torch.randn(1000, 2, 8), torch.randn(1000, 4, 8)
        first = 0
        for size in (1, 255, 3, 512, 229):
            metadata = Metadata()
            metadata.num_actual_tokens = size
            # As vLLM may pass.
            rows = slice(first, first + size + 7)
            recorder(None, queries[rows].flatten(1), keys[rows], None, None, metadata, output=1)
            first += size
        recorder(None, queries, keys, None, None, None, output=1)
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in recorder.queries)
        found_keys, found_queries, positions = recorder.take()
        assert positions == list(range(QUERY_EVERY_TOKENS - 1, 1000, QUERY_EVERY_TOKENS))
        np.testing.assert_array_equal(found_keys, keys)
        np.testing.assert_array_equal(found_queries, queries[positions])
    assert recorder.moments.num_tokens == 2 * (1000 - FIRST_TOKENS)
    assert len(passed) == 12 and all(named == {"output": 1} for _, named in passed)


def test_texts_that_are_too_short_are_refused() -> None:
    words = tokenizer()
    long = text(0, 4000)
    contexts = contexts_of({"a": long, "b": long}, words, 3000)
    assert [len(context) for context in contexts] == [3000, 3000]
    said = f"--texts: b has 900 tokens; pass files of {MIN_TOKENS + FIRST_TOKENS} or more"
    with pytest.raises(ValueError, match=said):
        contexts_of({"a": long, "b": text(1, 900)}, words, 3000)


def test_python_brings_a_long_text() -> None:
    assert len(default_text()) > 300_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "/nonexistent/a.npz"], "--output: there is no folder /nonexistent"),
        (["--output", "/proc"], "--output: no file /proc can be written"),
        (["--output", "a", "--texts", "/nonexistent"], "No such file"),
        (["--output", "a", "--tokens", "1000"], "--tokens is 1000; use 1088 or more"),
    ],
)
def test_bad_arguments_are_refused_before_an_engine_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    status, printed = run(tmp_path / "log", "--model", "m", *arguments)
    assert status == 2 and message in printed


def test_forbidden_folder_is_refused_before_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert main(["--model", "m", "--output", str(tmp_path / "a.npz")]) == 2
    assert f"--output: no file {tmp_path}/a.npz can be written" in capsys.readouterr().err


def test_engine_of_short_contexts_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = SimpleNamespace(model_config=SimpleNamespace(max_model_len=1088))
    monkeypatch.setattr("vllm.LLM", lambda *_, **__: llm)
    with pytest.raises(ValueError, match="--model: contexts of m have at most 1087 tokens"):
        calibrate("m", {"a": text(0, 4000)}, 8192)
