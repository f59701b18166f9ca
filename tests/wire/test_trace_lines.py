"""Lines of a recorded trace, and what a recording says of itself, without a server."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotkv_client.command import recorder
from hotkv_client.command.recorder import TraceWriter, record
from hotkv_client.types import WatchedRequest
from hotkv_proto.errors import HotKVError, Reason

HASH_BYTES = 4


def watched(*blocks: int, at_s: float = 10.0) -> WatchedRequest:
    """Returns a request whose blocks' hashes are numbers."""
    hashes = b"".join(block.to_bytes(HASH_BYTES, "little") for block in blocks)
    counts = {"prompt_tokens": 100, "device_hit_tokens": 5, "hit_tokens": 7}
    return WatchedRequest(key_space_id=1, unix_time_s=at_s, hashes=hashes, **counts)


def fields(line: str) -> dict[str, Any]:
    assert "\n" not in line and " " not in line
    return dict(json.loads(line))


@pytest.mark.parametrize(
    ("block_tokens", "rounded", "ids"),
    [(1, 16, 4), (16, 16, 4), (17, 32, 2), (32, 32, 2), (48, 48, 1)],
)
def test_blocks_of_a_trace_are_whole_hash_blocks(block_tokens: int, rounded: int, ids: int) -> None:
    tracer = TraceWriter(HASH_BYTES, 16, block_tokens, 0.0)
    assert tracer.block_tokens == rounded
    assert fields(tracer.line(watched(1, 2, 3, 4)))["hash_ids"] == list(range(ids))
    assert (tracer.num_requests, tracer.num_blocks, tracer.num_unique_blocks) == (1, ids, ids)


def test_a_block_is_named_by_its_last_hash() -> None:
    tracer = TraceWriter(HASH_BYTES, 16, 32, 0.0)
    # The rest of a prompt is no block.
    lines = [tracer.line(watched(*blocks)) for blocks in ((1, 2, 3, 4), (9, 2, 5), (2,), (7, 8))]
    assert [fields(line)["hash_ids"] for line in lines] == [[0, 1], [0], [], [2]]
    assert (tracer.num_requests, tracer.num_blocks, tracer.num_unique_blocks) == (4, 4, 3)


def test_a_line_says_what_the_engine_reported_and_time_does_not_go_back() -> None:
    tracer = TraceWriter(HASH_BYTES, 16, 16, 9.5)
    assert fields(tracer.line(watched(1, at_s=9.0)))["timestamp"] == 0
    assert fields(tracer.line(watched(1, at_s=10.0))) == {
        "timestamp": 500,
        "input_length": 100,
        "output_length": 0,
        "hash_ids": [0],
        "device_hit_length": 5,
        "hit_length": 7,
    }
    later = [fields(tracer.line(watched(1, at_s=at_s)))["timestamp"] for at_s in (9.75, 11.0)]
    assert later == [500, 1500]


class Client:
    """Stands for the admin client. `reports`: what it is told, each with how many were missed."""

    def __init__(self, spaces: int, *reports: tuple[list[WatchedRequest], int]) -> None:
        self._spaces, self._reports = spaces, reports
        self.asked: list[tuple[int, float]] = []
        self.before_end: Callable[[], None] = lambda: None

    def key_spaces(self) -> list[dict[str, Any]]:
        space = {"model": "m", "hash_byte_count": HASH_BYTES, "hash_block_token_count": 16}
        row = {"model": "LlamaForCausalLM", "model_name": "m", "key_space": space}
        return [{"key_space_id": 1 + at, **row} for at in range(self._spaces)]

    def watch_requests(self, number: int, seconds: float) -> Iterator[Any]:
        self.asked.append((number, seconds))
        yield from self._reports
        self.before_end()


def recorded(client: Client, path: Path, *, space: int = 0, most: int = 100) -> dict[str, Any]:
    return record(client, path, space, 16, 2.5, most)  # type: ignore[arg-type]


def test_a_recording_says_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is interrupted."""
    now_s = [10.0]
    monkeypatch.setattr(recorder.time, "time", lambda: now_s[0])
    client = Client(1, ([watched(1, 2)], 0), ([watched(1, 3), watched()], 4), ([], 1))

    def interrupt() -> None:
        now_s[0] = 12.0
        raise KeyboardInterrupt

    client.before_end = interrupt
    path = tmp_path / "trace"
    assert recorded(client, path) == {
        "file": str(path),
        "key_space_id": 1,
        "block_token_count": 16,
        "request_count": 3,
        "block_count": 4,
        "unique_block_count": 3,
        "lost_request_count": 5,
        "is_full": False,
        "seconds": 2.0,
    }
    lines = path.read_text().splitlines()
    assert [fields(line)["hash_ids"] for line in lines] == [[0, 1], [0, 2], []]
    assert client.asked == [(1, 2.5)]


@pytest.mark.parametrize("most, requests, is_full", [(2, 1, True), (3, 2, True), (4, 2, False)])
def test_a_recording_ends_when_it_is_full(
    tmp_path: Path, most: int, requests: int, is_full: bool
) -> None:
    client = Client(1, ([watched(1, 2)], 0), ([watched(3)], 0))
    said = recorded(client, tmp_path / "trace", most=most)
    assert (said["request_count"], said["is_full"]) == (requests, is_full)


@pytest.mark.parametrize(("spaces", "asked", "found"), [(1, 0, 1), (1, 1, 1), (2, 2, 2)])
def test_the_key_space_is_named_or_the_only_one(
    tmp_path: Path, spaces: int, asked: int, found: int
) -> None:
    said = recorded(Client(spaces), tmp_path / "trace", space=asked)
    assert (said["key_space_id"], said["block_token_count"]) == (found, 16)


@pytest.mark.parametrize(("spaces", "asked"), [(2, 0), (0, 0), (1, 9)])
def test_a_key_space_that_is_not_there_is_refused(tmp_path: Path, spaces: int, asked: int) -> None:
    client = Client(spaces)
    known = ", ".join(f"{1 + at} (m)" for at in range(spaces)) or "none yet"
    with pytest.raises(HotKVError, match=re.escape(f"known are {known}")) as refused:
        recorded(client, tmp_path / "trace", space=asked)
    assert refused.value.reason is Reason.UNKNOWN_KEY_SPACE and not client.asked


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_blocks_without_tokens_are_refused(tmp_path: Path, block_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        record(Client(1), tmp_path / "trace", 0, block_tokens, 1.0, 1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
