"""A fake of vLLM's LoRA manager."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from vllm.lora.request import LoRARequest

from hotkv_vllm.identity.adapter_watch import AdapterWatch
from tests.vllm.other_connectors import our_connector


def lora(number: int = 1, name: str = "a", path: str = "/a", **more: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **more)


class Manager:
    """files: content, a number; read when a request needs it.
    capacity: adapters that stay loaded.
    """

    def __init__(self, files: dict[str, int], capacity: int = 2) -> None:
        self.files = files
        self.capacity = capacity
        self.loaded: OrderedDict[int, Any] = OrderedDict()
        self.num_reads = 0

    def _load_adapter(self, request: LoRARequest) -> Any:
        self.num_reads += 1
        weights = {
            "q": SimpleNamespace(
                lora_a=torch.full((2, 2), float(self.files[request.lora_path])), scaling=2.0
            )
        }
        return SimpleNamespace(id=request.lora_int_id, rank=8, loras=weights)

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def add_adapter(self, request: LoRARequest) -> int:
        """Returns the content that the model then uses."""
        if request.lora_int_id not in self.loaded or request.load_inplace:
            self.loaded[request.lora_int_id] = self._load_adapter(request)
        self.loaded.move_to_end(request.lora_int_id)
        while len(self.loaded) > self.capacity:
            self.loaded.popitem(last=False)
        return int(self.loaded[request.lora_int_id].loras["q"].lora_a[0, 0])


def with_adapters(one: Any, files: dict[str, int], capacity: int = 2) -> Manager:
    """Each rank gets a manager; returns the first."""
    managers = []
    for rank, worker in enumerate(one.each_worker()):
        managers.append(Manager(files, capacity))
        our_connector(worker)._worker.rank.adapters = AdapterWatch(managers[-1], rank)

    def content_of(request: LoRARequest) -> int:
        contents = [manager.add_adapter(request) for manager in managers]
        return contents[0]

    one.content_of = content_of
    return managers[0]
