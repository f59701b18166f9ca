"""A stream of selections. In a selection, the server chooses, for a query, the blocks that sparse
attention reads.

Engines that can't map the server's memory use this stream, and so do tools for inspection.
Selections run one at a time: each call waits for its answer. The first selection opens the stream;
the stream ends with its session.

For a sequence (a context) with `SelectConfig.hot_blocks`, the server records the *hot set*: the
blocks that the caller keeps on the device. The record begins empty when a stream opens, and is
dropped with that stream. So use the same stream for all decode steps of a sequence.
"""

import queue
from typing import Any

import grpc

from hotkv_client.types import Float32s, SelectedBlocks
from hotkv_client.wire import answers as _answers
from hotkv_client.wire import sparse as _sparse_wire
from hotkv_proto.errors import HotKVError, Reason, SessionLostError

CLOSED = "the session was closed during a selection"


class Selects:
    """A stream in which the server makes selections (chooses blocks for sparse attention). For one
    thread. Use it in a `with` block, or close it."""

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
        """Selects the blocks that a layer of a sequence (a context that is decoded sparsely) should
        attend to. Waits for the answer.

        Raises HotKVError if the server refuses the selection, SessionLostError if the session is
        closed during the call. If Ctrl-C interrupts the call, the stream of selections ends.

        sequence_id: a sequence that was created with a `SelectConfig`.
        layer_index: one of `SelectConfig.layer_indices` of the sequence.
        query_QD: the query, float32 [query heads of the shard, head size], after positional
            encoding.
        context_tokens: number of the context's tokens to which the query attends.
        always_log_mass_Q: float32 [query heads]: log of the attention mass (sum of exp(score)) of
            the blocks that are always selected (first and recent blocks). None: the server
            estimates this mass from the sketches (compact forms of keys) of these blocks.
        shard_index: the shard (the KV heads of a rank) to which the query's heads belong.
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
            raise _answers.as_error(error) from error
        except ValueError as error:  # The channel is closed.
            raise SessionLostError(CLOSED) from error
        except BaseException:
            # Closes the stream: the answer may still arrive, and the next selection would take it
            # for its own answer.
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
        """Ends the stream."""
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
