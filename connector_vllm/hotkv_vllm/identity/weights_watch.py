"""Notices that weights may have changed in place, and computes their digest in memory. Worker side.

- After a write through vLLM (`reload_weights`, weight transfer, waking up) or the model's
  `load_weights`, `digest` reads all weights: a single different element changes it.
- Otherwise it reads samples first, so only a write that was not noticed and changed no sample is
  missed.
- But for that, equal digests mean equal weights, in any process with the same tensor- and
  pipeline-parallel sizes.
- If weights are packed into memory that can't be read (`_hiding_kernels`), the digest is random,
  and a new one if any may have changed.

With experts moved between ranks (EPLB) each check finds other weights. A step without a check
costs nothing.
"""

import functools
import hashlib
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hotkv_vllm.link import logger

WHOLE_BYTES = 1 << 20
"""Larger tensors are read by samples or sums."""
SAMPLE_BYTES = 4096
NUM_SAMPLES = 64
"""Evenly spread pieces. Training changes many elements, so samples reveal it."""
ROW_WORDS = 4096
"""A larger tensor's words are summed over rows of this length and over columns: only deliberate
changes would keep all sums."""
WRITERS = (
    "reload_weights",
    "reset_weights",
    "update_weights",
    "finish_weight_update",
    "finish_draft_weight_update",
    "wake_up",
    "load_model",
)
"""May change weights."""
EXPERTS = frozenset({"w13_weight", "w2_weight"})
"""Kernels may hold them in a form that can't be read (`_hiding_kernels`)."""
MAX_FRAMES = 40


class WeightsWatch:
    """touched: a write was noticed since the last `digest`.
    original: digest at the engine's start; empty after `forget_original`.
    """

    def __init__(self, models: Sequence[Any], writers: Sequence[Any] = ()) -> None:
        """Reads the weights once.

        writers: vLLM's worker and model runner, whose WRITERS are noticed.
        """
        self._models = tuple(models)
        self.touched = False
        for model in self._models:
            self._wrap(model, "load_weights")
        for writer in writers:
            for name in WRITERS:
                self._wrap(writer, name)
        self._known_samples = self._digest(_samples)
        # Of the last reading: digest, and kernels whose weights can't be read
        # (`_hiding_kernels`).
        self._found: tuple[str, list[Any]] = "", []
        self._read()
        self.original = self._known

    def __repr__(self) -> str:
        return (
            f"WeightsWatch({len(self._models)} models, "
            f"{'touched' if self.touched else 'untouched'}, {self.original[:8]})"
        )

    def digest(self) -> str:
        """Takes some tenths of a second for a large model; as long as two reads (`_sums`) if the
        weights were written and are in host memory."""
        # Before the read, so that a write during it is noticed.
        was_touched, self.touched = self.touched, False
        try:
            samples = self._digest(_samples)
            if was_touched or samples != self._known_samples:
                self._read()
                self._known_samples = samples
        except BaseException:
            self.touched = True
            raise
        return self._known

    def _read(self) -> None:
        kernels = [kernel for model in self._models for kernel in _hiding_kernels(model)]
        found = self._digest(_sums), kernels
        if found != self._found or None in kernels:
            self._found, self._known = found, uuid.uuid4().hex if kernels else found[0]

    def forget_original(self) -> None:
        """The model's files have changed since the process began: checks identify weights by
        their contents in memory."""
        logger.warning(
            "hotkv: files of the model have changed since this process began, so the weights are "
            "named by what they are in memory; engines "
            "that start from now on share no KV with this one"
        )
        self.original = ""
        self.touched = True

    def _digest(self, read: Callable[[torch.Tensor], Iterator[bytes]]) -> str:
        found = hashlib.sha256(b"hotkv-weights-in-memory-1\0")
        for number, model in enumerate(self._models):
            for name, tensor in _tensors(model):
                found.update(
                    f"{number}\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tuple(tensor.stride())}\0".encode()
                )
                for piece in read(tensor):
                    found.update(piece)
        return found.hexdigest()

    def _wrap(self, owner: Any, name: str) -> None:
        method = getattr(owner, name, None)
        if not callable(method):
            return
        try:
            setattr(owner, name, self._noticing(method))
        except (AttributeError, TypeError):
            logger.warning(
                "hotkv: can't watch %s.%s; reset the connector's cache after weights were "
                "changed by it",
                type(owner).__name__,
                name,
            )

    def _noticing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noticing(*args: Any, **kwargs: Any) -> Any:
            self.touched = True
            try:
                return method(*args, **kwargs)
            finally:
                self.touched = True

        return noticing


