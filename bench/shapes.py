"""KV shapes of public models, copied from their configurations on Hugging Face."""

from hotkv_server.cache.values import aligned

SHAPES: dict[str, tuple[int, int, int]] = {
    # Layers with the whole context, KV heads x head size, bytes per value.
    "Llama-3.1-8B": (32, 1024, 2),
    "Llama-3.1-8B, fp8": (32, 1024, 1),
    "Llama-3.1-70B": (80, 1024, 2),
    "Llama-3.1-70B, a rank of 8": (80, 128, 2),
    "Llama-3.1-405B, a rank of 8": (126, 128, 2),
    "Llama-3.2-1B": (16, 512, 2),
    "Llama-3.2-3B": (28, 1024, 2),
    "Llama-4-Scout": (48, 1024, 2),
    "Mistral-7B": (32, 1024, 2),
    "Mistral-Small-24B": (40, 1024, 2),
    "Mistral-Large-123B": (88, 1024, 2),
    "Mixtral-8x22B": (56, 1024, 2),
    "Qwen2.5-0.5B": (24, 128, 2),
    "Qwen2.5-7B": (28, 512, 2),
    "Qwen2.5-14B": (48, 1024, 2),
    "Qwen2.5-32B": (64, 1024, 2),
    "Qwen2.5-72B": (80, 1024, 2),
    "Qwen3-4B": (36, 1024, 2),
    "Qwen3-30B-A3B": (48, 512, 2),
    "Qwen3-235B-A22B": (94, 512, 2),
    "Gemma-2-9B": (42, 2048, 2),
    "Gemma-3-27B": (62, 2048, 2),
    "Phi-3-mini": (32, 3072, 2),
    "Phi-4": (40, 1280, 2),
    "gpt-oss-20b": (24, 512, 2),
    "gpt-oss-120b": (36, 512, 2),
    "GLM-4-9B": (40, 256, 2),
    "SmolLM2-135M": (30, 192, 2),
    "SmolLM2-1.7B": (24, 2048, 2),
    "Falcon-40B": (60, 1024, 2),
}
LATENTS: dict[str, tuple[int, int, int]] = {
    # Models that store one latent vector instead of keys and values.
    "DeepSeek-V3": (61, 576, 2),
    "DeepSeek-V2-Lite": (27, 576, 2),
}


def slot_sizes(block_tokens: int) -> dict[str, int]:
    """Bytes of a block's slot, by model."""
    kept = {name: (2, shape) for name, shape in SHAPES.items()}
    kept |= {name: (1, shape) for name, shape in LATENTS.items()}
    return {
        name: aligned(num_kinds * layers * width * value_bytes * block_tokens)
        for name, (num_kinds, (layers, width, value_bytes)) in kept.items()
    }
