"""Harness engines that read whole prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm import PoolingParams
from vllm.v1.outputs import ModelRunnerOutput

from tests.vllm.harness import Engine


class Pooling(Engine):
    """Answers with the last token's value."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.vectors: dict[str, float] = {}
        super().__init__(*arguments, runner="pooling", convert="embed", **settings)

    def _parameters(self, max_tokens: int, extra: dict[str, Any] | None) -> tuple[Any, Any]:
        return None, PoolingParams(task="embed", extra_kwargs=extra)

    def _sample(self, name: str) -> list[int]:
        self.vectors[name] = float(self._values(name)[-1])
        return []

    def _output(
        self, names: list[str], index: dict[str, int], sampled: dict[str, list[int]], kv: Any
    ) -> ModelRunnerOutput:
        vectors = [self.vectors.get(name) for name in names]
        return ModelRunnerOutput(
            names,
            index,
            [],
            pooler_output=[None if one is None else torch.tensor([one]) for one in vectors],
            kv_connector_output=kv,
        )


class NonCausal(Engine):
    """A common prefix has other KV in each prompt. Settings as by `EngineCore` for such models."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings |= {"enable_prefix_caching": False, "enable_chunked_prefill": False}
        super().__init__(*arguments, **settings)

    def values_of(self, name: str, tokens: Sequence[int]) -> list[int]:
        prompt = self.requests[name].prompt_token_ids
        whole = super().values_of(name, prompt)[-1]
        values = super().values_of(name, tokens)
        return [value ^ whole for value in values[: len(prompt)]] + values[len(prompt) :]
