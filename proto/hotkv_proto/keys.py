"""Key spaces, sketches, block keys and block hashes.

Engines share blocks exactly when the fingerprints of their key spaces are equal: every field
that changes a block's bytes is one of `KeySpace`. A field that changes only a sketch's bytes is
one of `Sketch`.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from hotkv_proto.groups import GroupSpec

MIN_HASH_BYTES = 8
MAX_HASH_BYTES = 32
MAX_GROUPS = 256
"""Of a key space. The server numbers sketches from here on."""
MAX_NAME = 64


@dataclass(frozen=True)
class Sketch:
    """A kind of sketch. Engines share sketches only if all fields are equal.

    group_index: of the blocks.
    format, version: define the meaning of the bytes (`hotkv_sparse.formats`); at most 63 bits.
    shard_bytes: of a sketch per shard, in the slot's order.

    Raises ValueError if a number is out of range.
    """

    group_index: int
    format: str
    version: int
    shard_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.group_index < MAX_GROUPS:
            raise ValueError(
                f"group_index is {self.group_index}; give the index of a KV cache group"
            )
        if not 0 < len(self.format) <= MAX_NAME:
            raise ValueError(
                f"format has {len(self.format)} characters; allowed are 1 to {MAX_NAME}"
            )
        if not 0 <= self.version < 1 << 63:
            raise ValueError(
                f"version is {self.version}; it must not be negative and must fit 63 bits"
            )
        if not self.shard_bytes or min(self.shard_bytes) < 0 or sum(self.shard_bytes) == 0:
            raise ValueError(
                f"shard_bytes is {self.shard_bytes}; sizes can't be negative, and one shard at "
                "least holds bytes"
            )

    @cached_property
    def slot_bytes(self) -> int:
        return sum(self.shard_bytes)


@dataclass(frozen=True)
class KeySpace:
    """All that determines the bytes of a block; fields as in `hotkv.v1.KeySpace`.

    `model` must not be a path: the same weights in another folder are the same model.
    """

    model: str
    weights_identity: str
    dtype: str
    groups: tuple[GroupSpec, ...]
    hash_block_tokens: int
    kv_dtype: str = "auto"
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    hash_bytes: int = 32
    parallel_shape: str = "tp=1,pp=1"
    page_format: str = ""
    tenant: str = ""
    extra: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not MIN_HASH_BYTES <= self.hash_bytes <= MAX_HASH_BYTES:
            raise ValueError(
                f"hash_bytes is {self.hash_bytes}; allowed are {MIN_HASH_BYTES} to {MAX_HASH_BYTES}"
            )
        if self.hash_block_tokens <= 0:
            raise ValueError(f"hash_block_tokens is {self.hash_block_tokens}; it must be positive")
        if not 0 < len(self.groups) <= MAX_GROUPS:
            raise ValueError(
                f"groups has {len(self.groups)} entries; a key space has 1 to {MAX_GROUPS} KV "
                "cache groups"
            )
        for index, group in enumerate(self.groups):
            if group.block_tokens % self.hash_block_tokens:
                raise ValueError(
                    f"groups[{index}].block_tokens {group.block_tokens} is no multiple of "
                    f"hash_block_tokens {self.hash_block_tokens}"
                )
            if len(group.shard_bytes) != len(self.groups[0].shard_bytes):
                raise ValueError(
                    f"groups[{index}].shard_bytes has another number of shards than groups[0]"
                )
        if not self.weights_identity:
            raise ValueError(
                "weights_identity is empty; give a revision or a content hash of the weights"
            )

    @cached_property
    def num_shards(self) -> int:
        """Number of ranks that hold different KV."""
        return len(self.groups[0].shard_bytes)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over the canonical JSON of all fields, 32 bytes."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"hotkv-key-space-1\0" + text.encode()).digest()

    def group_salt(self, group_index: int) -> int:
        """64 bits that the block table mixes into hashes: equal hashes of two groups or key
        spaces are different keys."""
        digest = hashlib.sha256(self.fingerprint + group_index.to_bytes(4, "little")).digest()
        return int.from_bytes(digest[:8], "little")

    def sketch_salt(self, sketch: Sketch) -> int:
        """As `group_salt`, for a kind of sketch."""
        text = json.dumps(asdict(sketch), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        digest = hashlib.sha256(b"hotkv-sketch-1\0" + self.fingerprint + text.encode()).digest()
        return int.from_bytes(digest[:8], "little")


def signed_salt(salt: int) -> int:
    return salt - (1 << 64) if salt >> 63 else salt


def unsigned_salt(number: int) -> int:
    """Inverse of `signed_salt`."""
    return number & ((1 << 64) - 1)


def group_hashes(
    hashes: Sequence[bytes], hash_block_tokens: int, block_tokens: int
) -> Sequence[bytes]:
    """A group's block has the last of the engine's hashes within it.

    hashes: one per `hash_block_tokens`, of which `block_tokens` is a multiple.
    """
    step = block_tokens // hash_block_tokens
    return hashes if step == 1 else hashes[step - 1 :: step]


def _sha256_pickle(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


TOKEN_HASH_ALGORITHMS: dict[str, Callable[[object], bytes]] = {"sha256": _sha256_pickle}
"""Of vLLM's block hashes, those that `token_block_hashes` can compute."""


def token_block_hashes(
    token_ids: Sequence[int], block_tokens: int, algorithm: str, seed: str
) -> list[bytes]:
    """Hashes a plain prompt (no images, no adapter, no salt) as vLLM does, once per full block. The
    hash of `seed` (`KeySpace.hash_seed`) is the first parent.

    Source: `hash_block_tokens` and `init_none_hash` in vLLM 0.32. Raises ValueError for an
        algorithm that is not in TOKEN_HASH_ALGORITHMS.
    """
    if algorithm not in TOKEN_HASH_ALGORITHMS:
        raise ValueError(
            f"hash_algorithm {algorithm!r} can't be recomputed from tokens; allowed: "
            f"{sorted(TOKEN_HASH_ALGORITHMS)}"
        )
    hash_function = TOKEN_HASH_ALGORITHMS[algorithm]
    parent = hash_function(seed)
    hashes = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = hash_function(
            (parent, tuple(int(t) for t in token_ids[start : start + block_tokens]), None)
        )
        hashes.append(parent)
    return hashes
