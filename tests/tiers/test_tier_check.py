"""Tests `hotkv-server tiers check`: it tells which tiers work and leaves stores as they were.
Also how a starting server names its tiers' faults."""

import contextlib
import errno
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.policies.lru import LRU
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.table import SLOT_ALIGN
from hotkv_server.cache.core import CacheCore
from hotkv_server.cache.sessions import Catalog
from hotkv_server.cache.values import CoreConfig
from hotkv_server.cli import main
from hotkv_server.dataplane.plan import Region
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory.state import KnownKeySpace, ServerState, write_state
from hotkv_server.settings import Settings, load_settings
from hotkv_server.settings.tiers import TierSettings
from hotkv_server.startup import StartError
from hotkv_server.tiers import check as tier_check
from hotkv_server.tiers import start as tier_start
from hotkv_server.tiers.compression.staged import Staged
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.drive.records import LowerMemory
from hotkv_server.tiers.kinds import TIERS
from hotkv_server.tiers.protocol import Blocks, Codes, OnRead, Read, Shown
from hotkv_server.tiers.start import OpenedTiers, check_tiers, open_tiers
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.core.support import make_key_space, make_table
from tests.doubles.memory_tier import MemoryStore, SharedMemoryTier
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import PATIENT, Server
from tools.mutate_tests import TESTS

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SIZES = [(64 << 10, 32), (MIB, 8)]


def test_shared_tier_is_where_contributing_says() -> None:
    assert set(TIERS) == set(TierSettings.shared_names()), "settings and tiers/kinds.py differ"
    page = (ROOT / "docs" / "tiers.md").read_text()
    for name in TIERS:
        assert f"[tiers.{name}]" in page, f"docs/tiers.md needs a section on {name}"
        folder = f"server/hotkv_server/tiers/{name}/"
        assert any(path.startswith(folder) for path in TESTS), f"tools/mutate_tests.py: {folder}"


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_is_tried_beside_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(SlabFile.open(tmp_path, 16 * MIB)):
        (tmp_path / "records").write_bytes(b"records of a server")
        with (tmp_path / "slabs").open("r+b") as slabs:
            slabs.write(b"blocks of a server")
        before = content_of(tmp_path)
        config = tmp_path / "hotkv.toml"
        config.write_text(f'[tiers.disk]\npath = "{tmp_path}"\nbytes = "16MiB"\n')
        before = {**before, str(config): config.read_bytes()}
        assert main(["tiers", "check", "--config", str(config)]) == 0
        assert content_of(tmp_path) == before
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    head, *rows, foot = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["tier", "block"] and foot.endswith("bytes compared")
    assert [row.split()[:4] for row in rows] == [
        ["disk", "64", "KiB", "32"],
        ["disk", "1024", "KiB", "8"],
    ]


def test_a_folder_that_is_missing_is_missing_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tiers.disk.path", str(tmp_path / "a" / "b"), "--tiers.disk.bytes", "16MiB"]
    assert main(["tiers", "check", "--json", *flags]) == 0
    assert not list(tmp_path.iterdir())
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == said["left"] == {}
    assert [(one["block_bytes"], one["num_blocks"]) for one in said["timings"]] == SIZES
    assert all(one["write_ms"] > 0 and one["read_ms"] > 0 for one in said["timings"])


def test_failure_is_a_sentence_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    (tmp_path / "file").touch()
    size = ("--tiers.disk.bytes", "16TiB")
    for flags, status, sentence in (
        (("--tiers.disk.path", f"{tmp_path}/disk", *size), 1, "needs 16777216 MiB more"),
        (("--tiers.disk.path", f"{tmp_path}/file", *size), 1, f"tiers.disk: {tmp_path}/file"),
        (("--tiers.valkey.address", f"unix:{tmp_path}/nobody"), 1, "can't be reached"),
        (("--tiers.s3.bucket", "bucket"), 1, "tiers.s3: a tier in S3 needs the module obstore"),
        ((), 2, "the settings have no tier"),
        (("--tiers.disk.bytes", "1"), 2, "tiers.disk"),
    ):
        assert main(["tiers", "check", *flags]) == status
        said = capsys.readouterr()
        assert sentence in said.err and not said.out
    settings = load_settings(None, ["--tiers.s3.bucket", "bucket"], "hotkv-server")
    with pytest.raises(StartError, match="needs the module obstore"):
        check_tiers(settings)


