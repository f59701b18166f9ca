"""Prompts that hide facts in a long text and ask for one.

Two tasks of RULER (arXiv 2404.06654), in other words: `single`, one fact (niah_single_2);
`multikey`, four similar ones (niah_multikey_1). A fact is a seven-digit number of a name of two
words. The haystack comes with Python: its licence, and `help()`'s language reference; every
prompt uses another part. Equal seeds give equal prompts.
"""

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS = {"single": 1, "multikey": 4}
"""Number of similar facts that a prompt hides."""
QUALITIES = (
    *("amber", "brittle", "crooked", "dusty", "eager", "faded", "gentle", "hollow", "icy"),
    *("jagged", "lively", "mellow", "narrow", "quiet", "rusty", "silver", "tidy", "wooden"),
)
THINGS = (
    *("anchor", "basket", "candle", "drawer", "engine", "fiddle", "garden", "hammer", "island"),
    *("kettle", "ladder", "mirror", "needle", "orchard", "pillow", "saddle", "teapot", "wagon"),
)
FACT = "Note: the locker number of the {name} is {number}."
OPENING = (
    "Somewhere in the text below there are notes about locker numbers. Read the text and keep the "
    "numbers in mind; you will be asked about them at the end.\n\n"
)
QUESTION = "\n\nWhat is the locker number of the {name} that the text above notes?\n"
ANSWER = "According to the note, the locker number of the {name} is"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ends right before the answer.

    task: of TASKS.
    number: the right answer.
    depth_ratio: where the wanted fact is, 0 to 1.
    """

    task: str
    tokens: tuple[int, ...]
    number: str
    depth_ratio: float

    def is_answered_by(self, said: str) -> bool:
        """Does the answer begin with the number?"""
        return said.strip().startswith(self.number)


def haystack() -> str:
    """About 200,000 tokens."""
    from pydoc_data.topics import topics

    spec = importlib.util.find_spec("os")
    assert spec is not None and spec.origin is not None, "Python has its standard library"
    licence = Path(spec.origin).parent / "LICENSE.txt"
    texts = [licence.read_text()] if licence.is_file() else []
    return "\n\n".join([*texts, *topics.values()])


def prompts(
    task: str, count: int, num_tokens: int, encode: Encode, seed: int = 0, hay: str | None = None
) -> list[Prompt]:
    """Nearly `num_tokens` each, never more. Raises ValueError if the haystack is too short. hay:
    None: `haystack()`.
    """
    dice = random.Random(f"{task} {seed}")
    lines = [" ".join(part.split()) for part in (hay or haystack()).split("\n\n")]
    parts = [line for line in lines if line]
    found, place = [], 0
    for number in range(count):
        facts = _facts(dice, TASKS[task])
        # Evenly spread; random ones might leave a part out.
        depth_ratio = (number + dice.random()) / count
        frame = _text(facts, [], depth_ratio, dice)
        room = num_tokens - len(encode(frame))
        chosen: list[str] = []
        while True:
            if place == len(parts):
                raise ValueError(f"the haystack is too short for {count} prompts")
            # A token more for each joint is always enough.
            room -= len(encode(parts[place])) + 1
            if room < 0:
                break
            chosen.append(parts[place])
            place += 1
        tokens = encode(_text(facts, chosen, depth_ratio, dice))
        if not chosen:
            raise ValueError(f"a paragraph of the haystack has more than {num_tokens} tokens")
        found.append(Prompt(task, tuple(tokens), facts[0][1], depth_ratio))
    return found


def _facts(dice: random.Random, count: int) -> list[tuple[str, str]]:
    """(name, number) each; the first is asked for."""
    names = dice.sample([f"{quality} {thing}" for quality in QUALITIES for thing in THINGS], count)
    return list(zip(names, map(str, dice.sample(range(10**6, 10**7), count)), strict=True))


def _text(
    facts: Sequence[tuple[str, str]], parts: Sequence[str], depth_ratio: float, dice: random.Random
) -> str:
    """The wanted fact at `depth_ratio`, the others at random."""
    lines = list(parts)
    notes = [FACT.format(name=name, number=number) for name, number in facts]
    for note in notes[1:]:
        lines.insert(dice.randint(0, len(lines)), note)
    lines.insert(round(depth_ratio * len(lines)), notes[0])
    name = facts[0][0]
    return OPENING + "\n".join(lines) + QUESTION.format(name=name) + ANSWER.format(name=name)
