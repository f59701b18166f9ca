"""WarmStartService: names of blocks, and calls that bring them in; plain values in and out."""

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from hotkv_client.channels import Metadata
from hotkv_client.wire.admin import plain
from hotkv_client.wire.answers import as_error
from hotkv_proto.messages.fields import enum_word
from hotkv_proto.v1 import cache_pb2, layout_pb2, warm_pb2, warm_pb2_grpc

Stub = warm_pb2_grpc.WarmStartServiceStub
"""Of a channel that is open."""
NamedGroups = Sequence[tuple[int, bytes]]
"""Group index and packed hashes."""


def export(
    stub: Stub, key_space_id: int, byte_count: int, timeout_s: float, metadata: Metadata
) -> Iterator[dict[str, Any] | list[tuple[int, bytes]]]:
    """The key space, as JSON has it, then parts of its hottest blocks. Raises HotKVError."""
    request = warm_pb2.ExportBlocksRequest(key_space_id=key_space_id, byte_count=byte_count)
    try:
        for part in stub.ExportBlocks(request, timeout=timeout_s, metadata=metadata):
            if part.HasField("key_space"):
                yield json_format.MessageToDict(part.key_space, preserving_proto_field_name=True)
            else:
                yield [(group.group_index, group.hashes) for group in part.groups]
    except grpc.RpcError as error:
        raise as_error(error) from error


def prefetch(
    stub: Stub,
    key_space: dict[str, Any] | int,
    groups: NamedGroups,
    prompts: Sequence[tuple[bytes, bytes]],
    wait_s: float,
    timeout_s: float,
    metadata: Metadata,
) -> dict[str, Any]:
    """One call. `key_space`: as `export` gave it, as operators are shown it, or a number.
    `prompts`: hashes or token ids. Raises HotKVError; ValueError for what is no key space."""
    request = warm_pb2.PrefetchBlocksRequest(
        groups=[cache_pb2.GroupHashes(group_index=at, hashes=hashes) for at, hashes in groups],
        prompts=[warm_pb2.NamedPrompt(hashes=hashes, token_ids=ids) for hashes, ids in prompts],
        timeout_ms=int(wait_s * 1000),
    )
    if isinstance(key_space, int):
        request.key_space_id = key_space
    else:
        try:
            named = json_format.ParseDict(_with_numbers(key_space), layout_pb2.KeySpace())
            request.key_space.CopyFrom(named)
        except json_format.ParseError as error:
            raise ValueError(f"key_space: {error}") from error
    try:
        answer = stub.PrefetchBlocks(request, timeout=wait_s + timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        raise as_error(error) from error
    return plain(answer)


def _with_numbers(key_space: dict[str, Any]) -> dict[str, Any]:
    """The key space with the kinds of its groups as numbers where they are words, as `plain` shows
    them."""
    kinds = layout_pb2.KvGroupKind.DESCRIPTOR
    numbers = {enum_word(kinds, number): number for number in kinds.values_by_number}
    groups = [
        {**group, "kind": numbers.get(group.get("kind"), group.get("kind"))}
        for group in key_space.get("groups", ())
    ]
    return {**key_space, "groups": groups}
