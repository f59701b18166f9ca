"""Tests invalid requests: each of `ROWS` is refused with its reason, changes nothing, and the
session goes on."""

import contextlib
import importlib
import math
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

import hotkv_client
import hotkv_proto
import hotkv_server
import hotkv_sparse
from demo.processes import Server, runtime_folder
from hotkv_client import BlockRun, GroupHashes, LoadRun, Role, SelectConfig, SessionConfig
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_client.targets import admin_target
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire.sparse import _select_message, create_sequence
from hotkv_proto.blocks import NO_OPTIONS
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_proto.layout import FENCE_HANDLE, FENCE_WORDS, Layout, MemoryHandle, PageTensor
from hotkv_proto.order import MAX_MARKS, NO_ORDER
from hotkv_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    hints_pb2,
    hints_pb2_grpc,
    residency_pb2,
    session_pb2,
    sparse_pb2,
    sparse_pb2_grpc,
)
from hotkv_server.node.capability import Capability, Topic
from hotkv_server.wire.admin_service import MAX_TOLD, AdminService
from hotkv_server.wire.errors import CODES
from tests.doubles.with_constants import cores
from tests.robustness.raw_client import RawSession
from tests.server.conftest import SHARED_FLAGS
from tests.server.nodes import local_node, memory_file
from tests.server.refusals import open_with, reason_of, refused, state
from tests.server.sparse_support import (
    CONFIG,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    LOG_MASS,
    SketchEngine,
    queries,
)
from tests.server.support import (
    FULL,
    NUM_BLOCKS,
    PAGE_BYTES,
    WINDOW,
    GroupsEngine,
    block_ids,
    hashes,
    number_of,
)

Make = Callable[..., PagedEngine]
Request = session_pb2.ConnectRequest
FIELD, LARGE, HASH = Reason.INVALID_FIELD, Reason.TOO_LARGE, Reason.INVALID_HASH
LAYOUT, TWICE = Reason.INVALID_LAYOUT, Reason.DUPLICATE_ID
NUM_STORED = 8
ZEROS = bytes(4 * KV_HEADS * HEAD_SIZE)


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


class Row(NamedTuple):
    """value: a list of dicts is appended, None clears the field.
    words: in the error.
    """

    path: str
    value: Any
    reason: Reason
    words: str


# ----------------------------------------------------------------------------------- sound messages


@dataclass
class World:
    """An engine with a lease "mine" on `blocks`. The server selects for "s", not for "plain"."""

    server: Server
    engine: SketchEngine
    blocks: list[bytes]

    def sound(self, kind: str) -> Request:
        """A valid request. `kind`: field of `ConnectRequest`."""
        packed, new = b"".join(self.blocks), os.urandom(32)
        list_of = cache_pb2.GroupHashes(hashes=packed)
        load = cache_pb2.LoadRun(lease_positions=ints(0), block_ids=ints(20))
        run = cache_pb2.BlockRun(hashes=new, block_ids=ints(20))
        select = _select_message(self.engine.select_config())
        config = self.engine.session.config
        layer = sparse_pb2.LayerCounters(layer_index=3, selects=1.0)
        room = residency_pb2.ResidencyGroup(block_count=2)
        sound: dict[str, Callable[[], Any]] = {
            "lookup": lambda: cache_pb2.LookupRequest(groups=[list_of]),
            "acquire_lease": lambda: cache_pb2.AcquireLeaseRequest(lease_id="x", groups=[list_of]),
            "reserve_blocks": lambda: cache_pb2.ReserveBlocksRequest(lease_id="r", runs=[run]),
            "load": lambda: cache_pb2.LoadRequest(
                transfer_id="t", lease_id="mine", runs=[load], timeout_ms=5000
            ),
            "store": lambda: cache_pb2.StoreRequest(
                transfer_id="t", lease_id="l", runs=[run], timeout_ms=5000
            ),
            "create_sequence": lambda: sparse_pb2.CreateSequenceRequest(
                sequence_id="t", hashes=packed, select=select
            ),
            "append_blocks": lambda: sparse_pb2.AppendBlocksRequest(
                sequence_id="s", first_position=NUM_STORED, hashes=new
            ),
            "report_sparse": lambda: sparse_pb2.ReportSparse(
                sequences=[sparse_pb2.SequenceReport(sequence_id="s")], layers=[layer]
            ),
            "report_use": lambda: session_pb2.ReportUse(
                requests=[session_pb2.RequestReport(hashes=bytes(64), prompt_token_count=40)],
                prefill_tokens_per_s=7.0,
            ),
            "open_residency": lambda: residency_pb2.OpenResidencyRequest(
                residency_id="a", groups=[room]
            ),
            "open_session": lambda: _wire.open_session(config).open_session,
            "register_memory": lambda: (
                _wire.register_memory(self.engine.layout, NO_ORDER).register_memory
            ),
        }
        return Request(**{kind: sound[kind]()})

    def ask(self, request: Request) -> HotKVError:
        return refused(self.engine.session._call(lambda: request))


