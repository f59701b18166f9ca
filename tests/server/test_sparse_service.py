"""Tests sparse decode on a real server."""

import os
import re
import threading
import time
from typing import Any
from unittest.mock import MagicMock, Mock

import grpc
import numpy as np
import pytest

from demo.processes import Server
from hotkv_client import GroupHashes, LoadRun, SelectConfig, Session, TransferStatus
from hotkv_client.admin import AdminClient
from hotkv_client.selects import Selects
from hotkv_client.wire.sparse import _select_message
from hotkv_proto.errors import HotKVError, NoAnswerError, Reason, SessionLostError
from hotkv_proto.v1 import sparse_pb2, sparse_pb2_grpc
from hotkv_proto.v1.sparse_pb2 import SelectBlocksResponse
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres, LayerCentre
from hotkv_sparse.selection import select_layer
from hotkv_sparse.server.select.calls import _config
from tests.doubles.with_constants import constant, cores
from tests.server.page_support import get
from tests.server.places import Place, place, spoil
from tests.server.sparse_support import (
    BLOCK_TOKENS,
    CONFIG,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    LOG_MASS,
    Make,
    SketchEngine,
    ints,
    queries,
    refused,
    sparse_engine,
)
from tests.server.support import block_ids, hashes, http_port, number_of
from tests.support.waiting import wait_for

__all__ = ["sparse_engine"]
"""A fixture."""

__all__ = ["place"]


def centres() -> Centres:
    mu = 3 * np.random.default_rng(1).standard_normal((KV_HEADS, HEAD_SIZE)).astype(np.float32)
    centre = LayerCentre(mu, {"rot2u": 0.75, "rot3u": 0.1})
    return Centres("some model", 5000, {0: centre, 2: centre})


@pytest.mark.parametrize("centred", [False, True])
def test_server_selects_as_the_engine_does(
    sparse_engine: Make, server: Server, *, centred: bool
) -> None:
    known = centres() if centred else None
    engine, other = sparse_engine(centres=known), sparse_engine(centres=known)
    used = server.counter("sparse_used_blocks_total")
    blocks, tokens, rows = hashes(100), 100 * BLOCK_TOKENS + 5, block_ids(100)
    engine.store(blocks)
    created = other.session.create_sequence("s", 0, blocks, other.select_config()).result(60)
    assert created.covered_blocks == 100
    with other.session.selects() as stream:
        for query in queries(6):
            for layer in LAYERS:
                found = stream.select("s", layer, query, tokens, LOG_MASS)
                of_engine = engine.sources(layer), rows, LOG_MASS, tokens, BLOCK_TOKENS
                expected = select_layer(CONFIG, layer, query, *of_engine)
                assert found.positions.tolist() == expected.blocks.tolist()
                assert np.array_equal(found.weights, expected.weights)
                assert found.estimated_mass == expected.mass
                assert not len(found.hot_positions) and not len(found.load_positions)
        chosen = stream.select("s", 2, queries(1)[0], 100 * BLOCK_TOKENS).positions
    result = other.session.load("l", created.lease_id, [LoadRun(0, chosen, chosen)], 10).result(60)
    assert result.status is TransferStatus.DONE
    assert np.array_equal(other.kv[chosen], engine.kv[chosen])
    assert server.counter("sparse_used_blocks_total") > used


def test_covered_blocks_are_pinned_until_sequence_ends(sparse_engine: Make, server: Server) -> None:
    engine = sparse_engine()
    blocks, session, config = hashes(60), engine.session, engine.select_config()
    engine.store(blocks[:30])
    engine.store(blocks[30:40], first=30, with_sketches=False)
    created = session.create_sequence("s", 0, blocks[:50], config).result(60)
    assert created.covered_blocks == 30
    absent = session.create_sequence("absent", 0, hashes(9), config).result(60)
    assert (absent.lease_id, absent.covered_blocks) == ("", 0)
    # The same again; then blocks that it has in part.
    assert session.create_sequence("s", 0, blocks[:50], config).result(60) == created
    engine.store(blocks[30:60], first=30)
    state = session.append_blocks("s", 45, blocks[45:60]).result(60)
    assert (state.num_blocks, state.covered_blocks) == (60, 60)
    assert state.lease_id != created.lease_id
    assert session.append_blocks("s", 60, []).result(60).covered_blocks == 60
    with AdminClient(server.target) as admin:
        number = number_of(admin, engine.key_space.model)

        def evicted() -> int:
            return int(admin.evict(number, 0, b"".join(blocks))["evicted_block_count"])

        assert evicted() == 0
        assert session.delete_sequence("s").result(60) is True
        assert session.delete_sequence("s").result(60) is False
        assert evicted() == 60
        # Without a select config, it pins nothing.
        engine.store(blocks)
        created = session.create_sequence("plain", 0, blocks).result(60)
        assert (created.lease_id, created.covered_blocks) == ("", 0) and evicted() == 60


