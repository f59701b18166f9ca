"""A stand-in for a vLLM engine: KV in torch tensors on a GPU, registered with a real server by the
connector's code; and plain CUDA copies to compare with.

A transfer begins only after the device's earlier work on the same memory: the engine waits
before the call, or the server waits for the call's mark. With a `MadeUp` device all runs without
a GPU: bytes count, times mean nothing.
"""

import contextlib
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.servers import MIB, new_hashes
from demo.processes import SHM, Server, ends_cleanly, runtime_folder
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
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_vllm.worker.device_order import WORDS_HANDLE, CudaDevice, MarkEvent, Marks, Words
from hotkv_vllm.worker.layout import ExportedMemory, cuda_handle
from tests.doubles import with_constants
from tests.doubles.device_memory import FakeAllocation, FakeIpcEvent, uuid_of
from tests.doubles.with_devices import FakeDevices

# ----------------------------------------------------------------------------- The layout of blocks

HEADS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """layout: order of the axes, outermost first: B blocks, L layers, H heads, N tokens, C
    channels, K if keys and values are apart. It decides the pieces of a copy: a block in
    `BLHNC`, a page in `LBHNC`, half a page in `LKBNHC`, a head's part of a page in `LHBNC`."""

    page_bytes: int
    layers: int
    num_blocks: int
    layout: str

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def tensors(self) -> tuple[PageTensor, ...]:
        return tuple(self._tensor(i) for i in range(self.layers))

    def _tensor(self, layer: int) -> PageTensor:
        page, layer_bytes, slot = (
            self.page_bytes,
            self.num_blocks * self.page_bytes,
            layer * self.page_bytes,
        )
        if self.layout == "BLHNC":
            return PageTensor(0, "kv", layer * page, self.block_bytes, page, slot)
        parts = {"LBHNC": 1, "LKBNHC": 2, "LHBNC": HEADS}[self.layout]
        if parts == 1:
            return PageTensor(0, "kv", layer * layer_bytes, page, page, slot)
        run = page // parts
        return PageTensor(
            0, "kv", layer * layer_bytes, run, run, slot, ((parts, self.num_blocks * run),)
        )


# --------------------------------------------------------------------------------------- The device


