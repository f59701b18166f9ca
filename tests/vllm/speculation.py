"""The harness with drafts and asynchronous scheduling. Each decode step also computes drafts, and
some of them are rejected.

As in vLLM, the scheduler plans a step as if all drafts of the previous step were accepted; the
worker starts it after the accepted tokens. KV of rejected drafts stays in the blocks until the
right tokens overwrite it.
"""

import random
from collections.abc import Sequence
from typing import Any

from tests.vllm.harness import Engine, next_token

WRONG_TOKEN = 2


class SpeculatingEngine(Engine):
    """`drafts` and `rejected` count tokens."""

    drafts = 0
    rejected = 0

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        known: dict[str, list[int]] = {}
        cached = scheduled.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            tokens = self.tokens[name]
            # Otherwise it computes its prompt, perhaps again after a preemption.
            if cached.num_computed_tokens[index] >= len(tokens) - 1:
                cached.num_computed_tokens[index] = len(tokens) - 1
                known[name] = list(tokens)
                tokens += self._drafts(name, tokens, scheduled.num_scheduled_tokens[name] - 1)
        sampled = super()._forward(scheduled)
        for name, tokens in known.items():
            end = len(tokens) + scheduled.num_scheduled_tokens[name] - 1
            drafts = self.tokens[name][len(tokens) : end]
            sampled[name] = [self._next(name, tokens)]
            for draft in drafts:
                if draft != sampled[name][-1]:
                    break
                sampled[name].append(self._next(name, tokens + sampled[name]))
            self.drafts += len(drafts)
            self.rejected += len(drafts) + 1 - len(sampled[name])
            self.tokens[name] = tokens + sampled[name]
        return sampled

    def _next(self, name: str, tokens: Sequence[int]) -> int:
        return next_token(self.values_of(name, tokens))

    def _drafts(self, name: str, tokens: Sequence[int], count: int) -> list[int]:
        """Returns drafts that are right up to a random position and wrong after it."""
        dice = random.Random(len(tokens))
        drafts: list[int] = []
        for _ in range(count):
            is_right = WRONG_TOKEN not in drafts and dice.random() < 0.7
            drafts.append(self._next(name, [*tokens, *drafts]) if is_right else WRONG_TOKEN)
        return drafts
