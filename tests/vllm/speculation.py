"""The harness with speculative decoding.

Asynchronous, vLLM plans as if all drafts were accepted, and the worker corrects it. KV of
rejected drafts stays until it is overwritten.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from hotkv_vllm.compat import fingerprint, model_weights
from tests.vllm.harness import Engine, next_token
from tests.vllm.tiny import write_model

WRONG_TOKEN = 2
NUM_DRAFTS = 3


def speculating(monkeypatch: Any, folder: Path) -> dict[str, Any]:
    """The drafter has no KV."""
    for module in (model_weights, fingerprint):
        monkeypatch.setattr(module, "draft_model", lambda _: None)
    drafter = {
        "method": "eagle",
        "model": str(write_model(folder / "drafter", "eagle")),
        "num_speculative_tokens": NUM_DRAFTS,
    }
    return {"speculative_config": drafter}


class SpeculatingEngine(Engine):
    drafts = 0
    rejected = 0

    def step(self) -> None:
        super().step()
        if not self.pipelined:
            names = [name for name in self.scheduler.requests if self.outputs[name]]
            drafts = [self._drafts(name, self.tokens[name], NUM_DRAFTS) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _forward(self, scheduled: Any) -> dict[str, list[int]]:
        known: dict[str, list[int]] = {}
        cached = scheduled.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            tokens = self.tokens[name]
            # Others compute their prompt.
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
        for name in scheduled.num_scheduled_tokens:
            self._keep_states(name, max(1, len(sampled[name])) - 1)
        return sampled

    def _keep_states(self, name: str, num_accepted: int) -> None:
        """The state at a block's end is copied into the block. Source:
        `postprocess_mamba_fused_kernel`."""
        at, tokens = self.states.get(name, (0, 0))
        for table, group in self._state_groups(name):
            size = group.kv_cache_spec.block_size
            kept = (tokens + num_accepted) // size - 1
            behind = (kept + 1) * size - tokens
            if behind >= 0:
                self._copy_block(group.layer_names, table[at + behind], table[kept])
            self.states[name] = at if kept == at else at + num_accepted, tokens + num_accepted

    def _next(self, name: str, tokens: Sequence[int]) -> int:
        return next_token(self.values_of(name, tokens))

    def _drafts(self, name: str, tokens: Sequence[int], count: int) -> list[int]:
        """Right up to a random position."""
        dice = random.Random(len(tokens))
        drafts: list[int] = []
        for _ in range(count):
            is_right = WRONG_TOKEN not in drafts and dice.random() < 0.7
            drafts.append(self._next(name, [*tokens, *drafts]) if is_right else WRONG_TOKEN)
        return drafts
