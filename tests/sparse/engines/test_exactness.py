"""No KV of sparse decode is stored, and none computed from it. Only `Approximate` engines may
read inexact values."""

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_sparse import SparseConfig
from hotkv_sparse.vllm.scheduler.rows import RowNames
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness, announce
from tests.sparse.engines.approximate import SPARSE, Approximate, cannot_install, without_layers
from tests.vllm.harness import Engine, prompt
from tests.vllm.other_connectors import PLAN, beside, loads_into
from tests.vllm.parts import admission
from tests.vllm.specs import HYBRIDS, full_model, hybrid_model, states_and_full_model
from tests.vllm.speculation import SpeculatingEngine, speculating
from tests.vllm.tiny import BLOCK_TOKENS


@pytest.fixture
def approximate(make: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    without_layers(monkeypatch)
    return functools.partial(make, Approximate, extra=SPARSE)


def test_sparse_engines_share_prompts_and_short_answers(approximate: Any, engine: Any) -> None:
    sparse = approximate()
    answer, _ = sparse.generate("a", prompt(1, 40), 200)
    sparse.fill(prompt(2, 330), 1)
    dense = engine()
    # Sparse from 97 tokens: position 96 is the first inexact one.
    assert dense.generate("c", prompt(1, 40) + answer, 1)[1] == 96
    assert dense.generate("d", prompt(2, 330), 1)[1] == 320


def test_answers_within_the_budget_are_shared(approximate: Any, engine: Any) -> None:
    sparse, dense = approximate(extra={"sparse": SPARSE["sparse"] | {"sparse_topk": 192}}), engine()
    answer, _ = sparse.generate("a", prompt(1, 40), 200)
    # A budget of 192 tokens: position 192 is the first inexact one.
    assert dense.generate("c", prompt(1, 40) + answer, 1)[1] == 192


def test_dense_workers_answers_are_shared(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cannot_install(monkeypatch)
    one, other = engine(extra=SPARSE), engine()
    answer, _ = one.generate("a", prompt(1, 40), 200)
    assert other.generate("c", prompt(1, 40) + answer, 1)[1] == 224


def streamed(one: Any) -> list[int]:
    """Tokens of its context, with two streamed chunks and then aborted."""
    for chunk in (prompt(1, 100), prompt(2, 60)):
        one.add("a", chunk, 5, resumable=True)
        one.steps(20)
    context = one.scheduler.requests["a"].prompt_token_ids[:]
    one.abort("a")
    return context


def test_streamed_input_behind_sparse_answer_isnt_shared(approximate: Any, engine: Any) -> None:
    """The second chunk begins in a block with the sparse answer's end."""
    sparse = approximate()
    context = streamed(sparse)
    sparse.generate("stores end", prompt(9, 40))
    assert len(context) == 164 and sparse.num_sparse_rows
    assert engine().generate("b", [*context, 7], 1)[1] == 96


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("speculates", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("model", [full_model, states_and_full_model])
def test_later_streamed_turn_shares_from_right_kv(
    make: Any, monkeypatch: Any, tmp_path: Any, model: Any, speculates: bool, pipelined: bool
) -> None:
    """vLLM keeps drafts' KV behind the answer, and resets no states to its end."""
    kind, more = Engine, {"specs": model(), "pipelined": pipelined}
    if speculates:
        kind, more = SpeculatingEngine, more | speculating(monkeypatch, tmp_path)
    one, other = make(kind, **more), make(kind, **more)
    has_states = model is states_and_full_model
    is_wrong = speculates or pipelined if has_states else speculates > pipelined
    if is_wrong:
        # vLLM itself continues from wrong KV.
        monkeypatch.setattr(one, "_check", lambda *_: None)
        monkeypatch.setattr(one, "_check_state", lambda *_: None)
    context = streamed(one)
    one.fill([*context, 7], 40)
    # With a drafter the last block's KV depends on the next token.
    shared = (96 if is_wrong else 160) - BLOCK_TOKENS * speculates
    assert other.generate("c", [*context, 7], 1)[1] == shared


def test_dense_connector_beside_sparse_stores_nothing_either(server: Any, engine: Any) -> None:
    """The engine's other connector decodes sparsely."""
    one = engine()
    names = RowNames(SparseConfig(**SPARSE["sparse"]), ((0, BLOCK_TOKENS),))
    announce(str(one.vllm_config.kv_transfer_config.engine_id), names)
    request = one.add("a", prompt(1, 150), 200)
    names.arrived(request)
    one.run()
    one.generate("stores end", prompt(9, 40))
    stored = {block_hash for _, _, block_hash in server.blocks}
    exact = set(request.block_hashes[: 150 // BLOCK_TOKENS])
    assert stored.intersection(request.block_hashes) == exact


def test_states_that_another_connector_loads_are_inexact() -> None:
    """Block size 0: a state covers no fixed number of tokens."""
    exactness = Exactness((0,), 4)
    exactness.distrust_all()
    exactness.matched("a", 16)
    exactness.step(admission("a", 64, 1), [1, 2], ())
    assert exactness.exact_tokens("a") == 0


def test_a_copy_of_an_inexact_block_is_inexact() -> None:
    exactness = Exactness((BLOCK_TOKENS,), 4)
    exactness.distrust_all()
    exactness.matched("a", BLOCK_TOKENS)
    step = admission("a", BLOCK_TOKENS, 1)
    step.kv_cache_block_copies = [SimpleNamespace(src_block_id=1, dst_block_id=2)]
    step.kv_connector_block_state.get_block_ids = lambda _: ([2, 3],)
    exactness.step(step, [2], ())
    assert exactness.exact_tokens("a") == 0


def test_blocks_that_are_computed_anew_are_exact_again() -> None:
    exactness = Exactness((BLOCK_TOKENS,), 4)
    exactness.distrust_all()
    for name, hit, computed, written, exact_tokens in (
        ("hits what was distrusted", 2, 2 * BLOCK_TOKENS, (), 0),
        ("computes the first block", 0, 0, (1,), EVERYTHING),
        ("computes the end of its hit again", 2, BLOCK_TOKENS, (2,), BLOCK_TOKENS),
        ("hits what is half exact", 2, 2 * BLOCK_TOKENS, (), BLOCK_TOKENS),
        ("computes", 0, 0, (1, 2), EVERYTHING),
        ("hits what was computed", 2, 2 * BLOCK_TOKENS, (), EVERYTHING),
    ):
        exactness.matched(name, hit * BLOCK_TOKENS)
        exactness.step(admission(name, computed, 2 * BLOCK_TOKENS - computed or 1), written, ())
        assert exactness.exact_tokens(name) == exact_tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_that_another_connector_loads_are_not_shared(
    approximate: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """The other connector may have stored them from a sparse answer."""
    sparse = approximate(within=beside("LoadingConnector", ours_first=False))
    sparse.generate("connects", prompt(9, 5), 2)
    tokens = prompt(1, 200)

    def fill(name: str, *what: Any) -> None:
        sparse.sparse_rows = frozenset({name})
        loads_into(sparse)(name, *what)

    monkeypatch.setattr(PLAN, "is_async", is_async)
    monkeypatch.setattr(PLAN, "fill", fill)
    sparse.generate("a", tokens[:90], 1)
    PLAN.tokens |= {"b": 192}
    sparse.generate("b", tokens, 1)
    assert sparse.external["b"] == 128
    sparse.fill(tokens, 1)
    assert engine().generate("d", tokens, 1)[1] == 64


@pytest.mark.parametrize(
    "pipelined",
    [pytest.param(False, id="sync", marks=pytest.mark.long), pytest.param(True, id="async")],
)
@pytest.mark.parametrize("model", [full_model, hybrid_model, *HYBRIDS[2:]])
def test_conversations_in_any_order(
    approximate: Any, engine: Any, server: Any, pipelined: bool, model: Any
) -> None:
    dice = random.Random(0)
    sparse = approximate(specs=model(), pipelined=pipelined, blocks=40, max_tokens_per_step=128)
    dense = [engine(specs=model(), pipelined=pipelined) for _ in range(2)]
    contexts = [prompt(family, dice.randrange(30, 120)) for family in range(3)]
    for turn in range(25):
        talks = dice.sample(range(3), dice.randrange(1, 4))
        for talk in talks:
            sparse.add(f"{turn}-{talk}", contexts[talk], dice.randrange(1, 60))
        if dice.random() < 0.2:
            for _ in range(dice.randrange(10)):
                sparse.step()
            sparse.abort(f"{turn}-{talks[0]}")
        sparse.run()
        for talk in talks:
            asked = prompt(dice.randrange(9), dice.randrange(1, 40))
            contexts[talk] = contexts[talk] + sparse.outputs[f"{turn}-{talk}"] + asked
            if len(contexts[talk]) > 400:
                contexts[talk] = prompt(dice.randrange(3, 9), 50)
        if dice.random() < 0.3:
            sparse.drop_local()
        one = dice.choice(dense)
        one.generate(f"{turn}", contexts[dice.randrange(3)], 5)
        one.drop_local()
        # Later requests share only its beginning, stored by a dense engine.
        contexts[0] = contexts[0][: dice.randrange(20, 300)]
    # The model answers exactly even from inexact KV.
    assert not any("callback_errors" in one.counters for one in (sparse, *dense))
    assert sum(one.counters.get("hit_requests", 0) for one in dense) > 3


def test_a_load_that_was_under_way_is_shared_by_nobody() -> None:
    """Its bytes may be older than what made the KV on the device inexact."""
    exactness, emptied = Exactness((16,), 8), list[bool]()
    exactness.distrusted = lambda: emptied.append(True)
    loading, new = (SimpleNamespace(request_id=name, num_computed_tokens=32) for name in "ab")
    exactness.matched("a", 16)
    assert exactness.shareable_tokens(loading) == EVERYTHING
    exactness.distrust_all()
    assert emptied and exactness.shareable_tokens(loading) == 0
    exactness.matched("b", 16)
    assert exactness.shareable_tokens(new) == EVERYTHING
    exactness.matched("a", 0)
    assert exactness.shareable_tokens(loading) == EVERYTHING
