"""Tests the prompts and figures of `bench.sparse_needles`, and its selection by exact
attention."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.sparse.engine import Setup
from bench.sparse.needles import Prompt
from bench.sparse_needles import TASKS, Row, missed
from hotkv_sparse import SparseConfig, span
from hotkv_sparse.selection import exact_log_mass

PROMPT_TOKENS, NUM_PROMPTS = 1500, 3
_words: list[str] = []
_numbers: dict[str, int] = {}


def encode(text: str) -> list[int]:
    """Words with what precedes them, and other characters."""
    pieces = re.findall(r"\s?\w+|\W", text)
    for piece in pieces:
        if _numbers.setdefault(piece, len(_words)) == len(_words):
            _words.append(piece)
    return [_numbers[piece] for piece in pieces]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_of_a_seed_fit_and_are_alike(task: str) -> None:
    made = TASKS[task](NUM_PROMPTS, PROMPT_TOKENS, encode, 0)
    assert len({prompt.tokens for prompt in made}) == NUM_PROMPTS
    assert all(
        0.8 * PROMPT_TOKENS < len(prompt.tokens) <= PROMPT_TOKENS and prompt.task == task
        for prompt in made
    )
    assert made == TASKS[task](NUM_PROMPTS, PROMPT_TOKENS, encode, 0)
    assert made != TASKS[task](NUM_PROMPTS, PROMPT_TOKENS, encode, 1)


@pytest.mark.parametrize("task", ["single", "multikey", "manykey"])
def test_the_note_asked_for_has_the_right_number(task: str) -> None:
    for prompt in TASKS[task](NUM_PROMPTS, PROMPT_TOKENS, encode, 0):
        text = "".join(_words[token] for token in prompt.tokens)
        name = text.rpartition("the locker number of the ")[2].removesuffix(" is")
        (number,) = re.findall(rf"Note: the locker number of the {name} is (\d+)\.", text)
        assert prompt.reply == ("", f" {number}")


def test_a_chain_of_notes_leads_to_the_value() -> None:
    for prompt in TASKS["variables"](NUM_PROMPTS, PROMPT_TOKENS, encode, 0):
        text = "".join(_words[token] for token in prompt.tokens)
        known = dict(re.findall(r"Note: the value of (\w+) is (?:the value of )?(\w+)\.", text))
        name = text.rpartition("the value of ")[2].removesuffix(" is")
        followed = []
        while name in known:
            name = known[name]
            followed.append(f" {name}")
        assert prompt.reply[1::2] == tuple(followed) and followed[-1].strip().isdecimal()
        notes = re.findall(r"the value of (\w+) is the value of (\w+)", "".join(prompt.reply))
        assert all(known[one] == before for one, before in notes) and len(notes) == 2


def test_the_word_asked_for_is_most_frequent() -> None:
    for prompt in TASKS["words"](NUM_PROMPTS, PROMPT_TOKENS, encode, 0):
        text = "".join(_words[token] for token in prompt.tokens)
        listed = text.rpartition("remember it.\n\n")[2].partition("\n\n")[0].split()
        (most, count), (_, second) = Counter(listed).most_common(2)
        assert prompt.reply == ("", f" {most}") and count > 10 * second


def test_only_words_of_a_reply_count() -> None:
    prompt = Prompt("variables", (), (" of", " a b", ". of", " c"))
    tokens, words = prompt.forced(encode)
    found = [[_words[token] for token in tokens[word]] for word in words]
    assert found == [[" a", " b"], [" c"]]
    # Decode would choose all but the second token of the first word.
    log_probs_NW = torch.full((len(tokens), len(_words)), -9.0)
    for place, token in enumerate(tokens):
        log_probs_NW[place, token if place != words[0].start + 1 else 0] = -0.5
    row = Row("variables", None)
    row.add(log_probs_NW, log_probs_NW, (tokens, words))
    assert (row.right, row.kl) == (0.5, 0.0) and row.loss == pytest.approx((0.5 + 9 + 0.5) / 3)
    row.add(log_probs_NW[:, [0] * len(_words)], log_probs_NW, (tokens, words))
    assert row.num_prompts == 2 and row.right == 0.25


def test_a_scorer_two_needles_behind_dense_has_missed() -> None:
    def rows(setup: Setup | None, single: float, words: float) -> list[Row]:
        return [Row("single", setup, 10, single), Row("words", setup, 10, words)]

    near, far, other = (Setup(scorer=scorer) for scorer in ("mix2", "rot2u", "quest"))
    found = [*rows(None, 0.9, 0.9), *rows(near, 0.8, 0.0), *rows(far, 0.7, 0.9)]
    assert missed([*found, *rows(other, 0.0, 0.0)]) == ["rot2u at 0.2"]


def test_exact_decoder_takes_the_heaviest_blocks() -> None:
    from bench.sparse.exact import ExactDecoder, log_mass

    dice = np.random.default_rng(3)
    keys_BTHD = dice.normal(size=(12, 16, 2, 8)).astype(np.float32)
    query_QD = dice.normal(size=(6, 8)).astype(np.float32)
    expected = [exact_log_mass(query_QD, keys, 0.5) for keys in keys_BTHD]
    np.testing.assert_allclose(
        log_mass(query_QD, keys_BTHD, 0.5), np.stack(expected, axis=1), rtol=1e-5
    )
    config = SparseConfig(sparse_topk=112, scorer="rot2u", sink_tokens=16, recent_tokens=16)
    where = span(config, 192, 16)
    keys_BTHD[7] = keys_BTHD[3] = 4.0 * query_QD.reshape(2, 3, 8).mean(axis=1)
    layer: Any = SimpleNamespace(
        keys_of=lambda blocks: keys_BTHD[blocks],
        pages=SimpleNamespace(log_mass=lambda *_: np.zeros(6, np.float32)),
        scale=0.5,
        shape=SimpleNamespace(block_tokens=16),
    )
    selected, nothing = np.zeros(12, np.bool_), np.empty(0, np.int32)
    own: Any = None
    found = ExactDecoder(config, layer).step(
        own, {}, query_QD, np.arange(12, dtype=np.int32), nothing, 0, 192, where, selected
    )
    assert len(found.blocks) == 7 and {0, 3, 7, 11} <= set(found.blocks.tolist())
    assert np.flatnonzero(selected).tolist() == found.blocks.tolist()


def test_budget_of_the_engine_does_not_cover_contexts() -> None:
    # The scheduler lists no row whose context the budget covers.
    given = dict(Setup(min_tokens=1024).extra_config()["hotkv.sparse"])
    config = SparseConfig(**(given | {"dense_layers": tuple(given["dense_layers"])}))
    assert not config.covers(1024, 32)
