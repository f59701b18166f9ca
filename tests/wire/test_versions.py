"""Versions of the protocol: sides of unequal age agree, and an upgrade of the server needs no
engine restarted."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import Server, runtime_folder
from hotkv import versions
from hotkv.errors import HotKVError, Reason
from hotkv.groups import GroupKind, GroupSpec
from hotkv.keys import KeySpace, Representation, signed_salt, unsigned_salt
from hotkv.results import BlockResult, TransferStatus
from hotkv.v1 import session_pb2, session_pb2_grpc
from hotkv_client import (
    BlockRun,
    GroupHashes,
    LoadRun,
    Role,
    Session,
    SessionConfig,
    _answers,
    _wire,
)
from hotkv_client.admin import AdminClient
from hotkv_client.testing import PagedEngine
from tests.server.support import hashes
from tests.server.test_life import wait_until
from tests.wire.version_1 import DESCRIPTORS, OldEngine, OldServer, has_unknown_fields, message

ROOT = Path(__file__).resolve().parents[2]
OLD_ONLY = """
import hotkv.versions
hotkv.versions.NEWEST_VERSION = 1
hotkv.versions.FEATURES = frozenset()
"""
"""Makes a daemon speak version 1 alone, and know no feature."""
FLAGS = ("--arena.slab-bytes", "64KiB")
SPACE = KeySpace(
    "m",
    "w",
    "bfloat16",
    (
        GroupSpec(GroupKind.FULL_ATTENTION, 16, (4096,)),
        GroupSpec(GroupKind.SLIDING_WINDOW, 32, (4096,), 64),
    ),
    16,
)
KIND = Representation(1, "mean", 3, (64,))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with runtime_folder(64 << 20) as folder, Server(folder, "16MiB", *FLAGS) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    with runtime_folder(64 << 20) as place:
        yield place


def old_daemon(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A daemon of version 1; the next one in the folder is of today."""
    (tmp_path / "sitecustomize.py").write_text(OLD_ONLY)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        made = Server(folder, "16MiB", *FLAGS)
    made.wait_ready()
    return made


def stop(server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    server._child.process.wait(60)
    server.__exit__()


# What two sides agree on


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (2, 2, 2),
        (1, 9, 2),
        (2, 9, 2),
        (3, 9, None),
        (0, 0, None),
        (9, 2, None),
    ],
)
def test_the_newest_common_version_is_spoken(oldest: int, newest: int, agreed: int | None) -> None:
    assert versions.agreed_version(oldest, newest) == agreed


@given(st.integers(-5, 20), st.integers(-5, 20))
def test_a_version_that_is_agreed_on_is_spoken_by_both(oldest: int, newest: int) -> None:
    mine = range(versions.OLDEST_VERSION, versions.NEWEST_VERSION + 1)
    common = set(mine) & set(range(oldest, newest + 1))
    assert versions.agreed_version(oldest, newest) == max(common, default=None)


def open_with(server: Server, **changes: Any) -> session_pb2.SessionOpened:
    """What the server answers to an opening."""
    config = SessionConfig(server.target, "e", Role.TOOL, SPACE, (KIND,))
    request = _wire.open_session(config)
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(request.open_session, name)[:] = value
        else:
            setattr(request.open_session, name, value)
    with grpc.insecure_channel(server.target) as channel:
        call = session_pb2_grpc.SessionServiceStub(channel).Connect(iter([request]))
        return next(call).session_opened


@pytest.mark.parametrize(
    ("oldest", "newest", "spoken"), [(1, 0, 1), (1, 2, 2), (2, 0, 2), (1, 9, 2)]
)
def test_a_session_speaks_the_newest_common_version(
    server: Server, oldest: int, newest: int, spoken: int
) -> None:
    opened = open_with(server, protocol_version=oldest, newest_protocol_version=newest)
    assert opened.protocol_version == spoken


