"""Helpers for the gRPC services. `Edge` has the objects of a listener (socket or port). `calls_of`
returns the functions that serve calls; optional parts of the server may have wrapped them, for
example to trace them. `prompt_hashes` reads the prompt that a call names."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hotkv_proto.errors import invalid
from hotkv_proto.keys import KeySpace, token_block_hashes
from hotkv_proto.messages import fields
from hotkv_proto.messages.cache import read_hashes
from hotkv_proto.table import Words
from hotkv_proto.v1 import cache_pb2
from hotkv_server.cache.values import HashList
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import Node
from hotkv_server.node.transfers import TransferEnd
from hotkv_server.security.identity import AccessControl, Peer
from hotkv_server.wire import calls
from hotkv_server.wire.guard.limits import Guests, Pace

MAX_SELECT_STREAMS = 64
"""Most streams of the call SelectBlocks on a listener. These streams also count among all calls of
the listener (`wire.server.MAX_CALLS`)."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The objects of one listener (socket or port), which its services use.

    access: decides for which tenant a peer may open sessions.
    identify: function that returns the peer of a call, with the identity that the peer has proven.
        Its arguments are the call's message, which may have a ticket, and the call's context.
        Raises HotKVError if the proof (for example the ticket) is not valid.
    pace: delays answers to malformed messages.
    guests: bounds the calls that may last without a session.
    has_descriptor_socket: True if clients of this listener can use the descriptor socket.
    """

    node: Node
    access: AccessControl
    identify: Callable[[Any, Any], Peer]
    pace: Pace
    guests: Guests
    has_descriptor_socket: bool


def full_name(module: Any, service: str) -> str:
    """Returns the full name of a gRPC service, with its package. `module`: the generated module
    that defines the service."""
    return str(module.DESCRIPTOR.services_by_name[service].full_name)


class Calls(Protocol):
    """The calls that a capability (optional part of the server) may wrap, for example to trace
    them. The module `calls` implements them."""

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
    """Returns the functions that serve the calls in `Calls`: the functions of the module `calls`,
    wrapped by the capabilities (optional parts) of this node (`Capability.traced`)."""
    served: Calls = calls
    for one in node.capabilities:
        served = one.traced(served)
    return served


# A call names a prompt by its hashes or by its tokens.


def prompt_hashes(space: KeySpace, hashes: bytes, token_ids: bytes) -> Words:
    """Returns the block hashes of a prompt, words [n, 8]: a row for each full hash block (of
    `hash_block_tokens` tokens).

    hashes: packed hashes of the prompt; if empty, the hashes are computed from the tokens.
    token_ids: the prompt's tokens, packed int32; not used if `hashes` is given.

    Takes long for long prompts, so it is called on a thread. Raises INVALID_HASH if `hashes` is not
    valid, INVALID_FIELD if the key space's hashes can't be computed from tokens.
    """
    if hashes:
        return read_hashes("hashes", hashes, space.hash_bytes)
    tokens = fields.int32s("token_ids", token_ids)
    try:
        computed = token_block_hashes(
            tokens.tolist(), space.hash_block_tokens, space.hash_algorithm, space.hash_seed
        )
    except ValueError as error:
        raise invalid(f"token_ids: {error}; give hashes instead") from error
    return read_hashes("token_ids", b"".join(computed), space.hash_bytes)


def of_groups(space: KeySpace, hashes: Words) -> list[HashList]:
    """Returns the blocks of a prompt: a list of block hashes for each group. A group's blocks may
    have more tokens than a hash block (`hash_block_tokens`, the tokens that a hash covers). Such a
    block has the hash of the last hash block in it.

    hashes: the prompt's hashes, one for each hash block.
    """
    steps = [group.block_tokens // space.hash_block_tokens for group in space.groups]
    return [
        HashList(index, np.ascontiguousarray(hashes[step - 1 :: step]))
        for index, step in enumerate(steps)
    ]
