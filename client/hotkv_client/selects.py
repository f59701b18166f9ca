"""A stream of selections that the server makes, for engines that can't map its memory, and for
inspection.

Selections run one at a time. The first opens the stream, which ends with its session.

For a sequence with `SelectConfig.hot_blocks` the server records the hot set. The record begins
empty with each stream: all decode steps of a sequence must use the same.
"""

import queue
from typing import Any

import grpc

from hotkv_client.types import Float32s, SelectedBlocks
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_client.wire.call_errors import as_error
from hotkv_proto.errors import HotKVError, Reason, SessionLostError

CLOSED = "the session was closed during a selection"


class Selects:
    """For one thread. Must be closed, or used in a `with` block."""

    def __init__(self, stub: _sparse_wire.Stub, session_id: str) -> None:
        self._stub = stub
        self._session_id = session_id
        self._outbox: queue.SimpleQueue[_sparse_wire.SelectRequest | None] = queue.SimpleQueue()
        self._call: Any = None

    def __enter__(self) -> "Selects":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def select(
        self,
        sequence_id: str,
        layer_index: int,
        query_QD: Float32s,
        context_tokens: int,
        always_log_mass_Q: Float32s | None = None,
        *,
        shard_index: int = 0,
    ) -> SelectedBlocks:
        """Selects the blocks that a layer should attend to. Waits for the answer.

        Raises HotKVError if the server refuses, SessionLostError if the session is closed
        meanwhile. Ctrl-C ends the stream.

        sequence_id: created with a `SelectConfig`.
        layer_index: one of `SelectConfig.layer_indices`.
        query_QD: float32 [query heads of the shard, head size], after positional encoding.
        context_tokens: to which the query attends.
        always_log_mass_Q: float32 [query heads]: log of the sum of exp(score) over the always
            selected blocks; without it, it is estimated from their sketches.
        shard_index: of the query's heads.
        """
        self._outbox.put(
            _sparse_wire.select_request(
                self._session_id,
                sequence_id,
                layer_index,
                query_QD,
                context_tokens,
                always_log_mass_Q,
                shard_index,
            )
        )
        try:
            if self._call is None:
                self._call = _sparse_wire.select_blocks(self._stub, iter(self._outbox.get, None))
            response = next(self._call, None)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                raise SessionLostError(CLOSED) from error
            raise as_error(error) from error
        except ValueError as error:  # The channel is closed.
            raise SessionLostError(CLOSED) from error
        except BaseException:
            # The next selection would take a late answer for its own.
            self.close()
            raise
        if response is None:
            raise SessionLostError("the server ended the stream of selections")
        try:
            return _sparse_wire.selected(response)
        except ValueError as error:
            why = f"the answer to a selection can't be read: {error}"
            raise HotKVError(Reason.INTERNAL, why) from error

    def close(self) -> None:
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
