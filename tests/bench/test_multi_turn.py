"""The benchmark of conversations: their sizes, and who asks what when."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.load.chat_engine import hold
from bench.load.conversations import Shape, as_json, conversations


def test_conversations_have_the_shape_and_are_the_same_for_a_seed() -> None:
    shape = Shape()
    some = conversations(3, 20_000, shape)
    assert some == conversations(3, 20_000, shape) != conversations(4, 20_000, shape)
    sizes = [one.num_tokens for one in some]
    assert sum(sizes) >= 20_000 > sum(sizes[:-1])
    for one in some:
        assert one.prefix[: shape.common_tokens] == some[0].prefix[: shape.common_tokens]
        assert shape.num_turns[0] <= len(one.turns) <= shape.num_turns[1]
        assert max(one.prefix) < shape.words[1]


class Engine:
    """Answers the oldest request in each step."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.waiting: list[Any] = []
        self.most = 0

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.asked.append((name, prompt["prompt_token_ids"]))
        self.waiting.append((name, params.max_tokens))
        self.most = max(self.most, len(self.waiting))

    def step(self) -> list[Any]:
        name, count = self.waiting.pop(0)
        done = SimpleNamespace(token_ids=[7] * count)
        return [
            SimpleNamespace(finished=False),
            SimpleNamespace(
                finished=True,
                request_id=name,
                outputs=[done],
                metrics=SimpleNamespace(first_token_latency=0.5),
                num_cached_tokens=None,
            ),
        ]


@pytest.mark.parametrize("num_clients", [1, 2, 50])
def test_clients_go_round_and_each_turn_has_all_that_was_said(num_clients: int) -> None:
    some, engine = conversations(5, 6_000, Shape()), Engine()
    reply = hold(SimpleNamespace(llm_engine=engine), as_json(some), num_clients)
    assert len(reply["turns"]) == sum(len(one.turns) for one in some)
    assert engine.most == min(num_clients, len(some)) and not engine.waiting
    for index, one in enumerate(some):
        history, mine = (
            list(one.prefix),
            [tokens for name, tokens in engine.asked if name.split("-")[1] == str(index)],
        )
        for turn, asked in zip(one.turns, mine, strict=True):
            history += turn.tokens
            assert asked == history
            history += [7] * turn.answer_tokens
    order = [int(name.split("-")[1]) for name, _ in engine.asked]
    assert order[: len(some)] == list(range(len(some))), "no second turn before all first ones"
