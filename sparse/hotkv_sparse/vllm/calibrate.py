"""Measures the centres and principal axes of a model's keys, for the setting `hotkv.sparse_centre`.

    python -m hotkv_sparse.vllm.calibrate --model MODEL --output centres.npz

Runs the model over ordinary text in a vLLM engine in this process, and records keys and some
queries at the input of attention: after RoPE, in the model's dtype. So any model works with layers
of plain full attention that vLLM runs on a CPU. The result depends on the model and the context
length, hardly on the text.

Shapes: S tokens of a context, N sampled tokens, Q query heads, H KV heads, D channels.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_proto.errors import HotKVError
from hotkv_sparse.axes import MIN_TOKENS, Axes, AxesEstimate
from hotkv_sparse.centre import (
    FIRST_TOKENS,
    TOKEN_FORMATS,
    Centres,
    LayerCentre,
    measured_bias,
)
from hotkv_sparse.centre_file import write_centres

F32 = npt.NDArray[np.float32]
DEFAULT_TOKENS = 8192
QUERY_EVERY_TOKENS = 256
"""One query per so many tokens measures each format's bias."""
LEAST_TOKENS = MIN_TOKENS + FIRST_TOKENS
"""Of a context for a calibration."""


@dataclass(slots=True)
class Recorder:
    """Wraps a layer's `forward`, and records keys and some queries of one context at a time.

    scale: factor of the layer's attention scores.
    keys: one tensor [tokens, KV heads, channels] per call.
    queries: one tensor [query heads, channels] each, at `positions`.
    moments: sums over all recorded contexts, for the principal axes.
    """

    forward: Any
    kv_heads: int
    query_heads: int
    head_size: int
    scale: float
    num_tokens: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    moments: AxesEstimate = field(init=False)

    def __post_init__(self) -> None:
        self.moments = AxesEstimate(self.kv_heads, self.head_size)

    def __call__(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        metadata: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        """A call without metadata is vLLM's memory profiling, and not recorded."""
        if metadata is not None:
            self._keep(query, key, metadata.num_actual_tokens)
        return self.forward(layer, query, key, value, kv_cache, metadata, *more, **named)

    def _keep(self, query: torch.Tensor, key: torch.Tensor, num_tokens: int) -> None:
        first = -(self.num_tokens + 1) % QUERY_EVERY_TOKENS
        sampled = range(first, num_tokens, QUERY_EVERY_TOKENS)
        keys = key[:num_tokens].reshape(num_tokens, self.kv_heads, self.head_size)
        self.keys.append(keys.clone())
        counted = slice(max(FIRST_TOKENS - self.num_tokens, 0), num_tokens)
        queries = query[:num_tokens].reshape(num_tokens, self.query_heads, self.head_size)
        self.moments.add(keys[counted].float().numpy(), queries[counted].float().numpy())
        # With float32, `float` returns a view, which would retain all queries of this call:
        # hence `clone`.
        self.queries += [
            query[place].reshape(self.query_heads, self.head_size).float().clone()
            for place in sampled
        ]
        self.positions += [self.num_tokens + place for place in sampled]
        self.num_tokens += num_tokens

    def take(self) -> tuple[F32, F32, list[int]]:
        """Keys, float32 [tokens, KV heads, channels], queries, float32 [sampled tokens, query
        heads, channels], and the queries' positions. Clears the record."""
        keys: F32 = torch.cat(self.keys).float().numpy()
        queries: F32 = torch.stack(self.queries).numpy()
        positions = self.positions
        self.keys, self.queries, self.positions, self.num_tokens = [], [], [], 0
        return keys, queries, positions


def recorders(worker: Any) -> dict[int, Recorder]:
    """Wraps every layer of plain full attention; by layer index.

    worker: vLLM's.
    """
    from hotkv_sparse.vllm.attention_layers import full_attention_layers

    found = {}
    for layer in full_attention_layers(worker.vllm_config, worker.model_runner.kv_cache_config):
        impl = layer.impl
        found[layer.index] = Recorder(
            impl.forward, impl.num_kv_heads, impl.num_heads, impl.head_size, impl.scale
        )
        impl.forward = found[layer.index]
    return found


class ContextSums:
    """Collects the contexts of each layer, and computes centres, principal axes and biases from
    them."""

    def __init__(self) -> None:
        self._contexts: dict[int, list[tuple[F32, F32, list[int], float]]] = {}
        self._moments: dict[int, AxesEstimate] = {}

    def add(self, layers: Mapping[int, Recorder]) -> None:
        """Adds the recorded context, and clears the recorders."""
        for index, recorder in layers.items():
            keys_SHD, queries_NQD, positions = recorder.take()
            self._moments[index] = recorder.moments
            self._contexts.setdefault(index, []).append(
                (keys_SHD, queries_NQD, positions, recorder.scale)
            )

    def centres(self, model: str) -> Centres:
        """A bias says by how much a format's scores overestimate the log of a block's attention
        mass (sum of exp(q · k * scale) over its tokens), on average over the contexts. Raises
        INVALID_FIELD if there were too few tokens."""
        layers = {}
        for index, contexts in self._contexts.items():
            calibrated = self._moments[index].axes()
            if calibrated is not None:
                mu, axes = calibrated
                biases = {name: _bias(name, mu, axes, contexts) for name in TOKEN_FORMATS}
                layers[index] = LayerCentre(mu, biases, axes)
        num_tokens = min((moments.num_tokens for moments in self._moments.values()), default=0)
        return Centres(model, num_tokens, layers)


def _bias(
    name: str,
    mu_HD: F32,
    axes: Axes,
    contexts: Sequence[tuple[F32, F32, list[int], float]],
) -> float:
    return float(
        np.mean(
            [
                measured_bias(name, mu_HD, keys, queries, positions, scale, axes)
                for keys, queries, positions, scale in contexts
            ]
        )
    )


def default_text() -> str:
    """English text that comes with Python: the language reference of `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def contexts_of(texts: Mapping[str, str], tokenizer: Any, num_tokens: int) -> list[list[int]]:
    """Takes at most `num_tokens` tokens of each text. Raises ValueError if one is too short for a
    calibration.

    texts: by name.
    """
    contexts = []
    for name, text in texts.items():
        tokens = list(tokenizer.encode(text[: 16 * num_tokens]))[:num_tokens]
        if len(tokens) < LEAST_TOKENS:
            raise ValueError(
                f"--texts: {name} has {len(tokens)} tokens; pass files of {LEAST_TOKENS} or more"
            )
        contexts.append(tokens)
    return contexts


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(
        prog="python -m hotkv_sparse.vllm.calibrate",
        description="Calibrates centres for sparse decode.",
    )
    flags.add_argument(
        "--model", required=True, help="the model, as vLLM takes it: a folder or a name"
    )
    flags.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="where to write the centres"
    )
    flags.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="plain texts (default: Python's own documentation)",
    )
    flags.add_argument(
        "--tokens",
        type=int,
        default=DEFAULT_TOKENS,
        help="tokens of each text; at most the model's context",
    )
    flags.add_argument(
        "--dtype",
        default="auto",
        help="as vLLM's --dtype: use that of the engines to be calibrated",
    )
    flags.add_argument("--trust-remote-code", action="store_true", help="as vLLM's")
    return flags.parse_args(arguments)


def calibrate(model: str, texts: Mapping[str, str], num_tokens: int, **engine: Any) -> Centres:
    """Blocks for minutes. Raises ValueError or INVALID_FIELD if the model can't be calibrated.

    texts: by name.
    num_tokens: of each text, at most.
    engine: further arguments of vLLM's `LLM`.
    """
    from vllm import LLM, SamplingParams

    settings = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "max_model_len": -1,
    } | engine
    llm = LLM(model, **settings)
    longest = llm.model_config.max_model_len - 1
    if longest < LEAST_TOKENS:
        raise ValueError(
            f"--model: contexts of {model} have at most {longest} tokens in this engine, a "
            f"calibration takes {LEAST_TOKENS}; give the engine more memory "
            "(VLLM_CPU_KVCACHE_SPACE) if the model allows more"
        )
    contexts = contexts_of(texts, llm.get_tokenizer(), min(num_tokens, longest))
    layers: dict[int, Recorder] = llm.collective_rpc(recorders)[0]
    if not layers:
        raise ValueError(
            f"--model: {model} has no layer of plain full attention, so it cannot decode sparsely"
        )
    calibration = ContextSums()
    for context in contexts:
        llm.generate(
            [{"prompt_token_ids": context}],
            SamplingParams(max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
        calibration.add(layers)
    return calibration.centres(Path(model).name)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        texts = {str(file): file.read_text(errors="replace") for file in chosen.texts} or {
            "Python's documentation": default_text()
        }
        folder = chosen.output.parent
        if not folder.is_dir():
            raise ValueError(f"--output: there is no folder {folder}")
        if chosen.output.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"--output: no file {chosen.output} can be written")
        if chosen.tokens < LEAST_TOKENS:
            raise ValueError(f"--tokens is {chosen.tokens}; use {LEAST_TOKENS} or more")
        centres = calibrate(
            chosen.model,
            texts,
            chosen.tokens,
            dtype=chosen.dtype,
            trust_remote_code=chosen.trust_remote_code,
        )
        write_centres(chosen.output, centres)
    except (OSError, ValueError, HotKVError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{chosen.output}: {centres}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
