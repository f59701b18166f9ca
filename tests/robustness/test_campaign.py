"""The kill campaign in short; `make torture` runs the long form."""

import pytest

from tests.robustness.campaign import Findings, campaign

MAX_KILLS = 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roomy", "has_disk"),
    [
        pytest.param(True, False, id="roomy", marks=pytest.mark.long),
        pytest.param(False, False, id="tight"),
        pytest.param(False, True, id="disk"),
    ],
)
def test_no_kill_makes_wrong_bytes_or_loses_what_was_acknowledged(
    roomy: bool, has_disk: bool
) -> None:
    """`run` raises at the first wrong byte, lost block, or server that ends by itself."""
    findings = Findings()
    with campaign(5, roomy=roomy, findings=findings, has_disk=has_disk) as running:
        running.run(15)
        # On a busy machine engines may not have come to their turn.
        needed = ["loaded_blocks", "read_blocks", "acknowledged_blocks"]
        needed += ["promoted_blocks", "encoded_blocks"] if has_disk else []
        while (
            not all(getattr(findings, name) for name in needed) and findings.num_kills < MAX_KILLS
        ):
            running.run(5)
    assert (
        findings.num_kills >= 15 and findings.loaded_blocks > 0 and findings.acknowledged_blocks > 0
    )
    assert findings.read_blocks > 0
    assert not roomy or findings.found_again_blocks > 0
    assert not has_disk or (findings.promoted_blocks > 0 and findings.encoded_blocks > 0)
    assert findings.condemned_blocks == 0
