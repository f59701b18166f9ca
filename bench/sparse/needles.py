"""Prompts that hide facts in a long text and ask for one.

After RULER (arXiv 2404.06654), in other words: `single`, one fact (niah_single_2); `multikey`, four
similar ones (niah_multikey_1); `manykey`, sixteen. A fact is a seven-digit number of a name of two
words. The haystack comes with Python: its licence, and `help()`'s language reference; every prompt
uses another part. Equal seeds give equal prompts.
"""

import importlib.util
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TASKS = {"single": 1, "multikey": 4, "manykey": 16}
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

    reply: the right answer: what precedes a word, the word, what precedes the next, and so on.
    """

    task: str
    tokens: tuple[int, ...]
    reply: tuple[str, ...]

    def forced(self, encode: Encode) -> tuple[list[int], list[slice]]:
        """The reply's tokens, and where its words are among them."""
        tokens: list[int] = []
        words = []
        for place, piece in enumerate(self.reply):
            begin = len(tokens)
            tokens += encode(piece)
            if place % 2:
                words.append(slice(begin, len(tokens)))
        return tokens, words


class Hay:
    """The haystack's paragraphs, each used once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        lines = (" ".join(part.split()) for part in haystack().split("\n\n"))
        self._left = deque(line for line in lines if line)

    def take(self, num_tokens: int) -> list[str]:
        """As many as have `num_tokens` or fewer. Raises ValueError if there are no more, or if
        one is too long."""
        taken: list[str] = []
        while self._left:
            # A token more for each joint is always enough.
            num_tokens -= len(self._encode(self._left[0])) + 1
            if num_tokens < 0:
                break
            taken.append(self._left.popleft())
        if not taken or not self._left:
            raise ValueError("the haystack has too few paragraphs, or prompts are too short")
        return taken


def haystack() -> str:
    """About 200,000 tokens."""
    from pydoc_data.topics import topics

    spec = importlib.util.find_spec("os")
    assert spec is not None and spec.origin is not None, "Python has its standard library"
    licence = Path(spec.origin).parent / "LICENSE.txt"
    texts = [licence.read_text()] if licence.is_file() else []
    return "\n\n".join([*texts, *topics.values()])


def prompts(task: str, count: int, num_tokens: int, encode: Encode, seed: int = 0) -> list[Prompt]:
    """Nearly `num_tokens` each, never more. Raises ValueError if the haystack is too short."""
    dice, hay, found = random.Random(f"{task} {seed}"), Hay(encode), []
    for number in range(count):
        facts = _facts(dice, TASKS[task])
        # Evenly spread; random ones might leave a part out.
        depth_ratio = (number + dice.random()) / count
        room = num_tokens - len(encode(_text(facts, [], depth_ratio, dice)))
        text = _text(facts, hay.take(room), depth_ratio, dice)
        found.append(Prompt(task, tuple(encode(text)), ("", f" {facts[0][1]}")))
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
