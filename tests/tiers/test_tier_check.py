"""`hotkv-server tiers check` reports for each tier whether it works, in a table or a sentence, and
leaves every store unchanged."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotkv_server.cli import main
from hotkv_server.settings import load_settings
from hotkv_server.startup import StartError
from hotkv_server.testing.memory_tier import MemoryStore, SharedMemoryTier
from hotkv_server.tiers import check as tier_check
from hotkv_server.tiers.disk.slab_file import SlabFile
from hotkv_server.tiers.protocol import Blocks, Codes, OnRead, Read
from hotkv_server.tiers.start import check_tiers
from tests.tiers.valkey_support import Server

MIB = 1 << 20
SIZES = [(64 << 10, 32), (MIB, 8)]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_is_tried_beside_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = SlabFile.open(tmp_path, 16 * MIB)
    try:
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
    finally:
        held.close()
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


def test_what_does_not_work_is_a_sentence_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    (tmp_path / "file").touch()
    size = ("--tiers.disk.bytes", "4096TiB")
    for flags, status, sentence in (
        (("--tiers.disk.path", f"{tmp_path}/disk", *size), 1, "needs 4294967296 MiB more"),
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


class Bad(SharedMemoryTier):
    """A tier with wrong reads. `answers` replace the codes; `flips` changes the bytes."""

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


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
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
    monkeypatch.setattr(tier_check, "ANSWER_S", 0.2)
    monkeypatch.setattr(tier_check, "REMOVE_S", 0.5)
    arena, _ = tier_check._arena()
    store = MemoryStore(places=False, content={b"hotkv/1/another": (b"bytes", 1)})
    tier = Bad(arena, store)
    spoil(tier)
    with pytest.raises(StartError, match=sentence):
        tier_check.check_shared(tier, arena)
    assert store.content == {b"hotkv/1/another": (b"bytes", 1)}


def test_a_store_that_does_not_remove_blocks_works_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tier_check, "REMOVE_S", 0.1)
    (arena, _), store = tier_check._arena(), MemoryStore(places=False)
    tier = SharedMemoryTier(arena, store)
    monkeypatch.setattr(tier, "forget", lambda keys: None)
    checked = tier_check.check_shared(tier, arena)
    assert [(one.block_bytes, one.num_blocks) for one in checked.timings] == SIZES
    (fingerprint,) = store.epochs
    assert checked.left.startswith("works, but 40 keys") and fingerprint in checked.left


def test_a_store_that_others_use_is_left_as_it_was(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    client: Any = server.client
    client.set(b"hotkv/1/abc/epoch", b"7")
    client.set(b"hotkv/1/abc/7/0/hash", b"bytes")
    flags = ["--tiers.valkey.address", f"unix:{server.path}"]
    assert main(["tiers", "check", "--json", *flags]) == 0
    assert sorted(client.keys()) == [b"hotkv/1/abc/7/0/hash", b"hotkv/1/abc/epoch"]
    assert client.get(b"hotkv/1/abc/epoch") == b"7"
    said = json.loads(capsys.readouterr().out)
    assert said["problems"] == said["left"] == {}
    assert [(one["tier"], one["block_bytes"]) for one in said["timings"]] == [
        ("valkey", size) for size, _ in SIZES
    ]
