"""Sends cache hints to the server outside a request (for routers), and reads their outcomes."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from hotkv_client import channels
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.types import NO_CREDENTIALS, Credentials
from hotkv_client.wire import admin as _wire
from hotkv_proto.errors import HotKVError


class HintClient:
    """A client of the server's HintService, for one tenant. For one thread.

    Calls block for at most `timeout_s` each and raise HotKVError.

    tenant: whose blocks the hints concern; empty if the server has no tenants.
    """

    def __init__(
        self,
        target: str,
        tenant: str = "",
        timeout_s: float = 10.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._target = target
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._metadata = channels.metadata(target, credentials)
        self._channel = channels.open_channel(target, credentials)
        self._stub = _wire.HintStub(self._channel)

    def __enter__(self) -> "HintClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def send(
        self, envelope: Mapping[str, Any], key_space_id: int = 0, hashes: Sequence[bytes] = ()
    ) -> list[dict[str, Any]]:
        """Sends an envelope (a set of hints) with the fields of vLLM's `kv_hints`. Returns an
        outcome for each hint, as far as it is known.

        hashes: hashes of a prompt in the key space `key_space_id`. Actions that name no session
            apply to this prompt.
        """
        return _wire.send_hints(
            self._stub,
            self._tenant,
            envelope,
            key_space_id,
            hashes,
            self._timeout_s,
            self._metadata,
            self._ticket(),
        )

    def outcomes(
        self, message_id: str = "", cursor: int = 0, page_size: int = 0
    ) -> tuple[list[dict[str, Any]], int]:
        """Returns the hints' outcomes that have changed since an earlier call, and the cursor for
        the next call.

        message_id: only outcomes of the envelope with this id; empty: of all envelopes.
        cursor: the number that the earlier call returned; 0: all known outcomes.
        """
        return _wire.poll_hints(
            self._stub,
            self._tenant,
            message_id,
            cursor,
            page_size,
            self._timeout_s,
            self._metadata,
            self._ticket(),
        )

    def _ticket(self) -> bytes:
        """Fetches a ticket, which proves which user this process runs as. Returns empty bytes if
        the server refuses a ticket, over TCP, or if no tenant is set.

        A server without tenants needs no ticket.
        """
        path = descriptor_socket(self._target)
        if path is None or not self._tenant:
            return b""
        try:
            return fetch_ticket(path, self._timeout_s)
        except (HotKVError, OSError):
            return b""
