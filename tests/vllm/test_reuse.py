"""Reuse that vLLM itself forbids is forbidden to hotkv too; what only the user turned off is not.

Tables compare hotkv's answer with vLLM's own; engines show that a model for which vLLM allows no
prefix caching answers the same with hotkv configured, and stays alive.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.processes import Daemon, EngineProcess
from tests.vllm.test_end_to_end import settled
from tests.vllm.test_features import Starter, requests, same
from tests.vllm.tiny import write_model
from tests.vllm.tokenizer import write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PREFIX_LM = {
    "architectures": ["HrmTextForCausalLM"],
    "model_type": "hrm_text",
    "H_cycles": 2,
    "L_cycles": 2,
    "L_bp_cycles": [2],
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "num_layers_per_stack": 2,
    "prefix_lm": True,
    "embedding_scale": 50.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


@pytest.fixture
def start(shared_daemon: Daemon, tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(shared_daemon, tmp_path)
    yield starter
    starter.stop()


def answers_the_same_beside_a_known_prefix(engine: EngineProcess) -> bool:
    """Whether three prompts are answered as alone after others began as they do."""
    for seed in range(51, 81, 10):
        known = requests(seed, (300,))[0]["tokens"]
        asked = known[:260] + requests(seed + 1, (240,))[0]["tokens"]
        params = {"max_tokens": 24}
        alone = engine.ask("sample", requests=[{"tokens": asked, "salt": "alone"}], params=params)
        engine.ask("sample", requests=[{"tokens": known}], params=params)
        settled(engine)
        beside = engine.ask("sample", requests=[{"tokens": asked}], params=params)
        if beside["cached"] != [0] or not same(alone, beside):
            return False
    return True


def test_a_prefix_lm_answers_the_same_whatever_others_have_asked(
    start: Starter, tmp_path: Path
) -> None:
    """Its prompt's KV depends on all of the prompt, so no prefix of it can be shared."""
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | PREFIX_LM
    (model / "config.json").write_text(json.dumps(config))
    engine = start(model)
    assert answers_the_same_beside_a_known_prefix(engine)
    assert "hotkv is off: vLLM itself forbids prefix caching: " in engine.log()


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM allows it")
def test_latent_attention_on_a_cpu_without_amx_is_not_shared(
    start: Starter, tmp_path: Path
) -> None:
    engine = start(write_model(tmp_path / "model", "deepseek"), block_size=16)
    assert answers_the_same_beside_a_known_prefix(engine)
    assert "hotkv is off: vLLM itself forbids prefix caching: " in engine.log()


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_pooling_over_all_tokens_lives_through_a_text_that_was_there(
    start: Starter, tmp_path: Path, pooling: str
) -> None:
    """vLLM's pooler raises, and ends the engine, if it is given part of a text."""
    model = write_tokenizer(write_model(tmp_path / "model"))
    batch, answers = requests(37, (300,)), []
    for _ in range(2):
        engine = start(
            model, runner="pooling", convert="embed", pooler_config={"seq_pooling_type": pooling}
        )
        for _ in range(2):
            answers.append(engine.ask("embed", requests=batch))
            for _ in range(3):
                engine.ask("embed", requests=requests(38, (5,)))
                time.sleep(0.1)
        assert "hotkv is off: vLLM itself forbids prefix caching: " in engine.log()
        engine.stop()
    assert all(answer["cached"] == [0] for answer in answers)
    assert all(answer["vectors"] == answers[0]["vectors"] for answer in answers)
