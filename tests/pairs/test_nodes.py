"""Each pair of a feature and a tier, with real servers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pairs.features import PLAYS
from tests.pairs.servers import Nodes
from tests.pairs.table import TIERS, Kind, beside_tiers, names_of, of_kind
from tests.pairs.world import World
from tests.tiers.valkey_support import running
from tests.vllm.processes import Daemon, own_daemon

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TURNS = 4


class Places:
    """Servers by tiers, started at first use."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._made: dict[tuple[bool, bool], list[Daemon]] = {}

    def __call__(self, *, disk: bool, shares: bool) -> list[Daemon]:
        if (disk, shares) not in self._made:
            self._made[disk, shares] = self._make(disk, shares)
        return self._made[disk, shares]

    def _make(self, disk: bool, shares: bool) -> list[Daemon]:
        folder = self._folder / f"{disk}{shares}"
        folder.mkdir()
        flags: list[str] = []
        if shares:
            valkey = self._stack.enter_context(running(folder / "valkey"))
            flags += ["--tiers.valkey.address", f"unix:{valkey.path}"]
            flags += ["--tiers.lookup-wait-ms", "20000"]
        made = []
        for number in range(2 if shares else 1):
            daemon = self._stack.enter_context(own_daemon())
            daemon.flags = list(flags)
            if disk:
                daemon.flags += ["--tiers.disk.path", str(folder / f"disk{number}")]
                daemon.flags += ["--tiers.disk.bytes", "64MiB"]
            made.append(daemon.start())
        return made


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    with contextlib.ExitStack() as stack:
        yield Places(stack, tmp_path_factory.mktemp("nodes"))


def run(
    features: list[str], daemons: list[Daemon], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = {name: PLAYS[name]() for name in features}
    world = World(plays, Nodes(daemons, "+".join(features)), 0, folder, monkeypatch)
    try:
        world.play(TURNS)
        world.check()
    finally:
        if not world.server.up:
            world.server.come_back()
        world.server.hold = world.server.late = set()
        world.close()


@pytest.mark.long
@pytest.mark.parametrize("names", [names_of(names) for names in beside_tiers()])
def test_features_beside_every_tier(
    names: str, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = [*names.split("+"), *TIERS]
    run(features, places(disk=True, shares=True), tmp_path, monkeypatch)


@pytest.mark.campaign
@pytest.mark.parametrize("names", [names_of(pair) for pair in of_kind(Kind.DAEMON)])
def test_a_pair_of_features_works(
    names: str, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = names.split("+")
    shares = bool({"shared", "warm"} & {*features})
    run(features, places(disk="disk" in features, shares=shares), tmp_path, monkeypatch)
