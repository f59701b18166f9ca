"""What gRPC services share: the objects of their listener (`Edge`), the functions that serve
calls (`calls_of`), and the prompt that a call names (`prompt_hashes`)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hotkv_proto.errors import invalid
from hotkv_proto.keys import KeySpace, token_block_hashes
from hotkv_proto.messages import arrays
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.table import Words
from hotkv_proto.v1 import cache_pb2
from hotkv_server.cache.values import HashList
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.security.identity import AccessControl, Peer
from hotkv_server.wire import calls
from hotkv_server.wire.guard.limits import Pace, SessionlessCalls

MAX_SELECT_STREAMS = 64
"""Of SelectBlocks on a listener; they also count among all its calls (`wire.server.MAX_CALLS`)."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The objects of one listener, a socket or port.

    identify: the peer of a call, from its message, which may have a ticket, and its context. Raises
        HotKVError if the peer's proof is not valid.
    pace: delays answers to malformed messages.
    guests: bounds the calls that may last without a session.
    has_descriptor_socket: True if this listener's clients can use it.
    """

    node: Node
    access: AccessControl
    identify: Callable[[Any, Any], Peer]
    pace: Pace
    guests: SessionlessCalls
    has_descriptor_socket: bool


def full_name(module: Any, service: str) -> str:
    """With the package. `module`: the generated module that defines the service."""
    return str(module.DESCRIPTOR.services_by_name[service].full_name)


class Calls(Protocol):
    """The calls of the module `calls` that a capability may wrap, for example to trace them."""

    def lookup(
        self, node: Node, session: LiveSession | None, request: cache_pb2.LookupRequest
    ) -> "cache_pb2.LookupResponse | asyncio.Task[cache_pb2.LookupResponse]": ...
    def acquire(
        self, node: Node, session: LiveSession, request: cache_pb2.AcquireLeaseRequest
    ) -> "cache_pb2.AcquireLeaseResponse | asyncio.Task[cache_pb2.AcquireLeaseResponse]": ...
    def load(
        self, node: Node, session: LiveSession, request: cache_pb2.LoadRequest
    ) -> "asyncio.Future[TransferEnd]": ...
    async def store(
        self, node: Node, session: LiveSession, request: cache_pb2.StoreRequest
    ) -> "asyncio.Future[TransferEnd]": ...


def calls_of(node: Node) -> Calls:
    """The functions of `calls`, traced if spans are exported."""
    traced = node.offers.traced
    return calls if traced is None else traced(calls)


def prompt_hashes(space: KeySpace, hashes: bytes, token_ids: bytes) -> Words:
    """A prompt's hashes, words [n, 8]: a row for each full hash block of `hash_block_tokens`
    tokens.

    hashes: packed; if empty, they are computed from the tokens.
    token_ids: packed int32.

    Takes long for long prompts. Raises INVALID_HASH, and INVALID_FIELD if the key space's hashes
    can't be computed from tokens.
    """
    if hashes:
        return read_hashes("hashes", hashes, space.hash_bytes)
    tokens = arrays.int32s("token_ids", token_ids)
    try:
        computed = token_block_hashes(
            tokens.tolist(), space.hash_block_tokens, space.hash_algorithm, space.hash_seed
        )
    except ValueError as error:
        raise invalid(f"token_ids: {error}; give hashes instead") from error
    return read_hashes("token_ids", b"".join(computed), space.hash_bytes)


def of_groups(space: KeySpace, hashes: Words) -> list[HashList]:
    """A list of block hashes for each group. A block of several hash blocks has the hash of its
    last.

    hashes: one for each hash block of the prompt.
    """
    steps = [group.block_tokens // space.hash_block_tokens for group in space.groups]
    return [
        HashList(index, np.ascontiguousarray(hashes[step - 1 :: step]))
        for index, step in enumerate(steps)
    ]
