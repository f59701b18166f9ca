"""The arithmetic of `bench.estimate`: medians, ratios, and a fit that finds what it should."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.estimate import (
    CHECKED,
    FITTED,
    SHARES,
    Case,
    cases_of,
    fit,
    model_of,
    predicted,
    report_of,
    rows_of,
    write_config,
)
from bench.sparse.steps import Timed
from hotkv_sparse.estimate import read_config
from hotkv_sparse.estimate.here import cpu_device

DEVICE = cpu_device(1 << 34, 2e10, 1e11)
WANTED = {
    "weight_ratio": 0.5,
    "attention_ratio": 0.25,
    "score_ratio": 0.125,
    "compute_ratio": 2.0,
    "prefill_attention_ratio": 0.75,
    "step_s": 0.003,
    "layer_s": 0.0005,
    "select_s": 0.0001,
}


def made_up(shares: dict[str, float]) -> list[Case]:
    """What a machine with these shares would show."""
    device, found = DEVICE.with_(shares).with_({"build_ratio": 10.0}), []
    for name, contexts in FITTED.items():
        for context in contexts:
            for mode in ("dense", "sparse"):
                case = Case(name, context, mode, True, 1.0, 1.0, DEVICE.bandwidth, DEVICE.flops)
                prefill_s, step_s = predicted(case, device)
                found.append(replace(case, prefill_s=prefill_s, step_s=step_s))
    return found


def test_a_fit_finds_the_shares_that_made_the_times() -> None:
    found = fit(made_up(WANTED))
    assert set(found) == set(SHARES) == set(WANTED)
    assert found == pytest.approx(WANTED, rel=0.02)


def test_a_fit_has_no_negative_costs() -> None:
    """Short contexts that take longer than the costs of their steps explain ask for one."""
    made = made_up(WANTED)
    cases = [replace(case, step_s=case.step_s / (1 + case.context_tokens)) for case in made]
    assert all(value >= 0.0 for value in fit(cases).values())


def test_ratios_are_predicted_over_measured() -> None:
    case = Case("smollm2-135m", 4096, "sparse", True, 1.0, 1.0, 2e10, 1e11)
    prefill_s, step_s = predicted(case, cpu_device(1 << 34, 2e10, 1e11))
    case = replace(case, prefill_s=2 * prefill_s, step_s=step_s / 1.1)
    report = report_of([case])
    assert report == pytest.approx(
        {
            "ratio_prefill_smollm2-135m_4096_sparse": 0.5,
            "ratio_step_smollm2-135m_4096_sparse": 1.1,
        }
    )
    (row,) = rows_of([case], report)
    assert row[6] == "0.50 missed"
    assert row[9] == "1.10"


def test_a_case_is_the_median_of_its_rounds() -> None:
    def one(mode: str, prefill_s: float | None, step_s: float) -> Timed:
        return Timed(2048, mode, prefill_s, step_s, bandwidth=step_s, flops=1e11)

    found = [one("dense", 3.0, 1.0), one("sparse", None, 5.0)]
    found += [one("sparse", 4.0, 7.0), one("dense", None, 2.0)]
    dense, sparse = cases_of("llama-3.2-1b", found)
    assert (dense.mode, dense.prefill_s, dense.step_s, dense.fitted) == ("dense", 3.5, 1.5, True)
    assert (sparse.mode, sparse.prefill_s, sparse.step_s) == ("sparse", 3.5, 6.0)
    assert dense.bandwidth == 3.5


@pytest.mark.parametrize("name", [*FITTED, *CHECKED])
def test_a_model_s_config_is_read_back_as_the_model(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    write_config(tmp_path, model, 4096)
    assert replace(read_config(tmp_path), name=name) == model
