"""Every copy engine keeps to one contract."""

import dataclasses

import pytest

from hotkv_server.dataplane.cuda.values import CudaCopySettings, Method
from hotkv_server.testing import copy_engine_contract as contract
from tests.dataplane.rigs import SMALL, cuda_rig, host_rig, mixed_rig

METHODS = {method.value: dataclasses.replace(SMALL, method=method) for method in Method}
RIGS = {
    "host": host_rig,
    **{f"cuda {name}": cuda_rig(settings) for name, settings in METHODS.items()},
    "cuda half pinned": cuda_rig(num_pinned=2),
    "cuda not pinned": cuda_rig(num_pinned=0),
    "cuda defaults": cuda_rig(CudaCopySettings(staging_bytes=1 << 20, calibration_bytes=64 << 10)),
    "cuda without staging": cuda_rig(
        dataclasses.replace(SMALL, method=Method.STAGED, staging_bytes=0)
    ),
    "all together": mixed_rig,
}


@pytest.fixture(params=RIGS)
def make_rig(request: pytest.FixtureRequest) -> contract.MakeRig:
    return RIGS[request.param]


@pytest.mark.parametrize("seed", range(2))
def test_bytes(make_rig: contract.MakeRig, seed: int) -> None:
    contract.check_bytes(make_rig, seed=seed)


def test_nothing_to_do(make_rig: contract.MakeRig) -> None:
    contract.check_nothing_to_do(make_rig)


@pytest.mark.parametrize("seed", range(2))
def test_cancel(make_rig: contract.MakeRig, seed: int) -> None:
    contract.check_cancel(make_rig, seed=seed)


def test_failure(make_rig: contract.MakeRig) -> None:
    contract.check_failure(make_rig)


def test_close(make_rig: contract.MakeRig) -> None:
    contract.check_close(make_rig)


def test_idle(make_rig: contract.MakeRig) -> None:
    contract.check_idle(make_rig)


def test_times(make_rig: contract.MakeRig) -> None:
    contract.check_times(make_rig)
