"""Generates conversations of several turns, with the shape of vLLM's `benchmarks/multi_turn`: a
prefix that all conversations share, a prefix of each conversation, and turns. In each turn the
client sends some tokens and wants an answer of some tokens."""

import math
import random
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation: the client sends `tokens`, and wants an answer of `answer_tokens`
    tokens."""

    tokens: list[int]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of several turns. `prefix`: the tokens before its first turn."""

    prefix: list[int]
    turns: list[Turn]

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of the prefix, all questions and all answers."""
        said = sum(len(turn.tokens) + turn.answer_tokens for turn in self.turns)
        return len(self.prefix) + said


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of conversations. Pairs are inclusive bounds of uniformly distributed numbers. By
    default answers are short, so that they take little of a turn's time.

    common_tokens: length of the prefix that all conversations share.
    prefix_tokens: median and maximum (of a lognormal distribution) of the length of the prefix that
        only one conversation has.
    words: the range of the token ids.
    """

    num_turns: tuple[int, int] = (3, 5)
    common_tokens: int = 64
    prefix_tokens: tuple[int, int] = (320, 1200)
    turn_tokens: tuple[int, int] = (120, 240)
    answer_tokens: tuple[int, int] = (12, 24)
    words: tuple[int, int] = (20, 49000)


UPSTREAM = Shape(
    num_turns=(6, 9),
    common_tokens=500,
    prefix_tokens=(850, 2400),
    turn_tokens=(120, 160),
    answer_tokens=(80, 120),
)
"""The shape of vLLM's `generate_multi_turn.json`, without prefixes of more than 2,400 tokens: they
don't fit into 6,144 tokens together with their turns."""


def conversations(seed: int | str, num_tokens: int, shape: Shape) -> list[Conversation]:
    """Returns conversations with at least `num_tokens` tokens in total. Equal seeds give equal
    conversations."""
    dice = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(*shape.words) for _ in range(count)]

    common, found = tokens(shape.common_tokens), list[Conversation]()
    while sum(one.num_tokens for one in found) < num_tokens:
        median, most = shape.prefix_tokens
        own = min(most, int(dice.lognormvariate(math.log(median), 0.5)))
        turns = [
            Turn(tokens(dice.randint(*shape.turn_tokens)), dice.randint(*shape.answer_tokens))
            for _ in range(dice.randint(*shape.num_turns))
        ]
        found.append(Conversation([*common, *tokens(own)], turns))
    return found


def as_json(some: list[Conversation]) -> list[dict[str, Any]]:
    """Returns the conversations in the form that `bench.load.chat_engine` reads."""
    return [asdict(one) for one in some]
