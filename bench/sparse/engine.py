"""Teacher-forced decode in a real vLLM engine on CPU, attending to everything and to hot sets, over
the same prompt and its same KV.

The engine runs in this process, so nothing may have loaded numba before. The prompt is computed
once, and every run finds it in the engine's own prefix cache, all but its last block: runs differ
by what decode attends to, and by nothing else.

Shapes: N compared tokens, W words.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KV_CACHE_BYTES = 1 << 30
_taken: list[torch.Tensor] = []
_forced: list[int] = []


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of both the engine and the offline decode."""

    block_tokens: int = 32
    budget_ratio: float = 0.1
    scorer: str = "rot2u"
    corrections: int = 4
    centres: Path | None = None

    def extra_config(self) -> dict[str, Any]:
        """`kv_connector_extra_config`; there is no server."""
        sparse = {
            "sparse_topk": self.budget_ratio,
            "scorer": self.scorer,
            "max_correction_blocks": self.corrections,
        }
        extra = {
            "hotkv.target": "unix:/nonexistent/hotkv.sock",
            "hotkv.startup_wait_s": 0.0,
            "hotkv.sparse": sparse,
        }
        return extra | ({"hotkv.sparse_centre": str(self.centres)} if self.centres else {})


class Forced:
    """Takes down what the model says and makes it say the text's next token. A vLLM logits
    processor."""

    def __init__(self, *_: Any) -> None:
        """vLLM passes its config, a device and whether to pin memory."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, _: Any) -> None:
        """One request at a time needs no bookkeeping."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        _taken.append(logits[0].float().log_softmax(dim=-1))
        forced = torch.full_like(logits, -torch.inf)
        # Asynchronous scheduling may begin a step after the last one.
        forced[:, _forced[min(len(_taken), len(_forced)) - 1]] = 0.0
        return forced


class Engine:
    """`prefill`, then `run` as often as wanted; `close` ends the engine."""

    def __init__(self, model: Path, context_tokens: int, setup: Setup) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM
        from vllm.v1.sample.logits_processor import LogitsProcessor

        connector = {
            "kv_connector": "HotKVConnector",
            "kv_connector_module_path": "hotkv_vllm.connector",
            "kv_role": "kv_both",
        }
        self._llm = LLM(
            str(model),
            block_size=setup.block_tokens,
            max_model_len=context_tokens,
            max_num_seqs=1,
            # A prompt in one step: vLLM asks logits processors at every step of a prompt.
            max_num_batched_tokens=context_tokens,
            enforce_eager=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            logits_processors=[type("ForcedTokens", (Forced, LogitsProcessor), {})],
            kv_transfer_config=connector | {"kv_connector_extra_config": setup.extra_config()},
        )
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._worker: Any = get_kv_transfer_group()._worker.sparse.worker
        self._attend = self._worker.attend

    def prefill(self, tokens: Sequence[int]) -> None:
        """Computes a prompt."""
        self._generate(tokens, [0], 1)

    def run(self, tokens: Sequence[int], num_compared: int, *, sparse: bool) -> torch.Tensor:
        """Log probabilities [N, W] of the last N tokens of a text, each from a decode step; its
        other tokens have been prefilled."""
        num_prompt = len(tokens) - num_compared - 1
        self._worker.attend = self._attend if sparse else _everything
        self._generate(tokens[:num_prompt], tokens[num_prompt:], num_compared + 1)
        # The first token comes from the prompt's last block, which is dense.
        return torch.stack(_taken[1 : num_compared + 1])

    def _generate(self, prompt: Sequence[int], forced: Sequence[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        _taken.clear()
        _forced[:] = forced
        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _everything(*_: Any) -> None:
    """In place of `SparseWorker.attend`: nothing is left out."""