def test_the_server_keeps_a_hot_set(sparse_engine: Make) -> None:
    engine, blocks = sparse_engine(), hashes(100)
    engine.store(blocks)
    engine.session.create_sequence("s", 0, blocks, engine.select_config(hot_blocks=50)).result(60)
    held: dict[int, int] = {}
    with engine.session.selects() as stream:
        for step, query in enumerate(queries(12)):
            answer = stream.select("s", 2, query, 100 * BLOCK_TOKENS + 5, LOG_MASS)
            for block in answer.evict_positions.tolist():
                del held[block]
            loads = dict(zip(answer.load_positions, answer.load_slots, strict=True))
            num_corrections = sum(1 <= block < 97 for block in loads)
            assert step == 0 or num_corrections <= CONFIG.max_correction_blocks
            held |= loads
            mapped = dict(zip(answer.hot_positions, answer.hot_slots, strict=True))
            # The last block, which is partial, has a slot too, but the client fills it.
            assert mapped == held | {100: mapped[100]} and len(mapped) <= 50
            held = mapped
    # The old stream's last answer may be lost, so all are listed again.
    with engine.session.selects() as stream:
        answer = stream.select("s", 2, queries(1)[0], 100 * BLOCK_TOKENS + 5, LOG_MASS)
    assert {*answer.load_positions.tolist(), 100} == set(answer.hot_positions.tolist())


def test_reports_touch_the_blocks_they_name(sparse_engine: Make, server: Server) -> None:
    engine, blocks, mark = sparse_engine(), hashes(10), hashes(1)
    engine.store(blocks, with_sketches=False)
    engine.session.create_sequence("s", 0, blocks).result(60)
    engine.store(mark, first=20, with_sketches=False)
    # Longer than the eviction policy's time step.
    time.sleep(0.1)
    before, begun_s = server.status()["counters"], time.monotonic()
    engine.session.report_sparse({"s": ints([2, 5, 5, 400]), "unknown": ints([1])}, {})
    # One report counts per second; this one counts at the end.
    engine.session.report_sparse({"s": ints([6])}, {})
    engine.session.ping(10)

    def touched() -> set[int]:
        with AdminClient(server.target) as admin:
            listed = admin.blocks(number_of(admin, engine.key_space.model))["blocks"]
        idle_s = {bytes.fromhex(b["block_hash"]): b["idle_s"] for b in listed}
        return {place for place, block in enumerate(blocks) if idle_s[block] < idle_s[mark[0]]}

    # After more than a second, both count.
    assert touched() == {2, 5} or time.monotonic() >= begun_s + 1.0
    engine.session.delete_sequence("s").result(60)
    assert touched() == {2, 5, 6}
    after = server.status()["counters"]
    names = [f"sparse_{name}_total" for name in ("reports", "unknown_sequences", "used_blocks")]
    assert [after[name] - before[name] for name in names] == [2, 1, 3]


def test_figures_are_shown_per_engine_and_layer(sparse_engine: Make, server: Server) -> None:
    one, two = sparse_engine(engine_id="figures-one"), sparse_engine(engine_id="figures-two")
    first = {
        "selects": 10,
        "selected_blocks": 250,
        "wanted_blocks": 200,
        "hit_blocks": 190,
        "estimated_mass": 9.5,
        "select_s": 0.002,
    }
    one.session.report_sparse({}, {0: first, 255: {"selects": 1, "swap_bytes": 4096}})
    one.session.report_sparse({}, {0: {"recall_samples": 2, "recall": 1.5, "swap_bytes": 2048}})
    two.session.report_sparse({}, {0: {"selects": 30, "selected_blocks": 350}})
    for engine in (one, two):
        engine.session.ping(10)

    def rows() -> list[dict[str, Any]]:
        with AdminClient(server.target) as admin:
            listed = admin.sparse_layers()
        return [row for row in listed if row["engine_id"].startswith("figures-")]

    places = [("figures-one", 0), ("figures-one", 255), ("figures-two", 0)]
    assert [(row["engine_id"], row["layer_index"]) for row in rows()] == places
    of_first, of_second, _ = rows()
    ratios = [of_first[name] for name in ("hit_ratio", "recall_ratio", "mean_estimated_mass")]
    assert ratios == [0.95, 0.75, 0.95] and of_second["recall_ratio"] is None
    assert (of_first["mean_selected_blocks"], of_first["swap_bytes"]) == (25.0, 2048)
    shown = server.cli("sparse")
    assert re.search(r"figures-one +0 +10 +95.0% +75.0% +95.0% +25.0 +2.0 KiB +200.0 +0", shown)

    def selects() -> float:
        metrics = get(http_port(server), "/metrics").text
        (shown,) = re.findall(r'\nhotkv_sparse_layer_selects_total\{layer="0"\} (\S+)', metrics)
        return float(shown)

    before = selects()
    assert before >= 40
    two.session.close()
    assert {row["engine_id"] for row in rows()} == {"figures-one"} and selects() == before


