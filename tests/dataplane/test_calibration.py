"""Tests `Calibration`: its JSON, the choice of the fastest method, and the measurement on a fake
device."""

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_server.dataplane.cuda.calibration import (
    DEPTH,
    NUM_ROUNDS,
    PAGE_BYTES,
    STAGED_RUN_PAGES,
    Calibration,
    driver_version,
    measure,
    rule_of_thumb,
)
from hotkv_server.dataplane.cuda.values import Direction, Method
from hotkv_server.device.runtime import DeviceError, Event, Int64s, Stream
from tests.doubles.device import FakeRuntime

KEYS = st.tuples(st.sampled_from(Direction), st.sampled_from(Method), st.sampled_from(PAGE_BYTES))
CALIBRATIONS = st.builds(
    Calibration,
    st.binary(max_size=16),
    st.text(),
    st.text(),
    st.dictionaries(KEYS, st.floats(0, 500).map(lambda speed: round(speed, 3))),
)


@given(CALIBRATIONS)
def test_json_there_and_back(calibration: Calibration) -> None:
    assert Calibration.from_json(calibration.to_json()) == calibration


def test_nearest_size_counts_failing_methods_never() -> None:
    load = {(Direction.LOAD, method, size): 1.0 for method in Method for size in PAGE_BYTES}
    load |= {
        (Direction.LOAD, Method.KERNEL, 4096): 9.0,
        (Direction.LOAD, Method.STAGED, 4096): 20.0,
        (Direction.LOAD, Method.MEMCPY, 65536): 5.0,
    }
    calibration = Calibration(b"", "", "", load)
    assert calibration.choose(Direction.LOAD, 5000) is Method.KERNEL
    assert calibration.choose(Direction.LOAD, 4096, STAGED_RUN_PAGES * 4096) is Method.STAGED
    assert calibration.choose(Direction.LOAD, 60000) is Method.MEMCPY
    assert calibration.choose(Direction.LOAD, 1 << 30) is Method.BATCH, "of equals the most frugal"
    assert calibration.choose(Direction.STORE, 4096) is Method.MEMCPY, (
        "nothing works, as far as is known"
    )
    for speed, chosen in ((97.0, Method.BATCH), (96.9, Method.MEMCPY)):
        near = {(Direction.LOAD, Method.BATCH, 4096): speed}
        near[Direction.LOAD, Method.MEMCPY, 4096] = 100.0
        assert Calibration(b"", "", "", near).choose(Direction.LOAD, 4096) is chosen
    assert Calibration(b"", "", "", {}).choose(Direction.LOAD, 4096) is rule_of_thumb(4096)
    assert rule_of_thumb(256 << 10) is Method.MEMCPY and rule_of_thumb(255 << 10) is Method.BATCH


VALID = json.loads(
    Calibration(b"u", "n", "d", {(Direction.LOAD, Method.BATCH, 4096): 1.5}).to_json()
)


ENTRY = VALID["speeds"][0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("format", 1), ("uuid", "zz"), ("uuid", 3), ("name", None), ("driver", [])),
        *(("speeds", {}), ("speeds", [7])),
        *(("speeds", [ENTRY | {"method": "magic"}]), ("speeds", [ENTRY | {"direction": ""}])),
        *(("speeds", [ENTRY | {"page_bytes": size}]) for size in (0, True, 10**400)),
        *(("speeds", [ENTRY | {"gb_per_s": speed}]) for speed in (-1, "1", 1e999, 10**400)),
    ],
)
def test_what_is_no_calibration_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Calibration.from_json(json.dumps(VALID | {field: value}))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="calibration"):
        Calibration.from_json(text)


def test_measured_calibration_holds_for_device_and_driver() -> None:
    """With one piece in flight, the time between two calls would count as copying."""

    class Spy(FakeRuntime):
        in_flight: ClassVar[set[Event]] = set()
        most = 0

        def record(self, event: Event, stream: Stream) -> None:
            assert event not in self.in_flight, "a slot in use"
            self.in_flight.add(event)
            self.most = max(self.most, len(self.in_flight))
            super().record(event, stream)

        def synchronize(self, event: Event) -> None:
            super().synchronize(event)
            self.in_flight.discard(event)

        def copy_batch(self, stream: Stream, dst: Int64s, src: Int64s, num_bytes: Int64s) -> None:
            assert len(dst) == len(np.unique(dst)) == len(np.unique(src)), "a page counts twice"
            super().copy_batch(stream, dst, src, num_bytes)

    runtime = Spy(num_devices=2)
    info, other = runtime.devices()
    calibration = measure(runtime, info, "1.2", 256 << 10, lambda: False)
    assert runtime.most == DEPTH and not runtime.in_flight and not runtime.held()
    runtime.close()
    assert calibration is not None and all(speed > 0 for speed in calibration.speeds.values())
    pages = [size for size in PAGE_BYTES if size <= 256 << 10]
    assert set(calibration.speeds) == set(itertools.product(Direction, Method, pages))
    holds = [calibration.holds_for(*of) for of in ((info, "1.2"), (info, "1.3"), (other, "1.2"))]
    assert holds == [True, False, False]


def test_devices_are_measured_one_after_another() -> None:
    """Two threads measure a device each. None may copy before the other has ended."""
    copied = list[int]()

    class Spy(FakeRuntime):
        def record(self, event: Event, stream: Stream) -> None:
            copied.append(stream.device)
            super().record(event, stream)

    runtime = Spy(num_devices=2)
    threads = [
        threading.Thread(target=measure, args=(runtime, info, "", 64 << 10, lambda: False))
        for info in runtime.devices()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.close()
    assert [device for device, _ in itertools.groupby(copied)] in ([0, 1], [1, 0])


@pytest.mark.parametrize(("call_s", "num_rounds"), [(0.01, NUM_ROUNDS), (0.02, 1)])
def test_a_speed_is_of_all_copied_bytes(
    monkeypatch: pytest.MonkeyPatch, call_s: float, num_rounds: int
) -> None:
    """Fast copies are repeated `num_rounds` times; the pages between runs are not copied."""
    ticks, num_bytes = itertools.count(), 256 << 10
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * call_s)
    monkeypatch.setattr("hotkv_server.dataplane.cuda.calibration.time", clock)
    runtime = FakeRuntime()
    found = measure(runtime, runtime.devices()[0], "", num_bytes, lambda: False)
    runtime.close()
    assert found is not None
    for speed in found.speeds.values():
        assert num_bytes / 2 < speed * 1e9 * call_s / num_rounds <= num_bytes * 1.001


def test_failing_method_counts_none_lost_device_ends() -> None:
    runtime = FakeRuntime()
    device = runtime.devices()[0]
    assert measure(runtime, device, "", 64 << 10, lambda: True) is None
    for nth in range(1, 101):
        runtime.fail_call("copy_kernel", nth)
    calibration = measure(runtime, device, "", 64 << 10, lambda: False)
    assert calibration is not None and not runtime.held()
    failed = {method for (_, method, _), speed in calibration.speeds.items() if not speed}
    assert failed == {Method.KERNEL, Method.STAGED}
    runtime.lose_after(0, 20)
    with pytest.raises(DeviceError) as raised:
        measure(runtime, device, "", 64 << 10, lambda: False)
    assert raised.value.is_lost
    runtime.close()


def test_driver_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert driver_version(path) == ""
    path.write_text("NVRM version: 1.2.3\nGCC version: 4\n")
    assert driver_version(path) == "NVRM version: 1.2.3"