def test_first_start_needs_room_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--tiers.disk.path", str(tmp_path), "--tiers.disk.bytes", "64MiB"]
    settings, free_mib = load_settings(None, flags, "hotkv-server"), 64

    def said(_: Any) -> os.statvfs_result:
        return os.statvfs_result((MIB, MIB, *[free_mib] * 3, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", said)
    with pytest.raises(StartError, match=r"has 64 MiB free, .* asks for 65 MiB more"):
        check_tiers(settings)
    free_mib = 65
    check_tiers(settings)


@contextlib.contextmanager
def started(settings: Settings) -> Iterator[OpenedTiers]:
    """Opens the tiers as a start does; shared ones close at once."""
    memory = np.zeros(16 * SLOT_ALIGN, np.uint8)
    arena = Region(memory.ctypes.data, len(memory), "arena")
    check_tiers(settings)
    opened = open_tiers(settings, arena, reset=False)
    assert opened is not None
    try:
        core = CacheCore(CoreConfig(len(memory), 4 * SLOT_ALIGN, 40), make_table(40), LRU(40))
        opened.add_books(core)
        opened.take_over(core)
        place: Any = SimpleNamespace(arena=SimpleNamespace(fd=-1), directory=settings.arena_dir)
        for one in opened.drive(core, Verifier(core, arena), place).shared:
            one.tier.close()
        yield opened
    finally:
        if opened._lower is not None:
            opened._lower.tier.close()
        opened.close()


def fails(*arguments: Any, **named: Any) -> Any:
    raise OSError(errno.ENOMEM, "no more")


def lacks() -> Any:
    raise ImportError("no module", name="abc")


def hang(patch: pytest.MonkeyPatch, at: Path) -> None:
    patch.setattr(tier_start, "ANSWER_S", 0.1)
    patch.setattr(tier_start, "_check_disk", lambda *arguments: threading.Event().wait())


def slabs_folder(patch: pytest.MonkeyPatch, at: Path) -> None:
    (at / "disk").mkdir(mode=0o700)
    (at / "disk/slabs").mkdir()


DISK = ("--tiers.disk.compress", "auto", "--tiers.disk.bytes", "32MiB", "--tiers.disk.path")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda patch, at: (at / "arena").mkdir(), ""),
        (lambda patch, at: (at / "disk").touch(), "is no folder that this user may write"),
        (lambda patch, at: (at / "disk").mkdir(mode=0o755), "disk is open to others"),
        (slabs_folder, "can't open .*slabs"),
        (lambda patch, at: (at / "generations.json").mkdir(), "arena.dir: .*generations.json"),
        (hang, "has not answered"),
        (lambda patch, at: patch.setattr(Staged, "open", fails), "compress: no memory"),
        (lambda patch, at: patch.setattr(ValkeyTier, "__init__", fails), "tiers.valkey: .*no more"),
        (
            lambda patch, at: patch.setitem(tier_start.TIERS, "valkey", lacks),
            "abc is not installed",
        ),
    ],
)
def test_start_names_faults_of_its_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., object], words: str
) -> None:
    closed: list[Staged] = []
    monkeypatch.setattr(Staged, "close", lambda staged: closed.append(staged))
    flags = [*DISK, f"{tmp_path}/disk", "--tiers.valkey.address", f"unix:{tmp_path}/v"]
    flags += ["--tiers.valkey.compress", "auto"]
    settings = load_settings(None, [*flags, "--arena.dir", str(tmp_path)], "hotkv-server")
    with monkeypatch.context() as patch:
        spoil(patch, tmp_path)
        with (
            contextlib.nullcontext() if not words else pytest.raises(StartError, match=words),
            started(settings),
        ):
            pass
    if (tmp_path / "disk" / "lock").exists():
        LowerMemory.open(tmp_path / "disk", 32 * MIB, MIB, 40).close()
    if "valkey" in words:
        wait_for(lambda: len(closed) == 2, "staging memory is left behind")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("written.json", b"[[1]]", "write budget begins anew .*damaged"),
        ("written.json", b"", "write budget begins anew .*damaged"),
        ("written.json", b"[[1e999, 1]]", "write budget begins anew .*can't be"),
        ("written.json", b"[[1, -1]]", "write budget begins anew .*can't be"),
        ("written.json", b"[" * 100_000, "write budget begins anew .*recursion"),
        ("written.json", None, "write budget begins anew .*no regular file"),
        ("state.json", None, "disk tier starts empty .*no regular file"),
        ("records", b"x", "disk tier starts empty"),
        ("records", None, "disk tier starts empty .*no regular file"),
        ("", b"", "key space of the disk tier dropped .*too many"),
    ],
)
def test_start_passes_over_earlier_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    name: str, content: bytes | None, words: str,
) -> None:  # fmt: skip
    """`content`: None: a pipe. `name`: empty: registering the saved key space fails."""

    def refuse(*arguments: Any) -> Any:
        raise HotKVError(Reason.OVERLOADED, "too many")

    folder = tmp_path / "disk"
    flags = [*DISK, str(folder), "--arena.dir", str(tmp_path)]
    settings = load_settings(None, flags, "hotkv-server")
    with started(settings):
        pass
    if content is None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    elif name:
        (folder / name).write_bytes(content)
    else:
        known = KnownKeySpace(1, make_key_space("m", SLOT_ALIGN, SLOT_ALIGN))
        write_state(folder / "state.json", ServerState(4 * SLOT_ALIGN, [known]))
        monkeypatch.setattr(Catalog, "register", refuse)
    with started(settings):
        pass
    assert re.search(words, caplog.text)


