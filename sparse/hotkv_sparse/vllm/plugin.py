"""Registers hotkv's attention backends, which without `hotkv.sparse` behave as vLLM's own."""

from hotkv_sparse.vllm import attention_layers

BACKEND = "hotkv_sparse.vllm.cpu.backend.HotAttentionBackend"
CUDA_BACKEND = "hotkv_sparse.vllm.cuda.backend.HotFlashBackend"


def register() -> None:
    """Leaves a backend that another plugin has replaced."""
    attention_layers.override_cpu_attention(BACKEND)
    attention_layers.override_cuda_attention(CUDA_BACKEND)
