"""Prompts with hidden facts: what they hide, where, and what counts as an answer."""

from dataclasses import replace

import pytest

from bench.sparse.engine import Setup
from bench.sparse.needles import TASKS, prompts
from bench.sparse_engine import Row as EngineRow
from bench.sparse_engine import missed as engine_missed
from bench.sparse_needles import Row, missed

WORDS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    return [WORDS.setdefault(word, len(WORDS)) for word in text.split()]


def decode(tokens: tuple[int, ...]) -> str:
    words = {number: word for word, number in WORDS.items()}
    return " ".join(words[token] for token in tokens)


HAY = "\n\n".join(
    f"Paragraph {number} " + " ".join(f"w{number}x{place}" for place in range(number % 30 + 5))
    for number in range(2000)
)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_prompt_hides_its_facts_in_text_of_its_own(task: str) -> None:
    found = prompts(task, 8, 500, encode, seed=3, hay=HAY)
    assert found == prompts(task, 8, 500, encode, seed=3, hay=HAY)
    assert found != prompts(task, 8, 500, encode, seed=4, hay=HAY)
    seen: set[str] = set()
    for number, prompt in enumerate(found):
        text = decode(prompt.tokens)
        assert 440 < len(prompt.tokens) <= 500
        assert text.count("Note: the locker number of the") == TASKS[task]
        assert text.count(prompt.number) == 1
        name = text.rpartition("locker number of the ")[2].removesuffix(" is")
        assert f"locker number of the {name} is {prompt.number}." in text
        assert number / 8 <= prompt.depth_ratio <= (number + 1) / 8
        place = text.index(prompt.number) / len(text)
        assert place == pytest.approx(prompt.depth_ratio, abs=0.2)
        paragraphs = {word for word in text.split() if word.startswith("w") and "x" in word}
        assert paragraphs and not paragraphs & seen
        seen |= paragraphs


def test_an_answer_begins_with_the_number() -> None:
    (prompt,) = prompts("single", 1, 300, encode, hay=HAY)
    assert prompt.is_answered_by(f" {prompt.number}. And so on")
    assert not prompt.is_answered_by(f" 1{prompt.number}")
    assert not prompt.is_answered_by(f"It is {prompt.number}")
    assert not prompt.is_answered_by("")


def test_held_scorers_may_miss_one_prompt_more_than_dense() -> None:
    rows = [Row(None, {"single": 10, "multikey": 9})]
    for scorer, right in (("rot2u", 18), ("mix2", 17), ("mean", 0)):
        rows.append(Row(Setup(scorer=scorer, budget=256), {"single": 9, "multikey": right - 9}))
    assert missed(rows) == ["mix2 at 256"]


def test_bounds_of_residency_hold_at_its_settings_alone() -> None:
    setup = Setup(dense_layers=0, budget=0.1)
    rows = [
        EngineRow("prose", "rot2u", 0.0101, 0.0, 0.008, 0.0),
        EngineRow("gpl3", "rot2u", 0.0199, 0.5, 0.0199, 0.0),
        EngineRow("repeat", "rot2u", 0.5, 0.001, None, None),
        EngineRow("vimdoc", "rot2u", 0.5, 0.1, 0.1, 0.0),
    ]
    assert [engine_missed(row, setup) for row in rows] == [
        "KL > 0.01", "", "ΔNLL > 0", "ratio > 1.5",
    ]  # fmt: skip
    for other in (replace(setup, dense_layers=2), replace(setup, budget=256)):
        assert [engine_missed(row, other) for row in rows] == ["", "", "", "ratio > 1.5"]
