"""Runs the contract that every copy engine must pass, with each engine and many settings."""

import dataclasses
from collections.abc import Callable

import pytest

from hotkv_server.dataplane.cuda.values import CudaCopySettings, Method
from tests.contracts import copy_engine_contract as contract
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
CHECKS = [
    contract.check_nothing_to_do,
    contract.check_failure,
    contract.check_close,
    contract.check_idle,
    contract.check_times,
]


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("check", CHECKS)
def test_calls(rig: str, check: Callable[[contract.MakeRig], None]) -> None:
    check(RIGS[rig])


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("check", [contract.check_bytes, contract.check_cancel])
@pytest.mark.parametrize("seed", range(2))
def test_bytes(rig: str, check: Callable[..., None], seed: int) -> None:
    check(RIGS[rig], seed=seed)
