"""An engine without vLLM: KV in torch tensors on a GPU, shown to a real server by the connector's
own code, and plain copies beside it.

Always true: memory that is compared or overwritten is settled on the device before the server is
asked, unless a mark says so. With a `MadeUp` device all of it runs without a GPU, server included;
then bytes count and times do not."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.shape import Shape
from bench.gpu.sides import Cuda, MadeUp, Side
from demo.processes import SHM, Child, Server
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
from hotkv_proto.layout import Layout
from hotkv_vllm.worker.layout import ExportedMemory

DEADLINE_S = 30.0
LEASE_S = 600.0
MIB, GIB = 1 << 20, 1 << 30


class GpuServer(Server):
    """A server with the device, in a folder as `demo.processes.Server`."""

    def __init__(self, side: Side, folder: Path, arena_bytes: int, *flags: str) -> None:
        self.arena_bytes = arena_bytes
        self.runtime_folder = folder / "run"
        self.runtime_folder.mkdir(mode=0o700, exist_ok=True)
        self.target = f"unix:{self.runtime_folder}/grpc.sock"
        self.begin_s = time.monotonic()
        command = [
            *side.server_command(),
            "--runtime-dir",
            str(self.runtime_folder),
            "--arena.dir",
            str(folder / "arena"),
        ]
        command += [
            "--arena.bytes",
            str(arena_bytes),
            "--http.port",
            "-1",
            "--arena.slab-bytes",
            str(min(arena_bytes // 16, 64 * MIB)),
        ]
        self._child = Child("hotkv-server", [*command, *flags], folder / "hotkv-server.log", {})

    def __enter__(self) -> "GpuServer":
        return self

    def devices(self) -> dict[str, Any]:
        """Its only device, as `hotkv devices --json` has it, with what it says of the arena."""
        answer: dict[str, Any] = json.loads(self.cli("devices", "--json"))
        return {**answer.pop("devices")[0], **answer}

    def wait_settled(self, *, calibrated: bool, timeout_s: float = 90.0) -> dict[str, Any]:
        """Until all of the arena is pinned and copies are measured; says what `devices` says.
        Raises ChildError."""
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
        """As a crash would."""
        self._child.process.kill()
        self._child.process.wait()


class Engine:
    """A worker's session over `memory`, uint8 [bytes] on the device, with marks of the kind that
    the server took."""

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
        """Waits for it. Raises TimeoutError, with what the server said."""
        if not self.session.wait_connected(DEADLINE_S):
            raise TimeoutError(f"not connected: {self.session!r}: {self.said[-1:]}")
        return self

    def close(self) -> None:
        """Ends the session and gives the memory back."""
        self.session.close()
        self._views.clear()
        del self.memory
        if not self.side.is_made_up:
            # torch keeps memory that it has exported until it has looked who still holds it.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    # Bytes

    def fill(self) -> None:
        """Random bytes everywhere."""
        self.memory.random_(0, 256)
        self.side.synchronize()

    def clear(self, ids: Int32s) -> None:
        """Zeros in these blocks."""
        at = self._at(ids)
        for view in self._views:
            view[at] = 0
        self.side.synchronize()

    def equal(self, one: Int32s, other: Int32s) -> bool:
        """Whether these blocks have the same bytes."""
        a, b = self._at(one), self._at(other)
        return all(torch.equal(view[a], view[b]) for view in self._views)

    def content(self, ids: Int32s) -> bytes:
        """All bytes of these blocks, one tensor after the other."""
        at = self._at(ids)
        return b"".join(view[at].cpu().numpy().tobytes() for view in self._views)

    def _at(self, ids: Int32s) -> torch.Tensor:
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self.memory.device)

    # Transfers

    def store(
        self, hashes: Sequence[bytes], ids: Int32s, after: After | None = None
    ) -> "Future[TransferResult]":
        name = os.urandom(8).hex()
        return self.session.store(name, name, [BlockRun(0, hashes, ids)], DEADLINE_S, after=after)

    def lease(self, hashes: Sequence[bytes]) -> str:
        """Of blocks that must be there."""
        name = os.urandom(8).hex()
        grant = self.session.acquire(name, [GroupHashes(0, hashes)], LEASE_S).result(DEADLINE_S)
        if not grant.pinned[0].all():
            raise AssertionError(
                f"{int((~grant.pinned[0]).sum())} of {len(hashes)} blocks are not there"
            )
        return name

    def load(self, lease: str, ids: Int32s, after: After | None = None) -> "Future[TransferResult]":
        """Of the first blocks of the lease."""
        positions = np.arange(len(ids), dtype=np.int32)
        return self.session.load(
            os.urandom(8).hex(), lease, [LoadRun(0, positions, ids)], DEADLINE_S, after=after
        )


def done(transfer: "Future[TransferResult]") -> TransferResult:
    """Its result; it must have succeeded."""
    result = transfer.result(DEADLINE_S)
    if result.status is not TransferStatus.DONE:
        raise AssertionError(f"a transfer ended as {result}")
    return result


def new_hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


class PlainCopies:
    """Copies of `num_bytes` contiguous bytes between pinned and device memory, by CUDA's plain
    call: the ceiling."""

    def __init__(self, side: Side, num_bytes: int) -> None:
        self._side = side
        self._device = [side.scratch(num_bytes).random_(0, 256) for _ in range(2)]
        self._host = [side.pinned(num_bytes).copy_(device) for device in self._device]
        self._streams = [side.stream() for _ in range(2)]

    def seconds(self, *, load: bool, store: bool) -> float:
        """Of one copy each way that is named, at once."""
        self._side.synchronize()
        start_s = time.perf_counter()
        self.give(load=load, store=store)
        self._side.synchronize()
        return time.perf_counter() - start_s

    def give(self, *, load: bool, store: bool) -> None:
        """Without waiting for the end."""
        if load:
            with self._streams[0]:
                self._device[0].copy_(self._host[0], non_blocking=True)
        if store:
            with self._streams[1]:
                self._host[1].copy_(self._device[1], non_blocking=True)

    def copy_in(self, stream: Any) -> None:
        """One copy to the device on the stream; waits for it."""
        with stream:
            self._device[0].copy_(self._host[0], non_blocking=True)
            self._side.wait_stream()


def until(reached: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Blocks until then. Raises TimeoutError."""
    end_s = time.monotonic() + deadline_s
    while not reached():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not come in {deadline_s:g} s")
        time.sleep(0.005)


def operation_bytes(wanted_bytes: int, arenas: int) -> int:
    """Bytes of an operation: as many as wanted, or the largest power of two that fits so many times
    into shared memory."""
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
    """An engine to be killed: `python -m bench.gpu.engine TARGET BYTES [made-up]` allocates so
    much, stores and loads without end."""
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
