"""Speculative decoding with asynchronous scheduling, which vLLM runs on GPUs only: vLLM's own
scheduler, the model that checks all KV."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm.compat import fingerprint, model_weights
from hotkv_vllm.scheduler import hits
from tests.vllm.harness import prompt
from tests.vllm.specs import hybrid_model
from tests.vllm.speculation import SpeculatingEngine
from tests.vllm.tiny import BLOCK_TOKENS, write_model


@pytest.fixture
def speculating(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SpeculatingEngine]]:
    made: list[SpeculatingEngine] = []
    # This drafter keeps no KV; what a real one keeps, in groups of its own, keeps engines with
    # other drafters apart.
    for module in (model_weights, fingerprint):
        monkeypatch.setattr(module, "draft_model", lambda _: None)
    drafter = {
        "method": "eagle",
        "model": str(write_model(tmp_path / "drafter", "eagle")),
        "num_speculative_tokens": 3,
    }

    def make(**settings: Any) -> SpeculatingEngine:
        made.append(
            SpeculatingEngine(
                server,
                tmp_path / "model",
                monkeypatch,
                pipelined=True,
                speculative_config=drafter,
                **settings,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.worker.shutdown()
        one.connector.shutdown()


@pytest.mark.parametrize("model", [None, hybrid_model])
def test_rejected_drafts_are_never_stored(
    engine: Any, speculating: Callable[..., SpeculatingEngine], model: Any
) -> None:
    specs = {} if model is None else {"specs": model()}
    # The first answer ends with a block, whose last token was sampled and never computed.
    prompts = [prompt(seed, length) for seed, length in ((1, 106), (2, 133), (3, 40))]
    one = speculating(**specs)
    for index, tokens in enumerate(prompts):
        one.add(f"r{index}", tokens, 150)
    one.run()
    assert one.drafts > one.rejected > 20 and "hook_errors" not in one.counters
    # An engine without a drafter reads what was stored meanwhile; the harness compares each value.
    other = engine(**specs)
    for index, tokens in enumerate(prompts):
        _, external = other.generate(
            f"again{index}", [*tokens, *one.outputs[f"r{index}"], *[5] * 40], 8
        )
        assert external == (len(tokens) + 149) // BLOCK_TOKENS * BLOCK_TOKENS


def test_preempted_among_drafts(
    engine: Any, speculating: Callable[..., SpeculatingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A quick machine would resume a preempted request while its miss is still remembered.
    monkeypatch.setattr(hits, "MISS_MEMORY_S", 0.0)
    prompts = [prompt(seed, 60) for seed in range(4, 8)]
    expected = [engine().generate("alone", tokens, 120)[0] for tokens in prompts]
    one = speculating(blocks=16)
    for _ in range(2):
        for index, tokens in enumerate(prompts):
            one.add(f"r{index}", tokens, 120)
        one.run()
        assert [one.outputs[f"r{index}"] for index in range(4)] == expected
        one.drop_local()
    assert one.preemptions > 0 and one.counters["loads"] > 0 and "hook_errors" not in one.counters
