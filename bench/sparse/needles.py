"""Generates prompts that hide facts in a long text and ask for one of them.

Two tasks of RULER (arXiv 2404.06654), in other words. `single`: one fact (niah_single_2).
`multikey`: four similar facts, of which the prompt asks for one (niah_multikey_1). A fact is a
seven-digit number that belongs to a name of two words. The haystack is text that comes with Python:
its licence, and the language reference of `help()`. Every prompt uses another part of it.

Equal seeds give equal prompts."""

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS = {"single": 1, "multikey": 4}
"""Number of similar facts that a prompt hides, by task. The prompt asks for one of them."""
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
    """A prompt that hides facts in a long text and ends right before the answer.

    task: a key of TASKS.
    number: the right answer.
    depth_ratio: relative position of the wanted fact in the long text, 0 to 1.
    """

    task: str
    tokens: tuple[int, ...]
    number: str
    depth_ratio: float

    def is_answered_by(self, said: str) -> bool:
        """Returns True if the answer begins with the wanted number."""
        return said.strip().startswith(self.number)


def haystack() -> str:
    """Returns Python's licence followed by its language reference, about 200,000 tokens."""
    from pydoc_data.topics import topics

    spec = importlib.util.find_spec("os")
    assert spec is not None and spec.origin is not None, "Python has its standard library"
    licence = Path(spec.origin).parent / "LICENSE.txt"
    texts = [licence.read_text()] if licence.is_file() else []
    return "\n\n".join([*texts, *topics.values()])


def prompts(
    task: str, count: int, num_tokens: int, encode: Encode, seed: int = 0, hay: str | None = None
) -> list[Prompt]:
    """Returns `count` prompts of the task `task`, each with nearly `num_tokens` tokens, but not
    more. Raises ValueError if the haystack (the long text) is too short for them.

    encode: the tokenizer.
    hay: the long text; None: `haystack()`.
    """
    dice = random.Random(f"{task} {seed}")
    lines = [" ".join(part.split()) for part in (hay or haystack()).split("\n\n")]
    parts = [line for line in lines if line]
    found, place = [], 0
    for number in range(count):
        facts = _facts(dice, TASKS[task])
        # Spreads the positions of the wanted facts evenly over the text; random positions might
        # leave a part of the text out.
        depth_ratio = (number + dice.random()) / count
        frame = _text(facts, [], depth_ratio, dice)
        room = num_tokens - len(encode(frame))
        chosen: list[str] = []
        while True:
            if place == len(parts):
                raise ValueError(f"the haystack is too short for {count} prompts")
            # Counts one extra token for each place where two parts are
            # joined, which is always enough.
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
    """Returns different facts, (name, number) each. The prompt asks for the first."""
    names = dice.sample([f"{quality} {thing}" for quality in QUALITIES for thing in THINGS], count)
    return list(zip(names, map(str, dice.sample(range(10**6, 10**7), count)), strict=True))


def _text(
    facts: Sequence[tuple[str, str]], parts: Sequence[str], depth_ratio: float, dice: random.Random
) -> str:
    """Returns a prompt made of the long text's `parts`, with the wanted fact at the relative
    position `depth_ratio` and the other facts at random positions."""
    lines = list(parts)
    notes = [FACT.format(name=name, number=number) for name, number in facts]
    for note in notes[1:]:
        lines.insert(dice.randint(0, len(lines)), note)
    lines.insert(round(depth_ratio * len(lines)), notes[0])
    name = facts[0][0]
    return OPENING + "\n".join(lines) + QUESTION.format(name=name) + ANSWER.format(name=name)
