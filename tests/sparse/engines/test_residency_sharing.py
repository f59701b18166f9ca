"""Resident and dense engines hit each other's exact KV, never KV of sparse steps."""

from typing import Any

import pytest

from tests.sparse.engines.resident_runs import (
    AUTO,
    POOL_BLOCKS,
    REFERENCE,
    RESIDENT,
    Start,
    prompts,
    references,
    same,
    start,
)
from tests.sparse.engines.sparse_runs import References
from tests.vllm.processes import Daemon
from tests.vllm.runs import settled

__all__ = ["references", "start"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "sparse", [pytest.param(RESIDENT, id="host"), pytest.param(AUTO, id="auto")]
)
def test_dense_and_resident_engines_share_exact_kv_only(
    start: Start, daemon: Daemon, references: References, sparse: dict[str, Any]
) -> None:
    target = daemon.start().target
    dense = start(target=target)
    resident = start(sparse, target=target, num_gpu_blocks_override=POOL_BLOCKS + 41)
    for one in (dense, resident):
        one.ask("wait", connected=True, timeout_s=60.0)
    first, second = prompts(11, 1601), prompts(12, 1601)

    dense.ask("generate", prompts=first, max_tokens=4)
    settled(dense)
    found = resident.ask("generate", prompts=first, max_tokens=40)
    assert found["cached"] == [1600]
    assert same(found, references.ask(engine=REFERENCE, prompts=first, max_tokens=40))

    found = resident.ask("generate", prompts=second, max_tokens=150)
    settled(resident)
    longer = [second[0] + found["tokens"][0]]
    found = dense.ask("generate", prompts=longer, max_tokens=20)
    assert found["cached"] == [1600], "the answer's KV is of sparse steps"
    assert same(found, references.ask(prompts=longer, max_tokens=20))
    assert len(daemon.admin("key_spaces")) == 1
