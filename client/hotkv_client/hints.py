"""Sends routers' hints to the server, and reads their outcomes."""

from collections.abc import Mapping, Sequence
from typing import Any

from hotkv_client import channels
from hotkv_client.targets import NO_CREDENTIALS, Credentials, descriptor_socket
from hotkv_client.tickets import fetch_ticket
from hotkv_client.wire import admin as _wire
from hotkv_proto.errors import HotKVError


class HintClient:
    """For one tenant and one thread. Calls block for at most `timeout_s`, and raise HotKVError if
    the server refuses or does not answer.

    tenant: empty if the server has none.
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
        """Sends an envelope of actions, with the fields of vLLM's `kv_hints`. Returns the outcomes
        known so far.

        key_space_id, hashes: the prompt for actions that name no user session.
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
        """Outcomes that have changed since `cursor`, and the next cursor.

        message_id: of an envelope; empty: all.
        cursor: 0: all known outcomes.
        page_size: 0: the server's default.
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
        """Proves this process's user. Empty over TCP, without a tenant, or if none can be
        fetched."""
        path = descriptor_socket(self._target)
        if path is None or not self._tenant:
            return b""
        try:
            return fetch_ticket(path, self._timeout_s)
        except (HotKVError, OSError):
            return b""
