"""Export of CUDA memory and events, with fakes of torch's calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotkv_proto.order import NO_ORDER
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.worker import device_order, layout

HANDLE = bytes(range(64))
UUID = bytes(range(100, 116))
EXPANDABLE = "max_split_size_mb:64,expandable_segments:True"
INVALID = RuntimeError("CUDA error: invalid argument\nmore")


class Storage:
    device = torch.device("cuda", 1)

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _share_cuda_(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """IPC counters that hotkv releases, on a fake device."""
    found: list[Any] = []
    uuid = SimpleNamespace(bytes=list(UUID))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_release_ipc_counter_cuda",
        lambda *counter: found.append(counter),
        raising=False,
    )
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    return found


@pytest.mark.parametrize(
    "handle", [HANDLE, b"\x01c" + HANDLE, b"\x02c" + HANDLE, bytearray(b"\x02c" + HANDLE)]
)
@pytest.mark.parametrize("rest", [(), (b"/torch_1", 3, b"e" * 64, True), (None, 0, None, None)])
def test_handles_of_all_versions_of_torch(
    released: list[Any], handle: Any, rest: tuple[Any, ...]
) -> None:
    found = layout.cuda_handle("kv0", Storage((1, handle, 4096, 512, *rest)))
    assert (found.cuda_handle, found.num_bytes, found.base_offset_bytes, found.device_uuid) == (
        HANDLE,
        4096,
        512,
        UUID,
    )
    assert found.is_cuda and type(found.device_uuid) is bytes
    assert released == ([(b"/torch_1", 3)] if rest and rest[0] else [])


@pytest.mark.parametrize(
    ("answer", "setting", "name", "why"),
    [
        ((1, b"\x02e" + bytes(40), 4096, 0), "", "", "unset expandable_segments"),
        ((1, b"\x03e" + bytes(64), 4096, 0), "", "", "unset expandable_segments"),
        ((1, b"\x02x" + HANDLE, 4096, 0), "", "", "not known"),
        ((1, b"", 4096, 0), "", "", "not known"),
        (INVALID, "", "", "enable_sleep_mode"),
        (INVALID, EXPANDABLE, "", "unset expandable_segments"),
        (INVALID, "", "NVIDIA H200 MIG 1g.18gb", "MIG"),
    ],
)
def test_memory_that_can_not_be_shared_says_why(
    released: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    setting: str,
    name: str,
    why: str,
) -> None:
    if setting:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    if name:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with pytest.raises(Unsupported) as caught:
        layout.cuda_handle("kv0", Storage(answer))
    assert why in str(caught.value) and "\n" not in str(caught.value)
    other: Any = SimpleNamespace(device=torch.device("xpu"))
    with pytest.raises(Unsupported, match="on device xpu"):
        layout.export(layout.EngineMemoryMap(storages={"kv0": other}), 8, 0, "BLHNC")


def test_several_allocations_and_storages_in_one(released: list[Any]) -> None:
    """One handle, two offsets."""
    found = layout.EngineMemoryMap(
        storages={
            "kv0": Storage((1, b"\x02c" + HANDLE, 4096, 0)),  # type: ignore[dict-item]
            "kv1": Storage((1, b"\x02c" + HANDLE, 4096, 1 << 20)),  # type: ignore[dict-item]
            "kv2": Storage((1, b"\x02c" + HANDLE[::-1], 4096, 0)),  # type: ignore[dict-item]
        }
    )
    memory = layout.export(found, 8, 0, "BLHNC")
    places = [(handle.cuda_handle, handle.base_offset_bytes) for handle in memory.layout.handles]
    assert places == [(HANDLE, 0), (HANDLE, 1 << 20), (HANDLE[::-1], 0)] and memory.fds == {}


class Cuda:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        cuda = self

        class Event:
            def __init__(self, *, interprocess: bool) -> None:
                self.interprocess = interprocess

            def record(self, stream: Any) -> None:
                cuda.calls.append(("record", self.interprocess, stream.cuda_stream))

            def query(self) -> bool:
                return False

            def ipc_handle(self) -> bytes:
                assert self.interprocess
                return HANDLE

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(
            torch.cuda,
            "current_stream",
            lambda device: SimpleNamespace(cuda_stream=40 + device.index),
        )
        monkeypatch.setattr(
            torch.cuda,
            "synchronize",
            lambda device: self.calls.append(("synchronize", device.index)),
        )


def test_marks_of_a_cuda_device(released: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, device = Cuda(monkeypatch), torch.device("cuda", 1)
    zeros = torch.zeros
    made: list[torch.Tensor] = []

    def on_host(count: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(zeros(count, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch, "zeros", on_host)
    monkeypatch.setattr(
        device_order,
        "cuda_memory",
        lambda handle_id, *_: layout.MemoryHandle(handle_id, 16, 512, HANDLE, UUID),
    )
    marks = device_order.marks_for(device, "auto")
    assert marks.order.device_uuid == UUID
    assert marks.order.event_handles == (HANDLE,) * device_order.NUM_EVENTS
    assert (marks.order.flags_handle_id, marks.order.num_flags) == (device_order.WORDS_HANDLE, 4)
    assert ("synchronize", 1) in cuda.calls
    cuda.calls.clear()
    mark = marks.make(device_order.OrderKind.EVENTS)
    assert cuda.calls == [("record", True, 41)]
    assert mark.after is not None
    assert not mark.passed()
    assert mark.lets_send()
    with torch.inference_mode():
        for value in (1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 0):
            marks._values[0] = value - 1
            flag = marks.make(device_order.OrderKind.FLAGS)
            assert flag.after is not None and flag.after.mark.value == value
            assert int(made[0].numpy().view("uint32")[0]) == value
    assert not marks.make(device_order.OrderKind.HOST).lets_send()


def test_a_device_that_refuses_everything_offers_nothing(
    released: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Cuda(monkeypatch)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "Event", refuse)
    monkeypatch.setattr(torch, "zeros", refuse)
    assert device_order.marks_for(torch.device("cuda", 0), "auto").order == NO_ORDER
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    with pytest.raises(Unsupported):
        device_order.marks_for(torch.device("cuda", 0), "auto")
