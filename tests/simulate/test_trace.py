"""Tests how traces are read."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from hotkv_server.simulate.trace import W_ID, TraceError, load_trace, make_trace
from tests.simulate.naive import any_requests, distinct, prefix_length
from tests.simulate.traces import Requests

GOOD = '{"timestamp": 5, "input_length": 1024, "output_length": 3, "hash_ids": [7, 8], "turn": 1}'


@pytest.mark.parametrize("packed", [False, True])
def test_blank_lines_and_unknown_fields_are_read(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "trace.jsonl"
    text = f'\n{GOOD}\n\n  \n{{"timestamp": 2005.5, "hash_ids": [7, 9, 10]}}'.encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    trace = load_trace(path)
    assert trace.name == str(path)
    assert trace.times_s.tolist() == [0.0, 2.0005]
    assert (trace.blocks.tolist(), trace.starts.tolist()) == ([0, 1, 0, 2, 3], [0, 2, 5])
    assert (trace.num_unique_blocks, trace.num_accesses, trace.num_late) == (4, 5, 0)


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("7", 7), ("7.0", 7), ("7.5", 0), ("-1", 0), ("NaN", 0), ("1e300", 0), ("true", 0), ("[]", 0)],
)
def test_lengths_that_are_no_whole_numbers_are_unknown(
    tmp_path: Path, written: str, tokens: int
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 1.0, "hash_ids": [1], "input_length": {written}}}')
    assert load_trace(path).prompt_tokens.tolist() == [tokens]


@pytest.mark.parametrize("packed", [False, True])
def test_a_pipe_is_read_from_its_beginning(packed: bool) -> None:
    lines = "".join(f'{{"timestamp": {i}, "hash_ids": [{i}]}}\n' for i in range(100)).encode()
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(lines) if packed else lines)
    os.close(writing)
    try:
        assert load_trace(Path(f"/dev/fd/{reading}")).num_requests == 100
    finally:
        os.close(reading)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    lines = (f'{{"timestamp": {i}, "hash_ids": [{i * i}]}}\n' for i in range(2000))
    whole = gzip.compress("".join(lines).encode())
    middle = len(whole) // 2
    spoiled = whole[:middle] + bytes(64) + whole[middle + 64 :]
    for damaged in (whole[:-20], spoiled, whole[:-8] + bytes(8)):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"line \d+: (the gzip data is damaged|not JSON)"):
            load_trace(path)


def test_late_requests_are_sorted_stably() -> None:
    trace = make_trace("t", [(2.0, [1]), (1.0, [2]), (2.0, [3]), (1.5, [4])])
    assert trace.times_s.tolist() == [0.0, 0.5, 1.0, 1.0]
    assert trace.num_late == 2
    assert trace.hashes[:, W_ID].tolist() == trace.blocks.tolist() == [0, 1, 2, 3]


def test_ids_may_be_any_64_bits() -> None:
    ids = [-1, (1 << 64) - 1, -(1 << 63), 0, 1 << 63]
    trace = make_trace("t", [(0.0, ids)])
    assert trace.num_unique_blocks == len(ids)
    assert len(np.unique(trace.hashes[:, :2], axis=0)) == len(ids)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "a JSON list"),
        (b'{"hash_ids": [1]}', "timestamp is missing"),
        (b'{"timestamp": "1", "hash_ids": [1]}', 'timestamp is "1"'),
        (b'{"timestamp": true, "hash_ids": [1]}', "timestamp is true"),
        (b'{"timestamp": NaN, "hash_ids": [1]}', "timestamp is NaN"),
        (b'{"timestamp": 1%s, "hash_ids": [1]}' % (b"0" * 400), "timestamp is 1000"),
        (b"[" * 100_000, "not JSON"),
        (b'{"timestamp": 1}', "hash_ids is missing"),
        (b'{"timestamp": 1, "hash_ids": 3}', "hash_ids is 3"),
        (b'{"timestamp": 1, "hash_ids": [1, 2.5]}', r"hash_ids is \[1, 2.5\]"),
        (b'{"timestamp": 1, "hash_ids": [true]}', "hash_ids is"),
        (b'{"timestamp": 1, "hash_ids": [18446744073709551616]}', "hash_ids has a number"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + line)
    with pytest.raises(TraceError, match=f"line 2: {message}") as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", '{"timestamp": 1, "hash_ids": []}'])
def test_nothing_to_replay(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="no request has a block"):
        load_trace(path)


@given(requests=any_requests())
def test_prefixes_count_every_access(requests: Requests) -> None:
    trace = make_trace("t", requests)
    in_order = [ids for _, ids in sorted(requests, key=lambda request: request[0]) if ids]
    assert trace.lengths.tolist() == [len(ids) for ids in in_order]
    every = distinct([block for ids in in_order for block in ids])
    numbers = {block: number for number, block in enumerate(every)}
    assert trace.blocks.tolist() == [numbers[block] for ids in in_order for block in distinct(ids)]
    held = {block for block, number in numbers.items() if number % 3}
    prefix = trace.prefix_lengths(trace.blocks % 3 != 0)
    assert prefix.tolist() == [prefix_length(distinct(ids), held) for ids in in_order]
    assert trace.hit_blocks(prefix) == sum(prefix_length(ids, held) for ids in in_order)
