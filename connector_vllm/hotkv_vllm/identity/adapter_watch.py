"""Identifies the bytes that a worker has loaded for a LoRA adapter, and notices other bytes. Worker
side.

The identity is a digest of the adapter in memory, so it is right even if the files change while
vLLM reads them.

- vLLM uses the bytes that were reported until the adapter is released or evicted: if it has not
  loaded them yet, `AdapterWatch` reads ahead, and vLLM gets this copy.
- After other bytes were loaded for a known id, `is_trusted` is False until the scheduler knows:
  stores and loads planned for the old bytes must not run.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotkv_vllm.compat.fingerprint import canonical, digest
from hotkv_vllm.identity.adapters import LATER, UNKNOWN, AdapterReport, AdapterWork
from hotkv_vllm.identity.weights_watch import calling_worker
from hotkv_vllm.link import logger

MAX_AHEAD = 4
"""Most adapters read ahead at a time, or vLLM's `max_loras` if larger."""


class AdapterWatch:
    """manager: vLLM's; None without LoRA, or if not found: every answer is UNKNOWN.
    settings: digest of what affects KV besides the adapter's bytes.
    """

    def __init__(
        self, manager: Any, rank: int = 0, settings: str = "", max_ahead: int = MAX_AHEAD
    ) -> None:
        self._manager = manager
        self._max_ahead = max_ahead
        self._rank = rank
        self._settings = settings
        self._held: dict[int, str] = {}
        self._ahead: dict[int, Any] = {}
        self._put_off: dict[int, Any] = {}
        self._changed: set[int] = set()
        self._unacknowledged: frozenset[int] = frozenset()
        self._answers: dict[int, dict[int, str]] = {}
        if manager is not None:
            self._read = manager._load_adapter
            manager._load_adapter = self._load

    def __repr__(self) -> str:
        return (
            f"AdapterWatch({len(self._held)} adapters, {len(self._ahead)} read ahead, "
            f"{len(self._changed)} changed)"
        )

    @property
    def is_watching(self) -> bool:
        return self._manager is not None

    @property
    def is_trusted(self) -> bool:
        return not self._unacknowledged

    @property
    def is_quiet(self) -> bool:
        return not (self._answers or self._unacknowledged or self._put_off)

    def before_step(self, work: AdapterWork) -> None:
        self._unacknowledged -= work.acknowledged
        for adapter_id in work.released:
            self._ahead.pop(adapter_id, None)
        if work.released:
            self._put_off = {
                number: lora
                for number, lora in self._put_off.items()
                if lora.lora_int_id not in work.released
            }
        for number, lora_request in (*self._put_off.items(), *work.asked):
            identity = self._name(lora_request)
            if identity != LATER:
                self._put_off.pop(number, None)
            elif number in self._put_off:
                continue
            else:
                self._put_off[number] = lora_request
            self._answers[number] = {self._rank: identity}

    def take_report(self) -> AdapterReport | None:
        """Each answer once."""
        if not self._answers and not self._unacknowledged:
            return None
        report = AdapterReport(self._answers, self._unacknowledged)
        self._answers = {}
        return report

    def _name(self, lora_request: Any) -> str:
        """Of the bytes that vLLM uses or will use, which it reads ahead if need be."""
        if self._manager is None:
            return UNKNOWN
        adapter_id = lora_request.lora_int_id
        try:
            if adapter_id not in self._ahead and adapter_id not in self._manager.list_adapters():
                if len(self._ahead) >= self._max_ahead:
                    return LATER
                model = self._read(lora_request)
                self._note(adapter_id, model)
                if adapter_id not in self._changed:
                    self._ahead[adapter_id] = model
        except Exception:  # noqa: BLE001 - edge to vLLM
            # vLLM itself reports the error when it loads the adapter.
            logger.exception("hotkv: LoRA adapter %r could not be read", lora_request.lora_name)
            return UNKNOWN
        return UNKNOWN if adapter_id in self._changed else self._held.get(adapter_id, UNKNOWN)

    def _load(self, lora_request: Any) -> Any:
        """In place of vLLM's method: the copy that was read ahead, but for a reload
        (`load_inplace`)."""
        adapter_id = lora_request.lora_int_id
        model = self._ahead.pop(adapter_id, None)
        if model is None or lora_request.load_inplace:
            model = self._read(lora_request)
            self._note(adapter_id, model)
        return model

    def _note(self, adapter_id: int, model: Any) -> None:
        try:
            identity = self._identity(model)
        except Exception:  # noqa: BLE001 - edge to vLLM
            logger.exception("hotkv: the contents of LoRA adapter %d could not be read", adapter_id)
            identity = UNKNOWN
        if (
            self._held.setdefault(adapter_id, identity) != identity
            and adapter_id not in self._changed
        ):
            self._changed.add(adapter_id)
            self._unacknowledged |= {adapter_id}

    def _identity(self, model: Any) -> str:
        found = hashlib.sha256(f"hotkv-adapter-in-memory-1\0{self._settings}\0".encode())
        # `id` is only this engine's number for the adapter.
        _feed(found, {name: value for name, value in vars(model).items() if name != "id"})
        return found.hexdigest()


def watch_adapters(vllm_config: Any) -> AdapterWatch:
    """Call while vLLM's worker, found on the call stack, registers its KV caches."""
    rank = vllm_config.parallel_config.rank
    if vllm_config.lora_config is None:
        return AdapterWatch(None, rank)
    runner, _ = calling_worker()
    manager = getattr(runner, "lora_manager", None)
    if not callable(getattr(manager, "_load_adapter", None)) or not callable(
        getattr(manager, "list_adapters", None)
    ):
        manager = None
    return AdapterWatch(
        manager,
        rank,
        digest(vllm_config.lora_config),
        max(MAX_AHEAD, vllm_config.lora_config.max_loras),
    )


def _feed(found: Any, value: Any) -> None:
    """Feeds `found`, of hashlib: tensors whole, objects by class and attributes, so that unequal
    values give different digests."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        found.update(f"tensor {data.dtype} {tuple(data.shape)}\0".encode())
        found.update(data.flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}\0".encode())
        for name in sorted(value, key=str):
            found.update(f"{name}\0".encode())
            _feed(found, value[name])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        found.update(f"sequence {len(value)}\0".encode())
        for entry in value:
            _feed(found, entry)
    elif hasattr(value, "__dict__"):
        found.update(f"{type(value).__qualname__}\0".encode())
        _feed(found, vars(value))
    else:
        found.update(f"{canonical(value)!r}\0".encode())
