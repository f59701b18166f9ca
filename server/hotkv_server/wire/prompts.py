"""Prompts that a call names by their hashes or by their tokens."""

import numpy as np

from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.keys import KeySpace, token_block_hashes
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.table import Words
from hotkv_server.cache.values import HashList


def prompt_hashes(space: KeySpace, hashes: bytes, token_ids: bytes) -> Words:
    """Words [n, 8], one for each full hash block: `hashes`, or those of `token_ids`, packed int32.

    Takes long for long prompts. Raises INVALID_HASH, or INVALID_FIELD if the key space's hashes
    can't be computed from tokens.
    """
    if hashes:
        return read_hashes("hashes", hashes, space.hash_bytes)
    tokens = fields.int32s("token_ids", token_ids)
    try:
        computed = token_block_hashes(
            tokens.tolist(), space.hash_block_tokens, space.hash_algorithm, space.hash_seed
        )
    except ValueError as error:
        raise HotKVError(
            Reason.INVALID_FIELD, f"token_ids: {error}; give hashes instead"
        ) from error
    return read_hashes("token_ids", b"".join(computed), space.hash_bytes)


def of_groups(space: KeySpace, hashes: Words) -> list[HashList]:
    """A prompt's blocks in each group, by the last hash of each block."""
    steps = [group.block_tokens // space.hash_block_tokens for group in space.groups]
    return [
        HashList(index, np.ascontiguousarray(hashes[step - 1 :: step]))
        for index, step in enumerate(steps)
    ]
