"""Sends hints about cached blocks to the server, for routers, and reads their outcomes (what the
server has done about each hint)."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotkv_client import channels
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.types import NO_CREDENTIALS, Credentials
from hotkv_client.wire import admin as _wire
from hotkv_proto.errors import HotKVError


class HintClient:
    """A client of the server's HintService, for one tenant. For one thread.

    Each call blocks for at most `timeout_s`. It raises HotKVError if the server refuses or does not
    answer.

    tenant: the tenant whose blocks the hints name; empty if the server has no tenants.
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

    def __exit__(self, *raised: object) -> None:
        self._channel.close()

    def send(
        self, envelope: Mapping[str, Any], key_space_id: int = 0, hashes: Sequence[bytes] = ()
    ) -> list[dict[str, Any]]:
        """Sends an envelope: a set of actions on blocks, such as `pin` or `prefetch`, with the
        fields of vLLM's `kv_hints`. Returns the outcomes of the actions that are known so far.

        key_space_id, hashes: a prompt, named by its key space and block hashes. Actions that name
            no user session apply to the blocks of this prompt.
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
        """Returns the outcomes that have changed since an earlier call, and the cursor for the next
        call.

        message_id: only outcomes of the envelope with this id; empty: of all envelopes.
        cursor: the cursor that the earlier call returned; 0: all known outcomes.
        page_size: largest number of outcomes; 0: the server's default.
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
        """Fetches a ticket, which proves to the server which user this process runs as.

        Returns empty bytes over TCP, without a tenant, or if no ticket can be fetched. A server
        without tenants needs no ticket.
        """
        path = descriptor_socket(self._target)
        if path is None or not self._tenant:
            return b""
        try:
            return fetch_ticket(path, self._timeout_s)
        except (HotKVError, OSError):
            return b""
