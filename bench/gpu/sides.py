"""The engine's device in the benchmarks: the first GPU, or memory of the host that stands for one.

Always true: what a `MadeUp` device is given is done at once, so its bytes count and times on it are
no figures.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from hotkv_proto.layout import MemoryHandle
from hotkv_server.testing.device_memory import FakeAllocation, FakeIpcEvent, uuid_of
from hotkv_server.testing.with_devices import FakeDevices
from hotkv_vllm.worker.device_order import WORDS_HANDLE, CudaDevice, Event, Marks, Words
from hotkv_vllm.worker.layout import cuda_handle


class Side(Protocol):
    """The engine's device."""

    @property
    def name(self) -> str: ...
    @property
    def is_made_up(self) -> bool:
        """Then nothing that is timed is a figure."""

    def server_command(self) -> list[str]:
        """Of a server that has this device, without its flags."""

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, MemoryHandle]:
        """uint8 [bytes] on the device, and what lets the server open it."""

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """uint8 [bytes] on the device, for this process alone."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8 [bytes] of the host, which the device copies from and to by itself."""

    def marks(self, wanted: str) -> Marks:
        """Marks at the end of the current stream; `wanted` as in the connector's setting."""

    def stream(self) -> Any:
        """A queue of its own, a context manager: work given to the device inside is put there."""

    def synchronize(self) -> None:
        """Waits for all that was given to the device by this process."""

    def wait_stream(self) -> None:
        """Waits for what was given to the current stream."""

    def free_bytes(self) -> int:
        """Of the device's memory, over all processes."""


class Cuda:
    """The first GPU."""

    is_made_up = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.name = str(torch.cuda.get_device_name(self.device))

    def server_command(self) -> list[str]:
        return [sys.executable, "-m", "hotkv_server.cli", "run", "--copy.cuda", "on"]

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, MemoryHandle]:
        memory = self.scratch(num_bytes)
        return memory, cuda_handle("kv", memory.untyped_storage())

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def marks(self, wanted: str) -> Marks:
        return Marks(CudaDevice(self.device), wanted)

    def stream(self) -> Any:
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def wait_stream(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])


class MadeUp:
    """A device of `hotkv_server.testing`: memory of the host, a queue that is done at once."""

    name, is_made_up = "no GPU, a made-up device", True

    def __init__(self) -> None:
        self._kept: list[FakeAllocation] = []

    def server_command(self) -> list[str]:
        return FakeDevices(max_delay_s=0.0005).command()

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, MemoryHandle]:
        self._kept.append(FakeAllocation(num_bytes))
        return torch.from_numpy(self._kept[-1].array()), MemoryHandle(
            "kv", num_bytes, 0, self._kept[-1].handle, uuid_of(0)
        )

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def marks(self, wanted: str) -> Marks:
        return Marks(_Queue(), wanted)

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass

    def wait_stream(self) -> None:
        pass

    def free_bytes(self) -> int:
        """All addresses, less the allocations that some process has mapped."""
        held = {}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                for line in maps.read_text().splitlines():
                    if "memfd:hotkv-device " in line:
                        span, inode = line.split()[0], line.split()[4]
                        begin, end = (int(part, 16) for part in span.split("-"))
                        held[inode] = end - begin
        return (1 << 47) - sum(held.values())


class _Queue:
    """A `hotkv_vllm.worker.device_order.Device` that has passed all it is given."""

    uuid, stream = uuid_of(0), 0

    def new_event(self, *, interprocess: bool) -> Event:
        return _Event()

    def record(self, event: Event) -> None:
        assert isinstance(event, _Event)
        event.shared.record()
        event.shared.reach()

    def new_words(self, count: int) -> Words:
        return _Words(count)


class _Event:
    def __init__(self) -> None:
        self.shared = FakeIpcEvent()

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        return self.shared.handle


class _Words:
    def __init__(self, count: int) -> None:
        self._memory = FakeAllocation(4096)
        self.handle = MemoryHandle(WORDS_HANDLE, 4 * count, 0, self._memory.handle, uuid_of(0))
        self.fds: dict[str, int] = {}

    def write(self, index: int, value: int) -> None:
        self._memory.words()[index] = value


def find_side(made_up: bool) -> Side:
    """Returns the first GPU, or a made-up one. Ends the program if there is no GPU."""
    if made_up:
        print("made-up device: bytes are checked, times mean nothing", file=sys.stderr)
        return MadeUp()
    if not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no GPU; --made-up runs the same without one, for its bytes and not for "
            "its times"
        )
    return Cuda()
