"""Every pair that simulated engines can run, in sets; `make torture` adds single pairs and
random triples."""

import os
import random
from pathlib import Path

import pytest

from tests.pairs.features import PLAYS
from tests.pairs.servers import Double
from tests.pairs.table import FEATURES, REAL_ONLY, TIERS, Kind, meets, names_of, of_kind, worlds
from tests.pairs.world import TURNS, World

NUM_TRIPLES = int(os.environ.get("NUM_TRIPLES", "120"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


def everyday() -> set[str]:
    """Together these sets have every feature."""
    chosen, met = set(), set[str]()
    for names in worlds():
        if not names <= met:
            met |= names
            chosen.add(names_of(names))
    return chosen


EVERYDAY = everyday()


def run(names: list[str], seed: int, folder: Path, turns: int = TURNS) -> World:
    with pytest.MonkeyPatch.context() as patch:
        plays = {name: PLAYS[name]() for name in names}
        world = World(plays, Double(), seed, folder, patch)
        try:
            world.play(turns)
            world.check()
        finally:
            world.close()
    return world


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.long)
        for name in map(names_of, worlds())
    ],
)
def test_a_world_with_some_pairs(names: str, tmp_path: Path) -> None:
    run(names.split("+"), 0, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("names", [names_of(pair) for pair in of_kind(Kind.HARNESS)])
def test_a_pair_in_longer_traffic(names: str, tmp_path: Path) -> None:
    run(names.split("+"), 1, tmp_path, turns=25)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_random_triples(tmp_path: Path) -> None:
    seed, num_walked = FIRST_SEED, 0
    while num_walked < NUM_TRIPLES:
        dice = random.Random(seed)
        names = dice.sample([name for name in PLAYS if name not in TIERS], 3)
        if meets(frozenset(names)):
            try:
                run(names, seed, tmp_path / str(seed))
            except Exception as error:
                raise AssertionError(f"{'+'.join(names)} with seed {seed}: {error}") from error
            num_walked += 1
        seed += 1


def test_every_feature_plays() -> None:
    assert FEATURES.keys() - PLAYS.keys() == set(REAL_ONLY)