class Cuda:
    """The first GPU."""

    is_made_up = False
    """If so, times mean nothing."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.name = str(torch.cuda.get_device_name(self.device))

    def server_command(self) -> list[str]:
        """The server's command without flags."""
        return [*with_constants.COMMAND, "--copy.cuda", "on"]

    def allocate(self, num_bytes: int) -> tuple[torch.Tensor, MemoryHandle]:
        """uint8 [bytes], and the handle with which the server opens it."""
        memory = self.scratch(num_bytes)
        return memory, cuda_handle("kv", memory.untyped_storage())

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """uint8 [bytes], not shared."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def marks(self, wanted: str) -> Marks:
        """Marks of the current stream. wanted: of the setting `device_order`."""
        return Marks(CudaDevice(self.device), wanted)

    def stream(self) -> Any:
        """A context manager that makes a new stream current."""
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def wait_stream(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def free_bytes(self) -> int:
        """Counts all processes."""
        return int(torch.cuda.mem_get_info(self.device)[0])


class MadeUp:
    """`tests.doubles.device`: host memory; queued work is done at once."""

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
    """A `MarkedDevice` that does work at once."""

    uuid, stream = uuid_of(0), 0

    def new_event(self, *, interprocess: bool) -> MarkEvent:
        return _Event()

    def record(self, event: MarkEvent) -> None:
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
        fd = os.memfd_create("words")
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        self._words = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), np.uint32)
        self.handle = MemoryHandle(WORDS_HANDLE, 4 * count)
        self._fd = fd

    @property
    def fds(self) -> dict[str, int]:
        return {WORDS_HANDLE: os.dup(self._fd)}

    def write(self, index: int, value: int) -> None:
        self._words[index] = value


Side = Cuda | MadeUp


def about(side: Side) -> dict[str, object]:
    """What a report says about the device."""
    return {"device": side.name, "made_up": side.is_made_up}


def find_side(made_up: bool) -> Side:
    """Ends the program if a GPU is wanted and missing."""
    if made_up:
        print("made-up device: bytes are checked, times mean nothing", file=sys.stderr)
        return MadeUp()
    if not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no GPU; --made-up runs the same without one, for its bytes and not for "
            "its times"
        )
    return Cuda()


# ------------------------------------------------------------------------ The engine and its server

DEADLINE_S = 30.0
LEASE_S = 600.0


class GpuServer(Server):
    """Its only device is the GPU or the simulated one."""

    def __init__(self, side: Side, folder: Path, arena_bytes: int, *flags: str) -> None:
        self.arena_bytes = arena_bytes
        super().__init__(folder, str(arena_bytes), *flags, command=side.server_command())

    def __enter__(self) -> "GpuServer":
        return self

    def devices(self) -> dict[str, Any]:
        """`hotkv devices --json`: the device's and the arena's fields in one."""
        answer: dict[str, Any] = json.loads(self.cli("devices", "--json"))
        return {**answer.pop("devices")[0], **answer}

    def wait_settled(self, *, calibrated: bool, timeout_s: float = 90.0) -> dict[str, Any]:
        """Until the arena is pinned and, if `calibrated`, copies are measured. Returns
        `devices`. Raises ChildError."""
        self.wait_ready(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            found = self.devices()
            if found["registering_error"] or found["problem"]:
                raise self._child.error(found["registering_error"] or found["problem"])
            if found["registered_byte_count"] >= self.arena_bytes and (
                found["speeds"] or not calibrated
            ):
                return found
            time.sleep(0.1)
        raise self._child.error(f"not settled: {found}")

    def kill(self) -> None:
        self._child.process.kill()
        self._child.process.wait()


@contextmanager
def settled(
    side: Side, arena_bytes: int, *flags: str, is_calibrated: bool = True
) -> Iterator[GpuServer]:
    """A server whose speed no longer changes. Without a measurement if simulated, or not
    `is_calibrated`."""
    with (
        ends_cleanly(),
        runtime_folder(arena_bytes) as folder,
        GpuServer(side, folder, arena_bytes, *flags) as server,
    ):
        server.wait_settled(calibrated=is_calibrated and not side.is_made_up)
        yield server


class Engine:
    """A worker's session over `memory`, uint8 [bytes]. Transfers wait for marks of the server's
    kind."""

    def __init__(
        self, side: Side, target: str, shape: Shape, *, order: str = "host", model: str = ""
    ) -> None:
        self.side, self.shape = side, shape
        self.memory, handle = side.allocate(shape.num_bytes)
        self.marks = side.marks(order)
        tensors = shape.tensors()
        exported = self.marks.beside(
            ExportedMemory(Layout(0, shape.num_blocks, (handle,), tensors, shape.layout), {})
        )
        self._views = [
            torch.as_strided(
                self.memory,
                (shape.num_blocks, *(count for count, _ in tensor.dims), tensor.run_bytes),
                (tensor.block_stride_bytes, *(stride for _, stride in tensor.dims), 1),
                tensor.base_offset_bytes,
            )
            for tensor in tensors
        ]
        self.said: list[str] = []
        group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.block_bytes,))
        key_space = KeySpace(model or repr(shape), "gpu", "bfloat16", (group,), 16)
        config = SessionConfig(
            target,
            os.urandom(8).hex(),
            Role.WORKER,
            key_space,
            reconnect_max_s=0.3,
            on_state=lambda _, why: self.said.append(why),
        )
        self.session = Session(
            config, EngineMemory(exported.layout, exported.fds, self.marks.order)
        )
        self.session.start()

    def connected(self) -> "Engine":
        """Raises TimeoutError with the server's message."""
        if not self.session.wait_connected(DEADLINE_S):
            raise TimeoutError(f"not connected: {self.session!r}: {self.said[-1:]}")
        return self

    def close(self) -> None:
        self.session.close()
        self._views.clear()
        del self.memory
        if not self.side.is_made_up:
            # torch frees exported memory only once it has seen that others have closed it.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    # Bytes

    def fill(self) -> None:
        self.memory.random_(0, 256)
        self.side.synchronize()

    def clear(self, ids: Int32s) -> None:
        at = self._at(ids)
        for view in self._views:
            view[at] = 0
        self.side.synchronize()

    def equal(self, one: Int32s, other: Int32s) -> bool:
        a, b = self._at(one), self._at(other)
        return all(torch.equal(view[a], view[b]) for view in self._views)

    def content(self, ids: Int32s) -> bytes:
        """All bytes, one tensor after the other."""
        at = self._at(ids)
        return b"".join(view[at].cpu().numpy().tobytes() for view in self._views)

    def _at(self, ids: Int32s) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self.memory.device)

    # Transfers

    def store(
        self, hashes: Sequence[bytes], ids: Int32s, after: After | None = None
    ) -> "Future[TransferResult]":
        name, runs = os.urandom(8).hex(), [BlockRun(0, hashes, ids)]
        return self.session.store(name, name, runs, DEADLINE_S, after=after, polls=True)

    def lease(self, hashes: Sequence[bytes]) -> str:
        """Raises AssertionError unless all are ready. Returns the lease's id."""
        name = os.urandom(8).hex()
        grant = self.session.acquire(name, [GroupHashes(0, hashes)], LEASE_S).result(DEADLINE_S)
        if not grant.pinned[0].all():
            raise AssertionError(
                f"{int((~grant.pinned[0]).sum())} of {len(hashes)} blocks are not there"
            )
        return name

    def load(self, lease: str, ids: Int32s, after: After | None = None) -> "Future[TransferResult]":
        """The lease's first blocks into `ids`. `after`: the mark that the server waits for."""
        positions = np.arange(len(ids), dtype=np.int32)
        return self.session.load(
            os.urandom(8).hex(),
            lease,
            [LoadRun(0, positions, ids)],
            DEADLINE_S,
            after=after,
            polls=True,
        )


