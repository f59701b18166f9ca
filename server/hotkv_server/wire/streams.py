"""Server streams over a feed: the part that both kinds share.

The first answer is empty and says that reading has begun. A reader that is too slow misses items
and is told how many.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from hotkv_server.node.broadcast import Feeds, Measured
from hotkv_server.node.node import Node
from hotkv_server.wire.errors import abort, as_refusal

Item = TypeVar("Item", bound=Measured)
Part = TypeVar("Part", bound=Message)
Response = TypeVar("Response", bound=Message)

MAX_RESPONSE_BYTES = 4 << 20
MAX_RESPONSE_ITEMS = 256


async def stream(
    context: Any,
    node: Node,
    key_space_id: int,
    feeds: Feeds[Item],
    message: Callable[[Item], Part | None],
    response: Callable[[list[Part], int], Response],
) -> AsyncIterator[Response]:
    """Answers until the client ends the call; refuses an unknown key space.

    `message` puts an item on the wire; None for an item that the client did not ask for.
    """
    try:
        if key_space_id:
            node.core.key_space(key_space_id)
        with feeds.reader() as feed:
            yield response([], 0)
            while True:
                items, lost = await feed.get(MAX_RESPONSE_ITEMS)
                parts: list[Part] = []
                num_bytes = 0
                for part in filter(None, map(message, items)):
                    if num_bytes + part.ByteSize() > MAX_RESPONSE_BYTES and parts:
                        yield response(parts, 0)
                        parts, num_bytes = [], 0
                    parts.append(part)
                    num_bytes += part.ByteSize()
                if parts or lost:
                    yield response(parts, lost)
    except Exception as error:  # noqa: BLE001 The edge of server streams: every failure is an answer.
        await abort(context, as_refusal(node, error, f"peer={context.peer()}"))