def spoiled(request: Request, path: str, value: Any) -> Request:
    """Sets a field to a value, see `Row.value`."""
    target: Any = request
    *parents, name = re.findall(r"\w+", path)
    for parent in parents:
        target = target[int(parent)] if parent.isdecimal() else getattr(target, parent)
    if value is None:
        target.ClearField(name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for one in value:
            getattr(target, name).add(**one)
    elif isinstance(value, list):
        del getattr(target, name)[:]
        getattr(target, name).extend(value)
    else:
        setattr(target, name, value)
    return request


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Leases last long: if one ended, the state would change between two looks."""
    flags = (*SHARED_FLAGS, *cores(lease_ttl_s=600))
    with runtime_folder(256 << 20) as folder, Server(folder, "64MiB", *flags) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def world(server: Server) -> Iterator[World]:
    with closing(SketchEngine(server.target, os.urandom(8).hex())) as engine:
        one = World(server, engine, hashes(NUM_STORED))
        engine.store(one.blocks)
        session = engine.session
        session.acquire("mine", [GroupHashes(0, one.blocks)], 600).result(60)
        session.create_sequence("s", 0, one.blocks, engine.select_config()).result(60)
        session.create_sequence("plain", 0, one.blocks).result(60)
        yield one
        assert session.lookup([GroupHashes(0, one.blocks)]).result(60)[0].all()


# --------------------------------------------------------------------------------------- the table

RUN, GROUP, SPACE = "store.runs[0]", "acquire_lease.groups", "open_session.key_space"
SELECT, TENSOR, HANDLES = (
    "create_sequence.select",
    "register_memory.layout.tensors[0]",
    "register_memory.layout.handles",
)
REPORT, NAME_OF_KIND = "report_use.requests[0]", "sketches[0]"
HINTED = f"{REPORT}.hints.actions"
KIND = f"open_session.{NAME_OF_KIND}"
BOTH = [{"layer_index": 2, "mu": ZEROS}]
BIASED = [{"layer_index": 2, "mu": ZEROS, "biases": [{"scorer": "mean"}] * 2}]
ROWS = [
    Row("load.lease_id", "nobody's", Reason.UNKNOWN_LEASE, "lease_id"),
    Row("load.transfer_id", "", FIELD, "transfer_id"),
    Row("load.runs[0].lease_positions", ints(NUM_STORED), FIELD, "lease_positions"),
    Row("load.runs[0].lease_positions", ints(-1), FIELD, "lease_positions"),
    Row("load.runs[0].lease_positions", bytes(4 << 18), LARGE, "blocks"),
    Row(
        "load.runs", [{"lease_positions": ints(0), "block_ids": ints(21)}], FIELD, "lease_positions"
    ),
    Row("load.runs[0].group_index", 7, FIELD, "group_index"),
    Row("load.runs[0].block_ids", ints(128), FIELD, "block_ids"),
    Row("load.runs[0].block_ids", ints(1, 2), FIELD, "block_ids"),
    Row("load.timeout_ms", -5, FIELD, "timeout_ms"),
    Row("store.lease_id", "", FIELD, "lease_id"),
    Row("store.lease_id", "mine", TWICE, "lease_id"),
    Row(f"{RUN}.block_ids", ints(128), FIELD, "block_ids"),
    Row(f"{RUN}.depth", -1, FIELD, "depth"),
    Row(f"{RUN}.group_index", -1, FIELD, "group_index"),
    Row(f"{RUN}.group_index", 2, FIELD, "group_index"),
    Row(f"{RUN}.group_index", 256, FIELD, "group_index"),
    Row(f"{RUN}.parent_hash", bytes(64), HASH, "runs.parent_hash has 64 bytes"),
    Row("acquire_lease.ttl_ms", -1, FIELD, "ttl_ms"),
    Row(GROUP, [{"hashes": bytes(32)}], FIELD, "groups"),
    Row(GROUP, [{}] * 1024, LARGE, "groups has 1025 entries"),
    Row(f"{GROUP}[0].group_index", 3, FIELD, "group_index"),
    Row("lookup.groups[0].group_index", -1, FIELD, "group_index"),
    Row("reserve_blocks.retention.priority", 9, FIELD, "priority is 9; allowed are -8 to 8"),
    Row("reserve_blocks.retention.ttl_ms", 86_400_001, FIELD, "86400.001; allowed are 0 to 86400"),
    Row("reserve_blocks.retention.ttl_ms", -1, FIELD, "retention.ttl_ms is -1"),
    Row("reserve_blocks.retention.pin", True, FIELD, "retention.pin needs retention.ttl_s"),
    Row(f"{RUN}.token_ids", bytes(60), FIELD, "token_ids has 60 bytes; 16 tokens of 1 blocks"),
    Row(f"{RUN}.extra_keys", [{}, {}], FIELD, "runs.extra_keys has 2 entries for 1 blocks"),
    Row(f"{RUN}.extra_keys", [{"keys": [{}]}], FIELD, "runs.extra_keys.keys.key is empty"),
    Row(f"{RUN}.lora_name", "x" * 300, LARGE, "runs.lora_name is longer than 256 characters"),
    Row("store.after.index", 1, FIELD, "after"),
    Row(f"{REPORT}.prompt_token_count", 31, FIELD, "hashes has 2 hashes of 16 tokens each"),
    Row(f"{REPORT}.prompt_token_count", 1 << 40, FIELD, "1099511627776; at most 4294967296"),
    Row(f"{REPORT}.hit_token_count", 50, FIELD, "must rise in this order"),
    Row(f"{REPORT}.device_hit_token_count", -16, FIELD, "must rise in this order"),
    Row(f"{REPORT}.age_ms", -1, FIELD, "requests.age_ms is -1"),
    Row(f"{REPORT}.hashes", bytes(33), HASH, "requests.hashes has 33 bytes"),
    Row(f"{REPORT}.saved_s", -1.0, FIELD, "requests.saved_s is -1.0"),
    Row(f"{REPORT}.wait_s", math.nan, FIELD, "requests.wait_s is nan"),
    Row(f"{REPORT}.retention.priority", 9, FIELD, "requests.retention: retention.priority is 9"),
    Row(f"{REPORT}.retention.ttl_ms", -1, FIELD, "requests.retention.ttl_ms is -1"),
    Row(f"{REPORT}.session_id", "s\n", FIELD, "requests.session_id must be printable"),
    Row(HINTED, [{"action_type": 9}], FIELD, "hints.actions.action_type is 9; allowed are 1 to 5"),
    Row(HINTED, [{"action_type": 1, "start_token": 5, "end_token": 5}], FIELD, "they must rise"),
    Row(HINTED, [{"action_type": 2}], FIELD, "requests.hints.actions: retention.pin needs"),
    Row(HINTED, [{"action_type": 1}] * 65, LARGE, "65 actions and 0 rejections; at most 64"),
    Row("report_use.loads", [{"report_id": 1}] * 1025, LARGE, "loads has 1025 entries"),
    Row("report_use.requests", [{}] * 1024, LARGE, "requests has 1025 entries; at most 1024"),
    Row("report_use.ended", [{}] * 1025, LARGE, "ended has 1025 entries"),
    Row("report_use.prefill_tokens_per_s", -1.0, FIELD, "prefill_tokens_per_s is -1.0"),
    Row("report_use.prefill_tokens_per_s", math.nan, FIELD, "prefill_tokens_per_s is nan"),
    Row("open_residency.groups[0].group_index", 7, FIELD, "group_index"),
    Row("open_residency.groups[0].block_count", 0, FIELD, "block_count"),
    Row("open_residency.groups", [{"block_count": 2}], FIELD, "groups lists a group twice"),
    Row("create_sequence.sequence_id", "", FIELD, "sequence_id is empty"),
    Row("create_sequence.sequence_id", "plain", TWICE, "sequence_id"),
    Row("create_sequence.group_index", 1, FIELD, "group_index is 1"),
    Row("append_blocks.sequence_id", "none", FIELD, "sequence_id 'none' is unknown"),
    Row("append_blocks.first_position", 9, FIELD, "first_position is 9"),
    Row("append_blocks.first_position", 4, FIELD, "hashes differ"),
    Row(f"{SELECT}.sketch_group_index", 0, FIELD, "sketch_group_index is 0"),
    Row(f"{SELECT}.sketch_group_index", 2, FIELD, "group_index is 2"),
    Row(f"{SELECT}.layer_indices", [2], FIELD, "the sketch is declared with"),
    Row(f"{SELECT}.hot_block_count", 1, FIELD, "select.hot_block_count is 1"),
    Row(f"{SELECT}.centres", BOTH + BOTH, FIELD, "select.centres lists layer 2 twice"),
    Row(f"{SELECT}.centres", BIASED, FIELD, "biases lists a scorer of layer 2 twice"),
    Row(f"{SELECT}.scorer", "oracle", FIELD, "select.scorer is 'oracle'"),
    Row(f"{SELECT}.scorer", "mix2", FIELD, "is scored by mix2, whose axes only the engine has"),
    Row(f"{SELECT}.sparse_topk_ratio", 1.5, FIELD, "select.sparse_topk is 1.5"),
    Row(f"{SELECT}.sparse_topk_ratio", None, FIELD, "select.sparse_topk is missing"),
    Row(f"{SELECT}.sparse_topk_token_count", 0, FIELD, "select.sparse_topk is 0"),
    Row(f"{SELECT}.adaptive_p", -1.0, FIELD, "select.adaptive_p is -1.0"),
    Row(f"{SELECT}.cache_policy", "mru", FIELD, "select.cache_policy is 'mru'"),
    Row(f"{SELECT}.sink_token_count", -1, FIELD, "select.sink_tokens is -1"),
    Row(f"{SELECT}.recent_token_count", 0, FIELD, "select.recent_tokens is 0"),
    Row(f"{SELECT}.max_correction_block_count", -2, FIELD, "max_correction_blocks is -2"),
    Row(f"{SELECT}.fusion", [{"scorer": "mean", "exponent": 1}] * 2, FIELD, "lists a scorer twice"),
    Row("report_sparse.sequences[0].positions", b"123", FIELD, "positions has 3 bytes"),
    Row("report_sparse.sequences[0].positions", ints(-1), FIELD, "sequences.positions has -1"),
    Row("report_sparse.sequences[0].positions", bytes(4 << 18), LARGE, "positions has 262144"),
    Row("report_sparse.sequences", [{}] * 4096, LARGE, "sequences has 4097 entries"),
    Row("report_sparse.layers", [{}] * 256, LARGE, "layers has 257 entries"),
    Row("report_sparse.layers", [{"layer_index": -1}], FIELD, "layers.layer_index is -1"),
    Row("report_sparse.layers", [{"layer_index": 256}], FIELD, "layers.layer_index is 256"),
    Row("report_sparse.layers[0].selects", -1.0, FIELD, "layers.selects is -1.0"),
    Row("report_sparse.layers[0].recall", math.nan, FIELD, "layers.recall is nan"),
    Row("open_session", None, FIELD, "open_session"),
    Row("open_session.protocol_version", 99, Reason.VERSION_MISMATCH, "protocol_version"),
    Row("open_session.engine_id", "", FIELD, "engine_id"),
    Row("open_session.engine_id", "e" * 1000, LARGE, "engine_id"),
    Row("open_session.engine_id", "e\nINFO forged", FIELD, "engine_id"),
    Row("open_session.client_name", "c\x1b[2J", FIELD, "client_name"),
    Row("open_session.engine_name", "n\x1b[2J", FIELD, "engine_name"),
    Row("open_session.engine_name", "n" * 1000, LARGE, "engine_name"),
    Row("open_session.model_names", ["m"] * 17, LARGE, "model_names has 17 entries"),
    Row("open_session.role", 0, FIELD, "role"),
    Row("open_session.role", 42, FIELD, "role"),
    Row(f"{KIND}.format", "mean\x1b", FIELD, f"{NAME_OF_KIND}.format is"),
    Row(f"{KIND}.group_index", 1, FIELD, f"{NAME_OF_KIND}.group_index"),
    Row(f"{KIND}.shard_byte_counts", [8, 8], FIELD, f"{NAME_OF_KIND}.shard_byte_counts"),
    Row(f"{KIND}.shard_byte_counts", [1 << 40], FIELD, NAME_OF_KIND),
    Row(f"{SPACE}.model", "m" * (256 << 10), LARGE, "key_space"),
    Row(f"{SPACE}.model", "m\n2026-11-21 00:00:00,000 ERROR forged", FIELD, "key_space.model is"),
    Row(f"{SPACE}.weights_identity", "", FIELD, "weights_identity"),
    Row(f"{SPACE}.page_format", "\u202e", FIELD, "key_space.page_format is"),
    Row(f"{SPACE}.extra", ["good", "\x07"], FIELD, "key_space.extra[1] is"),
    Row(f"{SPACE}.hash_byte_count", 4, FIELD, "hash_bytes"),
    Row(f"{SPACE}.hash_block_token_count", 0, FIELD, "hash_block_tokens"),
    Row(f"{SPACE}.groups", [], FIELD, "groups"),
    Row(f"{SPACE}.groups[0].block_token_count", 17, FIELD, "block_tokens"),
    Row(f"{SPACE}.groups[0].kind", 0, FIELD, "kind"),
    Row(f"{SPACE}.groups[0].kind", 3, FIELD, "window_tokens"),
    Row(f"{SPACE}.groups[0].group_index", 5, FIELD, "group_index"),
    Row(f"{SPACE}.groups[0].layer_names", ["l\n"], FIELD, "key_space.groups[0].layer_names is"),
    Row(f"{SPACE}.groups[0].shard_byte_counts", [-5], FIELD, "shard_bytes"),
    Row(f"{SPACE}.groups[0].shard_byte_counts", [1] * 200, FIELD, "shards"),
    Row(f"{SPACE}.groups[0].shard_byte_counts", [1 << 40], FIELD, "does not fit"),
    Row(f"{SPACE}.groups[0].shard_byte_counts", [1] * 32, FIELD, "at most 31 are supported"),
    Row("register_memory.layout.shard_index", 3, LAYOUT, "shard_index"),
    Row("register_memory.layout.name", "x\n", FIELD, "layout.name"),
    Row("register_memory.order.event_handles", [b""] * (MAX_MARKS + 1), LARGE, "event_handles has"),
    Row("register_memory.layout.block_count", 0, LAYOUT, "block_count"),
    Row("register_memory.layout.block_count", 129, LAYOUT, "beyond"),
    Row(f"{TENSOR}.handle_id", "else", LAYOUT, "handle_id"),
    Row(f"{TENSOR}.group_index", 9, LAYOUT, "group_index"),
    Row(f"{TENSOR}.base_byte_offset", -4096, LAYOUT, "negative"),
    Row(f"{TENSOR}.run_byte_count", 2048, LAYOUT, "fill"),
    Row(f"{TENSOR}.dims", [{"count": 2, "stride_byte_count": 8}], LAYOUT, "overlap"),
    Row(f"{HANDLES}[0].handle_id", "k" * 257, LARGE, "layout.handles[0].handle_id is longer than"),
    Row(HANDLES, [{"handle_id": "kv", "byte_count": 1, "file_mapping": {}}], LAYOUT, "handle_id"),
    Row(HANDLES, [{"handle_id": "more", "byte_count": 8}], LAYOUT, "source"),
    Row(f"{HANDLES}[0].cuda_ipc.handle", b"\x01e" + bytes(20), LAYOUT, "has 22 bytes, not 64"),
    Row(f"{HANDLES}[0].cuda_ipc.handle", b"\x01c" + bytes(64), LAYOUT, "cudaIpcGetMemHandle"),
]
"""Values beyond a limit, or against another field."""


def of_limits() -> Iterator[Row]:
    """Limits of many fields: of ids, hashes, and packed numbers."""
    for kind in ("acquire_lease", "reserve_blocks", "load", "store", "create_sequence"):
        for field in Request.DESCRIPTOR.fields_by_name[kind].message_type.fields:
            if field.name.endswith("_id") and field.name != "session_id":
                yield Row(f"{kind}.{field.name}", "x" * 257, LARGE, field.name)
    for path in ("lookup.groups[0]", "acquire_lease.groups[0]", "reserve_blocks.runs[0]", RUN):
        yield Row(f"{path}.hashes", bytes(33), HASH, "hashes has 33 bytes")
    for path in ("create_sequence", "append_blocks"):
        yield Row(f"{path}.hashes", bytes(33), HASH, "hashes has 33 bytes")
    for path in ("load.runs[0].lease_positions", "load.runs[0].block_ids", f"{RUN}.block_ids"):
        yield Row(path, b"123", FIELD, f"{path.split('.')[-1]} has 3 bytes")


def name_of(row: Row) -> str:
    return f"{row.path}={row.value!r}"[:70]


@pytest.mark.parametrize("row", [*ROWS, *of_limits()], ids=name_of)
def test_a_spoiled_field_is_refused(world: World, row: Row) -> None:
    before, kind = state(world.server), row.path.split(".")[0]
    request = spoiled(world.sound(kind), row.path, row.value)
    if kind == "open_session":
        code, reason, message = open_with(world.server, request)
        assert code == CODES[row.reason]
    else:
        error = world.ask(request)
        reason, message = error.reason, error.message
    assert (reason, row.words in message) == (row.reason, True), message
    assert message.isprintable() and state(world.server) == before


def test_a_list_that_is_too_long_is_refused(world: World) -> None:
    session = world.engine.session
    assert refused(session.acquire("x", [GroupHashes(0, [bytes(32)] * 300_000)])).reason is LARGE
    assert refused(session.create_sequence("t", 0, [bytes(32)] * 131_073)).reason is LARGE


def test_lease_has_one_engine_id_one_call(world: World, engine: Make) -> None:
    run = [LoadRun(0, np.zeros(1, np.int32), np.ones(1, np.int32))]
    error = refused(engine().session.load("a", "mine", run, 5))
    assert (error.reason, "lease_id" in error.message) == (Reason.FOREIGN_LEASE, True)
    session, blocks = world.engine.session, world.blocks
    for other in (blocks[:1], hashes(NUM_STORED)):
        assert refused(session.acquire("mine", [GroupHashes(0, other)])).reason is TWICE
    select = world.engine.select_config()
    assert refused(session.create_sequence("s", 0, blocks)).reason is TWICE
    assert refused(session.create_sequence("s", 0, blocks[:7], select)).reason is TWICE


# ----------------------------------------------------------------------------------- selections

TOKENS = NUM_STORED * 16
QUERY = queries(1)[0]


def with_nan(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    spoiled = values.copy()
    spoiled.flat[0] = np.nan
    return spoiled


SELECTIONS: list[tuple[tuple[Any, ...], str]] = [
    (("none", 2, QUERY, TOKENS), "sequence_id 'none' is unknown"),
    (("plain", 2, QUERY, TOKENS), "sequence_id 'plain' was created without select"),
    (("s", 3, QUERY, TOKENS), "layer_index is 3"),
    (("s", 2, QUERY[:, :5], TOKENS), "query has 160 bytes"),
    (("s", 2, QUERY[:0], TOKENS), "query has 0 heads"),
    (("s", 2, QUERY[:3], TOKENS), "query has 3 heads"),
    (("s", 2, with_nan(QUERY), TOKENS), "query has values that are not finite"),
    (("s", 2, QUERY, 0), "context_token_count is 0"),
    (("s", 2, QUERY, -5), "context_token_count is -5"),
    (("s", 2, QUERY, 1 << 62), "context_token_count is 4611686018427387904"),
    (("s", 2, QUERY, TOKENS + 160), f"only {NUM_STORED} leading blocks are covered"),
    (("s", 2, QUERY, TOKENS, LOG_MASS[:3]), "always_log_mass has 3 values for 8 query heads"),
    (("s", 2, QUERY, TOKENS, with_nan(LOG_MASS)), "always_log_mass has values"),
]


def test_refused_selections_do_not_end_their_stream(world: World) -> None:
    with world.engine.session.selects() as stream:
        for arguments, words in SELECTIONS:
            with pytest.raises(HotKVError) as caught:
                stream.select(*arguments)
            assert caught.value.reason in (FIELD, LARGE) and words in caught.value.message
            assert len(stream.select("s", 2, QUERY, TOKENS).positions)
        for shard in (1, -1):
            with pytest.raises(HotKVError, match=f"shard_index is {shard}"):
                stream.select("s", 2, QUERY, TOKENS, shard_index=shard)


# ---------------------------------------------------------------------------------- unary calls


def tell(topic: str, **filters: str) -> Message:
    return admin_pb2.TellRequest(topic=topic, filters=filters)


NO_SESSION, NO_SPACE = Reason.UNKNOWN_SESSION, Reason.UNKNOWN_KEY_SPACE
ODD = [cache_pb2.GroupHashes(hashes=b"x" * 33)]
CALLS: list[tuple[str, Message, Reason]] = [
    ("Lookup", cache_pb2.LookupRequest(), FIELD),
    ("Lookup", cache_pb2.LookupRequest(session_id="guess"), NO_SESSION),
    ("Lookup", cache_pb2.LookupRequest(key_space_id=999), NO_SPACE),
    ("Lookup", cache_pb2.LookupRequest(key_space_id=-1), NO_SPACE),
    ("Lookup", cache_pb2.LookupRequest(key_space_id=1, groups=ODD), HASH),
    ("AcquireLease", cache_pb2.AcquireLeaseRequest(lease_id="x"), NO_SESSION),
    ("ReserveBlocks", cache_pb2.ReserveBlocksRequest(session_id="y"), NO_SESSION),
    ("ReleaseLease", cache_pb2.ReleaseLeaseRequest(session_id="y"), NO_SESSION),
    ("Load", cache_pb2.LoadRequest(), NO_SESSION),
    ("Store", cache_pb2.StoreRequest(), NO_SESSION),
    ("CancelTransfer", cache_pb2.CancelTransferRequest(), NO_SESSION),
    ("CreateSequence", sparse_pb2.CreateSequenceRequest(session_id="guess"), NO_SESSION),
    ("AppendBlocks", sparse_pb2.AppendBlocksRequest(), NO_SESSION),
    ("DeleteSequence", sparse_pb2.DeleteSequenceRequest(session_id="guess"), NO_SESSION),
    *[
        ("SendHints", hints_pb2.SendHintsRequest(kv_hints=odd), FIELD)
        for odd in ("[]", "[" * 60_000)
    ],
    ("SendHints", hints_pb2.SendHintsRequest(kv_hints=f'"{"x" * 70_000}"'), LARGE),
    ("Evict", admin_pb2.EvictRequest(), FIELD),
    ("Evict", admin_pb2.EvictRequest(hashes=b"1" * 32, all=True), FIELD),
    ("Evict", admin_pb2.EvictRequest(key_space_id=77, all=True), NO_SPACE),
    *[("Tell", tell("blocks", page_size=odd), FIELD) for odd in (str(1 << 30), "-1", "²", "x")],
    *[("Tell", tell("blocks", hash_prefix=odd), FIELD) for odd in ("ab cd", "xy", "a" * 65)],
    ("Tell", tell("blocks", page_token="../.."), FIELD),
    ("Tell", tell("blocks", page_token="9" * 5000), FIELD),
    ("Tell", tell("blocks", key_space_id="-1"), FIELD),
    ("Tell", tell("blocks", pages="1"), FIELD),
    ("Tell", tell("secrets"), FIELD),
    *[("Tell", tell("savings", since_s=odd), FIELD) for odd in ("nan", "-1")],
    ("Tell", tell("blocks", key_space_id="77"), NO_SPACE),
    ("Explain", admin_pb2.ExplainRequest(), FIELD),
    ("Explain", admin_pb2.ExplainRequest(key_space_id=1, hashes=b"odd"), HASH),
]


@pytest.mark.parametrize(("method", "request_", "reason"), CALLS)
def test_a_unary_call_is_refused(
    world: World, method: str, request_: Message, reason: Reason
) -> None:
    before, target = state(world.server), world.server.target
    with (
        grpc.insecure_channel(target) as users,
        grpc.insecure_channel(admin_target(target)) as admins,
    ):
        stubs = (
            cache_pb2_grpc.CacheServiceStub(users),
            sparse_pb2_grpc.SparseServiceStub(users),
            hints_pb2_grpc.HintServiceStub(users),
            admin_pb2_grpc.AdminServiceStub(admins),
        )
        call = next(getattr(stub, method) for stub in stubs if hasattr(stub, method))
        with pytest.raises(grpc.RpcError) as caught:
            call(request_)
    assert (caught.value.code(), reason_of(caught.value)) == (CODES[reason], int(reason))
    assert state(world.server) == before


def test_answer_too_large_for_message_is_refused(server: Server) -> None:
    with (
        closing(GroupsEngine(server.target, (FULL,) * 8, "explained")) as one,
        AdminClient(server.target) as admin,
    ):
        prompt = hashes(8192)
        # The reason of a lost block needs more bytes than an unknown block.
        one.store(BlockRun(0, prompt[:2048], block_ids(2048) % NUM_BLOCKS))
        number = number_of(admin, one.key_space.model)
        admin.flush(number)
        with pytest.raises(HotKVError) as caught:
            admin.explain(number, b"".join(prompt))
    assert caught.value.reason is LARGE


async def test_topics_answer_is_bounded_in_bytes(tmp_path: Path) -> None:
    """The text's characters are within the limit, its bytes are not."""

    class Talks(Capability):
        def topics(self) -> Mapping[str, Topic]:
            return {"names": Topic(lambda filters: {"name": "\u00fc" * (MAX_TOLD // 2)})}

    context = Mock(abort=AsyncMock(side_effect=EOFError))
    with local_node(tmp_path) as node:
        node.capabilities.append(Talks())
        with pytest.raises(EOFError):
            await AdminService(node).Tell(admin_pb2.TellRequest(topic="names"), context)
    assert context.abort.call_args.args[0] is CODES[LARGE]


# -------------------------------------------------------------------------------- sessions by hand

NUM_BYTES = NUM_BLOCKS * PAGE_BYTES
ONE_FILE = Layout(
    0,
    NUM_BLOCKS,
    (MemoryHandle("kv", NUM_BYTES),),
    (PageTensor(0, "kv", 0, PAGE_BYTES, PAGE_BYTES, 0),),
)
Open = Callable[..., RawSession]


@pytest.fixture
def raw(server: Server) -> Iterator[Open]:
    """Opens sessions with messages made by hand."""
    with grpc.insecure_channel(server.target) as channel, contextlib.ExitStack() as stack:

        def make(kinds: tuple[Sketch, ...] = (), *more: GroupSpec) -> RawSession:
            space = KeySpace(os.urandom(4).hex(), "w", "bfloat16", (FULL, *more), 16)
            config = SessionConfig(server.target, os.urandom(4).hex(), Role.WORKER, space, kinds)
            made = RawSession(channel, server.target, _wire.open_session(config))
            assert not made.why_not
            stack.callback(made.close)
            return made

        yield make


def test_memory_needs_its_descriptor_and_transfers_need_memory(raw: Open) -> None:
    session, long = raw(), "k" * 257
    fd, fence, short = (memory_file(size) for size in (NUM_BYTES, 4 * FENCE_WORDS, 8))
    store = _wire.store("t", "l", [BlockRun(0, hashes(1), block_ids(1))], 5, NO_OPTIONS, 0, 32)
    register = _wire.register_memory(ONE_FILE, NO_ORDER)
    assert session.link({long: fd}) == "TOO_LARGE"
    # The server must keep none of these for the registration.
    assert session.link({"kv": short, FENCE_HANDLE: short}) == "INVALID_LAYOUT"
    assert session.ask(register)[0] == "UNKNOWN_HANDLE"
    assert session.ask(store)[0] == "NO_MEMORY_REGISTERED"
    assert session.link({"kv": fd, FENCE_HANDLE: fence, long[1:]: fd}) == "answered"
    assert session.link({FENCE_HANDLE: fence}) == "DUPLICATE_ID"
    assert session.ask(register)[0] == "answered"
    assert session.ask(register)[0] == "DUPLICATE_ID"
    assert session.ask(store)[0] == "answered"
    for one in (fd, fence, short):
        os.close(one)


@pytest.mark.parametrize(
    "group",
    [
        WINDOW,
        GroupSpec(GroupKind.CHUNKED_LOCAL, 16, (PAGE_BYTES,), 32),
        GroupSpec(GroupKind.MAMBA, 16, (PAGE_BYTES,)),
    ],
)
def test_selections_are_from_groups_that_attend_to_everything(raw: Open, group: GroupSpec) -> None:
    session = raw((Sketch(1, "mean", 0, (64,)),), group)
    config = SelectConfig(CONFIG, 2, LAYERS, KV_HEADS, HEAD_SIZE)
    word, answer = session.ask(create_sequence("s", 1, hashes(2), config, 32))
    assert word == "INVALID_FIELD"
    assert answer.error.message.startswith(f"group_index is 1, a group of {group.kind.name}")
    # Without a select config, the engine selects itself.
    assert session.ask(create_sequence("s", 1, hashes(2), None, 32))[0] == "answered"


# ------------------------------------------------------------------------ packets, other services


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("grpc.health.v1.Health/Check", "unary_unary"),
        ("grpc.health.v1.Health/Watch", "unary_stream"),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
        ("grpc.channelz.v1.Channelz/GetTopChannels", "unary_unary"),
    ],
)
def test_nonsense_to_other_services_is_refused(server: Server, method: str, kind: str) -> None:
    with grpc.insecure_channel(admin_target(server.target)) as channel:
        call = getattr(channel, kind)(f"/{method}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b"\xff"]) if kind == "stream_stream" else b"\xff", timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == FIELD and "Traceback" not in server.log.read_text()


def test_no_module_keeps_an_exception() -> None:
    """An exception that is raised twice keeps both stacks."""
    packages = (hotkv_proto, hotkv_client, hotkv_server, hotkv_sparse)
    names = [
        module.name
        for package in packages
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not module.name.endswith("__main__")
    ]
    assert len(names) > 100, "the packages were not found"
    for name in names:
        for attribute, value in vars(importlib.import_module(name)).items():
            assert not isinstance(value, BaseException), f"{name}.{attribute}"
