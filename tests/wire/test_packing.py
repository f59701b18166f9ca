"""The server unpacks the hashes that the client has packed; both refuse wrong lengths."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hotkv_client import LoadEnd, RequestReport
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import requests as _wire
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import MAX_HASH_BYTES, MIN_HASH_BYTES
from hotkv_proto.messages.cache import pack, packed_words, read_hashes, unpack
from hotkv_proto.messages.errors import error_detail
from hotkv_proto.messages.session import read_load_ends, read_reports
from hotkv_proto.reports import SAID_BY_ENGINES, Miss
from hotkv_proto.v1 import session_pb2

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
def test_the_client_names_the_first_hash_of_another_length(
    lengths: list[int], hash_bytes: int
) -> None:
    hashes = [b"x" * length for length in lengths]
    wrong = [number for number, length in enumerate(lengths) if length != hash_bytes]
    if not wrong:
        assert pack(hashes, hash_bytes) == b"".join(hashes)
        return
    with pytest.raises(HotKVError) as caught:
        pack(hashes, hash_bytes)
    assert caught.value.reason is Reason.INVALID_HASH
    assert f"hashes[{wrong[0]}] has {lengths[wrong[0]]} bytes" in caught.value.message


@given(age_s=st.floats(0, 1e6))
def test_the_age_of_a_report_goes_in_milliseconds(age_s: float) -> None:
    report = RequestReport([], 10, 0, 0, age_s)
    (request,) = _wire.report_requests([report], 32)
    (message,) = request.report_use.requests
    assert message.age_ms <= age_s * 1000 < message.age_ms + 1


@given(
    miss=st.sampled_from(Miss),
    seconds=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    number=st.integers(0, (1 << 63) - 1),
    failed=st.booleans(),
)
def test_what_a_report_says_for_the_ledger_arrives(
    miss: Miss, seconds: tuple[float, float], number: int, failed: bool
) -> None:
    """Times of more than a day count as a day, and reasons that engines can't know as unknown."""
    saved_s, wait_s = seconds
    tokens = (10, 0, 0, 0.0)
    known = {"miss": miss, "saved_s": saved_s, "wait_s": wait_s, "report_id": number}
    ends = [LoadEnd(number, saved_s, failed)]
    (request,) = _wire.report_requests([RequestReport([], *tokens, **known)], 32, 0.0, loads=ends)
    (heard,) = read_reports(request.report_use.requests, 32)
    (ended,) = read_load_ends(request.report_use.loads)
    assert heard.miss == (miss if miss in SAID_BY_ENGINES else Miss.UNKNOWN)
    assert (heard.saved_s, heard.wait_s) == tuple(min(one, 86_400.0) for one in seconds)
    assert heard.report_id == ended.report_id == number
    assert ended.wait_s == heard.saved_s and ended.failed == failed


@pytest.mark.parametrize("read", [_answers.link_sizes, _answers.ticket])
def test_a_refusal_of_the_descriptor_socket_is_raised(read: Callable[[bytes], object]) -> None:
    error = error_detail(HotKVError(Reason.NOT_ALLOWED, "not for you"))
    packet = session_pb2.LinkResponse(error=error).SerializeToString()
    with pytest.raises(HotKVError, match="not for you") as raised:
        read(packet)
    assert raised.value.reason is Reason.NOT_ALLOWED
