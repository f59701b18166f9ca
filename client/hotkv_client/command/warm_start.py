"""Warm start of a node: exports the hashes of the hottest blocks, and promotes blocks before
requests need them.

A file of blocks has a JSON object per line: format and key space, then a group index and
hexadecimal hashes each, hottest first. No tokens, no KV. A file of prompts has a JSON list of
token ids per line.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hotkv_client.admin import AdminClient

FORMAT = "hotkv-blocks-1"
CALL_BLOCKS = 2_000
"""Of a call. Calls run one after the other, so the hottest blocks are promoted first."""
TOKEN_BYTES = 4
MAX_LINE_CHARS = 1 << 26
"""A file with a longer line, such as /dev/zero, is none of ours."""
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error)
"""Raised by a line of another format."""
COUNTS = (
    "present_block_count",
    "fetched_block_count",
    "lower_block_count",
    "absent_block_count",
)


def export(client: AdminClient, path: Path, key_space_id: int, byte_count: int) -> dict[str, Any]:
    """Replaces `path` once the new file is complete.

    Raises HotKVError if the server refuses or does not answer, OSError if the file can't be
    written, ValueError if `path` is a pipe or a device, such as /dev/stdout, which the new file
    would replace.

    byte_count: approximate size of the named blocks; 0: all.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: name a file to write")
    place = path.resolve()
    parts = client.export_blocks(key_space_id, byte_count)
    space = next(parts)
    partial = place.with_name(f"{place.name}.part-{os.getpid()}")
    num_blocks = 0
    hash_bytes = int(space["hash_byte_count"])
    try:
        with partial.open("w") as file:
            print(json.dumps({"format": FORMAT, "key_space": space}), file=file)
            for part in parts:
                for group_index, packed in part:
                    starts = range(0, len(packed), hash_bytes)
                    num_blocks += len(starts)
                    hashes = [packed[at : at + hash_bytes].hex() for at in starts]
                    line = {"group_index": group_index, "hashes": hashes}
                    print(json.dumps(line), file=file)
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)
    return {"file": str(path), "key_space_id": key_space_id, "block_count": num_blocks}


def fetch(client: AdminClient, path: Path, wait_s: float) -> dict[str, Any]:
    """Promotes the blocks in a file of blocks. Returns COUNTS.

    Raises HotKVError if the server refuses or does not answer, OSError if the file can't be read,
    ValueError with the line number for another format.

    wait_s: of each call.
    """
    totals = dict.fromkeys(COUNTS, 0)
    with path.open(errors="replace") as file:
        space = read_key_space(path, file.readline(MAX_LINE_CHARS))
        for groups in _calls(_groups(path, file)):
            _add(totals, client.prefetch_blocks(space, groups, wait_s=wait_s))
    return {"file": str(path), **totals}


def fetch_prompts(
    client: AdminClient, path: Path, key_space: dict[str, Any] | int, wait_s: float
) -> dict[str, Any]:
    """Promotes the blocks of the prompts in a file. Returns COUNTS and the numbers of prompts.
    Prompts shorter than a block are skipped. Raises as `fetch`."""
    totals = dict.fromkeys(COUNTS, 0)
    num_prompts = num_short = 0
    block_tokens = _block_tokens(client, key_space)
    with path.open(errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARS), ""), 1):
            if line.strip():
                packed = _tokens(path, number, line)
                if len(packed) < TOKEN_BYTES * block_tokens:
                    num_short += 1
                    continue
                answer = client.prefetch_blocks(key_space, prompts=[(b"", packed)], wait_s=wait_s)
                _add(totals, answer)
                num_prompts += 1
    return {
        "file": str(path),
        "prompt_count": num_prompts,
        "short_prompt_count": num_short,
        **totals,
    }


def _block_tokens(client: AdminClient, key_space: dict[str, Any] | int) -> int:
    """Tokens of the smallest block; 0 if the server does not know the key space."""
    if not isinstance(key_space, int):
        return _smallest_block(key_space)
    known = [one["key_space"] for one in client.key_spaces(key_space)]
    return _smallest_block(known[0]) if known else 0


def _smallest_block(space: dict[str, Any]) -> int:
    return min((int(one["block_token_count"]) for one in space["groups"]), default=0)


def read_key_space(path: Path, line: str) -> dict[str, Any]:
    """Reads the first line of a file of blocks. Raises ValueError for another format."""
    try:
        found = json.loads(line)
        space: dict[str, Any] = found["key_space"]
        if found["format"] != FORMAT or not isinstance(space, dict):
            raise ValueError(f"format is {found['format']!r}")
        _smallest_block(space)
    except UNREADABLE as error:
        raise ValueError(
            f"{path}:1: this is no file of `hotkv export` ({error}); its format is {FORMAT}"
        ) from error
    return space


def _groups(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[bytes]]]:
    for number, line in enumerate(lines, 2):
        try:
            found = json.loads(line)
            yield int(found["group_index"]), [bytes.fromhex(one) for one in found["hashes"]]
        except UNREADABLE as error:
            raise ValueError(
                f"{path}:{number}: group_index and hashes in hexadecimal were expected ({error})"
            ) from error


def _calls(lines: Iterable[tuple[int, list[bytes]]]) -> Iterator[list[tuple[int, bytes]]]:
    """The blocks of each call of `AdminClient.prefetch_blocks`, at most CALL_BLOCKS.

    lines: group index and hashes of each line of a file of blocks.
    """
    groups: list[tuple[int, bytes]] = []
    room = CALL_BLOCKS
    for group_index, hashes in lines:
        rest = hashes
        while rest:
            taken, rest = rest[:room], rest[room:]
            groups.append((group_index, b"".join(taken)))
            room -= len(taken)
            if not room:
                yield groups
                groups, room = [], CALL_BLOCKS
    if groups:
        yield groups


def _tokens(path: Path, number: int, line: str) -> bytes:
    try:
        ids = json.loads(line)
        return struct.pack(f"<{len(ids)}i", *ids)
    except UNREADABLE as error:
        raise ValueError(
            f"{path}:{number}: a JSON list of token ids was expected ({error})"
        ) from error


def _add(totals: dict[str, int], answer: dict[str, Any]) -> None:
    for name in COUNTS:
        totals[name] += answer[name]
