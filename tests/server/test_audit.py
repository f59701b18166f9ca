"""Tests the audit log: its file, refused callers, and calls that fail, are cancelled or never
end."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.v1 import admin_pb2, admin_pb2_grpc, warm_pb2, warm_pb2_grpc
from hotkv_server import logs
from hotkv_server.security.identity import Peer
from hotkv_server.settings import Settings
from hotkv_server.settings.security import SecuritySettings
from hotkv_server.startup import StartError
from hotkv_server.startup.preflight import check_audit
from hotkv_server.wire.guard.audit import MAX_REFUSED_PER_S, AuditLog
from hotkv_server.wire.guard.interceptor import EdgeInterceptor
from hotkv_server.wire.guard.limits import BURST_S, MAX_PEERS, FaultBound, Pace, SessionlessCalls
from tests.support.waiting import eventually, wait_for

EVICT = "/hotkv.v1.AdminService/Evict"
REQUEST = admin_pb2.EvictRequest(all=True)


ADMINS = ("hotkv.v1.AdminService", "hotkv.v1.WarmStartService")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_file_that_cant_reopen_fails_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "audit"
    folder.mkdir()
    audit = AuditLog("all", folder / "audit.jsonl")
    audit.note(EVICT, Peer("x"), REQUEST, "ok")
    wait_for(lambda: len(lines(folder / "audit.jsonl")) == 1)
    shutil.rmtree(folder)
    for _ in range(3):
        audit.note(EVICT, Peer("somebody"), REQUEST, "ok")
    wait_for(lambda: caplog.text.count("somebody") == 3)
    assert caplog.text.count("can't be written") == 1
    folder.mkdir()
    audit.note(EVICT, Peer("again"), REQUEST, "ok")
    audit.close()
    assert [line["who"] for line in lines(folder / "audit.jsonl")] == ["again"]
    assert (folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_refused_calls_fill_no_disk(tmp_path: Path) -> None:
    """The refused calls get few lines, which count those that were left out."""
    audit = AuditLog("all", tmp_path / "audit.jsonl")
    for _ in range(2):
        for _ in range(MAX_REFUSED_PER_S):
            audit.note(EVICT, Peer("admin"), REQUEST, "ok")
        for _ in range(1000):
            audit.note(EVICT, Peer("stranger"), None, "unauthenticated")
    audit.close()
    written = lines(tmp_path / "audit.jsonl")
    strangers = sum(line.get("who") == "stranger" for line in written)
    assert strangers < 1000 and sum("left_out" in line for line in written) >= 2
    assert strangers + sum(line.get("left_out", 0) for line in written) == 2000
    assert sum(line.get("who") == "admin" for line in written) == 2 * MAX_REFUSED_PER_S


def test_lines_are_logged_at_any_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    caplog.handler.setLevel(0)
    AuditLog("all").note(EVICT, Peer("somebody"), REQUEST, "ok")
    assert caplog.text.count("somebody") == 1


def test_flood_of_refusals_leaves_few_counting_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, lines = [5.0], list[str]()
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s[0])
    throttle, shown = logs.Throttle(2), logging.Formatter("%(message)s%(call)s")
    for number in range(9):
        now_s[0] = 5.0 + number // 7
        record = logging.LogRecord("x", logging.WARNING, "", 0, "refused %s", ("100%",), None)
        if throttle.filter(record):
            assert logs._add_context(record)
            lines.append(shown.format(record))
    few, many = "refused 100%", "refused 100% (left_out=5 before it)"
    assert lines == [few, few, many, few]


def test_impossible_file_is_refused_link_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link that replaces the file later could lead to any other."""
    path, other, link = (tmp_path / name for name in ("audit.jsonl", "other", "link"))
    os.mkfifo(tmp_path / "fifo")
    for file in (path, other):
        file.touch(0o644)
    link.symlink_to(other)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    for name in ("fifo", "x" * 300, ".", "none/file", "link", "nowhere"):
        with pytest.raises(StartError, match="audit_file"):
            check_audit(Settings(security=SecuritySettings(audit_file=tmp_path / name)))
        with pytest.raises(OSError):
            AuditLog("all", tmp_path / name)
    assert not (tmp_path / "none").exists()
    audit = AuditLog("all", path)
    assert path.stat().st_mode & 0o777 == 0o600, "a file that is there is made private"
    path.rename(tmp_path / "audit.jsonl.1")
    path.symlink_to(other)
    audit.note(EVICT, Peer("test"), None, "ok")
    audit.close()
    assert "is a symbolic link" in caplog.text
    assert not other.read_text() and other.stat().st_mode & 0o777 == 0o644


