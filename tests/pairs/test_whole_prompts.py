"""Attention that is not causal: a block's KV depends on the whole prompt, so hotkv must refuse
to share it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hotkv_vllm.compat import reuse
from tests.pairs.servers import Double
from tests.vllm.harness import prompt
from tests.vllm.specs import full_model
from tests.vllm.whole_prompts import NonCausal, Pooling

Make = Callable[..., Any]
PROMPT = prompt(1, 200)


@pytest.fixture
def server() -> Double:
    return Double()


def non_causal(make: Make) -> Any:
    specs = {name: replace(spec, non_causal=True) for name, spec in full_model().items()}
    return make(NonCausal, specs=specs, max_tokens_per_step=512)


def ask(one: Any) -> None:
    for name, tokens in (("a", PROMPT), ("b", [*PROMPT[:160], 5, 6, 7]), ("c", PROMPT)):
        one.generate(name, tokens, 4)
        one.generate(f"{name} ends", prompt(9, 3), 2)
        one.drop_local()


def test_non_causal_attention_is_refused_in_words(
    make: Make, server: Double, warnings: list[str]
) -> None:
    ask(non_causal(make))
    assert not server.blocks
    assert any(
        "vLLM itself forbids prefix caching: the model has non-causal attention layers" in text
        for text in warnings
    )


def test_the_harness_sees_kv_of_another_prompt(
    make: Make, server: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "check_reuse", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong KV"):
        ask(non_causal(make))
    assert server.blocks


def test_last_tokens_vector_equals_after_a_hit(make: Make) -> None:
    one, other = make(Pooling), make(Pooling)
    for engine, external in ((one, 0), (other, 192)):
        engine.add("a", PROMPT)
        engine.run()
        engine.add("end", prompt(9, 3))
        engine.run()
        assert engine.external["a"] == external
    assert one.pooled["a"] == other.pooled["a"]


def test_pooling_over_all_tokens_is_refused_in_words(
    make: Make, server: Double, warnings: list[str]
) -> None:
    one = make(Pooling, pooler_config={"seq_pooling_type": "MEAN"}, max_tokens_per_step=512)
    one.add("a", PROMPT)
    one.run()
    one.add("end", prompt(9, 3))
    one.run()
    assert not server.blocks and one.pooled["a"]
    assert any("this pooling needs all tokens of a text at once" in text for text in warnings)
