"""Pinning of the arena, over a device runtime without a device."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotkv_proto import limits
from hotkv_server.device.runtime import DeviceError
from hotkv_server.memory.pinning import ArenaPinner, refusal
from hotkv_server.testing.device import FakeRuntime
from tests.support.waiting import wait_for

PAGE, ARENA = 4096, 1 << 40


@pytest.fixture
def runtime() -> Iterator[FakeRuntime]:
    made = FakeRuntime(threaded=False)
    yield made
    made.close()


@given(
    num_bytes=st.integers(1, 40 * PAGE),
    piece_pages=st.integers(1, 50),
    stops_after=st.integers(0, 60),
)
@settings(max_examples=40, deadline=None)
def test_pieces_cover_the_arena_in_order_and_go_with_it(
    num_bytes: int, piece_pages: int, stops_after: int
) -> None:
    runtime, piece_bytes = FakeRuntime(threaded=False), piece_pages * PAGE
    seen: list[tuple[int, int]] = []
    pinner = ArenaPinner(runtime, ARENA, num_bytes, piece_bytes, lambda *one: seen.append(one))
    while not pinner.is_done and len(seen) < stops_after:
        pinner.pin_next()
        assert pinner.pinned_bytes in (len(seen) * piece_bytes, num_bytes)
    assert runtime.held().get("registered", 0) == len(seen)
    assert [start for start, _ in seen] == [i * piece_bytes for i in range(len(seen))]
    assert sum(count for _, count in seen) == pinner.pinned_bytes
    pinner.close()
    assert pinner.pinned_bytes == 0 and not runtime.held().get("registered", 0)
    assert pinner.unpinned_bytes == len(seen) * piece_bytes
    runtime.close()


def test_closing_stops_early(runtime: FakeRuntime) -> None:
    first, go_on = threading.Event(), threading.Event()

    def prepare(start: int, count: int) -> None:
        first.set()
        go_on.wait(60)

    pinner = ArenaPinner(runtime, ARENA, 100 * PAGE, PAGE, prepare)
    pinner.start()
    assert first.wait(60)
    closing = threading.Thread(target=pinner.close)
    closing.start()
    wait_for(pinner._stop.is_set)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive() and not runtime.held()


def test_what_was_pinned_before_a_refusal_stays_pinned(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuses the fourth piece: the first three must stay pinned. If CUDA then fails to unregister
    one, `close` must still unregister the others."""
    monkeypatch.setattr(limits, "memlock_bytes", lambda: 64 << 10)
    runtime.fail_call("register", 4)
    pinner = ArenaPinner(runtime, ARENA, 100 * PAGE, PAGE)
    pinner.start()
    wait_for(lambda: bool(pinner.error))
    assert pinner.pinned_bytes == 3 * PAGE and not pinner.is_done
    assert "told to fail" in pinner.error and "65536" in pinner.error
    runtime.fail_call("unregister", 1)
    pinner.close()
    assert pinner.pinned_bytes == 0 and runtime.held() == {"registered": 1}


@pytest.mark.parametrize(
    ("memlock_bytes", "cause", "other"),
    [((1 << 30) - 1, "memlock", "/dev/nvidia"), (1 << 30, "/dev/nvidia", "memlock")],
)
def test_a_refusal_names_its_cause(
    monkeypatch: pytest.MonkeyPatch, memlock_bytes: int, cause: str, other: str
) -> None:
    monkeypatch.setattr(limits, "memlock_bytes", lambda: memlock_bytes)
    said = refusal(DeviceError("no"), 1 << 30)
    assert cause in said and other not in said


@pytest.mark.parametrize(("address", "piece_bytes"), [(1, PAGE), (0, 0), (0, -PAGE), (0, PAGE + 1)])
def test_pieces_are_whole_pages(runtime: FakeRuntime, address: int, piece_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        ArenaPinner(runtime, address, 10 * PAGE, piece_bytes)
