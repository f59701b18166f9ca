"""Tests the forward pass of `bench.sparse_quality` against transformers, and its sparse decode
against dense attention."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.sparse.decode import Decode, Outcome, scorer_of
from bench.sparse.llama import Calibration, Dense, Llama, Own, calibration, dense_pass
from bench.sparse.texts import REPEAT, Text
from bench.sparse.variants import (
    ENDS,
    FRESH,
    LRU,
    ORACLE,
    RESIDENT,
    TIGHT,
    Variant,
    bytes_per_token,
    field_variants,
)
from bench.sparse_quality import Row, targets, text_targets
from hotkv_sparse.axes import MIN_TOKENS
from hotkv_sparse.centre import Centres

CONTEXT_TOKENS, COMPARED_TOKENS, DENSE_LAYERS = 320, 64, 2


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (CONTEXT_TOKENS + 1,), generator=torch.Generator().manual_seed(6))


def _calibrated(dense: Dense) -> Calibration:
    own = Own.of(dense)
    # A file of centres need not contain every layer.
    file = Centres("tiny", MIN_TOKENS, {DENSE_LAYERS: own.whole_L[0]})
    return calibration(own, own, file, DENSE_LAYERS)


@torch.inference_mode()
def test_forward_pass_is_that_of_transformers(model_folder: Path, tokens: torch.Tensor) -> None:
    from transformers import LlamaForCausalLM

    expected = (
        LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)(tokens[None, :-1])
        .logits[0]
        .log_softmax(-1)
    )
    dense = dense_pass(Llama(model_folder), tokens[:-1], COMPARED_TOKENS, DENSE_LAYERS)
    torch.testing.assert_close(dense.log_probs_NW, expected[-COMPARED_TOKENS:], atol=2e-4, rtol=0)


@torch.inference_mode()
def test_budgets_that_cover_the_context_change_nothing(
    model_folder: Path, tokens: torch.Tensor
) -> None:
    model = Llama(model_folder)
    dense = dense_pass(model, tokens[:-1], COMPARED_TOKENS, DENSE_LAYERS)
    ways = itertools.cycle([(FRESH, 0), (LRU, 2)])
    variants = [
        Variant(scorer, 1.0, block_tokens, shared, *next(ways))
        for scorer, block_tokens, shared in (
            (ORACLE, 16, False),
            ("rot2u", 32, True),
            ("quest", 16, True),
            ("rot2u+mu", 32, False),
            ("rot3u+own", 16, True),
            ("rot2u+file", 16, False),
            ("mix2+own", 16, False),
            ("mix2+first", 32, True),
            ("lowrank4", 32, True),
            ("quest8", 32, False),
            ("mean4", 16, True),
        )
    ]
    for outcome in Decode(model, dense, tokens, _calibrated(dense), variants).run():
        assert abs(outcome.kl) < 1e-4 and abs(outcome.delta_nll) < 1e-4, outcome
        assert outcome.recall in (1.0, None)
        assert outcome.attended_ratio == pytest.approx(1.0)


@torch.inference_mode()
def test_smaller_budgets_attend_less_better_scorers_lose_less(
    model_folder: Path, tokens: torch.Tensor
) -> None:
    model = Llama(model_folder)
    dense = dense_pass(model, tokens[:-1], COMPARED_TOKENS, DENSE_LAYERS)
    variants = [Variant(ORACLE, 0.6, 16, False), Variant(ENDS, 0.6, 16, False)]
    oracle, ends = Decode(model, dense, tokens, _calibrated(dense), variants).run()
    assert 0.5 < oracle.attended_ratio < 0.62 and ends.attended_ratio < 0.4
    assert 0.0 < oracle.kl < ends.kl


def test_targets_take_the_worst_text() -> None:
    tight = Variant("rot2u", *TIGHT)
    outcomes = {
        "prose": Outcome(tight, 0.01, 0.9, 0.99, 0.05, 0.0),
        "more": Outcome(tight, 0.06, 0.9, None, 0.05, 0.0),
        REPEAT: Outcome(tight, 0.9, 0.02, 0.97, 0.05, 0.0),
    }
    rows = [Row(Text(name, "here", ()), outcome) for name, outcome in outcomes.items()]
    kl, loss, recall, *served = targets(rows, "rot2u")
    assert (kl.value, loss.value, recall.value) == (0.06, 0.02, 0.97)
    assert (kl.met, loss.met, recall.met) == (False, True, False)
    assert [(target.value, target.met) for target in served] == [(None, False)] * 2


def test_targets_by_text_are_each_texts_own() -> None:
    variant = Variant("rot2u", 0.20, *RESIDENT)
    rows = [
        Row(Text(name, "here", ()), Outcome(variant, kl, loss, None, 0.2, 0.0))
        for name, kl, loss in (("gpl3", 0.021, 0.0), ("prose", 0.009, 0.0), (REPEAT, 0.9, -0.01))
    ]
    found = {target.name.split(": ")[1]: target.met for target in text_targets(rows, variant)}
    assert found == {"prose kl": True, "gpl3 kl": False, "copy delta_nll": True}
    assert text_targets(rows, Variant("mix2+own", 0.20, *RESIDENT)) == []


@pytest.mark.parametrize(
    ("parted", "whole", "part_tokens", "merged"),
    [("quest8", "quest", 8, np.maximum), ("mean4", "mean", 4, np.logaddexp)],
)
def test_parted_scorers_merge_their_parts_scores(
    parted: str, whole: str, part_tokens: int, merged: np.ufunc
) -> None:
    dice = np.random.default_rng(7)
    keys_LHSD = [torch.from_numpy(dice.normal(size=(2, 64, 16)).astype(np.float32))]
    query_QD = dice.normal(size=(4, 16)).astype(np.float32)
    blocks, none = np.arange(4, dtype=np.int32), Calibration({})
    found = scorer_of(Variant(parted, 1.0, 16, False), keys_LHSD, 32, 64, none)
    plain = scorer_of(Variant(whole, 1.0, part_tokens, False), keys_LHSD, 64, 64, none)
    assert found is not None and plain is not None
    for block in (2, 3):
        keys_THD = keys_LHSD[0][:, 16 * block : 16 * (block + 1)].transpose(0, 1)
        found.block_filled(0, block, keys_THD.contiguous().numpy())
    parts = plain.scores(0, query_QD, np.arange(64 // part_tokens, dtype=np.int32))
    expected = merged.reduce(parts.reshape(4, 4, -1), axis=2)
    np.testing.assert_allclose(found.copy().scores(0, query_QD, blocks), expected, rtol=1e-6)


def test_field_variants_but_quest_have_equal_bytes() -> None:
    sizes = {
        variant.scorer: size
        for variant in field_variants()
        if (size := bytes_per_token(variant, 64)) is not None
    }
    assert sizes.pop("quest") < 9
    assert len(sizes) == 5 and all(17 <= size < 19 for size in sizes.values())
