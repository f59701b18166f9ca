"""Notices that an engine's weights may have changed in place, and computes a digest of them.

Always true:
- A write to the weights through vLLM (`reload_weights`, weight transfer, waking up) or through the
  model's own `load_weights` is noticed before the next step. `digest` then reads all weights, so a
  single different element changes it.
- If no write was noticed, as after a reset, `digest` reads samples, which reveal most other writes.
- Equal digests stand for equal weights, in any process with the same parallel shape.

Worker side. Nothing here runs in a step unless a write was noticed.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hotkv_vllm.link import logger

WHOLE_BYTES = 1 << 20
"""A tensor of at most this many bytes is read whole."""
SAMPLE_BYTES = 4096
NUM_SAMPLES = 64
"""Number of evenly spread pieces of a larger tensor that are samples. A step of training changes a
share of all elements, never a single element."""
ROW_WORDS = 4096
"""Number of words in a row of a larger tensor, which is summed over rows and over columns. Only
deliberate changes cancel in both sums."""

WRITERS = (
    "reload_weights",
    "update_weights",
    "finish_weight_update",
    "finish_draft_weight_update",
    "wake_up",
    "load_model",
)
"""Methods of vLLM's worker and model runner that may change weights."""
MAX_FRAMES = 40


class WeightsWatch:
    """Watches the models of a worker.

    original: digest of the weights that the engine started with; empty if these are not known.
    """

    def __init__(self, models: Sequence[Any], writers: Sequence[Any] = ()) -> None:
        """`models`: the worker's models, a drafter's too. `writers`: objects whose WRITERS write
        weights."""
        self._models = tuple(models)
        self.touched = False
        """True if weights were written since `digest` was last taken."""
        for model in self._models:
            self._wrap(model, "load_weights")
        for writer in writers:
            for name in WRITERS:
                self._wrap(writer, name)
        self._known_samples = self._digest(_samples)
        self.original = self._digest(_sums)
        self._known = self.original

    def __repr__(self) -> str:
        return (
            f"WeightsWatch({len(self._models)} models, "
            f"{'touched' if self.touched else 'untouched'}, {self.original[:8]})"
        )

    def digest(self) -> str:
        """Returns the digest of the present weights.

        Takes some tenths of a second for a large model. If weights were written, and are in host
        memory, the call takes the time to read the weights twice.
        """
        # Cleared before the read, so that a write during the read is noticed.
        was_touched, self.touched = self.touched, False
        try:
            samples = self._digest(_samples)
            if was_touched or samples != self._known_samples:
                self._known = self._digest(_sums)
                self._known_samples = samples
        except BaseException:
            self.touched = True
            raise
        return self._known

    def forget_original(self) -> None:
        """Makes the first check name the weights by their content in memory.

        For an engine whose weights may differ from those that its identity names.
        """
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
    """Returns vLLM's model runner and worker that are registering KV caches right now; None for
    either if it is not found.

    vLLM does not pass them to a connector, but both are on the stack when KV caches are registered.
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


def watch_callers(in_doubt: bool = False) -> WeightsWatch | None:
    """Returns a watch over the models of the worker that is registering its KV caches right now;
    None if the worker is not found.

    `in_doubt`: files of the model have changed since this process began, so the loaded weights may
    be older than the files.
    """
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
    watch = WeightsWatch(watched, [owner for owner in (runner, worker) if owner is not None])
    if in_doubt:
        logger.warning(
            "hotkv: files of the model have changed since this process began, so the weights are "
            "named by what they are in memory; engines "
            "that start from now on share no KV with this one"
        )
        watch.forget_original()
    return watch


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name in sorted(named):
        if named[name].device.type != "meta":
            yield name, named[name].detach()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory in the order of addresses, whatever its strides; uint8 [bytes]."""
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
    """Yields all bytes of a small tensor, and evenly spread pieces of a large tensor."""
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
    """Yields all bytes of a small tensor, and sums of a large tensor that depend on each byte and
    its place."""
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
