"""`Marks`, with a fake device."""

from typing import Any

import pytest
import torch

from hotkv_proto.layout import Layout, MemoryHandle
from hotkv_proto.order import NO_ORDER, OrderKind
from hotkv_vllm.worker.device_order import (
    NUM_EVENTS,
    NUM_WORDS,
    WORDS_HANDLE,
    Mark,
    Marks,
    marks_for,
)
from hotkv_vllm.worker.layout import ExportedMemory
from tests.vllm.device import ScriptedDevice
from tests.vllm.ordered_workers import KINDS


@pytest.mark.parametrize("wanted", ["auto", "events", "flags", "host"])
@pytest.mark.parametrize("has_events", [True, False])
@pytest.mark.parametrize("has_words", [True, False])
def test_wanted_and_possible_orders_are_offered(
    wanted: str, has_events: bool, has_words: bool
) -> None:
    marks = Marks(ScriptedDevice(has_events=has_events, has_words=has_words), wanted)
    events = has_events and wanted in ("auto", "events")
    words = has_words and wanted in ("auto", "flags")
    assert len(marks.order.event_handles) == (NUM_EVENTS if events else 0)
    assert marks.order.num_flags == (NUM_WORDS if words else 0)
    assert marks.order.flags_handle_id == (WORDS_HANDLE if words else "")
    assert marks.order.device_uuid == (ScriptedDevice.uuid if events or words else b"")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_mark_is_of_the_sessions_kind(kind: OrderKind) -> None:
    marks = Marks(ScriptedDevice(), "auto")
    made = [marks.make(kind).after for _ in range(3)]
    assert {after.kind for after in made if after} == {kind} - {OrderKind.HOST}
    if kind is OrderKind.EVENTS:
        assert [after.mark.index for after in made if after] == [0, 1, 2]


def test_all_marks_have_passed_on_a_cpu() -> None:
    marks = Marks()
    mark = marks.make(OrderKind.EVENTS)
    assert marks.order == NO_ORDER and mark.passed() and mark.lets_send() and mark.after is None
    marks.done(marks.use(mark))
    marks.done(mark)
    assert marks_for(torch.device("cpu"), "auto").order == NO_ORDER


def test_unrecorded_event_is_still_free() -> None:
    device = ScriptedDevice()
    marks = Marks(device, "events")
    device.on_record = lambda event: 1 // 0
    with pytest.raises(ZeroDivisionError):
        marks.make(OrderKind.EVENTS)
    device.on_record = lambda event: None
    assert marks.make(OrderKind.EVENTS).after and len(marks._free) == NUM_EVENTS - 1


@pytest.mark.parametrize("kind", [OrderKind.FLAGS, OrderKind.HOST])
def test_events_of_this_process_are_used_again(kind: OrderKind) -> None:
    made: list[Any] = []
    device = ScriptedDevice()
    plain = device.new_event
    device.new_event = lambda **how: made.append(how) or plain(**how)  # type: ignore[method-assign]
    marks = Marks(device, "flags")
    for _ in range(3):
        mark = marks.make(kind)
        assert mark.event is not None and (mark.after is not None) == (kind is OrderKind.FLAGS)
        marks.done(mark)
    assert made == [{"interprocess": False}] and len(marks._spare) == 1


def test_mark_passes_with_device_and_stays_passed() -> None:
    device = ScriptedDevice()
    device.give(lambda: None)
    marks = Marks(device, "host")
    mark = marks.make(OrderKind.HOST)
    assert not mark.passed() and not mark.lets_send() and not mark.has_passed
    device.run()
    assert mark.passed() and mark.lets_send()
    # The first stays passed.
    device.give(lambda: None)
    device.record(mark.event)
    assert mark.passed()
    assert Mark(None).passed()


def test_each_stream_has_a_word_that_counts_up() -> None:
    device = ScriptedDevice()
    marks = Marks(device, "flags")
    told = []
    for stream in (7, 8, 7, 7, 9):
        device.stream = stream
        after = marks.make(OrderKind.FLAGS).after
        assert after is not None
        told.append((after.mark.index, after.mark.value))
    assert told == [(0, 1), (1, 1), (0, 2), (0, 3), (2, 1)]
    device.run()
    assert device.words is not None and device.words.words[:4].tolist() == [3, 1, 1, 0]
    # NUM_WORDS streams have words; for others the worker waits itself.
    for stream in range(10, 10 + NUM_WORDS):
        device.stream = stream
        mark = marks.make(OrderKind.FLAGS)
        assert (mark.after is not None) == (stream < 7 + NUM_WORDS) and mark.event is not None


def test_the_servers_words_are_shown_beside_the_memory() -> None:
    layout = Layout(0, 1, (MemoryHandle("kv0", 64),), (), "test")
    memory = ExportedMemory(layout, {"kv0": 5})
    assert Marks(ScriptedDevice(), "events").beside(memory) is memory
    both = Marks(ScriptedDevice(), "flags").beside(memory)
    assert [one.handle_id for one in both.layout.handles] == ["kv0", WORDS_HANDLE]
    assert both.fds.keys() == {"kv0", WORDS_HANDLE} and both.fds["kv0"] == 5
    assert memory.fds == {"kv0": 5}
