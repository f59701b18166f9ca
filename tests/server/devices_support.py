"""Servers with simulated GPUs, and engines whose KV lies on them. `python -m
tests.server.devices_support TARGET ORDER` runs such an engine until it is killed."""

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.processes import Server
from hotkv_client import (
    BlockRun,
    EngineMemory,
    GroupHashes,
    LoadRun,
    Role,
    Session,
    SessionConfig,
    TransferResult,
    TransferStatus,
)
from hotkv_client.types import After, Int32s
from hotkv_proto.errors import HotKVError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_proto.order import DeviceMark, DeviceOrder
from tests.doubles.device_memory import FakeAllocation, FakeIpcEvent, uuid_of
from tests.doubles.with_constants import constant
from tests.doubles.with_devices import FakeDevices
from tests.server.support import hashes

NUM_BLOCKS = 24
LAYERS = 3
PAGE = 4096
NUM_MARKS = 4
DEADLINE_S = 20.0


class AnyDeviceServer(Server):
    """Has the simulated GPUs of `command`. In an earlier server's folder, continues its cache."""

    def __init__(
        self, folder: Path, command: Sequence[str], *flags: str, arena: str = "16MiB"
    ) -> None:
        pieces = constant("device.start.PIN_PIECE_BYTES", 2 << 20)
        super().__init__(folder, arena, *pieces, *flags, command=command)

    def num_held(self) -> int:
        """Counts what the server holds of engines: device allocations and events, from /proc."""
        maps = Path(f"/proc/{self.pid}/maps").read_text(errors="replace")
        return len({line.split()[4] for line in maps.splitlines() if "memfd:hotkv-device" in line})

    def kill(self) -> None:
        self._child.process.kill()
        self._child.process.wait()


class DeviceServer(AnyDeviceServer):
    def __init__(
        self, folder: Path, devices: FakeDevices, *flags: str, arena: str = "16MiB"
    ) -> None:
        self.devices = replace(devices, control=str(folder / "control"))
        super().__init__(folder, self.devices.command(), *flags, arena=arena)


@dataclass(frozen=True, slots=True)
class Shape:
    """Where an engine's pages lie.

    sizes: bytes by handle id.
    in_file: handles whose memory is a file, not of a device.
    """

    tensors: tuple[PageTensor, ...]
    sizes: dict[str, int]
    in_file: frozenset[str] = frozenset()


