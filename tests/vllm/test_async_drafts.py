"""Speculative decoding with asynchronous scheduling, which vLLM runs on GPUs only: vLLM's own
scheduler, the model that checks all KV."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm.compat import fingerprint, model_weights
from tests.vllm.harness import prompt
from tests.vllm.specs import full_model, hybrid_model
from tests.vllm.speculation import SpeculatingEngine
from tests.vllm.tiny import BLOCK_TOKENS, write_model


@pytest.fixture
def speculating(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SpeculatingEngine]]:
    # This drafter keeps no KV; what a real one keeps, in groups of its own, keeps engines with
    # other drafters apart.
    for module in (model_weights, fingerprint):
        monkeypatch.setattr(module, "draft_model", lambda _: None)
    drafter = {"method": "eagle", "model": str(write_model(tmp_path / "drafter", "eagle"))}
    drafter |= {"num_speculative_tokens": 3}
    settings = {"pipelined": True, "speculative_config": drafter}
    make = functools.partial(SpeculatingEngine, server, tmp_path / "model", monkeypatch, **settings)
    made: list[SpeculatingEngine] = []
    yield lambda **more: made.append(make(**more)) or made[-1]
    for one in made:
        one.worker.shutdown()
        one.connector.shutdown()


@pytest.mark.parametrize("model", [full_model, hybrid_model])
def test_rejected_drafts_are_never_stored(engine: Any, speculating: Any, model: Any) -> None:
    # The first answer ends with a block, whose last token was sampled and never computed.
    prompts = [prompt(seed, length) for seed, length in ((1, 106), (2, 133), (3, 40))]
    one = speculating(specs=model())
    for index, tokens in enumerate(prompts):
        one.add(f"r{index}", tokens, 150)
    one.run()
    assert one.drafts > one.rejected > 20 and "hook_errors" not in one.counters
    # An engine without a drafter reads what was stored meanwhile; the harness compares each value.
    other = engine(specs=model())
    for index, tokens in enumerate(prompts):
        longer = [*tokens, *one.outputs[f"r{index}"], *[5] * 40]
        _, external = other.generate(f"again{index}", longer, 8)
        assert external == (len(tokens) + 149) // BLOCK_TOKENS * BLOCK_TOKENS