class _Odd(admin_pb2_grpc.AdminServiceServicer):
    """One call never ends; the other raises an exception that is no HotKVError."""

    def __init__(self) -> None:
        self.num_evicts = 0

    async def Evict(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.num_evicts += 1
        await asyncio.Event().wait()

    async def Drain(self, request: Any, context: Any) -> None:  # type: ignore[override]
        raise KeyError("a defect")


class _OddStream(warm_pb2_grpc.WarmStartServiceServicer):
    """The stream never ends, or fails after its first answer."""

    async def ExportBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        yield warm_pb2.ExportBlocksResponse()
        if request.key_space_id:
            await context.abort(grpc.StatusCode.NOT_FOUND, "gone")
        await asyncio.Event().wait()


class _Evicts(admin_pb2_grpc.AdminServiceServicer):
    async def Evict(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        return admin_pb2.EvictResponse()


@contextlib.asynccontextmanager
async def _served(
    folder: Path, admin: admin_pb2_grpc.AdminServiceServicer, pace: Pace, guard: Any = None
) -> AsyncIterator[grpc.aio.Channel]:
    """Serves both behind the server's interceptor.

    pace: rate limit of refused calls.
    guard: raises if the caller is no admin; None: all are.
    """
    audit, node = AuditLog("all", folder / "audit.jsonl"), Mock(refusals=Counter[Reason]())
    edge = EdgeInterceptor(
        node, pace, SessionlessCalls(8), audit, lambda _: Peer("x"), ADMINS, guard
    )
    server = grpc.aio.server(interceptors=[edge])
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    warm_pb2_grpc.add_WarmStartServiceServicer_to_server(_OddStream(), server)
    server.add_insecure_port(f"unix:{folder}/s.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/s.sock") as channel:
        yield channel
    await server.stop(0)
    audit.close()


async def test_non_admin_waits_a_turn_before_refusal(tmp_path: Path) -> None:
    """Without the wait, tokens could be guessed quickly."""
    are_admins = [False, False, True, False, True]
    pace, outcomes = Mock(turn=AsyncMock()), list[tuple[str, int]]()

    def guard(context: Any) -> None:
        if not are_admins[len(outcomes)]:
            raise HotKVError(Reason.NOT_ALLOWED, "no admin")

    async with _served(tmp_path, _Evicts(), pace, guard) as channel:
        for _ in are_admins:
            code = "OK"
            try:
                await admin_pb2_grpc.AdminServiceStub(channel).Evict(REQUEST)
            except grpc.RpcError as error:
                code = error.code().name
            outcomes.append((code, pace.turn.await_count))
    refused, ok = "PERMISSION_DENIED", "OK"
    assert outcomes == [(refused, 1), (refused, 2), (ok, 2), (refused, 3), (ok, 3)]
    written = [line["outcome"].upper() for line in lines(tmp_path / "audit.jsonl")]
    assert written == [code for code, _ in outcomes]


def test_names_of_certificates_pass_for_nothing_else(tmp_path: Path) -> None:
    """An authority may sign names that look like other parts of a log line."""
    plain = Peer("peer=x", certificate_names=frozenset(("node-1.example.com", "a@b")))
    assert str(plain) == "peer=x certificate=a@b,node-1.example.com"
    for name in ("a with a token", "a,admin", "a\n2026-11-22 INFO hotkv_server.audit x", ""):
        shown = str(Peer("peer=x", certificate_names=frozenset((name,))))
        assert shown == f"peer=x certificate={name!r}" and "\n" not in shown


async def test_oddly_ended_calls_are_audited_with_end(tmp_path: Path) -> None:
    odd, timeout_s = _Odd(), 0.1
    async with _served(tmp_path, odd, Pace(50)) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        warm = warm_pb2_grpc.WarmStartServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            await admin.Drain(admin_pb2.DrainRequest())
        # On a busy machine, a call may end before the server has received it.
        while not odd.num_evicts:
            timeout_s *= 2
            with pytest.raises(grpc.RpcError):
                await admin.Evict(REQUEST, timeout=timeout_s)
        refused, left = (
            warm.ExportBlocks(warm_pb2.ExportBlocksRequest(key_space_id=one)) for one in (1, 0)
        )
        await refused.read()
        with pytest.raises(grpc.RpcError):
            await refused.read()
        await left.read()
        left.cancel()
        await eventually(lambda: len(lines(tmp_path / "audit.jsonl")) >= 3 + odd.num_evicts)
    written = lines(tmp_path / "audit.jsonl")
    assert {(line["method"].rpartition("/")[2], line["outcome"]) for line in written} == {
        ("Drain", "unknown"),
        ("Evict", "cancelled"),
        ("ExportBlocks", "not_found"),
        ("ExportBlocks", "cancelled"),
    }


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 0.3)), max_size=200),
    st.sampled_from([1.0, 7.0, 50.0]),
)
def test_a_peers_faults_are_bounded_and_no_others(
    tries: list[tuple[str, float]], per_s: float
) -> None:
    bound, now_s, served = FaultBound(per_s), 100.0, Counter[str]()
    for peer, pause_s in tries:
        now_s += pause_s
        assert not bound.is_over("faultless", now_s)
        if not bound.is_over(peer, now_s):
            bound.count(peer, now_s)
            served[peer] += 1
    most = per_s * (BURST_S + now_s - 100.0) + 1
    assert all(count <= most for count in served.values())
    assert not any(bound.is_over(peer, now_s + 1 / per_s + 1e-6) for peer in "ab")


def test_faults_of_many_peers_take_little_memory() -> None:
    bound = FaultBound(1.0)
    for number in range(3 * MAX_PEERS):
        for _ in range(4):
            bound.count(number, 0.0)
    assert len(bound._used_s) == MAX_PEERS and bound.is_over(3 * MAX_PEERS - 1, 0.0)