def calling_worker() -> tuple[Any, Any]:
    """vLLM's model runner and worker, or None, from the call stack while it registers its KV
    caches."""
    runner = None
    frame = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        owner = frame.f_locals.get("self")
        if (
            runner is None
            and callable(getattr(type(owner), "get_model", None))
            and hasattr(owner, "vllm_config")
        ):
            runner = owner
        elif runner is not None and getattr(owner, "model_runner", None) is runner:
            return runner, owner
        if frame.f_back is None:
            break
        frame = frame.f_back
    return runner, None


def watch_callers() -> WeightsWatch | None:
    """None if the calling worker is not found. Call as `calling_worker`."""
    runner, worker = calling_worker()
    if runner is None:
        logger.warning(
            "hotkv: the model was not found; after a reset this engine shares KV with no other"
        )
        return None
    drafters = (getattr(runner, name, None) for name in ("drafter", "speculator"))
    models = [
        runner.get_model(),
        *(model for drafter in drafters if (model := getattr(drafter, "model", None)) is not None),
    ]
    watched = list(
        {id(model): model for model in models if isinstance(model, torch.nn.Module)}.values()
    )
    return WeightsWatch(watched, [owner for owner in (runner, worker) if owner is not None])


def _hiding_kernels(model: torch.nn.Module) -> list["weakref.ref[Any] | None"]:
    """Per layer whose weights can't be read, a reference to its kernel object, which vLLM replaces
    when it packs again; None if the weights may change without a new one.

    vLLM 0.32: on CPUs `dispatch_cpu_unquantized_gemm` (which alone sets `cpu_linear`),
    `CPUInt8ScaledMMLinearKernel` and `ZentorchWNA16LinearKernel` leave an empty parameter or
    None for a weight. Quantized weights have other names than `weight`. On GPUs `Mxfp4MoEMethod`
    replaces experts' parameters by tensors of Triton's kernels.
    """
    if any(EXPERTS & vars(layer).keys() for layer in model.modules()):
        return [None]
    if any(one.device.type not in ("cpu", "meta") for one in model.parameters()):
        return []
    return [
        weakref.ref(layer.cpu_linear)
        if name == "weight" and callable(getattr(layer, "cpu_linear", None))
        else None
        for layer in model.modules()
        for name, weight in layer._parameters.items()
        if (name == "weight" if weight is None else not weight.numel())
    ]


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers.

    Without what steps overwrite: working memory, which is not persistent (as the indices of
    Qwen4Exp's sparse attention), and scales that adapt to inputs (`MMEncoderAttention`'s
    `_fp8_dynamic_scale`, vLLM 0.32). Other non-persistent buffers follow from settings or
    weights.
    """
    named = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if getattr(module, "_fp8_dynamic_scale", False):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                named[f"{prefix}.{name}"] = buffer
    for name in sorted(named):
        yield from _plain_tensors(name, named[name].detach())


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or the parts of a wrapper such as torchao's; none on the meta device."""
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))
    elif tensor.device.type != "meta":
        yield name, tensor


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes by address, whatever its strides, uint8 [bytes]."""
    size = tensor.element_size()
    span = (
        sum(
            (count - 1) * stride
            for count, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        + 1
    ) * size
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * size,
        (span if tensor.numel() else 0,),
        (1,),
    )


def _samples(tensor: torch.Tensor) -> Iterator[bytes]:
    data = _memory(tensor)
    if len(data) <= WHOLE_BYTES:
        yield _bytes(data)
        return
    pieces = data.as_strided(
        (NUM_SAMPLES, SAMPLE_BYTES),
        ((len(data) - SAMPLE_BYTES) // (NUM_SAMPLES - 1), 1),
        data.storage_offset(),
    )
    yield _bytes(pieces.contiguous())
    yield _bytes(data[-SAMPLE_BYTES:])


def _sums(tensor: torch.Tensor) -> Iterator[bytes]:
    data = _memory(tensor)
    if len(data) <= WHOLE_BYTES:
        yield _bytes(data)
        return
    word = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if data.storage_offset() % kind.itemsize == 0
    )
    body = len(data) // (ROW_WORDS * word.itemsize) * ROW_WORDS * word.itemsize
    rows = data[:body].view(word).view(-1, ROW_WORDS)
    yield _bytes(rows.sum(0))
    yield _bytes(rows.sum(1))
    yield _bytes(data[body:])


def _bytes(data: torch.Tensor) -> bytes:
    found: bytes = data.cpu().numpy().tobytes()
    return found
