"""Prompts whose answer is scattered over a long text, each with a short solved example.

Two tasks of RULER (arXiv 2404.06654), so that a small model can do them. `variables` (vt): notes,
each of which gives a name the value of another name, are to be followed to a number. `words`
(cwe): the word that a list repeats most. Equal seeds give equal prompts.
"""

import random
import re
from collections.abc import Sequence
from itertools import pairwise

from bench.sparse.needles import THINGS, Encode, Hay, Prompt, haystack

CHAIN = 4
"""Names."""
COMMON_SHARE, RARE_TIMES = 0.3, 3
"""Of the list, the common word's part; how often it has each other word."""
EXAMPLE_TOKENS, EXAMPLE_WORDS = 300, 60
TRACK = "Some notes about values are hidden in the text below. Remember them.\n\n"
FIRST = "Note: the value of {name} is {value}."
LINK = "Note: the value of {name} is the value of {before}."
TRACKED = (
    "\n\nWhat is the value of {last}, by the notes in the text above?\n"
    "Answer, note by note: the value of {last} is"
)
LIST = "Below is a list of words. One appears more often than the others; remember it.\n\n"
LISTED = "\n\nWhich word appears most often in the list above?\nAnswer: The word is:"


def variables(count: int, num_tokens: int, encode: Encode, seed: int = 0) -> list[Prompt]:
    """As `needles.prompts`."""
    dice, hay, found = random.Random(f"variables {seed}"), Hay(encode), []
    for _ in range(count):
        names = dice.sample(THINGS, 2 * CHAIN)
        numbers = [str(dice.randrange(10**4, 10**5)) for _ in range(2)]
        shown, asked = (names[:CHAIN], numbers[0]), (names[CHAIN:], numbers[1])
        example = _tracked(*shown, hay.take(EXAMPLE_TOKENS), dice)
        example += "".join(_chain_reply(*shown)) + ".\n\n"
        room = num_tokens - len(encode(example + _tracked(*asked, [], dice)))
        text = example + _tracked(*asked, hay.take(room), dice)
        found.append(Prompt("variables", tuple(encode(text)), _chain_reply(*asked)))
    return found


def _tracked(names: Sequence[str], value: str, lines: Sequence[str], dice: random.Random) -> str:
    """The notes in order between the lines, then the question for the last name."""
    notes = [FIRST.format(name=names[0], value=value)]
    notes += [LINK.format(name=name, before=before) for before, name in pairwise(names)]
    mixed = list(lines)
    places = sorted(dice.choices(range(len(lines) + 1), k=len(notes)))
    for place, note in reversed(list(zip(places, notes, strict=True))):
        mixed.insert(place, note)
    return TRACK + "\n".join(mixed) + TRACKED.format(last=names[-1])


def _chain_reply(names: Sequence[str], value: str) -> tuple[str, ...]:
    """From the last name back."""
    reply = [" the value of", f" {names[-2]}"]
    for name, before in pairwise(reversed(names[:-1])):
        reply += [f". the value of {name} is the value of", f" {before}"]
    return (*reply, f". the value of {names[0]} is", f" {value}")


def words(count: int, num_tokens: int, encode: Encode, seed: int = 0) -> list[Prompt]:
    """As `needles.prompts`."""
    dice, found = random.Random(f"words {seed}"), []
    known = sorted(set(re.findall(r"\b[a-z]{4,8}\b", haystack())))
    for _ in range(count):
        chosen = dice.sample(known, len(known))
        shown, right = chosen.pop(), chosen.pop()
        example = f"{_repeated(shown, chosen, EXAMPLE_WORDS, dice)} {shown}.\n\n"
        num_words = num_tokens
        while True:
            text = example + _repeated(right, chosen, num_words, dice)
            excess = len(encode(text)) - num_tokens
            if excess <= 0:
                break
            # Hardly a word has more than four tokens.
            num_words -= max(excess // 4, 1)
        found.append(Prompt("words", tuple(encode(text)), ("", f" {right}")))
    return found


def _repeated(common: str, others: Sequence[str], num_words: int, dice: random.Random) -> str:
    """The list, then the question."""
    times = round(COMMON_SHARE * num_words)
    rare = others[: (num_words - times) // RARE_TIMES]
    listed = [common] * times + [*rare] * RARE_TIMES
    dice.shuffle(listed)
    return LIST + " ".join(listed) + LISTED
