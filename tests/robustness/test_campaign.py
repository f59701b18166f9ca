"""Runs the kill campaign (`tests.robustness.campaign`) briefly; `make torture` runs it for long."""

import pytest

from tests.robustness.campaign import Findings, campaign

MAX_KILLS = 100
SEED, LONG_LIVES = 5, 77583
"""With LONG_LIVES the first servers live for seconds, so blocks soon go to the disk and back."""


def has_done(findings: Findings, roomy: bool, has_disk: bool) -> bool:
    """Has each kind of work happened that this campaign can do?"""
    ways = [findings.loaded_blocks, findings.read_blocks, findings.acknowledged_blocks]
    ways += [findings.found_again_blocks] if roomy else []
    ways += [findings.promoted_blocks, findings.encoded_blocks] if has_disk else []
    return all(ways)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roomy", "has_disk", "seed"),
    [
        pytest.param(True, False, SEED, id="roomy", marks=pytest.mark.campaign),
        pytest.param(False, False, SEED, id="tight", marks=pytest.mark.campaign),
        pytest.param(False, True, LONG_LIVES, id="disk", marks=pytest.mark.long),
    ],
)
def test_no_kill_corrupts_or_loses_acknowledged_blocks(
    roomy: bool, has_disk: bool, seed: int
) -> None:
    """`run` raises at the first violation."""
    findings = Findings()
    with campaign(seed, roomy=roomy, findings=findings, has_disk=has_disk) as running:
        running.run(15)
        # On a busy machine 15 kills may not do.
        while not has_done(findings, roomy, has_disk) and findings.num_kills < MAX_KILLS:
            running.run(5)
    assert findings.num_kills >= 15 and has_done(findings, roomy, has_disk), findings
    assert findings.condemned_blocks == 0
