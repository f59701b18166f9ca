"""Reads traces of requests in Mooncake's format into arrays.

A line is a JSON object with `timestamp` (ms) and `hash_ids`, the request's blocks in order; an id
stands for a block with all before it, in the whole file. Read if they are whole numbers:
`input_length` and `device_hit_length` (tokens; the latter hit in the engine's own cache). Files may
be gzipped.

Always true of a `Trace`: requests are in order of time and list each block once; block ids count
from 0 without gaps.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.table import Words

Int64s = NDArray[np.int64]

GZIP_MAGIC = b"\x1f\x8b"
MIN_ID, MAX_ID = -(1 << 63), (1 << 64) - 1
MAX_TIME_MS = 1e300
"""Differences of larger times might not be finite."""
MAX_TOKENS = 1 << 40
"""Larger numbers in a file are ignored."""
W_ID = 2
"""Column of a hash that has the block's id."""

Request = tuple[float, Sequence[int]]
"""(time in seconds, block ids in order)."""
Tokens = tuple[int, int]
"""Of the prompt (0: unknown), and of those that hit on the device."""
NO_TOKENS: Tokens = (0, 0)


class TraceError(ValueError):
    """The message names the line, the field and the fix."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """R requests with B blocks; a block counts once per request that has it.

    times_s: since the first request [R].
    starts: of each request in `blocks`, and B at the end [R + 1].
    blocks: one request after the other [B].
    positions: index in the file's list, of the first occurrence [B].
    lengths: of the file's lists, with repetitions [R].
    hashes: artificial, words [B, 8].
    num_late: requests with an earlier time than a line before.
    prompt_tokens: 0 if unknown [R].
    device_hit_tokens: [R].
    num_short, short_prompt_tokens, short_device_hit_tokens: of requests without a block, which are
        left out.
    seconds: from the first to the last request, also of the short ones.
    """

    name: str
    times_s: NDArray[np.float64]
    starts: Int64s
    blocks: Int64s
    positions: Int64s
    lengths: Int64s
    hashes: Words
    num_unique_blocks: int
    num_late: int
    prompt_tokens: Int64s
    device_hit_tokens: Int64s
    num_short: int = 0
    short_prompt_tokens: int = 0
    short_device_hit_tokens: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"Trace({self.name}: {self.num_requests} requests, {self.num_accesses} accesses "
            f"to {self.num_unique_blocks} blocks)"
        )

    @property
    def num_requests(self) -> int:
        return len(self.times_s)

    @property
    def num_accesses(self) -> int:
        """With repetitions."""
        return int(self.lengths.sum())

    def capacity_blocks(self, percent: float) -> int:
        """Share of all different blocks; at least 1."""
        return max(1, int(self.num_unique_blocks * percent / 100))

    def prefix_lengths(self, hit: NDArray[np.bool_]) -> Int64s:
        """Blocks before each request's first miss [R]. `hit`: [B]."""
        position = np.where(hit, len(hit), np.arange(len(hit)))
        first_miss = np.minimum.reduceat(position, self.starts[:-1])
        lengths: Int64s = np.minimum(first_miss, self.starts[1:]) - self.starts[:-1]
        return lengths

    def hit_blocks(self, prefix: Int64s) -> int:
        """Accesses that hit, with repetitions. `prefix`: leading blocks that hit, without [R]."""
        return int(self.served(prefix).sum())

    def served(self, prefix: Int64s) -> Int64s:
        """Like `hit_blocks`, per request [R]."""
        end = self.starts[:-1] + prefix
        whole = end == self.starts[1:]
        served: Int64s = np.where(whole, self.lengths, self.positions[np.where(whole, 0, end)])
        return served


