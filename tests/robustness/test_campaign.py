"""Runs the kill campaign (`tests.robustness.campaign`) for a short time: engines store and load
blocks while the server or an engine is killed again and again, and every byte is checked. `make
torture` runs the campaign for long."""

import pytest

from tests.robustness.campaign import Findings, campaign

MAX_KILLS = 100
SEED, LONG_LIVES = 5, 77583
"""Seeds of campaigns. With LONG_LIVES, the first servers live for seconds, so that blocks soon go
to the disk and come back.
"""


def has_done(findings: Findings, roomy: bool, has_disk: bool) -> bool:
    """Returns True if the campaign has stored, loaded, and read blocks in the arena; in a `roomy`
    arena also found some again after a restart; with a disk also promoted and encoded some."""
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
    """Runs the kill campaign. `run` raises at the first wrong byte, lost block, or server that ends
    without being killed."""
    findings = Findings()
    with campaign(seed, roomy=roomy, findings=findings, has_disk=has_disk) as running:
        running.run(15)
        # On a busy machine, some kinds of work may not have happened after 15 kills. Then the
        # campaign goes on.
        while not has_done(findings, roomy, has_disk) and findings.num_kills < MAX_KILLS:
            running.run(5)
    assert findings.num_kills >= 15 and has_done(findings, roomy, has_disk), findings
    assert findings.condemned_blocks == 0
