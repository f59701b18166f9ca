"""Those operators of vLLM's compiled kernels, in torch, that a Llama with Triton's attention and
vLLM's offloading call; the compiled files are too large to carry to a GPU machine without a
network.

`collect.sh` copies this to `vllm/_C_stable_libtorch.py`, which vLLM imports on CUDA. Engines
compute slower with it; copies of KV do not, as `swap_blocks_batch` makes the same driver call.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.library import Library

Function = TypeVar("Function", bound=Callable[..., Any])
OPS = Library("_C", "FRAGMENT")
CACHE_OPS = Library("_C_cache_ops", "FRAGMENT")
SOURCE_IN_STREAM_ORDER, SOURCE_IN_ANY_ORDER = 1, 3


def op(library: Library, schema: str, key: str) -> Callable[[Function], Function]:
    """A decorator that registers the schema's operator for a dispatch key."""

    def register(function: Function) -> Function:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, key)
        return function

    return register


@op(OPS, "rms_norm(Tensor! out, Tensor input, Tensor? weight, float epsilon) -> ()", "CUDA")
def rms_norm(out: Any, x: Any, weight: Any, epsilon: float) -> None:
    normal = x.float()
    normal = (normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    out.copy_(normal if weight is None else normal * weight)


@op(
    OPS,
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "CUDA",
)
def fused_add_rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


@op(OPS, "silu_and_mul(Tensor! out, Tensor input) -> ()", "CUDA")
def silu_and_mul(out: Any, x: Any) -> None:
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


@op(
    OPS,
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size,"
    " Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
    "CUDA",
)
def rotary_embedding(
    positions: Any,
    query: Any,
    key: Any,
    head_size: int,
    cos_sin_cache: Any,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """In place. Raises NotImplementedError for another style than NeoX's."""
    if not is_neox or rope_dim_offset or inverse:
        raise NotImplementedError("only NeoX's rotation is replaced here")
    cos, sin = cos_sin_cache[positions.flatten()].to(query.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(positions.numel(), -1, head_size)
            one, other = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
            heads[..., :half] = one * cos - other * sin
            heads[..., half : 2 * half] = other * cos + one * sin


class HostTensor:
    """Pinned; torch accepts it as device memory by `__cuda_array_interface__`."""

    def __init__(self, tensor: Any) -> None:
        kind = {torch.bool: "b", torch.uint8: "u"}.get(
            tensor.dtype, "f" if tensor.is_floating_point() else "i"
        )
        size = tensor.element_size()
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"{'|' if size == 1 else '<'}{kind}{size}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "version": 3,
        }


@op(OPS, "get_cuda_view_from_cpu_tensor(Tensor cpu) -> Tensor", "CPU")
def get_cuda_view_from_cpu_tensor(cpu: Any) -> Any:
    """Raises ValueError if torch has copied the pinned memory."""
    if not cpu.numel():
        return torch.empty(cpu.shape, dtype=cpu.dtype, device="cuda")
    view = torch.as_tensor(HostTensor(cpu), device="cuda")
    if view.data_ptr() != cpu.data_ptr():
        raise ValueError("torch copied the tensor instead of viewing it")
    return view


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the hints, for managed memory, are unused."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", 4 * ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


@op(
    CACHE_OPS,
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache,"
    " Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()",
    "CUDA",
)
def reshape_and_cache_flash(*arguments: Any) -> None:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    triton_reshape_and_cache_flash(*arguments)


@op(
    CACHE_OPS,
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool any_order=False) -> ()",
    "CPU",
)
def swap_blocks_batch(sources: Any, targets: Any, sizes: Any, any_order: bool = False) -> None:
    """On the current stream, not the default one. Raises RuntimeError with CUDA's status."""
    if not sources.numel():
        return
    attributes = CopyAttributes(SOURCE_IN_ANY_ORDER if any_order else SOURCE_IN_STREAM_ORDER)
    status = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2(
        *(ctypes.c_void_p(each.data_ptr()) for each in (targets, sources, sizes)),
        ctypes.c_size_t(sources.numel()),
        ctypes.byref(attributes),
        ctypes.byref(ctypes.c_size_t(0)),
        ctypes.c_size_t(1),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status:
        raise RuntimeError(f"cuMemcpyBatchAsync_v2 failed with {status}")


for name in (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "mxfp4_experts_quant_supported",
):
    op(OPS, f"{name}(int capability) -> bool", "CompositeExplicitAutograd")(
        lambda capability: False
    )


ROWS, SEGMENTS = 16, 16


@functools.cache
def segment_buffers(device: Any, heads: int, head_size: int) -> dict[str, Any]:
    """For Triton's kernel to split rows of a decode step into SEGMENTS, over the whole device;
    for ROWS rows."""
    width = 1 << (head_size - 1).bit_length()
    sums = {"dtype": torch.float32, "device": device}
    return {
        "seq_threshold_3D": ROWS,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": torch.empty((ROWS, heads, SEGMENTS, width), **sums),
        "softmax_segm_max": torch.empty((ROWS, heads, SEGMENTS), **sums),
        "softmax_segm_expsum": torch.empty((ROWS, heads, SEGMENTS), **sums),
    }


def segments(q: Any) -> dict[str, Any]:
    """Keyword arguments of Triton's kernel, for q [tokens, heads, channels]."""
    return segment_buffers(q.device, q.shape[1], q.shape[2])


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    seqused_k: Any,
    max_seqlen_k: int,
    block_table: Any,
    softmax_scale: float,
    causal: bool,
    window_size: Any = None,
    softcap: float = 0.0,
    **_: Any,
) -> Any:
    """FlashAttention's function, by vLLM's Triton kernel."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    unified_attention(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        tuple(window_size or (-1, -1)),
        block_table,
        softcap,
        None,
        None,
        None,
        **(segments(q) if max_seqlen_q == 1 and len(seqused_k) <= ROWS else {}),
    )
    return out


def add_module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members, __path__=[])
    sys.modules[name] = module


# FlashAttention's kernels are not in vLLM's CPU build.
add_module(
    "vllm.vllm_flash_attn",
    flash_attn_varlen_func=flash_attn_varlen_func,
    get_scheduler_metadata=None,
    compile_flash_attn_varlen_func_from_specs=None,
)
add_module(
    "vllm.vllm_flash_attn.flash_attn_interface",
    is_fa_version_supported=lambda version, *_: version == 2,
    fa_version_unsupported_reason=lambda *_: "only version 2 is replaced here",
)