def test_a_lease_lives_as_long_as_selections_come(sparse_engine: Make, place: Place) -> None:
    """The lease is a second long. Later, an append acquires a new one."""
    engine = sparse_engine(target=place.start(*cores(lease_ttl_s=1)).target)
    session, blocks, query = engine.session, hashes(30), queries(1)[0]
    engine.store(blocks)
    session.create_sequence("s", 0, blocks, engine.select_config()).result(60)
    with session.selects() as stream:
        used_s = begun_s = time.monotonic()
        while used_s < begun_s + 1.5:
            asked_s = time.monotonic()
            try:
                stream.select("s", 2, query, 30 * BLOCK_TOKENS)
            except HotKVError:
                # Only on a busy machine, or during the first compilation, may it expire.
                assert time.monotonic() > used_s + 1.0
                session.append_blocks("s", 30, []).result(60)
                begun_s = asked_s = time.monotonic()
            used_s = asked_s
            time.sleep(0.16)
        time.sleep(1.5)
        is_taken_anew(engine, stream, 30, 30)
    session.close()


def is_taken_anew(engine: SketchEngine, stream: Any, num_blocks: int, covered: int) -> None:
    """An append must acquire a new lease, on the first `covered` blocks."""
    query = queries(1)[0]
    error = refused(lambda: stream.select("s", 2, query, num_blocks * BLOCK_TOKENS))
    assert error.reason is Reason.UNKNOWN_LEASE and "append" in error.message
    assert engine.session.append_blocks("s", num_blocks, []).result(60).covered_blocks == covered
    assert len(stream.select("s", 2, query, covered * BLOCK_TOKENS).positions) == 6


def test_a_refused_append_leaves_the_lease(sparse_engine: Make, place: Place) -> None:
    server = place.start("--client-memory-bytes", "16MiB", "--leases.unadmitted-share", "0.03")
    target, more = server.target, hashes(90)
    one, two, blocks = sparse_engine(target=target), sparse_engine(target=target), hashes(30)
    one.store(blocks)
    one.store(more, first=30)
    created = one.session.create_sequence("s", 0, blocks, one.select_config()).result(60)
    # Before a load, a lease may pin only a few.
    most = one.session.create_sequence("more", 0, more, one.select_config()).result(60)
    assert 0 < most.covered_blocks < 90
    with AdminClient(target) as admin:
        assert max(row["lease_count"] for row in admin.sessions()) == 2
    assert one.session.delete_sequence("more").result(60)
    # When more leases are refused, the append's is too.
    unknown = hashes(1 << 16)
    for engine in (one, two):
        with pytest.raises(HotKVError, match="OVERLOADED"):
            for _ in range(64):
                groups = [GroupHashes(0, unknown)]
                engine.session.acquire(os.urandom(8).hex(), groups, 60).result(60)
    error = refused(lambda: one.session.append_blocks("s", 30, []).result(60))
    assert error.reason is Reason.OVERLOADED
    again = one.session.create_sequence("s", 0, blocks, one.select_config()).result(60)
    assert again == created
    with one.session.selects() as stream:
        assert len(stream.select("s", 2, queries(1)[0], 30 * BLOCK_TOKENS).positions) == 6


@pytest.mark.long
def test_sketches_changed_over_restart_are_never_scored(place: Place, sparse_engine: Make) -> None:
    checks = ("--integrity.check", "full")
    engine, blocks = sparse_engine(target=place.start(*checks).target), hashes(40)
    session = engine.session
    engine.store(blocks)
    place.stop()
    wait_for(lambda: not session.connected)
    spoil(place, engine.pools[2][30])
    place.start(*checks, *constant("startup.cache.START_CHECK_S", 0))
    assert session.wait_connected(20)
    created = session.create_sequence("s", 0, blocks, engine.select_config()).result(60)
    assert created.covered_blocks == 40
    with session.selects() as stream:
        # The damaged block 30 is gone.
        is_taken_anew(engine, stream, 40, 30)


