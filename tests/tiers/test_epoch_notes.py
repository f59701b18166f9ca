"""What a server knows of epochs outlives it: a flush that a store missed is told by the next one,
and blocks of before a flush that this one missed are dropped."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotkv_server.memory import epoch_notes
from hotkv_server.memory.epoch_notes import EPOCHS_FILE, UNSURE, EpochNotes
from hotkv_server.runtime import shared_epochs
from hotkv_server.runtime.health import Health
from hotkv_server.testing.memory_tier import MemoryStore
from tests.tiers import test_shared_runtime
from tests.tiers.test_shared_runtime import BLOCKS, SharedNode, until

soon = test_shared_runtime.soon
PRINTS = ["aa" * 32, "bb" * 32, "cc" * 32]


@contextlib.asynccontextmanager
async def server(store: MemoryStore, folder: Path, *, is_first: bool) -> AsyncIterator[SharedNode]:
    """A server on this folder that ends as if it were killed: what it has not noted is lost."""
    notes = EpochNotes([folder])
    one = SharedNode(store, 10.0, notes, None if is_first else BLOCKS)
    one.tiers.start(Health(), one.core.take_effects, one.flushed_here)
    try:
        yield one
    finally:
        await one.tiers.close()


def test_the_next_server_tells_what_the_store_has_missed(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore(places=False)
        async with server(store, tmp_path, is_first=True) as one:
            one.put(BLOCKS)
            await one.until_copied(6)
            (before,) = store.epochs.values()
            one.tier.faults.problem = "gone"
            await one.flush()
        assert EpochNotes([tmp_path]).untold("shared") == [one.fingerprint]
        async with server(store, tmp_path, is_first=False) as two:
            # It finds nothing that the store has before the store was told.
            await until(lambda: two.shared.epochs.get(1), "the store was not told")
            (after,) = store.epochs.values()
            assert after > before and two.shared.epochs.get(1) == after
            assert two.num_flushed_here == 0, "what was stored since has gone"
        assert not EpochNotes([tmp_path]).untold("shared")
        async with server(store, tmp_path, is_first=False) as three:
            await until(lambda: three.shared.epochs.get(1), "no epoch")
            assert list(store.epochs.values()) == [after], "the store was told twice"

    asyncio.run(run())


def test_a_server_waits_with_a_key_space_until_the_store_was_told(tmp_path: Path) -> None:
    async def run() -> None:
        store, notes = MemoryStore(places=False), EpochNotes([tmp_path])
        async with server(store, tmp_path, is_first=True) as one:
            one.put(BLOCKS)
            await one.until_copied(6)
        notes.add_untold("shared", one.fingerprint)
        notes.save()
        node = SharedNode(store, 0.1, EpochNotes([tmp_path]), [])
        node.tier.faults.problem = "away"
        node.tiers.start(Health(), node.core.take_effects, node.flushed_here)
        assert not any(await node.looked_up(BLOCKS))
        assert not node.shared.epochs.get(1)
        node.tier.faults.problem = ""
        await until(lambda: node.shared.epochs.get(1), "the store was not told")
        assert not any(await node.leased(BLOCKS))
        await node.tiers.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_flushed", [False, True])
def test_the_next_server_drops_what_another_has_flushed_meanwhile(
    tmp_path: Path, is_flushed: bool
) -> None:
    async def run() -> None:
        store = MemoryStore(places=False)
        async with server(store, tmp_path, is_first=True) as one:
            one.put(BLOCKS)
            await one.until_copied(6)
        if is_flushed:
            store.epochs[one.fingerprint] += 1
        async with server(store, tmp_path, is_first=False) as two:
            await until(lambda: two.shared.epochs.get(1), "no epoch")
            assert two.num_flushed_here == is_flushed
            assert two.shared.epochs.covers_old(1)
            assert await two.looked_up(BLOCKS) == [not is_flushed] * 6

    asyncio.run(run())


def test_blocks_of_an_unknown_epoch_are_not_vouched_for(tmp_path: Path) -> None:
    async def run() -> None:
        store = MemoryStore(places=False)
        async with server(store, tmp_path, is_first=False) as one:
            await until(lambda: one.shared.epochs.get(1), "no epoch")
            assert not one.shared.epochs.covers_old(1)
            await one.flush()
            assert one.shared.epochs.covers_old(1)

    asyncio.run(run())


class HeldNotes(EpochNotes):
    """Notes on a disk that hangs until `go` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])
        self.go, self.num_saving = threading.Event(), 0

    def save(self) -> None:
        self.num_saving += 1
        assert self.go.wait(20)
        super().save()


@contextlib.asynccontextmanager
async def held(store: MemoryStore, folder: Path) -> AsyncIterator[tuple[SharedNode, HeldNotes]]:
    """A server whose notes hang."""
    notes = HeldNotes(folder)
    one = SharedNode(store, 0.2, notes)
    one.tiers.start(Health(), one.core.take_effects, one.flushed_here)
    try:
        yield one, notes
    finally:
        notes.go.set()
        await one.tiers.close()


