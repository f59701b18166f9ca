"""Tests copy jobs whose start a gate delays."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from hotkv_server.dataplane.engines import CopyEngines, CopyJob, Outcome
from hotkv_server.device.runtime import HOST, DeviceError
from tests.contracts.copy_engine_contract import CopyRig, Ends, whole_plan
from tests.dataplane.rigs import SwitchedGate, mixed_rig


@pytest.fixture
def rig() -> Iterator[CopyRig]:
    with mixed_rig() as rig:
        yield rig


def engines_of(rig: CopyRig) -> CopyEngines:
    assert isinstance(rig.engine, CopyEngines)
    return rig.engine


def submit(rig: CopyRig, *gates: SwitchedGate) -> Ends:
    """A job per gate, named by its number."""
    ends = Ends()
    for number, gate in enumerate(gates):
        rig.engine.submit(ends.job(f"{number}", [whole_plan(rig.memories[0], rig.arena)], gate))
    return ends


def test_no_byte_moves_before_the_gate_has_passed(rig: CopyRig) -> None:
    ends, gate = Ends(), SwitchedGate()
    plans = [whole_plan(memory, rig.arena) for memory in rig.memories]
    for memory in rig.memories:
        rig.write(memory, rig.read(memory) | 1)
    rig.write(rig.arena, rig.read(rig.arena) * 0)
    rig.engine.submit(ends.job("waits", plans, gate))
    rig.engine.submit(ends.job("does not", [whole_plan(rig.arena, rig.memories[0])]))
    ends.wait("does not")
    while gate.num_asked < 10:
        time.sleep(1e-4)
    assert (
        not ends.outcomes["waits"]
        and engines_of(rig).num_waiting == 1
        and rig.engine.num_queued >= 1
    )
    assert all((rig.read(memory) == 1).all() for memory in rig.memories), (
        "bytes moved before the gate had passed"
    )
    gate.is_open = True
    ends.wait()
    assert (
        ends["waits"] is Outcome.DONE and gate.num_released == 1 and not engines_of(rig).num_waiting
    )


def test_passed_gate_is_asked_once_by_caller(rig: CopyRig) -> None:
    gate = SwitchedGate(is_open=True)
    submit(rig, gate).wait()
    assert (gate.num_asked, gate.num_released, gate.askers) == (1, 1, {threading.get_ident()})


def test_the_caller_asks_no_gate_of_a_device(rig: CopyRig) -> None:
    gate = SwitchedGate(is_open=True, device=1)
    submit(rig, gate).wait()
    assert (gate.num_asked, gate.num_released) == (1, 1)
    assert threading.get_ident() not in gate.askers


def test_a_hanging_device_delays_only_its_own_gates(rig: CopyRig) -> None:
    goes_on = threading.Event()

    class Hanging(SwitchedGate):
        def passed(self) -> bool:
            assert goes_on.wait(60)
            return super().passed()

    hanging = Hanging(is_open=True, device=0)
    ends = submit(rig, hanging, SwitchedGate(is_open=True, device=1), SwitchedGate(is_open=True))
    ends.wait("1")
    ends.wait("2")
    assert not hanging.num_asked and rig.engine.stalled_s(time.monotonic() + 5) > 4
    goes_on.set()
    ends.wait()


@pytest.mark.parametrize("error", [DeviceError("no mark"), ValueError("odd")])
def test_a_gate_that_breaks_fails_its_own_job(rig: CopyRig, error: Exception) -> None:
    gates = [SwitchedGate(), SwitchedGate()]
    ends = submit(rig, *gates)
    gates[0].error = error
    ends.wait("0")
    message = "no mark" if isinstance(error, DeviceError) else "ValueError: odd"
    assert ends["0"] is Outcome.FAILED and ends.message("0") == message
    gates[1].is_open = True
    ends.wait()
    assert ends["1"] is Outcome.DONE and [gate.num_released for gate in gates] == [1, 1]


def test_waiting_jobs_are_cancelled_at_close(rig: CopyRig) -> None:
    gates = [SwitchedGate() for _ in range(5)]
    ends = submit(rig, *gates)
    rig.engine.close()
    assert all(outcomes == [(Outcome.CANCELLED, "")] for outcomes in ends.outcomes.values())
    assert all(gate.num_released == 1 for gate in gates)


def test_plan_for_device_without_engine_fails(rig: CopyRig) -> None:
    ends = Ends()
    memory = rig.memories[0]
    stranger = type(memory)(memory.address, memory.num_bytes, "memory of nobody", 7)
    rig.engine.submit(
        ends.job("strange", [whole_plan(rig.arena, memory), whole_plan(stranger, rig.arena)])
    )
    ends.wait()
    assert ends["strange"] is Outcome.FAILED and "device 7" in ends.message("strange")


def test_partly_refused_job_ends_after_the_others() -> None:
    """The accepting engine's part still writes."""
    host, device = Mock(), Mock()
    device.submit.side_effect = MemoryError
    with contextlib.closing(CopyEngines(host, {1: device})) as both:
        ends: list[Outcome] = []
        plans: list[Any] = [Mock(device=number, total_bytes=1) for number in (HOST, 1)]
        both.submit(CopyJob(plans, lambda outcome, _: ends.append(outcome)))
        (part,) = host.submit.call_args.args
        assert not ends
        part.expect(0)
        assert ends == [Outcome.FAILED]
