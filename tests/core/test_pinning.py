"""Pinning of the arena, over a device runtime without a device."""

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory import limits
from hotkv_server.memory.pinning import ArenaPinner, refusal
from hotkv_server.testing.device import FakeRuntime

PAGE = 4096


def _until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline_s, "never came"
        time.sleep(0.001)


@given(
    num_bytes=st.integers(1, 40 * PAGE),
    piece_pages=st.integers(1, 50),
    stops_after=st.integers(0, 60),
)
@settings(max_examples=40, deadline=None)
def test_pieces_cover_the_arena_in_order_and_go_with_it(
    num_bytes: int, piece_pages: int, stops_after: int
) -> None:
    runtime = FakeRuntime(threaded=False)
    arena = 1 << 40
    seen: list[tuple[int, int]] = []
    pinner = ArenaPinner(
        runtime,
        arena,
        num_bytes,
        piece_pages * PAGE,
        lambda start, count: seen.append((start, count)),
    )
    while not pinner.is_done and len(seen) < stops_after:
        pinner.pin_next()
        assert pinner.pinned_bytes in (len(seen) * piece_pages * PAGE, num_bytes)
    assert runtime.held().get("registered", 0) == len(seen)
    assert [start for start, _ in seen] == [i * piece_pages * PAGE for i in range(len(seen))]
    assert sum(count for _, count in seen) == pinner.pinned_bytes
    pinner.close()
    assert pinner.pinned_bytes == 0 and not runtime.held().get("registered", 0)
    assert pinner.unpinned_bytes == len(seen) * piece_pages * PAGE
    runtime.close()


def test_closing_stops_early() -> None:
    runtime = FakeRuntime(threaded=False)
    first, go_on = threading.Event(), threading.Event()

    def prepare(start: int, count: int) -> None:
        first.set()
        go_on.wait(60)

    pinner = ArenaPinner(runtime, 1 << 40, 100 * PAGE, PAGE, prepare)
    pinner.start()
    assert first.wait(60)
    closing = threading.Thread(target=pinner.close)
    closing.start()
    _until(pinner._stop.is_set)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive() and not runtime.held()
    runtime.close()


def test_what_was_pinned_before_a_refusal_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memlock_bytes", lambda: 64 << 10)
    runtime = FakeRuntime(threaded=False)
    runtime.fail_call("register", 4)
    pinner = ArenaPinner(runtime, 1 << 40, 100 * PAGE, PAGE)
    pinner.start()
    _until(lambda: bool(pinner.error))
    assert pinner.pinned_bytes == 3 * PAGE and not pinner.is_done
    for word in ("told to fail", "65536", "LimitMEMLOCK=infinity", "--ulimit memlock=-1"):
        assert word in pinner.error
    pinner.close()
    assert not runtime.held()
    runtime.close()


def test_a_refusal_with_enough_locked_memory_names_other_causes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "memlock_bytes", lambda: limits.NO_LIMIT)
    assert "/dev/nvidia" in refusal(DeviceError("no"), 1 << 30) and "memlock" not in refusal(
        DeviceError("no"), 1 << 30
    )


@pytest.mark.parametrize(("address", "piece_bytes"), [(1, PAGE), (0, 0), (0, -PAGE), (0, PAGE + 1)])
def test_pieces_are_whole_pages(address: int, piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        ArenaPinner(FakeRuntime(threaded=False), address, 10 * PAGE, piece_bytes)


def test_what_cannot_be_undone_does_not_keep_the_server_from_stopping() -> None:
    runtime = FakeRuntime(threaded=False)
    pinner = ArenaPinner(runtime, 1 << 40, 4 * PAGE, PAGE)
    pinner.pin_next()
    pinner.pin_next()
    runtime.fail_call("unregister", 1)
    pinner.close()
    assert pinner.pinned_bytes == 0 and runtime.held() == {"registered": 1}
    runtime.close()
