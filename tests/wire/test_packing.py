"""Tests that the server unpacks what the client packs, and that wrong lengths are refused."""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_client import BlockRun, LoadEnd, RequestReport
from hotkv_client.parts import split_messages
from hotkv_client.types import EndedRequest
from hotkv_client.wire import call_messages as _wire
from hotkv_client.wire import link_messages as _link_messages
from hotkv_proto.blocks import (
    NO_OPTIONS,
    NO_RETENTION,
    BlockExtraKeys,
    Retention,
    StoreOptions,
)
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from hotkv_proto.messages.cache import (
    MAX_LOADED_BLOCKS,
    pack,
    packed_words,
    put_store_options,
    read_hashes,
    read_store_options,
    unpack,
)
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.messages.report_messages import MAX_REPORTS, read_load_ends, read_reports
from hotkv_proto.reports import CANCELS, SAID_BY_ENGINES, Miss
from hotkv_proto.v1 import cache_pb2, session_pb2
from hotkv_proto.versions import MAX_MESSAGE_BYTES
from hotkv_server.wire.guard.interceptor import is_light

HASH_BYTES = st.integers(MIN_HASH_BYTES, MAX_HASH_BYTES)


@given(data=st.data(), hash_bytes=HASH_BYTES, count=st.integers(0, 6))
def test_there_and_back(data: st.DataObject, hash_bytes: int, count: int) -> None:
    hashes = [data.draw(st.binary(min_size=hash_bytes, max_size=hash_bytes)) for _ in range(count)]
    packed = pack(hashes, hash_bytes)
    words = read_hashes("hashes", packed, hash_bytes)
    assert words.shape == (count, 8)
    assert packed_words(words, hash_bytes) == packed
    assert unpack(packed, hash_bytes) == hashes


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), hash_bytes=HASH_BYTES)
def test_client_names_first_hash_of_wrong_length(lengths: list[int], hash_bytes: int) -> None:
    hashes = [b"x" * length for length in lengths]
    wrong = [number for number, length in enumerate(lengths) if length != hash_bytes]
    if not wrong:
        assert pack(hashes, hash_bytes) == b"".join(hashes)
        return
    with pytest.raises(HotKVError) as caught:
        pack(hashes, hash_bytes)
    assert caught.value.reason is Reason.INVALID_HASH
    assert f"hashes[{wrong[0]}] has {lengths[wrong[0]]} bytes" in caught.value.message


@pytest.mark.parametrize(
    "options",
    [NO_OPTIONS, StoreOptions(Retention(-8, 60.0, pin=True), "residency", "trace", True)],
)
def test_the_options_of_a_store_arrive(options: StoreOptions) -> None:
    request = cache_pb2.StoreRequest()
    put_store_options(request, options)
    assert read_store_options(request) == options


@given(age_s=st.floats(0, 1e6))
def test_the_age_of_a_report_goes_in_milliseconds(age_s: float) -> None:
    report = RequestReport([], 10, 0, 0, age_s)
    (request,) = _wire.report_requests([report], 32)
    (message,) = request.report_use.requests
    assert message.age_ms <= age_s * 1000 < message.age_ms + 1


@given(
    ttl_s=st.sampled_from([0.0, 1e-9, 0.0004, 0.001, 0.0015, 2.5]) | st.floats(0, 1e6),
)
def test_only_zero_time_asks_for_the_default(ttl_s: float) -> None:
    expected = max(int(ttl_s * 1000), int(ttl_s > 0))
    assert _wire.acquire("l", [], ttl_s, 32).acquire_lease.ttl_ms == expected
    assert _wire.reserve("l", [], ttl_s, NO_RETENTION, 32).reserve_blocks.ttl_ms == expected
    assert _wire.load("t", "l", [], ttl_s).load.timeout_ms == expected
    assert _wire.store("t", "l", [], ttl_s, NO_OPTIONS, 0, 32).store.timeout_ms == expected


IMAGE = ("id of an image", 3)
KEYS: list[tuple[int, BlockExtraKeys, int, bool]] = [
    (8192, (IMAGE,), 16, False),
    (6000, (IMAGE,), 16, True),
    (8192, ("name of an adapter",), 16, True),
    (4000, ("salt", b"digest", IMAGE), 16, False),
    (8192, None, 16, True),
    (8192, None, 128, False),
]


