"""The connector with KV in CUDA's virtual memory, on a driver without a GPU (`tests.device`)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from demo.processes import runtime_folder
from hotkv_proto.cuda_memory import FABRIC
from hotkv_vllm.compat import Unsupported, checks
from hotkv_vllm.worker import layout
from tests.device.timed_gpu import library, needs_c_compiler
from tests.device.timed_world import World
from tests.device.virtual_memory import (
    BACKING_BYTES,
    VirtualPool,
    engine_gpus,
    num_descriptors,
)
from tests.doubles.device_memory import uuid_of
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import PAGE
from tests.vllm import harness
from tests.vllm.engine_core import Core, Executor
from tests.vllm.harness import Engine, prompt
from tests.vllm.ordered_server import engine_at, finish

pytestmark = needs_c_compiler
PROMPT = prompt(1, 200)
HANDLE = bytes(range(64))


class Storage:
    """Of a tensor that torch takes for CUDA memory. `answer`: of torch's IPC."""

    device = torch.device("cuda", 0)

    def __init__(self, address: int, num_bytes: int, answer: Any = None) -> None:
        self._address, self._num_bytes, self._answer = address, num_bytes, answer

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._num_bytes

    def _share_cuda_(self) -> Any:
        if self._answer is None:
            raise RuntimeError("CUDA error: invalid argument")
        return self._answer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At the end, no virtual memory of this process is left."""
    uuid = SimpleNamespace(uuid=SimpleNamespace(bytes=uuid_of(0)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: uuid)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(layout, "CUDA_LIBRARY", str(library()))
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    yield
    assert engine_gpus().virtual_memory() == {}


# Exports


@pytest.mark.usefixtures("cuda")
def test_both_kinds_of_memory_are_exported() -> None:
    pool = VirtualPool([PAGE] * 3)
    storages: Any = {
        "kv0": Storage(pool.address, PAGE + 8),
        "kv1": Storage(pool.address + PAGE + 8, PAGE),
        "kv2": Storage(16, 4096, (0, b"\x02c" + HANDLE, 4096, 512)),
    }
    memory = layout.export(layout.EngineMemoryMap(storages=storages), 8, 0, "BLHNC")
    one, two, three = memory.layout.handles
    assert [len(one.backings), len(two.backings), three.backings] == [2, 2, ()]
    assert one.backings[1] == two.backings[0] and len(memory.fds) == 3
    assert (two.base_offset_bytes, two.num_bytes, two.device_uuid) == (8, PAGE, uuid_of(0))
    assert three.cuda_handle == HANDLE and memory.fds.keys() == set(memory.layout.backing_ids)
    fds = list(memory.fds.values())
    memory.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    # A later storage that can't be shared leaves no descriptor.
    before = num_descriptors(os.getpid())
    storages["kv2"] = Storage(16, 4096)
    with pytest.raises(Unsupported, match="does not share this memory"):
        layout.export(layout.EngineMemoryMap(storages=storages), 8, 0, "BLHNC")
    assert num_descriptors(os.getpid()) == before
    pool.close()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("handle_types", "setting", "said"),
    [
        (0, "", r"requestedHandleTypes = 0.*; or leave out enable_sleep_mode and enable_cumem_al"),
        (0, "expandable_segments:True", "; set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC to 1, or unset"),
        (FABRIC, "", "take the IMEX channels from the engine"),
    ],
)
def test_memory_without_descriptors_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, handle_types: int, setting: str, said: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    pool = VirtualPool([PAGE], handle_types=handle_types)
    storages: Any = {"kv0": Storage(pool.address, PAGE)}
    with pytest.raises(Unsupported, match=said):
        layout.export(layout.EngineMemoryMap(storages=storages), 8, 0, "BLHNC")
    pool.close()


@pytest.mark.parametrize(("sleeps", "is_told"), [(True, True), (True, False), (False, False)])
def test_an_engine_that_sleeps_untold_is_refused(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, is_told: bool
) -> None:
    monkeypatch.setattr(base, "KVConnectorBase_V1", Told if is_told else object)
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    assert checks.tells_of_sleep(config) == (is_told or not sleeps)


class Told:
    def unregister_kv_caches(self) -> None: ...


# Engines


class Sleeper(Executor):
    """vLLM's allocator takes the memory; an access to it would kill this process."""

    pool: VirtualPool

    def _garble(self) -> None:
        if self.is_sleeping:
            self.pool.wake()
        else:
            self.pool.sleep()


