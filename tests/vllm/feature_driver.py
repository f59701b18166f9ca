"""`engine_driver` with a command for requests that use more of vLLM than token ids and a number of
tokens.

`sample`: `requests` are objects with `tokens`, and perhaps `salt`, `images` (seeds, one each),
`embeds` (seed and length, instead of tokens) and `uuids` (names of the images); `params` go to
SamplingParams, `structured` to its StructuredOutputsParams. `embed`: vectors of a pooling model.
`token_embed`: how many of each prompt's tokens have one. `beam`: the beams of one prompt.
`drafted`: tokens that a drafter proposed.
"""

from typing import Any

import engine_driver


def prompt(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the request as vLLM wants it."""
    if "embeds" in request:
        import torch

        seed, length = request["embeds"]
        size = llm.model_config.get_hidden_size()
        values = torch.randn((length, size), generator=torch.Generator().manual_seed(seed)) * 0.05
        made: dict[str, Any] = {"prompt_embeds": values.to(llm.model_config.dtype)}
    else:
        made = {"prompt_token_ids": request["tokens"]}
    if "salt" in request:
        made["cache_salt"] = request["salt"]
    if "images" in request:
        made["multi_modal_data"] = {"image": [image(seed) for seed in request["images"]]}
        made["mm_processor_kwargs"] = request.get("processor", {})
    if "uuids" in request:
        made["multi_modal_uuids"] = {"image": request["uuids"]}
    return made


def image(seed: int) -> Any:
    """Noise; every seed another."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    )


def sample(
    llm: Any,
    requests: list[dict[str, Any]],
    params: dict[str, Any] | None = None,
    structured: dict[str, Any] | None = None,
    priority: list[int] | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {
        "temperature": 0,
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": 1,
        **(params or {}),
    }
    if structured is not None:
        settings |= {
            "structured_outputs": StructuredOutputsParams(**structured),
            "ignore_eos": False,
        }
    outputs = llm.generate(
        [prompt(llm, r) for r in requests],
        SamplingParams(**settings),
        priority=priority,
        use_tqdm=False,
    )
    samples = [s for o in outputs for s in o.outputs]
    return {
        "tokens": [list(s.token_ids) for s in samples],
        "logprobs": [
            [p[t].logprob for t, p in zip(s.token_ids, s.logprobs, strict=True)] for s in samples
        ],
        "text": [s.text for s in samples],
        "finish": [[s.finish_reason, s.stop_reason] for s in samples],
        "cached": [o.num_cached_tokens for o in outputs],
        "prompt_logprobs": [
            [
                p[t].logprob
                for t, p in zip(o.prompt_token_ids[1:], (o.prompt_logprobs or [])[1:], strict=False)
            ]
            for o in outputs
        ],
    }


def embed(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    outputs = llm.embed([prompt(llm, r) for r in requests], use_tqdm=False)
    return {
        "vectors": [o.outputs.embedding for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
    }


def token_embed(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    outputs = llm.encode(
        [prompt(llm, r) for r in requests], pooling_task="token_embed", use_tqdm=False
    )
    return {
        "lengths": [len(o.outputs.data) for o in outputs],
        "cached": [o.num_cached_tokens for o in outputs],
    }


def beam(llm: Any, tokens: list[int], width: int, max_tokens: int) -> dict[str, Any]:
    from vllm.sampling_params import BeamSearchParams

    (output,) = llm.beam_search(
        [{"prompt_token_ids": tokens}],
        BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True),
    )
    return {
        "tokens": [list(s.tokens) for s in output.sequences],
        "scores": [s.cum_logprob for s in output.sequences],
    }


def drafted(llm: Any) -> dict[str, Any]:
    return {
        "tokens": sum(
            metric.value
            for metric in llm.get_metrics()
            if metric.name == "vllm:spec_decode_num_draft_tokens"
        )
    }


engine_driver.OPERATIONS |= {
    "sample": sample,
    "embed": embed,
    "token_embed": token_embed,
    "beam": beam,
    "drafted": drafted,
}