def test_sessions_may_end_while_selections_run(sparse_engine: Make, server: Server) -> None:
    blocks = hashes(100)
    sparse_engine().store(blocks)
    outcomes: list[Reason | None] = []

    def select(session: Session, layer: int) -> None:
        try:
            with session.selects() as stream:
                for query in queries(500):
                    stream.select("s", layer, query, 100 * BLOCK_TOKENS, LOG_MASS)
            outcomes.append(None)
        except HotKVError as error:
            outcomes.append(error.reason)

    before = server.counter("sparse_sequence_blocks")
    for _ in range(3):
        engine = sparse_engine()
        session, config = engine.session, engine.select_config(hot_blocks=40)
        session.create_sequence("s", 0, blocks, config).result(20)
        threads = [
            threading.Thread(target=select, args=(engine.session, layer))
            for layer in (*LAYERS, *LAYERS)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        engine.session.close()
        for thread in threads:
            thread.join(60)
    assert len(outcomes) == 12
    assert set(outcomes) <= {None, Reason.UNKNOWN_SESSION}
    for name, count in (("selects_in_flight", 0), ("sequence_blocks", before)):
        wait_for(lambda name=name, count=count: server.counter(f"sparse_{name}") == count)
    wait_for(lambda: server.counter("transfers_in_flight") == 0)


def test_a_selection_of_a_closed_session_is_refused(sparse_engine: Make) -> None:
    session = sparse_engine().session
    with session.selects() as stream:
        session.close()
        with pytest.raises(SessionLostError):
            stream.select("s", LAYERS[0], queries(1)[0], BLOCK_TOKENS, LOG_MASS)


def select_over(call: object) -> None:
    stream = Selects(Mock(SelectBlocks=lambda _: call), "s")
    stream.select("s", 0, queries(1)[0], BLOCK_TOKENS, LOG_MASS)


def test_an_interrupted_selection_ends_its_stream() -> None:
    """Otherwise the next selection would get this one's answer."""
    call = MagicMock(__next__=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        select_over(call)
    assert call.cancel.called


class Unreachable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (iter(()), SessionLostError, "ended the stream"),
        (iter([SelectBlocksResponse(positions=b"abc")]), HotKVError, "can't be read"),
        (MagicMock(__next__=Mock(side_effect=Unreachable)), NoAnswerError, "can't be reached"),
    ],
)
def test_a_selection_without_a_good_answer_fails(
    call: object, error: type[HotKVError], words: str
) -> None:
    with pytest.raises(error, match=words):
        select_over(call)


def test_everything_a_selection_needs_reaches_the_server() -> None:
    config = SparseConfig(
        sparse_topk=4096,
        adaptive_p=0.9,
        scorer="rot3u",
        sink_tokens=16,
        recent_tokens=40,
        dense_layers=(),
        max_correction_blocks=2,
        cache_policy="none",
        fusion={"rot2u": 0.5, "rot3u": 1.5},
    )
    assert _config(_select_message(SelectConfig(config, 1, (2, 5), 2, 64))) == config


def test_sequences_by_unary_calls(sparse_engine: Make, server: Server) -> None:
    connection = sparse_engine().session._connection
    assert connection is not None
    named = {"session_id": connection.session_id, "sequence_id": "u"}
    packed = b"".join(hashes(12))
    with grpc.insecure_channel(server.target) as channel:
        stub = sparse_pb2_grpc.SparseServiceStub(channel)
        created = stub.CreateSequence(sparse_pb2.CreateSequenceRequest(**named, hashes=packed))
        assert created == sparse_pb2.CreateSequenceResponse()
        more = sparse_pb2.AppendBlocksRequest(
            **named, first_position=10, hashes=packed[320:] + bytes(32)
        )
        first, again = stub.AppendBlocks(more), stub.AppendBlocks(more)
        assert first == again == sparse_pb2.AppendBlocksResponse(block_count=13)
        assert stub.DeleteSequence(sparse_pb2.DeleteSequenceRequest(**named)).deleted


def test_unknown_counter_is_not_sent(sparse_engine: Make) -> None:
    error = refused(lambda: sparse_engine().session.report_sparse({}, {1: {"luck": 1.0}}))
    assert error.reason is Reason.INVALID_FIELD