LAYER_BYTES = NUM_BLOCKS * PAGE
HEADS = 8
HEAD = (PAGE // HEADS, PAGE // HEADS)
"""Bytes from one block to the next, and of a head in a page. They are equal: a head's blocks
follow each other."""
A_LAYER_EACH = tuple(PageTensor(0, f"l{i}", 0, PAGE, PAGE, i * PAGE) for i in range(LAYERS))
SIZES_OF_EACH = {f"l{i}": LAYER_BYTES for i in range(LAYERS)}
SHAPES = {
    "BLHNC": Shape(
        tuple(PageTensor(0, "kv", i * PAGE, LAYERS * PAGE, PAGE, i * PAGE) for i in range(LAYERS)),
        {"kv": LAYERS * LAYER_BYTES},
    ),
    "LHBNC": Shape(
        tuple(
            PageTensor(0, "kv", i * LAYER_BYTES, *HEAD, i * PAGE, ((HEADS, NUM_BLOCKS * HEAD[0]),))
            for i in range(LAYERS)
        ),
        {"kv": LAYERS * LAYER_BYTES},
    ),
    "an allocation a layer": Shape(A_LAYER_EACH, SIZES_OF_EACH),
    "one layer in a file": Shape(A_LAYER_EACH, SIZES_OF_EACH, frozenset({"l1"})),
}
"""Layouts with LAYERS pages of PAGE bytes a block."""


@dataclass(slots=True)
class DeviceEngine:
    """A worker session with KV on a simulated GPU.

    offers: how the server learns the GPU's progress: `events` of CUDA, or `flags`.
    """

    target: str
    shape: str = "BLHNC"
    device: int = 0
    rank: int = 0
    num_ranks: int = 1
    offers: Sequence[str] = ()
    engine_id: str = field(default_factory=lambda: os.urandom(8).hex())
    allocations: dict[str, FakeAllocation] = field(default_factory=dict)
    files: dict[str, mmap.mmap] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)
    events: list[FakeIpcEvent] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """The reason of each change of its session's state."""
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.register()

    def register(self) -> None:
        """Opens the session."""
        shape = SHAPES[self.shape]
        handles = [
            self._handle(name, size, in_file=name in shape.in_file)
            for name, size in shape.sizes.items()
        ]
        flags = ""
        if "flags" in self.offers:
            flags = "flags"
            handles.append(self._handle(flags, PAGE, in_file=True))
        if "events" in self.offers:
            self.events = [FakeIpcEvent(self.device) for _ in range(NUM_MARKS)]
        order = DeviceOrder(
            uuid_of(self.device),
            tuple(event.handle for event in self.events),
            flags,
            NUM_MARKS if flags else 0,
        )
        layout = Layout(self.rank, NUM_BLOCKS, tuple(handles), shape.tensors, self.shape)
        group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (LAYERS * PAGE,) * self.num_ranks)
        key_space = KeySpace("devices", "devices", "bfloat16", (group,), 16)
        config = SessionConfig(
            self.target,
            self.engine_id,
            Role.WORKER,
            key_space,
            reconnect_max_s=0.3,
            on_state=lambda _, why: self.said.append(why),
        )
        self.session = Session(config, EngineMemory(layout, self.fds, order))
        self.session.start()

    def connected(self) -> "DeviceEngine":
        assert self.session.wait_connected(DEADLINE_S), repr(self.session)
        return self

    def _handle(self, name: str, num_bytes: int, *, in_file: bool) -> MemoryHandle:
        if in_file:
            self.fds[name] = os.memfd_create("engine")
            os.posix_fallocate(self.fds[name], 0, num_bytes)
            self.files[name] = mmap.mmap(self.fds[name], num_bytes)
            return MemoryHandle(name, num_bytes)
        # The memory begins a page after the allocation, as memory from PyTorch's caching
        # allocator may.
        if name not in self.allocations:
            self.allocations[name] = FakeAllocation(num_bytes + PAGE, self.device)
        memory = self.allocations[name]
        return MemoryHandle(name, num_bytes, PAGE, memory.handle, memory.device_uuid)

    def view(self, name: str) -> NDArray[np.uint8]:
        return (
            np.frombuffer(self.files[name], np.uint8)
            if name in self.files
            else self.allocations[name].array()[PAGE:]
        )

    @property
    def words(self) -> NDArray[np.uint32]:
        return self.view("flags").view(np.uint32)

    def _places(self, ids: Int32s) -> Iterator[tuple[NDArray[np.uint8], int]]:
        for tensor in sorted(SHAPES[self.shape].tensors, key=lambda t: t.shard_offset_bytes):
            view = self.view(tensor.handle_id)
            for block in ids.tolist():
                for offset in tensor.run_offsets().tolist():
                    at = tensor.base_offset_bytes + block * tensor.block_stride_bytes + offset
                    yield view[at : at + tensor.run_bytes], tensor.run_bytes

    def fill(self, ids: Int32s, seed: int) -> None:
        random = np.random.default_rng(seed)
        for view, count in self._places(ids):
            view[:] = random.integers(0, 256, count, np.uint8)

    def content(self, ids: Int32s) -> bytes:
        return b"".join(view.tobytes() for view, _ in self._places(ids))

    def after(self, index: int, value: int = 0) -> After:
        return After(self.session.order_kind, DeviceMark(index, value))

    def store(
        self, hashes: list[bytes], ids: Int32s, after: After | None = None
    ) -> tuple[str, "Future[TransferResult]"]:
        name, runs = os.urandom(8).hex(), [BlockRun(0, hashes, ids)]
        return name, self.session.store(name, name, runs, DEADLINE_S, after=after)

    def load(
        self,
        hashes: list[bytes],
        ids: Int32s,
        after: After | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> tuple[str, "Future[TransferResult]"]:
        """Starts a load of blocks, which must all be ready. (Transfer's id, future)."""
        name = os.urandom(8).hex()
        grant = self.session.acquire(name, [GroupHashes(0, hashes)]).result(DEADLINE_S)
        assert grant.pinned[0].all(), "some blocks are not there"
        runs = [LoadRun(0, np.arange(len(ids), dtype=np.int32), ids)]
        return name, self.session.load(name, name, runs, timeout_s, after=after)

    def close(self) -> None:
        self.session.close()
        for fd in self.fds.values():
            os.close(fd)
        for one in (*self.allocations.values(), *self.events):
            one.close()


def block_ids(*ids: int) -> Int32s:
    return np.array(ids, np.int32)


def done(future: "Future[TransferResult]") -> TransferResult:
    """Waits for a transfer that must succeed."""
    result = future.result(DEADLINE_S)
    assert result.status is TransferStatus.DONE, result
    return result


def main() -> None:
    engine = DeviceEngine(sys.argv[1], offers=json.loads(sys.argv[2])).connected()
    names, ids = hashes(8), np.arange(8, dtype=np.int32)
    engine.fill(ids, 1)
    done(engine.store(names, ids)[1])
    mark = engine.after(0, 1) if engine.offers else None
    for event in engine.events:
        event.record()  # The simulated device never reaches this event.
    print("copying", flush=True)
    while True:
        with contextlib.suppress(HotKVError):
            flying = [
                engine.load(names, ids + 8)[1],
                engine.store(hashes(8), ids, mark)[1],
                engine.store(hashes(8), ids)[1],
            ]
            done(flying[0])
            flying[2].result(DEADLINE_S)


if __name__ == "__main__":
    main()
