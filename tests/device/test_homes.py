"""Tests that slots of an engine lie in the arena's part near its devices, in a real server whose
machine seems to have two NUMA nodes. The devices of `timed_gpu` are on node 0."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from demo.processes import runtime_folder
from hotkv_server.memory import numa
from tests.device import timed_gpu
from tests.device.timed_gpu import TimedGpus, needs_c_compiler
from tests.doubles.with_constants import copies_by
from tests.server.devices_support import AnyDeviceServer, DeviceEngine, block_ids, done
from tests.server.page_support import get
from tests.server.support import hashes, http_port

pytestmark = needs_c_compiler

IDS = block_ids(*range(16))
HALF_BYTES = 8 << 20


def used_in_halves(server: AnyDeviceServer) -> tuple[bool, bool]:
    """Whether each half of the arena has used slots."""
    arena = json.loads(get(http_port(server), "/api/v1/status").text)["arena"]
    ratios = arena["used_ratios"]
    middle = len(ratios) // 2
    return any(ratios[:middle]), any(ratios[middle:])


@pytest.mark.parametrize(("nodes", "expected"), [("0,1", (True, False)), ("1,0", (False, True))])
def test_slots_lie_near_the_devices_of_their_engine(
    tmp_path: Path, nodes: str, expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES_OF_PARTS", nodes)
    gpus = TimedGpus(tmp_path)
    with (
        runtime_folder(64 << 20) as folder,
        AnyDeviceServer(folder, gpus.command(__name__), *copies_by("batch")) as server,
    ):
        server.wait_ready()
        with contextlib.closing(DeviceEngine(server.target)) as one:
            one.connected().fill(IDS, 1)
            names = hashes(len(IDS))
            done(one.store(names, IDS)[1])
            assert used_in_halves(server) == expected
            done(one.load(names[:8], IDS[:8])[1])


if __name__ == "__main__":
    halves = numa.Parts((0, HALF_BYTES), tuple(map(int, os.environ["NODES_OF_PARTS"].split(","))))
    numa.parts = lambda wanted, num_bytes, slab_bytes: halves
    status = timed_gpu.main()
    os._exit(status)
