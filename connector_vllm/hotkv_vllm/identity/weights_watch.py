"""Notices that an engine's weights may have changed in place, and computes a digest of the weights
in memory. Worker side.

Always true:
- A write to the weights through vLLM (`reload_weights`, weight transfer, waking up) or through the
  model's own `load_weights` is noticed before the next step. `digest` then reads all weights, so a
  single different element changes the digest.
- If no write was noticed, `digest` first reads only samples of the weights. If the samples have
  changed, it reads all weights; otherwise it returns the earlier digest. So a write is missed only
  if it was not noticed and changed no sample.
- Unless such a write was missed, equal digests mean equal weights, in any process with the same
  tensor- and pipeline-parallel sizes.
- Some engines pack weights into memory that can't be read (`_hiding_kernels`). In such an engine
  the digest is a random number, which no other process has. The engine gets a new number if weights
  that can be read have changed, or if weights may have been packed again.

If an engine moves experts between ranks (EPLB), each check of its weights finds other weights, so
the engine changes to another key space. In a step without a check of the weights, this module does
no work.
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
"""A tensor of at most this many bytes is read as a whole. Of a larger tensor, samples or sums are
read."""
SAMPLE_BYTES = 4096
NUM_SAMPLES = 64
"""Number of evenly spread pieces of a larger tensor that are read as samples. Training changes many
elements of a tensor, never a single element, so samples reveal it."""
ROW_WORDS = 4096
"""For its digest, the bytes of a larger tensor are read as integers (words) and arranged in rows of
this many words. The digest covers the sum of each row and of each column. Only deliberate changes
would leave all these sums as they were."""
WRITERS = (
    "reload_weights",
    "reset_weights",
    "update_weights",
    "finish_weight_update",
    "finish_draft_weight_update",
    "wake_up",
    "load_model",
)
"""Methods of vLLM's worker and model runner that may change weights."""
EXPERTS = frozenset({"w13_weight", "w2_weight"})
"""Names of the parameters in which vLLM stores the weights of a layer's experts. Kernels may hold
such weights in another form, which can't be read (`_hiding_kernels`)."""
MAX_FRAMES = 40


class WeightsWatch:
    """Watches the weights of a worker's models: notices writes, and computes a digest of the
    weights.

    touched: True if a write to the weights was noticed after the last call of `digest`.
    original: digest of the weights with which the engine started; empty after `forget_original`.
    """

    def __init__(self, models: Sequence[Any], writers: Sequence[Any] = ()) -> None:
        """Begins to notice writes to the weights, and reads the weights once.

        models: the worker's models, including a drafter's.
        writers: vLLM's worker and model runner. Calls of their methods listed in WRITERS are
            noticed, because these methods may change weights.
        """
        self._models = tuple(models)
        self.touched = False
        for model in self._models:
            self._wrap(model, "load_weights")
        for writer in writers:
            for name in WRITERS:
                self._wrap(writer, name)
        self._known_samples = self._digest(_samples)
        # The result of the last reading of all weights: their digest, and the kernel objects whose
        # weights can't be read (`_hiding_kernels`).
        self._found: tuple[str, list[Any]] = "", []
        self._read()
        self.original = self._known

    def __repr__(self) -> str:
        return (
            f"WeightsWatch({len(self._models)} models, "
            f"{'touched' if self.touched else 'untouched'}, {self.original[:8]})"
        )

    def digest(self) -> str:
        """Returns the digest of the present weights. Takes some tenths of a second for a large
        model. If weights were written and are in host memory, takes as long as reading them twice
        (for the sums over rows and over columns, `_sums`).
        """
        # `touched` is cleared before the read, so that a write during the read is noticed.
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
        """Reads all weights. If they may have changed since the last reading, sets `_known` to
        their new digest. But if some weights can't be read because kernel objects hold them
        (`_hiding_kernels`), sets `_known` to a new random value instead."""
        kernels = [kernel for model in self._models for kernel in _hiding_kernels(model)]
        found = self._digest(_sums), kernels
        if found != self._found or None in kernels:
            self._found, self._known = found, uuid.uuid4().hex if kernels else found[0]

    def forget_original(self) -> None:
        """Forgets the digest of the original weights. Later checks then identify the weights by
        their contents in memory, not by the model's files. Used if the weights in memory may differ
        from these files, because these have changed since the process began."""
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
    """Finds vLLM's model runner and its worker on the call stack; returns None for either if it is
    not found. Works only while the worker registers its KV caches. vLLM does not pass these objects
    to connectors.
    """
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
    """Returns a `WeightsWatch` for the models of the worker that is calling; None if the worker is
    not found on the call stack. Must be called while the worker registers its KV caches."""
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
    """Finds the layers whose weights can't be read, because a kernel object holds them. Returns an
    entry for each of these layers. Usually the entry is a reference to the kernel object: vLLM
    makes a new object when it packs the weights again. The entry is None if vLLM may change the
    weights without a new kernel object.

    Source: `dispatch_cpu_unquantized_gemm`, `CPUInt8ScaledMMLinearKernel` and
    `ZentorchWNA16LinearKernel` in vLLM 0.32: on CPUs they hand a layer's weight to a kernel, and
    leave an empty parameter or None in its place. Only `dispatch_cpu_unquantized_gemm` sets
    `cpu_linear`. The parameters of quantized weights have other names than `weight`. On GPUs,
    `Mxfp4MoEMethod` replaces the parameters of experts by tensors of Triton's kernels.
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
    """Yields the parameters and persistent buffers of a model, with their names.

    Leaves out buffers that steps overwrite: working memory, which is not persistent (such as the
    indices of Qwen4Exp's sparse attention), and the scales of a layer that adapts them to its
    inputs. Other buffers that are not persistent follow from the model's settings or its weights.

    Source: `MMEncoderAttention` in vLLM 0.32 (`_fp8_dynamic_scale`).
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
    """Yields the tensors, with their names, in which a tensor's data is stored: the tensor itself,
    or the parts of a wrapper such as torchao's quantized weights. Skips tensors on the meta device.
    """
    if is_traceable_wrapper_subclass(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{part}", getattr(tensor, part))
    elif tensor.device.type != "meta":
        yield name, tensor


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor's bytes in the order of their addresses, uint8 [bytes]. This
    order does not depend on the tensor's strides."""
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
    """Yields the bytes of a tensor that are read as samples: all bytes of a small tensor, and
    evenly spread pieces of a larger tensor."""
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
    """Yields bytes that depend on the whole contents of a tensor: all bytes of a small tensor, and
    sums over the rows and columns of a larger tensor."""
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
