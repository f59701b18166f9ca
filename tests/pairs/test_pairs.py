"""Every pair of features runs in a world of the harness; triples are walked at random."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pairs.features import PLAYS
from tests.pairs.servers import Double
from tests.pairs.table import FEATURES, TIERS, Kind, meets, names_of, of_kind
from tests.pairs.world import TURNS, World
from tests.vllm.harness import prompt

NUM_TRIPLES = int(os.environ.get("NUM_TRIPLES", "120"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
"""Triples that are walked; another first seed walks others."""


def everyday() -> set[str]:
    """Some of the pairs, in which each feature meets two others at least."""
    pairs = of_kind(Kind.HARNESS)
    random.Random(0).shuffle(pairs)
    num_met: Counter[str] = Counter()
    chosen = set()
    for pair in pairs:
        if min(num_met[name] for name in pair) < 2:
            num_met.update(pair)
            chosen.add(names_of(pair))
    return chosen


EVERYDAY = everyday()


def run(names: list[str], seed: int, folder: Path, turns: int = TURNS) -> World:
    """Returns a world of these features, from its start to its end."""
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
        for name in map(names_of, of_kind(Kind.HARNESS))
    ],
)
def test_a_pair(names: str, tmp_path: Path) -> None:
    run(names.split("+"), 0, tmp_path)


@pytest.mark.long
def test_random_triples(tmp_path: Path) -> None:
    """A failure names its features and its seed."""
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
    """Residency needs the layers of a real model."""
    assert FEATURES.keys() - PLAYS.keys() == {"residency"}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    one = World({}, Double(), 0, tmp_path, monkeypatch)
    yield one
    one.close()


# ------------------------------------------------------------------ a world sees what is wrong


def test_a_wrong_block_of_the_server_fails_a_world(world: World) -> None:
    world.play(3)
    world.check()
    shards: dict[int, Any] = next(iter(world.server.blocks.values()))
    shards[0] = shards[0][:-1] + bytes([shards[0][-1] ^ 1])
    with pytest.raises(AssertionError, match="the server's block"):
        world.check()


def test_a_lease_that_is_left_fails_a_world(world: World) -> None:
    world.play(3)
    world.server.leases["left"] = []
    with pytest.raises(AssertionError, match="leases"):
        world.check()


def test_a_request_that_was_lost_fails_a_world(world: World) -> None:
    world.play(3)
    one, name = world.asked[0]
    one.finished[name] = "error"
    world.aborted.discard(name)
    with pytest.raises(AssertionError, match=name):
        world.check()


def test_a_feature_that_never_shows_fails_a_world(world: World) -> None:
    world.plays["restart"] = PLAYS["restart"]()
    for one in world.engines:
        world.ask(one, prompt(1, 100))
        world.run(one)
        world.end(one)
    with pytest.raises(AssertionError, match=r"has not shown itself: .*restart"):
        world.check()