class Bad(SharedMemoryTier):
    """answers: what reads return; None: what is right.
    flips: reads change bytes.
    """

    answers: Read | None = None
    flips = False

    def read(self, blocks: Blocks, deadline_s: float, on_done: OnRead) -> None:
        def done(codes: Codes) -> None:
            if self.flips:
                self._arena[blocks.slots] ^= 1
            on_done(codes if self.answers is None else np.full_like(codes, self.answers))

        super().read(blocks, deadline_s, done)


def fault(name: str, value: object) -> Callable[[Bad], None]:
    return lambda tier: setattr(tier.faults, name, value)


def answers(code: Read) -> Callable[[Bad], None]:
    return lambda tier: setattr(tier, "answers", code)


def has_no_generation(tier: Bad) -> None:
    tier.generations = lambda names, until_s, done: done(Shown(dict.fromkeys(names, 0)))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (has_no_generation, "has no room for the generation"),
        (fault("is_hung", True), "does not answer within"),
        (fault("is_full", True), "is full: it took no block of 64 KiB"),
        (fault("fails", lambda key: True), "could not write a block of 64 KiB"),
        (fault("problem", "memory at nowhere can't be reached"), "memory at nowhere can't be"),
        (answers(Read.ABSENT), "has lost"),
        (answers(Read.CORRUPT), "gives damaged bytes"),
        (lambda tier: setattr(tier, "flips", True), "gives other bytes than were written"),
    ],
)
def test_each_fault_has_its_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Bad], None], sentence: str
) -> None:
    if "does not answer" in sentence:
        monkeypatch.setattr(tier_check, "ANSWER_S", 0.2)
    if "could not write" in sentence or "memory at" in sentence:
        monkeypatch.setattr(tier_check, "REMOVE_S", 0.5)
    arena, _ = tier_check._arena()
    store = MemoryStore(places=False, content={b"hotkv/1/another": (b"bytes", 1)})
    tier = Bad(arena, store)
    spoil(tier)
    with pytest.raises(StartError, match=sentence):
        tier_check.check_shared(tier, arena)
    assert store.content == {b"hotkv/1/another": (b"bytes", 1)}


def test_store_that_cant_remove_blocks_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_check, "REMOVE_S", 0.1)
    (arena, _), store = tier_check._arena(), MemoryStore(places=False)
    tier = SharedMemoryTier(arena, store)
    monkeypatch.setattr(tier, "forget", lambda keys: None)
    checked = tier_check.check_shared(tier, arena)
    assert [(one.block_bytes, one.num_blocks) for one in checked.timings] == SIZES
    (fingerprint,) = store.generations
    assert checked.left.startswith("works, but 40 keys") and fingerprint in checked.left


def test_others_store_is_left_untouched(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = server.client
    # A busy machine may delay the server for a second.
    monkeypatch.setattr("hotkv_server.tiers.valkey.tier.TIMEOUTS", PATIENT)
    client.set(b"hotkv/1/abc/generation", b"7")
    client.set(b"hotkv/1/abc/7/0/hash", b"bytes")
    flags = ["--tiers.valkey.address", f"unix:{server.path}"]
    assert main(["tiers", "check", "--json", *flags]) == 0
    assert sorted(client.keys()) == [b"hotkv/1/abc/7/0/hash", b"hotkv/1/abc/generation"]
    assert client.get(b"hotkv/1/abc/generation") == b"7"
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == said["left"] == {}
    assert [(one["tier"], one["block_bytes"]) for one in said["timings"]] == [
        ("valkey", size) for size, _ in SIZES
    ]