@pytest.mark.parametrize(("oldest", "newest"), [(3, 0), (3, 9), (0, 0), (-1, -1)])
def test_sides_without_a_common_version_say_which_they_speak(
    server: Server, oldest: int, newest: int
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        open_with(server, protocol_version=oldest, newest_protocol_version=newest)
    error = _answers.as_error(caught.value)
    assert error.reason is Reason.VERSION_MISMATCH
    assert f"protocol_version is {oldest}" in error.message and "speaks 1 to 2" in error.message


@pytest.mark.parametrize(
    ("named", "used"), [([], []), ([1], [1]), ([2, 1, 99, -3], [1, 2]), ([0], []), ([1, 1], [1])]
)
def test_only_features_that_both_know_are_used(
    server: Server, named: list[int], used: list[int]
) -> None:
    opened = open_with(server, features=named)
    assert (list(opened.features), len(opened.salts)) == (used, 3 if 1 in used else 0)


def test_the_server_says_which_versions_it_speaks(server: Server) -> None:
    with AdminClient(server.target) as admin:
        info = admin.info()
    assert (info["oldest_protocol_version"], info["protocol_version"]) == (1, 2)


# Salts


def test_salts_are_those_that_the_server_writes_the_table_with(server: Server) -> None:
    salts = [*map(SPACE.group_salt, range(2)), SPACE.representation_salt(KIND)]
    assert [unsigned_salt(salt) for salt in open_with(server).salts] == salts


def test_salts_are_what_they_were_in_version_1() -> None:
    """Engines of version 1 compute them."""
    salts = [*map(SPACE.group_salt, range(2)), SPACE.representation_salt(KIND)]
    assert salts == [0xD5500A68D0D45748, 0x88F10F00A6B0A34C, 0x4E20A5ABD40B3E2C]


@given(st.integers(0, (1 << 64) - 1))
def test_a_salt_comes_through_as_a_signed_number(salt: int) -> None:
    opened = session_pb2.SessionOpened(salts=[signed_salt(salt)])
    read = session_pb2.SessionOpened.FromString(opened.SerializeToString())
    assert unsigned_salt(read.salts[0]) == salt


# Sides of unequal age


def test_an_engine_of_version_1_is_answered_in_version_1(server: Server) -> None:
    engine = OldEngine(server.target).open()
    assert engine.opened.protocol_version == 1 and not has_unknown_fields(engine.opened)
    engine.kv[:4] = np.random.default_rng().integers(0, 256, engine.kv[:4].shape, np.uint8)
    blocks = hashes(4)
    assert engine.store(blocks) == [BlockResult.STORED] * 4
    assert engine.load(blocks, 20) == TransferStatus.DONE
    assert np.array_equal(engine.kv[:4], engine.kv[20:24])
    groups = [message("GroupHashes", hashes=b"x" * 31)]
    refused = engine.ask(lookup=message("LookupRequest", groups=groups)).error
    assert refused.reason == Reason.INVALID_HASH and "31 bytes" in refused.message
    engine.close()


def test_an_engine_of_version_1_keeps_working_through_an_upgrade(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_daemon(folder, tmp_path, monkeypatch)
    engine = OldEngine(old.target).open()
    engine.kv[:8] = np.random.default_rng().integers(0, 256, engine.kv[:8].shape, np.uint8)
    blocks = hashes(8)
    assert engine.store(blocks) == [BlockResult.STORED] * 8
    epoch = engine.opened.epoch
    stop(old)
    assert engine.ended()
    with Server(folder, "16MiB", *FLAGS) as new:
        new.wait_ready()
        with AdminClient(new.target) as admin:
            assert admin.info()["protocol_version"] == 2
        engine.open()
        assert (engine.opened.epoch, engine.opened.protocol_version) == (epoch, 1)
        assert engine.load(blocks, 20) == TransferStatus.DONE
        assert np.array_equal(engine.kv[:8], engine.kv[20:28])
        more = hashes(8)
        assert engine.store(more) == [BlockResult.STORED] * 8
        engine.close()


def test_a_session_of_today_goes_from_version_1_to_2_with_its_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = old_daemon(folder, tmp_path, monkeypatch)
    engine = PagedEngine(old.target).connect()
    session, blocks = engine.session, hashes(4)
    assert session.protocol_version == 1
    ids = np.arange(4, dtype=np.int32)
    engine.kv[:] = np.random.default_rng().integers(0, 256, engine.kv.shape, np.uint8)
    session.store("s", "s", [BlockRun(0, blocks, ids)], 10).result(60)
    found = session.probe(0, blocks)
    assert found is not None and found.all(), "salts of its own making"
    stop(old)
    wait_until(lambda: not session.connected)
    with Server(folder, "16MiB", *FLAGS) as new:
        new.wait_ready()
        assert session.wait_connected(20) and session.protocol_version == 2
        found = session.probe(0, blocks)
        assert found is not None and found.all(), "salts of the server's"
        session.acquire("l", [GroupHashes(0, blocks)], 30).result(60)
        loaded = session.load("t", "l", [LoadRun(0, ids, ids + np.int32(8))], 10).result(60)
        assert loaded.status is TransferStatus.DONE
        assert np.array_equal(engine.kv[:, :4], engine.kv[:, 8:12])
        engine.close()


def test_a_session_of_today_takes_what_a_server_of_version_1_answers(tmp_path: Path) -> None:
    target = f"unix:{tmp_path / 'old.sock'}"
    with OldServer(target):
        session = Session(SessionConfig(target, "e", Role.SCHEDULER, SPACE))
        session.start()
        assert session.wait_connected(20)
        assert (session.protocol_version, session.epoch) == (1, 7)
        assert session.lookup([GroupHashes(0, hashes(3))]).result(60)[0].tolist() == [True] * 3
        with pytest.raises(HotKVError) as caught:
            session.acquire("l", [GroupHashes(0, hashes(1))]).result(60)
        assert caught.value.reason is Reason.UNKNOWN_LEASE
        session.close()
        with AdminClient(target) as admin, pytest.raises(HotKVError) as caught:
            admin.info()
        assert (caught.value.reason, caught.value.message) == (Reason.NOT_ALLOWED, "not you")


def test_nothing_of_version_1_was_renumbered_or_removed() -> None:
    buf = Path(sys.executable).with_name("buf")
    done = subprocess.run(
        [str(buf), "breaking", "--against", str(DESCRIPTORS)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
