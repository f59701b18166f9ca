"""KV that is not what its key promises never leaves the engine: sparse decode's, and what is
computed from it.

The engines that decode sparsely are `approximate.Approximate`; every other engine fails at the
first of their approximate values that it reads.
"""

import functools
import random
from typing import Any

import pytest

from hotkv_sparse import SparseConfig
from hotkv_vllm.identity.exactness import EVERYTHING, Exactness
from hotkv_vllm.sparse.rows import RowNames, announce
from tests.vllm.approximate import SPARSE, Approximate, without_layers
from tests.vllm.harness import prompt
from tests.vllm.specs import HYBRIDS, full_model, hybrid_model
from tests.vllm.tiny import BLOCK_TOKENS


@pytest.fixture
def approximate(server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = []
    without_layers(monkeypatch)

    def make(**settings: Any) -> Approximate:
        made.append(Approximate(server, tmp_path / "model", monkeypatch, extra=SPARSE, **settings))
        return made[-1]

    yield make
    for one in made:
        one.worker.shutdown()
        one.connector.shutdown()


@pytest.mark.parametrize("model", [full_model, *HYBRIDS])
def test_what_was_decoded_sparsely_is_not_found_by_dense_engines(
    approximate: Any, engine: Any, model: Any
) -> None:
    sparse, first = approximate(specs=model()), prompt(1, 200)
    answer, _ = sparse.generate("a", first, 150)
    sparse.generate("stores end", prompt(9, 40))
    # The engine's own cache serves it the answer, and what follows builds on that.
    again = first + answer[:-1] + prompt(3, 100)
    sparse.generate("b", again, 100)
    sparse.generate("stores end again", prompt(9, 40))
    dense = engine(specs=model())
    assert dense.generate("c", again, 100)[1] >= 160
    assert dense.generate("d", first, 150)[0] == answer


def test_prompts_of_sparse_engines_are_shared_and_answers_below_the_least_context_too(
    approximate: Any, engine: Any
) -> None:
    sparse = approximate()
    answer, _ = sparse.generate("a", prompt(1, 40), 200)
    sparse.generate("b", prompt(2, 330), 1)
    sparse.generate("stores end", prompt(9, 40))
    dense = engine()
    # Rows are sparse from 96 tokens of context on: the token at position 95 is the first that is
    # not exact.
    assert dense.generate("c", prompt(1, 40) + answer, 1)[1] == 95 // BLOCK_TOKENS * BLOCK_TOKENS
    assert dense.generate("d", prompt(2, 330), 1)[1] == 320


def test_a_dense_connector_beside_a_sparse_one_does_not_store_either(
    server: Any, engine: Any
) -> None:
    """Both are of one engine, as in vLLM's MultiConnector; the engine decodes sparsely because of
    the other one."""
    one = engine()
    names = RowNames(SparseConfig(**SPARSE["sparse"]), ((0, BLOCK_TOKENS),))
    announce(str(one.vllm_config.kv_transfer_config.engine_id), names)
    request = one.add("a", prompt(1, 150), 200)
    names.arrived(request)
    one.run()
    one.generate("stores end", prompt(9, 40))
    stored = {block_hash for _, _, block_hash in server.blocks}
    assert stored.intersection(request.block_hashes) == set(
        request.block_hashes[: 150 // BLOCK_TOKENS]
    )


@pytest.mark.parametrize("pipelined", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", [full_model, hybrid_model, *HYBRIDS[2:]])
def test_conversations_in_any_order(
    approximate: Any, engine: Any, server: Any, pipelined: bool, model: Any
) -> None:
    """Turns build on earlier ones, in an engine with few blocks (preemption, eviction) and in dense
    ones."""
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
            contexts[talk] = (
                contexts[talk]
                + sparse.outputs[f"{turn}-{talk}"]
                + prompt(dice.randrange(9), dice.randrange(1, 40))
            )
            if len(contexts[talk]) > 400:
                contexts[talk] = prompt(dice.randrange(3, 9), 50)
        if dice.random() < 0.3:
            sparse.drop_local()
        one = dice.choice(dense)
        one.generate(f"{turn}", contexts[dice.randrange(3)], 5)
        one.drop_local()
        # What an exact engine has stored is as good for a sparse one.
        contexts[0] = contexts[0][: dice.randrange(20, 300)]
    # The model is arithmetic, so answers are exact whatever was read.
    assert not any("hook_errors" in one.counters for one in (sparse, *dense))
    assert sum(one.counters.get("hit_requests", 0) for one in dense) > 3


# ---------------------------------------------------------------------------------------- the class


def test_nothing_is_watched_without_need() -> None:
    one = Exactness((4, 0), 100)
    assert one.exact_tokens("any") == EVERYTHING
    one.step(None, (), ())
    one.step_was_lost()
    assert one.exact_tokens("any") == EVERYTHING


def output(
    scheduled: dict[str, tuple[int, int]],
    tables: dict[str, Any],
    new: Any = (),
    resumed: Any = (),
    copies: Any = (),
) -> Any:
    """Returns a step: (computed, scheduled) tokens of each request."""
    kind = functools.partial(type, "Output", ())
    return kind(
        {
            "kv_connector_block_state": kind({"get_block_ids": staticmethod(tables.get)})(),
            "kv_cache_block_copies": [
                kind({"src_block_id": a, "dst_block_id": b})() for a, b in copies
            ],
            "scheduled_new_reqs": [
                kind({"req_id": name, "num_computed_tokens": scheduled[name][0]})() for name in new
            ],
            "scheduled_cached_reqs": kind(
                {
                    "req_ids": [name for name in scheduled if name not in new],
                    "num_computed_tokens": [
                        scheduled[name][0] for name in scheduled if name not in new
                    ],
                    "resumed_req_ids": set(resumed),
                }
            )(),
            "num_scheduled_tokens": {name: tokens for name, (_, tokens) in scheduled.items()},
        }
    )()


def test_marks_follow_hits_copies_and_new_owners() -> None:
    one = Exactness((4,), 20)
    one.is_watching = True
    one.step(output({"a": (0, 8)}, {"a": ([1, 2],)}, new=["a"]), [1, 2], [])
    one.step(output({"a": (8, 1)}, {"a": ([1, 2, 3],)}), [3], ["a"])
    assert one.exact_tokens("a") == 8
    one.ended("a")
    # A hit in the marked block, and one in the block before it.
    one.step(
        output(
            {"b": (12, 4), "c": (8, 4)}, {"b": ([1, 2, 3, 4],), "c": ([1, 2, 5],)}, new=["b", "c"]
        ),
        [4, 5],
        [],
    )
    assert (one.exact_tokens("b"), one.exact_tokens("c")) == (8, EVERYTHING)
    one.ended("b")
    # Block 4 was computed from block 3; a copy of it into a new block is no better.
    one.step(output({"d": (14, 1)}, {"d": ([1, 2, 5, 6],)}, new=["d"], copies=[(4, 6)]), [6], [])
    assert one.exact_tokens("d") == 12
    # Given away anew, they are as good as any.
    one.step(output({"e": (0, 12)}, {"e": ([4, 6, 3],)}, new=["e"]), [3, 4, 6], [])
    assert one.exact_tokens("e") == EVERYTHING
    assert one.exact_tokens("never admitted") == 0


def test_after_distrust_only_new_blocks_are_exact() -> None:
    one = Exactness((4,), 20)
    one.distrust_all()
    one.step(output({"a": (4, 5)}, {"a": ([1, 2, 3],)}), [3], [])
    assert one.exact_tokens("a") == 0
    one.step(
        output({"b": (0, 8), "c": (4, 8)}, {"b": ([4, 5],), "c": ([1, 6, 7],)}, new=["b", "c"]),
        [4, 5, 6, 7],
        [],
    )
    assert (one.exact_tokens("b"), one.exact_tokens("c")) == (EVERYTHING, 0)
    # Preempted and computed again, it is exact.
    one.step(output({"a": (0, 12)}, {"a": ([8, 9, 10],)}, resumed=["a"]), [8, 9, 10], [])
    assert one.exact_tokens("a") == EVERYTHING
