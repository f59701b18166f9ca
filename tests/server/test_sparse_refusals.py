"""Bad input to sparse decode, over the wire: a canonical code with a reason, the field named, and
nothing changed."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demo.processes import Server
from hotkv_client import GroupHashes, SelectConfig
from hotkv_client.admin import AdminClient
from hotkv_client.wire.sparse import _select_message
from hotkv_proto.errors import Reason
from hotkv_proto.v1 import session_pb2, sparse_pb2, sparse_pb2_grpc
from hotkv_server.sparse.calls import _config
from hotkv_server.wire.errors import CODES
from hotkv_sparse import SparseConfig
from hotkv_sparse.centre import Centres, LayerCentre
from tests.server.refusals import fill, reason_of
from tests.server.sparse_support import (
    BLOCK_TOKENS,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    LOG_MASS,
    Make,
    queries,
    refused,
)
from tests.server.support import hashes

ZEROS = bytes(4 * KV_HEADS * HEAD_SIZE)


def test_refusals_of_sequences(sparse_engine: Make, server: Server) -> None:
    engine = sparse_engine()
    session, blocks, good = engine.session, hashes(8), engine.select_config()
    engine.store(blocks)
    session.create_sequence("s", 0, blocks, good).result(60)
    session.create_sequence("plain", 0, blocks).result(60)
    wrong: list[tuple[Any, Reason, str]] = [
        (session.create_sequence("", 0, blocks), Reason.INVALID_FIELD, "sequence_id is empty"),
        (session.create_sequence("x" * 300, 0, blocks), Reason.TOO_LARGE, "sequence_id"),
        (session.create_sequence("t", 1, blocks), Reason.INVALID_FIELD, "group_index is 1"),
        (session.create_sequence("t", -1, blocks), Reason.INVALID_FIELD, "group_index is -1"),
        (
            session.create_sequence("t", 0, [bytes(32)] * 131_073),
            Reason.TOO_LARGE,
            "a message has at most 4194304: ask for fewer blocks",
        ),
        (session.create_sequence("s", 0, blocks), Reason.DUPLICATE_ID, "sequence_id"),
        (session.create_sequence("s", 0, blocks[:7], good), Reason.DUPLICATE_ID, "sequence_id"),
        (
            session.create_sequence("s", 0, blocks, replace(good, hot_blocks=30)),
            Reason.DUPLICATE_ID,
            "sequence_id",
        ),
        (
            session.append_blocks("none", 0, blocks),
            Reason.INVALID_FIELD,
            "sequence_id 'none' is unknown",
        ),
        (session.append_blocks("s", 9, blocks), Reason.INVALID_FIELD, "first_position is 9"),
        (session.append_blocks("s", -1, blocks), Reason.INVALID_FIELD, "first_position is -1"),
        (session.append_blocks("s", 4, blocks), Reason.INVALID_FIELD, "hashes differ"),
    ]
    for change, field in (
        ({"representation_group": 0}, "select.representation_group_index is 0"),
        ({"representation_group": 2}, "group_index is 2"),
        ({"representation_group": -1}, "select.representation_group_index is -1"),
        ({"layer_indices": (2,)}, "the representation is declared with"),
        ({"kv_heads": 3}, "the representation is declared with"),
        ({"head_size": 1 << 30}, "select.head_size"),
        ({"layer_indices": (5, 2)}, "select.layer_indices"),
        ({"hot_blocks": 1}, "select.hot_block_count is 1"),
        ({"scale": -3.0}, "select.scale is -3.0"),
        (
            {
                "centres": Centres(
                    "m", 5000, {2: LayerCentre(np.zeros((1, HEAD_SIZE), np.float32), {})}
                )
            },
            "select.centres.mu of layer 2",
        ),
    ):
        wrong.append(
            (
                session.create_sequence("t", 0, blocks, replace(good, **change)),
                Reason.INVALID_FIELD,
                field,
            )
        )
    for future, reason, field in wrong:
        error = refused(lambda future=future: future.result(60))  # type: ignore[misc]
        assert (error.reason, field in error.message) == (reason, True), error
    assert (
        refused(lambda: session.report_sparse({}, {1: {"luck": 1.0}})).reason
        is Reason.INVALID_FIELD
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scorer": "oracle"}, "select.scorer is 'oracle'"),
        ({"sparse_topk_ratio": 1.5}, "select.sparse_topk is 1.5"),
        ({"sparse_topk_ratio": float("nan")}, "select.sparse_topk is nan"),
        ({"sparse_topk_token_count": 3}, "select.sparse_topk is 3"),
        ({"adaptive_p": -1.0}, "select.adaptive_p is -1.0"),
        ({"cache_policy": "mru"}, "select.cache_policy is 'mru'"),
        ({"scorer": "mix2"}, "is scored by mix2, whose axes only the engine has"),
        ({"sink_token_count": -1}, "select.sink_tokens is -1"),
        ({"recent_token_count": 0}, "select.recent_tokens is 0"),
        ({"max_correction_block_count": -2}, "select.max_correction_blocks is -2"),
        (
            {"fusion": [sparse_pb2.FusedScorer(scorer="mean", exponent=1)] * 2},
            "select.fusion lists a scorer twice",
        ),
        ({"fusion": [sparse_pb2.FusedScorer(scorer="mean", exponent=-1)]}, "select.fusion"),
        ({"sparse_topk": None}, "select.sparse_topk is missing"),
        (
            {"centres": [sparse_pb2.LayerCentre(layer_index=2, mu=ZEROS)] * 2},
            "select.centres lists layer 2 twice",
        ),
        (
            {
                "centres": [
                    sparse_pb2.LayerCentre(
                        layer_index=2, mu=ZEROS, biases=[sparse_pb2.FormatBias(scorer="rot2u")] * 2
                    )
                ]
            },
            "select.centres.biases lists a scorer of layer 2 twice",
        ),
    ],
)
def test_a_select_config_that_makes_no_sense_is_refused(
    sparse_engine: Make, fields: dict[str, Any], field: str
) -> None:
    engine = sparse_engine()
    message = _select_message(engine.select_config())
    for name, value in fields.items():
        if value is None:
            message.ClearField("sparse_topk_ratio")
        elif isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    body = sparse_pb2.CreateSequenceRequest(sequence_id="s", select=message)
    error = refused(
        lambda: engine.session._call(
            lambda: session_pb2.ConnectRequest(create_sequence=body)
        ).result(60)
    )
    assert (error.reason, field in error.message) == (Reason.INVALID_FIELD, True), error


@pytest.mark.parametrize(
    ("report", "field"),
    [
        (
            {"sequences": [{"sequence_id": "s", "positions": b"123"}]},
            "sequences.positions has 3 bytes",
        ),
        (
            {"sequences": [{"sequence_id": "s", "positions": b"\xff\xff\xff\xff"}]},
            "sequences.positions has -1",
        ),
        ({"sequences": [{"sequence_id": "s" * 257}]}, "sequences.sequence_id"),
        (
            {
                "sequences": [
                    {"sequence_id": "s", "positions": bytes(4 << 17)},
                    {"positions": bytes(4)},
                ]
            },
            "sequences.positions has 1 entries",
        ),
        ({"layers": [{"layer_index": -1}]}, "layers.layer_index is -1"),
        ({"layers": [{"layer_index": 256}]}, "layers.layer_index is 256"),
        ({"layers": [{"selects": -1.0}]}, "layers.selects is -1.0"),
        ({"layers": [{"recall": float("nan")}]}, "layers.recall is nan"),
        ({"layers": [{"swap_bytes": 1e300}]}, "layers.swap_bytes is 1e+300"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused_whole(
    sparse_engine: Make, server: Server, report: dict[str, Any], field: str
) -> None:
    engine = sparse_engine(engine_id="refused-report")
    report = {"layers": [{"layer_index": 3, "selects": 1.0}], **report}
    if "layers" in report and len(report["layers"]) == 1:
        report["layers"] = [{"layer_index": 3, "selects": 1.0}, *report["layers"]]
    request = session_pb2.ConnectRequest(report_sparse=sparse_pb2.ReportSparse(**report))
    error = refused(lambda: engine.session._call(lambda: request).result(60))
    assert (error.reason in (Reason.INVALID_FIELD, Reason.TOO_LARGE), field in error.message) == (
        True,
        True,
    ), error
    with AdminClient(server.target) as admin:
        assert not [row for row in admin.sparse_layers() if row["engine_id"] == "refused-report"]


def test_refusals_of_selections_do_not_end_the_stream(sparse_engine: Make) -> None:
    engine = sparse_engine()
    session, blocks = engine.session, hashes(50)
    engine.store(blocks[:40])
    session.create_sequence("s", 0, blocks, engine.select_config()).result(60)
    session.create_sequence("plain", 0, blocks).result(60)
    query = queries(1)[0]
    nan = query.copy()
    nan[3, 3] = np.nan
    tokens = 40 * BLOCK_TOKENS
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (("none", 2, query, tokens), {}, "sequence_id 'none' is unknown"),
        (("plain", 2, query, tokens), {}, "sequence_id 'plain' was created without select"),
        (("s", 3, query, tokens), {}, "layer_index is 3"),
        (("s", 2, query, tokens), {"shard_index": 1}, "shard_index is 1"),
        (("s", 2, query, tokens), {"shard_index": -1}, "shard_index is -1"),
        (("s", 2, query[:, :5], tokens), {}, "query has 160 bytes"),
        (("s", 2, query[:0], tokens), {}, "query has 0 heads"),
        (("s", 2, query[:3], tokens), {}, "query has 3 heads"),
        (("s", 2, nan, tokens), {}, "query has values that are not finite"),
        (("s", 2, query, 0), {}, "context_token_count is 0"),
        (("s", 2, query, -5), {}, "context_token_count is -5"),
        (("s", 2, query, 1 << 62), {}, "context_token_count is 4611686018427387904"),
        (("s", 2, query, 50 * BLOCK_TOKENS), {}, "only 40 leading blocks are covered"),
        (
            ("s", 2, query, tokens, LOG_MASS[:3]),
            {},
            "always_log_mass has 3 values for 8 query heads",
        ),
        (("s", 2, query, tokens, LOG_MASS * np.float32(np.nan)), {}, "always_log_mass has values"),
    ]
    with session.selects() as stream:
        for arguments, named, field in cases:
            error = refused(lambda a=arguments, n=named: stream.select(*a, **n))  # type: ignore[misc]
            assert field in error.message and error.reason in (
                Reason.INVALID_FIELD,
                Reason.TOO_LARGE,
            ), error
            assert len(stream.select("s", 2, query, tokens).positions) == 8


def test_unary_calls_and_their_refusals(sparse_engine: Make, server: Server) -> None:
    engine = sparse_engine()
    blocks = hashes(12)
    connection = engine.session._connection
    assert connection is not None
    own, packed = connection.session_id, b"".join(blocks)
    with grpc.insecure_channel(server.target) as channel:
        stub = sparse_pb2_grpc.SparseServiceStub(channel)
        for call in (
            lambda: stub.CreateSequence(
                sparse_pb2.CreateSequenceRequest(session_id="guess", sequence_id="s")
            ),
            lambda: stub.AppendBlocks(
                sparse_pb2.AppendBlocksRequest(session_id="", sequence_id="s")
            ),
            lambda: stub.DeleteSequence(
                sparse_pb2.DeleteSequenceRequest(session_id="guess", sequence_id="s")
            ),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert (caught.value.code(), reason_of(caught.value)) == (
                CODES[Reason.UNKNOWN_SESSION],
                Reason.UNKNOWN_SESSION,
            )
        created = stub.CreateSequence(
            sparse_pb2.CreateSequenceRequest(session_id=own, sequence_id="u", hashes=packed)
        )
        assert created == sparse_pb2.CreateSequenceResponse()
        again = sparse_pb2.AppendBlocksRequest(
            session_id=own, sequence_id="u", first_position=10, hashes=packed[320:] + bytes(32)
        )
        assert (
            stub.AppendBlocks(again)
            == stub.AppendBlocks(again)
            == sparse_pb2.AppendBlocksResponse(block_count=13)
        )
        odd = sparse_pb2.AppendBlocksRequest(
            session_id=own, sequence_id="u", first_position=13, hashes=b"odd"
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.AppendBlocks(odd)
        assert reason_of(caught.value) == Reason.INVALID_HASH
        assert stub.DeleteSequence(
            sparse_pb2.DeleteSequenceRequest(session_id=own, sequence_id="u")
        ).deleted


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=300))
def test_random_bytes_do_no_harm(server: Server, data: bytes) -> None:
    with grpc.insecure_channel(server.target) as channel:
        for method in ("CreateSequence", "AppendBlocks", "DeleteSequence"):
            call = channel.unary_unary(
                f"/hotkv.v1.SparseService/{method}",
                request_serializer=bytes,
                response_deserializer=bytes,
            )
            with pytest.raises(grpc.RpcError) as caught:
                call(data, timeout=5)
            assert reason_of(caught.value) != Reason.INTERNAL
        stream = channel.stream_stream(
            "/hotkv.v1.SparseService/SelectBlocks",
            request_serializer=bytes,
            response_deserializer=sparse_pb2.SelectBlocksResponse.FromString,
        )
        first, second = stream(iter([data, data]), timeout=5)
        assert first == second and first.error.reason in (
            Reason.INVALID_FIELD,
            Reason.UNKNOWN_SESSION,
        )


def test_selections_with_random_fields_are_answered(sparse_engine: Make) -> None:
    engine = sparse_engine()
    blocks = hashes(60)
    engine.store(blocks)
    engine.session.create_sequence("s", 0, blocks, engine.select_config(hot_blocks=30)).result(60)
    random = np.random.default_rng(11)
    connection = engine.session._connection
    assert connection is not None
    own = connection.session_id
    good = queries(1)[0].tobytes()

    def requests() -> Iterator[sparse_pb2.SelectBlocksRequest]:
        for _ in range(300):
            request = sparse_pb2.SelectBlocksRequest()
            fill(request, random, 0)
            request.session_id, request.sequence_id = own, "s"
            if random.random() < 0.7:
                request.layer_index, request.shard_index = int(random.choice(LAYERS)), 0
            if random.random() < 0.7:
                request.query = good if random.random() < 0.5 else os.urandom(4 * HEAD_SIZE * 4)
            if random.random() < 0.7:
                request.context_token_count = int(random.integers(1, 1000))
            yield request

    answers = list(sparse_pb2_grpc.SparseServiceStub(connection.channel).SelectBlocks(requests()))
    assert len(answers) == 300 and all(answer.error.reason != Reason.INTERNAL for answer in answers)
    assert sum(not answer.HasField("error") for answer in answers) > 30
    lists = [GroupHashes(0, blocks)]
    assert engine.session.lookup(lists).result(60)[0].all()


def test_all_that_matters_to_a_selection_reaches_the_server() -> None:
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
