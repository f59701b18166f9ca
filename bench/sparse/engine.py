"""Decodes in a real vLLM engine on CPU, densely and sparsely, over the same prompt and KV.

It runs in this process, so numba must not be loaded before. The prompt is computed once and then
hit in the engine's own prefix cache, but for the last block; so runs differ only in the blocks
that decode attends to. `Engine.use` changes settings between runs, as no real engine can:
sketches are built again, the first prompt's calibration stays. Shapes: N compared tokens, W
words.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from demo.machine import dtype_for
from hotkv_sparse.config import SparseConfig

KV_CACHE_BYTES = 1 << 30
EXACT = "oracle"
"""A scorer: `bench.sparse.exact`."""
CALIBRATING = "mix2"
"""The scorer to start with: the only one for which an engine calibrates itself."""
_taken: list[torch.Tensor] = []
_forced: list[int] = []
_then_free: list[bool] = [False]


@dataclass(frozen=True, slots=True)
class Setup:
    """budget: that a step attends to: share of the context (float) or tokens (int).
    corrections: `max_correction_blocks`.
    dense_layers: at the start of the model.
    min_tokens: shorter contexts are dense.
    centres: a file; None: the engine's own.
    """

    block_tokens: int = 32
    budget: int | float = 0.2
    scorer: str = "rot2u"
    corrections: int = 4
    dense_layers: int = 2
    dtype: str = "auto"
    min_tokens: int = 2048
    centres: Path | None = None

    def sparse_config(self) -> SparseConfig:
        return SparseConfig(
            sparse_topk=self.budget,
            scorer="rot2u" if self.scorer == EXACT else self.scorer,
            max_correction_blocks=self.corrections,
            dense_layers=tuple(range(self.dense_layers)),
            min_context_tokens=self.min_tokens,
        )

    def extra_config(self) -> dict[str, Any]:
        """`kv_connector_extra_config` without a server; all layers calibrate from the first
        prompt."""
        sparse = {
            # Any but the whole context, of which the scheduler would list no row.
            "sparse_topk": 0.5,
            "scorer": CALIBRATING,
            "dense_layers": [],
            "min_context_tokens": self.min_tokens,
        }
        extra = {
            "hotkv.target": "unix:/nonexistent/hotkv.sock",
            "hotkv.startup_wait_s": 0.0,
            "hotkv.sparse": sparse,
        }
        return extra | ({"hotkv.sparse_centre": str(self.centres)} if self.centres else {})


class Forced:
    """A logits processor that records the output and forces the next token of a text."""

    def __init__(self, *_: Any) -> None:
        """Ignores vLLM's arguments."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, _: Any) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        _taken.append(logits[0].float().log_softmax(dim=-1))
        if _then_free[0] and len(_taken) > len(_forced):
            return logits
        forced = torch.full_like(logits, -torch.inf)
        # Asynchronous scheduling may begin one step too many: the last token again.
        forced[:, _forced[min(len(_taken), len(_forced)) - 1]] = 0.0
        return forced


class Engine:
    """`calibrate` first (the first prompt gives centres and axes); then `prefill`, `use`, `run`
    and `answer`; `close`."""

    def __init__(self, model: Path, context_tokens: int, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM
        from vllm.v1.sample.logits_processor import LogitsProcessor

        connector = {
            "kv_connector": "HotKVConnector",
            "kv_role": "kv_both",
        }
        self._llm = LLM(
            str(model),
            dtype=dtype_for(str(model)) if setup.dtype == "auto" else setup.dtype,
            block_size=setup.block_tokens,
            max_model_len=context_tokens,
            max_num_seqs=1,
            # In one step, as vLLM calls logits processors in every step.
            max_num_batched_tokens=context_tokens,
            enforce_eager=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            logits_processors=[type("ForcedTokens", (Forced, LogitsProcessor), {})],
            kv_transfer_config=connector | {"kv_connector_extra_config": setup.extra_config()},
        )
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from hotkv_sparse.vllm.attention_layers import full_attention_layers

        rank: Any = get_kv_transfer_group()._worker.companion
        found = full_attention_layers(rank._vllm_config, rank._kv_cache_config)
        self._impls: dict[str, Any] = {layer.name: layer.impl for layer in found}
        self._rank, self._first = rank, rank.worker

    def use(self, setup: Setup | None) -> None:
        """None: dense. What belongs to the engine, such as its dtype, stays."""
        from hotkv_sparse.vllm.cpu.worker import SparseWorker

        if setup is None:
            # No context is that long.
            config = replace(self._first._config, min_context_tokens=1 << 30)
        else:
            config = setup.sparse_config()
        layers = []
        for layer in self._first.layers.values():
            names = tuple(config.scorers_of(layer.index))
            if names:
                known = self._first.sketches.shape(layer.index)
                shape = replace(
                    known, formats=names, mu=known.mu if self._knows_mu(names) else None
                )
                layers.append(replace(layer, shape=shape))
        self._rank.worker = worker = SparseWorker(config, layers)
        if setup is not None and setup.scorer == EXACT:
            from bench.sparse.exact import decoders

            worker._decoders = decoders(config, layers)
        of_name = {layer.name: layer for layer in layers}
        for name, impl in self._impls.items():
            impl._sparse = (worker, of_name[name]) if name in of_name else None

    def _knows_mu(self, names: Sequence[str]) -> bool:
        """From its own calibration or from a file."""
        return CALIBRATING in names or self._rank.centres is not None

    def calibrate(self, tokens: Sequence[int]) -> None:
        self._rank.worker = self._first
        for name, layer in self._first.layers.items():
            self._impls[name].attach(self._first, layer)
        self.prefill(tokens)
        assert not self._first.first_prompt.waiting, "the prompt is too short to calibrate from"

    def prefill(self, tokens: Sequence[int]) -> None:
        self._generate(tokens, [0], 1, then_free=False)

    def run(self, tokens: Sequence[int], num_compared: int) -> torch.Tensor:
        """Log probabilities [N, W] of the last `num_compared` tokens, each from a decode step."""
        num_prompt = len(tokens) - num_compared - 1
        self._generate(tokens[:num_prompt], tokens[num_prompt:], num_compared + 1, then_free=False)
        assert self._rank.worker._num_steps, "the scheduler listed no sparse row"
        # The first comes from the prefill of the prompt's last block.
        return torch.stack(_taken[1 : num_compared + 1])

    def answer(
        self, tokens: Sequence[int], num_answered: int, num_prompt: int | None = None
    ) -> list[int]:
        """Greedy. Each token comes from a decode step.

        num_prompt: leading tokens of `tokens` that are prefilled; None: all but the last.
        """
        prompt = tokens[:num_prompt] if num_prompt else tokens[:-1]
        forced = tokens[len(prompt) :]
        num_made = len(forced) + num_answered
        return self._generate(prompt, forced, num_made, then_free=True)[len(forced) :]

    def _generate(
        self, prompt: Sequence[int], forced: Sequence[int], max_tokens: int, *, then_free: bool
    ) -> list[int]:
        from vllm import SamplingParams

        _taken.clear()
        _forced[:] = forced
        _then_free[0] = then_free
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        (found,) = self._llm.generate(
            [{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False
        )
        return list(found.outputs[0].token_ids)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