def make_trace(
    name: str, requests: Iterable[Request], tokens: Iterable[Tokens] | None = None
) -> Trace:
    """Raises TraceError if no request has a block. `tokens`: None if unknown."""
    listed = list(requests)
    told = [NO_TOKENS] * len(listed) if tokens is None else list(tokens)
    both = list(zip(listed, told, strict=True))
    kept = [request for request in listed if len(request[1])]
    counts = np.array([of for (_, ids), of in both if len(ids)] or [NO_TOKENS], np.int64)
    short = [of for (_, ids), of in both if not len(ids)]
    if not kept:
        raise TraceError(
            f"{name}: no request has a block; give a trace whose hash_ids are not all empty"
        )
    raw_s = np.array([time_s for time_s, _ in kept], np.float64)
    order = np.argsort(raw_s, kind="stable")
    number: dict[int, int] = {}
    blocks: list[int] = []
    positions: list[int] = []
    starts = [0]
    for row in order:
        ids = kept[row][1]
        first = (
            dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))
            if len(set(ids)) != len(ids)
            else None
        )
        distinct = ids if first is None else sorted(first, key=first.__getitem__)
        blocks += [number.setdefault(block, len(number)) for block in distinct]
        positions += range(len(ids)) if first is None else sorted(first.values())
        starts.append(len(blocks))
    block_ids = np.array(blocks, np.int64)
    return Trace(
        name,
        raw_s[order] - raw_s.min(),
        np.array(starts, np.int64),
        block_ids,
        np.array(positions, np.int64),
        np.array([len(kept[row][1]) for row in order], np.int64),
        hash_words(block_ids),
        len(number),
        int((raw_s < np.maximum.accumulate(raw_s)).sum()),
        counts[order, 0],
        counts[order, 1],
        len(short),
        sum(prompt_tokens for prompt_tokens, _ in short),
        sum(device_hit_tokens for _, device_hit_tokens in short),
        max(time_s for time_s, _ in listed) - min(time_s for time_s, _ in listed),
    )


def hash_words(blocks: Int64s) -> Words:
    """Artificial hashes [B, 8]: 64 pseudorandom bits for the block table and the policies, then
    the id."""
    words = np.zeros((len(blocks), 8), np.uint32)
    mixed = blocks.astype(np.uint64) + np.uint64(1)
    # Finalizer of splitmix64 (Steele, Lea, Flood 2014): one to one, so ids have different
    # prefixes.
    mixed *= np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    mixed ^= mixed >> np.uint64(31)
    words[:, 0] = mixed & np.uint64(0xFFFF_FFFF)
    words[:, 1] = mixed >> np.uint64(32)
    words[:, W_ID] = blocks
    return words


def load_trace(path: Path) -> Trace:
    """Raises TraceError if a line is wrong, OSError if the file can't be read."""
    requests: list[tuple[Request, Tokens]] = []
    number = 0
    with _opened(path) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    requests.append(_request(line, f"{path}: line {number}"))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(
                f"{path}: line {number + 1}: the gzip data is damaged ({error}); compress the "
                "file anew"
            ) from error
    return make_trace(
        str(path), (request for request, _ in requests), [tokens for _, tokens in requests]
    )


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    """Yields lines. Opens once: a pipe can be read only once."""
    with path.open("rb") as file:
        if file.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)] == GZIP_MAGIC:
            with gzip.open(file, "rb") as unzipped:
                yield unzipped
        else:
            yield file


def _request(line: bytes, where: str) -> tuple[Request, Tokens]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: not JSON ({error}); each line is one object with timestamp and hash_ids"
        ) from error
    if not isinstance(fields, dict):
        raise TraceError(
            f"{where}: a JSON {type(fields).__name__}; each line is one object with timestamp "
            "and hash_ids"
        )
    timestamp_ms, ids = fields.get("timestamp"), fields.get("hash_ids")
    if (
        isinstance(timestamp_ms, bool)
        or not isinstance(timestamp_ms, int | float)
        or not abs(timestamp_ms) <= MAX_TIME_MS
    ):
        raise TraceError(
            f"{where}: timestamp is {_shown(fields, 'timestamp')}; give the time of the request "
            "as a number of milliseconds"
        )
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise TraceError(
            f"{where}: hash_ids is {_shown(fields, 'hash_ids')}; give a list of whole numbers, "
            "one a block"
        )
    if ids and not (min(ids) >= MIN_ID and max(ids) <= MAX_ID):
        raise TraceError(
            f"{where}: hash_ids has a number of more than 64 bits; give ids from {MIN_ID} to "
            f"{MAX_ID}"
        )
    tokens = _tokens(fields, "input_length"), _tokens(fields, "device_hit_length")
    return (timestamp_ms / 1000, ids), tokens


def _tokens(fields: dict[str, object], name: str) -> int:
    """0 unless it is a whole number from 0 to MAX_TOKENS (7.0 is one)."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return int(value) if 0 <= value <= MAX_TOKENS and value == int(value) else 0


def _shown(fields: dict[str, object], name: str) -> str:
    """For an error, at most 60 characters."""
    if name not in fields:
        return "missing"
    text = json.dumps(fields[name])
    return text if len(text) <= 60 else f"{text[:57]}..."
