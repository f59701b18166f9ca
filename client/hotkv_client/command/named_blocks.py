"""Finds the blocks that a user names by whole hashes or first digits, as git finds commits.

A prefix has at least MIN_DIGITS digits and must match exactly one hash of the server; otherwise
the error lists the candidates.
"""

import string
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hotkv_client.command.tables import space_name
from hotkv_proto.errors import HotKVError, Reason

if TYPE_CHECKING:
    from hotkv_client.admin import AdminClient

MIN_DIGITS = 4
MAX_DIGITS = 64
MAX_CANDIDATES = 8
"""That an error lists."""
LOOKED_AT = 200
"""Requested for a prefix. More than MAX_CANDIDATES: a hash may have a block in each group and
key space."""
Place = tuple[int, int]
"""Key space id and group index."""


def chosen_key_space(client: "AdminClient", key_space_id: int) -> tuple[int, dict[str, Any]]:
    """Id and description. Raises UNKNOWN_KEY_SPACE if there is none, or if `key_space_id` is 0
    and there are several."""
    # By id: of very many key spaces, only those with the most blocks are listed.
    listed = client.key_spaces(key_space_id) or client.key_spaces()
    known = {space["key_space_id"]: space for space in listed}
    number = key_space_id or (next(iter(known)) if len(known) == 1 else 0)
    if number not in known:
        choices = (
            ", ".join(f"{known_id} ({space['model_name']})" for known_id, space in known.items())
            or "none yet: start an engine first"
        )
        raise HotKVError(
            Reason.UNKNOWN_KEY_SPACE, f"name a key space with --key-space; known are {choices}"
        )
    return number, known[number]["key_space"]


def places(
    client: "AdminClient", words: Iterable[str], key_space_id: int, group_index: int | None
) -> dict[Place, list[bytes]]:
    """Hashes of the named blocks by place: a whole hash under every group with hashes of its
    length, a prefix only where the server has the block.

    Raises HotKVError if the server refuses or does not answer, ValueError for a prefix that matches
    no hash or several.

    key_space_id: 0: all.
    group_index: None: all.
    """
    words = list(map(checked, words))
    found: dict[Place, list[bytes]] = {}
    told = client.tell("key_spaces", key_space_id=key_space_id)
    spaces = told["key_spaces"]
    # Of very many key spaces, only those with the most blocks are listed.
    lists_all = bool(key_space_id) or told["key_space_count"] <= len(spaces)
    for word in words:
        if len(word) in _lengths(spaces):
            named = dict.fromkeys(_places_of(spaces, len(word), group_index))
            if not lists_all:
                named |= dict.fromkeys(_places_with(client, word, group_index))
            for place in named:
                found.setdefault(place, []).append(bytes.fromhex(word))
            continue
        for row in _blocks(client, word, key_space_id, group_index):
            place = int(row["key_space_id"]), int(row["group_index"])
            found.setdefault(place, []).append(bytes.fromhex(row["block_hash"]))
    return found


def whole_hashes(client: "AdminClient", words: Sequence[str], key_space_id: int) -> bytes:
    """Packed hashes of a prompt's blocks, named by whole hashes or first digits. Raises as
    `places`."""
    words = list(map(checked, words))
    if all(len(word) == MAX_DIGITS for word in words):
        return b"".join(map(bytes.fromhex, words))
    lengths, packed = _lengths(client.key_spaces(key_space_id)), []
    for word in words:
        if len(word) not in lengths:
            word = str(_blocks(client, word, key_space_id, None)[0]["block_hash"])
        packed.append(bytes.fromhex(word))
    return b"".join(packed)


def checked(word: str) -> str:
    """The word in lower case. Raises ValueError if it is not hexadecimal or has a wrong number
    of digits."""
    if not word or not set(word) <= set(string.hexdigits):
        raise ValueError(f"{word!r} is no hexadecimal block hash")
    if not MIN_DIGITS <= len(word) <= MAX_DIGITS:
        raise ValueError(f"{word!r} has {len(word)} digits; give {MIN_DIGITS} to {MAX_DIGITS}")
    return word.lower()


def _lengths(spaces: list[dict[str, Any]]) -> set[int]:
    """Hexadecimal digits of whole hashes."""
    return {2 * int(one["key_space"]["hash_byte_count"]) for one in spaces}


def _places_of(
    spaces: list[dict[str, Any]], num_digits: int, group_index: int | None
) -> Iterator[Place]:
    """Groups whose hashes have `num_digits` digits."""
    for one in spaces:
        if 2 * int(one["key_space"]["hash_byte_count"]) == num_digits:
            for group in one["key_space"]["groups"]:
                if group_index in (None, group["group_index"]):
                    yield int(one["key_space_id"]), int(group["group_index"])


def _places_with(client: "AdminClient", word: str, group_index: int | None) -> Iterator[Place]:
    """Where the server has the block of a whole hash."""
    for row in client.blocks(0, LOOKED_AT, hash_prefix=word)["blocks"]:
        if row["block_hash"] == word and group_index in (None, row["group_index"]):
            yield int(row["key_space_id"]), int(row["group_index"])


def _blocks(
    client: "AdminClient", word: str, key_space_id: int, group_index: int | None
) -> list[dict[str, Any]]:
    """Raises ValueError unless exactly one hash begins with `word`."""
    rows = [
        row
        for row in client.blocks(key_space_id, LOOKED_AT, hash_prefix=word)["blocks"]
        if group_index in (None, row["group_index"])
    ]
    num_hashes = len({row["block_hash"] for row in rows})
    if num_hashes > 1:
        raise ValueError(f"{word} fits several blocks; give more digits:\n{_listed(rows)}")
    if not rows:
        where = f"key space {key_space_id}" if key_space_id else "the server"
        raise ValueError(
            f"no block in {where} has a hash that begins with {word}{_near(client, word)}"
        )
    return rows


def _near(client: "AdminClient", word: str) -> str:
    """End of an error message: blocks whose hashes share the longest beginning with `word`."""
    for length in range(len(word) - 1, 0, -1):
        rows = client.blocks(0, LOOKED_AT, hash_prefix=word[:length])["blocks"]
        if rows:
            return f"; with {word[:length]} begin:\n{_listed(rows)}"
    return "; `hotkv blocks` lists hashes"


def _listed(rows: list[dict[str, Any]]) -> str:
    """A line per hash, with as many digits as distinguish them."""
    first = {row["block_hash"]: row for row in reversed(rows)}
    shown = list(first)[::-1][:MAX_CANDIDATES]
    digits = next(
        (n for n in range(16, MAX_DIGITS) if len({one[:n] for one in first}) == len(first)),
        MAX_DIGITS,
    )
    lines = [
        f"  {block_hash[:digits]}  {space_name(row)}, group {row['group_index']}, "
        f"block {row['depth']}, {row['state']}"
        for block_hash, row in ((one, first[one]) for one in shown)
    ]
    more = len(first) - len(shown)
    return "\n".join([*lines, *([f"  and {more} more"] if more else [])])