Make = Callable[..., tuple[Engine, Core]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with runtime_folder(64 << 20) as folder, contextlib.ExitStack() as stack:
        yield World(stack, folder).start(*copies_by("batch"))


@pytest.fixture
def make(
    cuda: None, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Engines whose KV lies in virtual memory."""
    allocate, export = harness.allocate_kv_cache, layout.export
    pools: list[VirtualPool] = []
    made: list[Engine] = []

    def in_pool(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = allocate(*arguments)
        storages = {one.untyped_storage().data_ptr(): one for one in tensors.values()}
        num_bytes = sum(one.untyped_storage().nbytes() for one in storages.values())
        pools.append(VirtualPool([BACKING_BYTES] * (num_bytes // BACKING_BYTES + 1)))
        moved, at = {}, 0
        for address, one in storages.items():
            size = one.untyped_storage().nbytes()
            moved[address] = torch.from_numpy(pools[-1].array()[at : at + size]).untyped_storage()
            at += size
        return {
            name: torch.empty(0, dtype=one.dtype).set_(
                moved[one.untyped_storage().data_ptr()],
                one.storage_offset(),
                one.shape,
                one.stride(),
            )
            for name, one in tensors.items()
        }

    def as_cuda(found: layout.EngineMemoryMap, *arguments: Any) -> layout.ExportedMemory:
        found.storages = {
            name: Storage(one.data_ptr(), one.nbytes())  # type: ignore[misc]
            for name, one in found.storages.items()
        }
        return export(found, *arguments)

    monkeypatch.setattr(harness, "allocate_kv_cache", in_pool)
    monkeypatch.setattr(layout, "export", as_cuda)

    def start(**settings: Any) -> tuple[Engine, Core]:
        made.append(engine_at(world.server, tmp_path, monkeypatch, **settings))  # type: ignore[arg-type]
        core = Core(made[-1])
        core.core.model_executor = sleeper = Sleeper(made[-1])
        sleeper.pool = pools[-1]
        return made[-1], core

    yield start
    for one in made:
        one.shutdown()
    for pool in pools:
        pool.close()


def test_an_engine_sleeps_and_hits_what_it_stored(make: Make, world: World) -> None:
    one, core = make()
    assert world.gpus.virtual_memory()["mapped"] > 1
    answer = one.fill(PROMPT)
    finish(one)
    for _ in range(2):
        core.sleep()
        assert world.gpus.virtual_memory() == {} and world.server.num_held() == 0
        core.wake_up()
        assert world.gpus.virtual_memory()["mapped"] > 1
        assert one.hit(PROMPT) == 192
    two, _ = make()
    assert two.generate("b", PROMPT, 4) == (answer, 192)


def test_a_sleep_during_transfers_leaves_kv_right(make: Make, world: World) -> None:
    one, core = make(pipelined=True)
    with world.gpus.held("cuMemcpyBatchAsync_v2"):
        one.add("a", PROMPT, 3)
        one.steps(2)
    core.sleep()
    assert world.gpus.virtual_memory() == {}
    core.wake_up()
    one.run()
    finish(one)
    assert one.generate("c", PROMPT, 3)[0] == make()[0].generate("d", PROMPT, 3)[0]


def test_an_engine_that_can_not_share_runs_without_hotkv(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "tells_of_sleep", lambda _: False)
    one, _ = make()
    assert "does not tell its connector" in one.worker._worker.handshake().why_off
    assert world.gpus.virtual_memory() == {}
    one.fill(PROMPT)
    assert one.hit(PROMPT) == 0