@pytest.mark.parametrize(("num_blocks", "keys", "block_tokens", "has_events"), KEYS)
def test_store_is_never_too_large_for_tokens(
    num_blocks: int, keys: BlockExtraKeys, block_tokens: int, has_events: bool
) -> None:
    """Token ids and extra keys are left out if the request is too large."""
    runs = [
        BlockRun(
            group,
            [bytes(32)] * (num_blocks // 2),
            np.arange(num_blocks // 2, dtype=np.int32),
            token_ids=np.ones(num_blocks // 2 * block_tokens, np.int32),
            lora_name="adapter",
            extra_keys=[keys] * (num_blocks // 2) if keys else (),
        )
        for group in range(2)
    ]
    request = _wire.store("transfer", "lease", runs, 1.0, NO_OPTIONS, 7, 32)
    request.request_id = 1 << 40
    data = request.SerializeToString()
    assert len(data) <= MAX_MESSAGE_BYTES and is_light(request.DESCRIPTOR, data)
    for sent, run in zip(request.store.runs, runs, strict=True):
        assert (len(sent.hashes), len(sent.block_ids)) == (16 * num_blocks, 2 * num_blocks)
        assert bool(sent.token_ids) == bool(sent.lora_name) == has_events
        assert len(sent.extra_keys) == (len(run.extra_keys) if has_events else 0)


@pytest.mark.parametrize("hash_bytes", [8, 16, 32])
def test_reports_come_in_messages_that_the_server_takes(hash_bytes: int) -> None:
    blocks = [bytes(hash_bytes)] * 100
    reports = [RequestReport(blocks, 1600, 0, 0, 0.0, report_id=n) for n in range(3000)]
    ends = [LoadEnd(n, 0.5) for n in range(2500)]
    over = [EndedRequest([], str(n)) for n in range(1025)]
    used = [
        request.report_use
        for request in _wire.report_requests(reports, hash_bytes, 7.0, over, ends)
    ]
    for one in used:
        assert max(map(len, (one.requests, one.loads, one.ended))) <= MAX_REPORTS
        assert sum(len(m.hashes) for m in one.requests) <= hash_bytes * MAX_LOADED_BLOCKS
        assert one.ByteSize() <= MAX_MESSAGE_BYTES
    assert [m.report_id for one in used for m in one.requests] == list(range(3000))
    assert [m.report_id for one in used for m in one.loads] == list(range(2500))
    assert [m.session_id for one in used for m in one.ended] == [str(n) for n in range(1025)]
    assert [one.prefill_tokens_per_s for one in used if one.prefill_tokens_per_s] == [7.0]
    assert len([*_wire.report_requests([], hash_bytes, 0.0, over[:MAX_REPORTS])]) == 1
    assert [*split_messages([3, 3, 1, 5, 9], int, 6)] == [[3, 3], [1, 5], [9]]


@pytest.mark.parametrize("miss", Miss)
@given(
    seconds=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    number=st.integers(0, (1 << 63) - 1),
    failed=st.booleans(),
)
def test_what_a_report_says_for_the_ledger_arrives(
    miss: Miss, seconds: tuple[float, float], number: int, failed: bool
) -> None:
    """A time above a day becomes a day; a reason that engines can't know becomes UNKNOWN."""
    saved_s, wait_s = seconds
    tokens = (10, 0, 0, 0.0)
    known = {"miss": miss, "saved_s": saved_s, "wait_s": wait_s, "report_id": number}
    ends = [LoadEnd(number, saved_s, failed, miss)]
    (request,) = _wire.report_requests([RequestReport([], *tokens, **known)], 32, 0.0, loads=ends)
    (heard,) = read_reports(request.report_use.requests, 32)
    (ended,) = read_load_ends(request.report_use.loads)
    assert heard.miss == (miss if miss in SAID_BY_ENGINES else Miss.UNKNOWN)
    assert (heard.saved_s, heard.wait_s) == tuple(min(one, 86_400.0) for one in seconds)
    assert heard.report_id == ended.report_id == number
    assert ended.wait_s == heard.saved_s and ended.failed == failed
    assert ended.miss == (miss if miss in CANCELS else Miss.FAILED_LOAD)


@pytest.mark.parametrize("read", [_link_messages.link_sizes, _link_messages.ticket])
def test_a_refusal_of_the_descriptor_socket_is_raised(read: Callable[[bytes], object]) -> None:
    error = error_detail(HotKVError(Reason.NOT_ALLOWED, "not for you"))
    packet = session_pb2.LinkResponse(error=error).SerializeToString()
    with pytest.raises(HotKVError, match="not for you") as raised:
        read(packet)
    assert raised.value.reason is Reason.NOT_ALLOWED
