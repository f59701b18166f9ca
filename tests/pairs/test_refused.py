"""Pairs that hotkv refuses with a message."""

from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm.config import ConfigError
from tests.pairs.features import PLAYS
from tests.pairs.servers import Double
from tests.pairs.table import REFUSALS, REFUSED_ELSEWHERE
from tests.pairs.world import World
from tests.sparse.engines.approximate import SPARSE
from tests.vllm.other_connectors import beside
from tests.vllm.processes import Engines
from tests.vllm.tiny import transfer_config, write_model

RESIDENT = {"sparse": SPARSE["sparse"] | {"residency": "host", "sparse_topk": 4096}}
OURS = REFUSALS.keys() - REFUSED_ELSEWHERE.keys()
ALONE = sorted(pair for pair in OURS if not pair[1].startswith("multi"))
BESIDE = sorted(pair for pair in OURS if pair[1].startswith("multi"))


def name_of(pair: tuple[str, str]) -> str:
    return "+".join(pair)


@pytest.mark.parametrize("pair", ALONE, ids=name_of)
def test_a_pair_that_is_refused(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = {name: PLAYS[name]() for name in pair if name != "residency"}
    if "residency" in pair:
        play = plays[pair[1]]
        settings = play.settings

        def resident(world: World, number: int) -> dict[str, Any]:
            return settings(world, number) | {"extra": RESIDENT}

        play.settings = resident  # type: ignore[method-assign]
    with pytest.raises(ConfigError) as refused:
        World(plays, Double(), 0, tmp_path, monkeypatch)
    assert str(refused.value).startswith(REFUSALS[pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", BESIDE, ids=name_of)
def test_a_pair_that_is_refused_beside_another_connector(
    pair: tuple[str, str], tmp_path: Path, engines: Engines
) -> None:
    """The refusal comes only after vLLM has made the layers."""
    ours = transfer_config(target=f"unix:{tmp_path}/none.sock", startup_wait_s=0.0, **RESIDENT)
    within = beside("LoadingConnector", ours_first=pair[1] == "multi_first")
    one = engines.start(
        write_model(tmp_path / "model"), None, kv_transfer_config=within(ours), dtype="float32"
    )
    with pytest.raises(AssertionError, match="the engine ended"):
        one.ready()
    assert REFUSALS[pair] in one.log()