def test_nobody_waits_for_notes_on_a_disk_that_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        store, other_folder = MemoryStore(places=False), tmp_path / "other"
        other_folder.mkdir()
        async with server(store, other_folder, is_first=True) as other:
            other.put(BLOCKS)
            await other.until_copied(6)
            async with held(store, tmp_path) as (one, notes):
                for _ in range(5):
                    found = await asyncio.wait_for(one.looked_up(BLOCKS), 5.0)
                    assert not any(found), "an epoch is known that is not written down"
                one.tier.faults.problem = "away"
                await asyncio.wait_for(one.flush(), 5.0)
                assert notes.num_saving == 1, "more threads than one hang"
                one.tier.faults.problem = ""
                notes.go.set()
                await until(lambda: one.shared.epochs.get(1), "no epoch")

    asyncio.run(run())


def test_what_is_known_is_what_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another node flushes between two lookups that ask for the epoch."""
    monkeypatch.setattr(shared_epochs, "POLL_S", 30.0)

    async def run() -> None:
        store = MemoryStore(places=False)
        async with held(store, tmp_path) as (one, notes):
            store.epochs[one.fingerprint] = 7
            until_s = time.monotonic() + 10
            first = asyncio.create_task(one.shared.epochs.learn(1, until_s))
            await until(lambda: notes.num_saving, "nothing is written down")
            store.epochs[one.fingerprint] += 1
            second = asyncio.create_task(one.shared.epochs.learn(1, until_s))
            await asyncio.sleep(0.1)
            notes.go.set()
            assert await first and await second
            said = EpochNotes([tmp_path]).epochs("shared")
            assert said == {one.fingerprint: one.shared.epochs.get(1)}

    asyncio.run(run())


def test_folders_that_disagree(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, epoch, untold in ((a, 7, PRINTS[0]), (b, 8, PRINTS[1])):
        folder.mkdir()
        notes = EpochNotes([folder])
        notes.settle("valkey", PRINTS[2], epoch)
        notes.add_untold("valkey", untold)
        notes.save()
    both = EpochNotes([a, b])
    assert both.epochs("valkey") == {PRINTS[2]: UNSURE}
    assert sorted(both.untold("valkey")) == PRINTS[:2]
    assert not both.untold("s3")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 2, "tiers": {}}', '{"format": 1, "tiers": {"v": {"untold": ["zz"]}}}'],
)
def test_a_damaged_file_says_nothing(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EPOCHS_FILE).write_text(content)
    notes = EpochNotes([tmp_path])
    assert not notes.untold("v") and not notes.epochs("v") and "can't be used" in caplog.text
    notes.settle("v", PRINTS[0], 3)
    notes.save()
    assert EpochNotes([tmp_path]).epochs("v") == {PRINTS[0]: 3}


def test_a_folder_that_cannot_be_written_keeps_the_others(tmp_path: Path) -> None:
    notes = EpochNotes([tmp_path / "gone", tmp_path])
    notes.add_untold("v", PRINTS[0])
    with pytest.raises(OSError):
        notes.save()
    assert EpochNotes([tmp_path]).untold("v") == [PRINTS[0]]
    (tmp_path / "gone").mkdir()
    notes.save()
    assert EpochNotes([tmp_path / "gone"]).untold("v") == [PRINTS[0]]


def test_untold_flushes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_notes, "MAX_UNTOLD", 2)
    notes = EpochNotes()
    for fingerprint in PRINTS:
        notes.add_untold("v", fingerprint)
    assert notes.untold("v") == PRINTS[1:]


def test_a_server_that_leaves_no_blocks_leaves_what_is_untold(tmp_path: Path) -> None:
    notes = EpochNotes([tmp_path])
    notes.add_untold("v", PRINTS[0])
    notes.save()
    notes.discard()
    assert EpochNotes([tmp_path]).untold("v") == [PRINTS[0]]
    notes.settle("v", PRINTS[0], 0)
    notes.save()
    notes.discard()
    assert not (tmp_path / EPOCHS_FILE).exists()


class Restarts(RuleBasedStateMachine):
    """Notes beside a naive model; a restart keeps what was saved."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.notes = EpochNotes([Path(self.folder.name)])
        self.epochs: dict[str, int] = {}
        self.untold: set[str] = set()
        self.saved = (dict(self.epochs), set(self.untold))

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(name=st.sampled_from(PRINTS))
    def flush(self, name: str) -> None:
        self.notes.add_untold("v", name)
        self.untold.add(name)

    @rule(name=st.sampled_from(PRINTS), epoch=st.integers(0, 3))
    def settle(self, name: str, epoch: int) -> None:
        self.notes.settle("v", name, epoch)
        self.untold.discard(name)
        self.epochs.pop(name, None)
        if epoch:
            self.epochs[name] = epoch

    @rule()
    def save(self) -> None:
        self.notes.save()
        self.saved = (dict(self.epochs), set(self.untold))

    @rule()
    def restart(self) -> None:
        self.notes = EpochNotes([Path(self.folder.name)])
        self.epochs, self.untold = dict(self.saved[0]), set(self.saved[1])

    @invariant()
    def agrees(self) -> None:
        assert self.notes.epochs("v") == self.epochs
        assert set(self.notes.untold("v")) == self.untold


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
