"""Conversations in the shape of vLLM's `benchmarks/multi_turn`: a prefix that all share, one of
each, and turns."""

import math
import random
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    tokens: list[int]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    prefix: list[int]
    turns: list[Turn]

    @property
    def num_tokens(self) -> int:
        """Counts all answers too."""
        said = sum(len(turn.tokens) + turn.answer_tokens for turn in self.turns)
        return len(self.prefix) + said


@dataclass(frozen=True, slots=True)
class Shape:
    """Pairs are bounds, inclusive, of uniform numbers. Short answers take little of a turn's time.

    common_tokens: of the prefix that all share.
    prefix_tokens: median and maximum (lognormal) of a conversation's own prefix.
    words: range of token ids.
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
"""vLLM's `generate_multi_turn.json`, without prefixes of more than 2,400 tokens, which don't fit
into 6,144 with their turns."""


def conversations(seed: int | str, num_tokens: int, shape: Shape) -> list[Conversation]:
    """At least `num_tokens` in total; equal seeds give equal conversations."""
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
    """As `bench.load.chat_engine` reads them."""
    return [asdict(one) for one in some]