def done(transfer: "Future[TransferResult]") -> TransferResult:
    """Raises AssertionError if the transfer failed."""
    result = transfer.result(DEADLINE_S)
    if result.status is not TransferStatus.DONE:
        raise AssertionError(f"a transfer ended as {result}")
    return result


@contextmanager
def half_leased(
    side: Side, target: str, shape: Shape, *, order: str = "host", is_scattered: bool = False
) -> Iterator[tuple[Engine, Int32s, Int32s, str]]:
    """Yields (engine, ids of the stored half, ids of the other, lease). The caller loads the lease
    into the other half; raises AssertionError if they differ at the end. Everything stored is
    deleted.

    order: the setting `device_order`.
    is_scattered: at random places.
    """
    engine = Engine(side, target, shape, order=order).connected()
    try:
        engine.fill()
        ids = np.arange(shape.num_blocks, dtype=np.int32)
        if is_scattered:
            # As in an engine's block pool.
            ids = np.random.default_rng(1).permutation(ids)
        stored, others = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        names = new_hashes(len(stored))
        done(engine.store(names, stored))
        lease = engine.lease(names)
        yield engine, stored, others, lease
        if not engine.equal(stored, others):
            raise AssertionError(f"wrong bytes after loads of {shape}")
        engine.session.release(lease)
        engine.session.flush().result(DEADLINE_S)
    finally:
        engine.close()


class PlainCopies:
    """CUDA's plain call on contiguous bytes: the server can't be faster."""

    def __init__(self, side: Side, num_bytes: int) -> None:
        self._side = side
        self._device = [side.scratch(num_bytes).random_(0, 256) for _ in range(2)]
        self._host = [side.pinned(num_bytes).copy_(device) for device in self._device]
        self._streams = [side.stream() for _ in range(2)]

    def seconds(self, *, load: bool, store: bool) -> float:
        """Of a copy to the device (`load`), from it (`store`), or both at once."""
        self._side.synchronize()
        start_s = time.perf_counter()
        self.give(load=load, store=store)
        self._side.synchronize()
        return time.perf_counter() - start_s

    def give(self, *, load: bool, store: bool) -> None:
        """Submits the copies without waiting."""
        if load:
            with self._streams[0]:
                self._device[0].copy_(self._host[0], non_blocking=True)
        if store:
            with self._streams[1]:
                self._host[1].copy_(self._device[1], non_blocking=True)

    def copy_in(self, stream: Any) -> None:
        """Copies to the device, and waits."""
        with stream:
            self._device[0].copy_(self._host[0], non_blocking=True)
            self._side.wait_stream()


def until(reached: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Raises TimeoutError with `what`."""
    end_s = time.monotonic() + deadline_s
    while not reached():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not come in {deadline_s:g} s")
        time.sleep(0.005)


def operation_bytes(wanted_bytes: int, arenas: int) -> int:
    """`wanted_bytes`, halved until `arenas` times as many fit into shared memory."""
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    found = wanted_bytes
    while found > 16 * MIB and free < arenas * found + 256 * MIB:
        found //= 2
    if found < wanted_bytes:
        print(
            f"{SHM} has {free >> 20} MiB free: operations of {found >> 20} MiB instead of "
            f"{wanted_bytes >> 20}",
            file=sys.stderr,
        )
    return found


def main() -> None:
    """`python -m bench.gpu.engine TARGET BYTES [made-up]`: stores and loads until a test kills
    it."""
    side = MadeUp() if "made-up" in sys.argv[3:] else Cuda()
    num_blocks = int(sys.argv[2]) >> 20
    engine = Engine(
        side, sys.argv[1], Shape(64 << 10, 16, num_blocks, "LBHNC"), order="auto"
    ).connected()
    engine.fill()
    few = np.arange(num_blocks // 4, dtype=np.int32)
    names = new_hashes(len(few))
    done(engine.store(names, few))
    lease = engine.lease(names)
    print("copying", flush=True)
    for flying in _for_ever(engine, lease, few):
        for transfer in flying:
            transfer.result(DEADLINE_S)


def _for_ever(engine: Engine, lease: str, ids: Int32s) -> "Iterator[list[Future[TransferResult]]]":
    while True:
        mark = engine.marks.make(engine.session.order_kind)
        yield [
            engine.load(lease, ids + len(ids), mark.after),
            engine.store(new_hashes(len(ids)), ids, mark.after),
        ]
        engine.marks.done(mark)


if __name__ == "__main__":
    main()
