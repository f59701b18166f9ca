"""Admin calls for people and scripts: plain values in, plain values out."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from hotkv_client import channels
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.types import NO_CREDENTIALS, Credentials, WatchedRequest
from hotkv_client.wire import admin as _admin_wire
from hotkv_proto.errors import HotKVError

DEFAULT_TARGET = "unix:/run/hotkv/grpc.sock"
EXPORT_TIMEOUT_S = 300.0
CHANGING = frozenset(("evict", "flush", "drain"))
"""Calls that change something: the server writes down who made them."""
TICKET_KEY = "hotkv-ticket-bin"


class AdminClient:
    """One channel to the server. Calls block, at most `timeout_s` each, and raise HotKVError.

    `target`: as for sessions; of a Unix target the admin socket beside it is used. Raises
    HotKVError for credentials that can't be used.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        timeout_s: float = 10.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._metadata = channels.metadata(target, credentials)
        self._channel = channels.open_channel(channels.admin_target(target), credentials)
        self._stubs = _admin_wire.Stubs(self._channel)
        self._warm_start = _admin_wire.WarmStartStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def ping(self, service: str = "") -> bool:
        """Returns whether the server serves; asks on the engines' socket. `service` "live": whether
        it is in order, even if it only drains."""
        with channels.open_channel(self._target, self._credentials) as channel:
            return _admin_wire.is_serving(channel, service, self._timeout_s, self._metadata)

    def tell(self, topic: str = "", **filters: str | float) -> dict[str, Any]:
        """What the server says of a topic, as JSON has it; the topics and their filters if none is
        named. docs/told.md has the fields."""
        given = {name: str(value) for name, value in filters.items() if value}
        return _admin_wire.tell(self._stubs, topic, self._timeout_s, self._metadata, given)

    def info(self) -> dict[str, Any]:
        """Version, epoch, state, devices, and `counters` by name."""
        return self.tell("server")

    def tiers(self) -> list[dict[str, Any]]:
        """Tiers with capacity and use."""
        return list(self.tell("tiers")["tiers"])

    def key_spaces(self, key_space_id: int = 0) -> list[dict[str, Any]]:
        """Key spaces with what they hold, or one."""
        return list(self.tell("key_spaces", key_space_id=key_space_id)["key_spaces"])

    def sessions(self) -> list[dict[str, Any]]:
        """Live sessions."""
        return list(self.tell("sessions")["sessions"])

    def blocks(
        self, key_space_id: int = 0, page_size: int = 0, page_token: str = ""
    ) -> dict[str, Any]:
        """One page of blocks, with `next_page_token`."""
        return self.tell(
            "blocks", key_space_id=key_space_id, page_size=page_size, page_token=page_token
        )

    def evict(
        self,
        key_space_id: int = 0,
        group_index: int = 0,
        hashes: bytes = b"",
        *,
        everything: bool = False,
    ) -> dict[str, Any]:
        """Drops the named blocks, or with `everything` all of a key space (0: of every)."""
        return self._call(
            "evict",
            key_space_id=key_space_id,
            group_index=group_index,
            hashes=hashes,
            all=everything,
        )

    def flush(self, key_space_id: int) -> dict[str, Any]:
        """Forgets a key space's blocks, also pinned ones."""
        return self._call("flush", key_space_id=key_space_id)

    def watch_requests(
        self, key_space_id: int = 0, seconds: float = 0
    ) -> Iterator[tuple[list[WatchedRequest], int]]:
        """Requests that engines report, as they come, and how many were missed after them. The
        first answer is empty: from there on all is seen. Ends after `seconds`; 0 for never.
        """
        return _admin_wire.watch_requests(self._stubs, key_space_id, seconds, self._metadata)

    def events(
        self, key_space_id: int = 0, seconds: float = 0, *, tiers: bool = False
    ) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Events as they come, and how many were missed after them. First answer and end as for
        `watch_requests`. `tiers`: also of blocks in tiers; else of host memory only."""
        return _admin_wire.subscribe(self._stubs, key_space_id, seconds, tiers, self._metadata)

    def drain(self, timeout_s: float = 0) -> dict[str, Any]:
        """Begins to drain; the server stops when all has ended or the time is up."""
        return self._call("drain", timeout_ms=int(timeout_s * 1000))

    def explain(
        self,
        key_space_id: int = 0,
        hashes: bytes = b"",
        token_ids: bytes = b"",
        session_id: str = "",
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """Of each block of a prompt, would it hit, and why not. `token_ids`: packed little-endian
        int32. `session_id`: in place of a prompt, of the latest ones of this session, of one
        `tenant` or of all."""
        answer = self._call(
            "explain",
            key_space_id=key_space_id,
            hashes=hashes,
            token_ids=token_ids,
            session_id=session_id,
            tenant=tenant,
        )
        return list(answer["key_spaces"])

    def export_blocks(self, key_space_id: int, byte_count: int = 0) -> Iterator[Any]:
        """The key space as JSON has it, then the hottest blocks that take so many bytes (0: all),
        in parts: group index and packed hashes."""
        return _admin_wire.export(
            self._warm_start, key_space_id, byte_count, EXPORT_TIMEOUT_S, self._metadata
        )

    def prefetch_blocks(
        self,
        key_space: dict[str, Any] | int,
        groups: _admin_wire.NamedGroups = (),
        prompts: Sequence[tuple[bytes, bytes]] = (),
        wait_s: float = 0,
    ) -> dict[str, Any]:
        """Brings blocks in from lower tiers, and says where they lie now. `key_space`: as
        `export_blocks` gave it, or a number. `prompts`: packed hashes or packed token ids."""
        return _admin_wire.prefetch(
            self._warm_start, key_space, groups, prompts, wait_s, self._timeout_s, self._signed()
        )

    def explain_session(self, session_id: str, tenant: str = "") -> list[dict[str, Any]]:
        """Where each block of the sessions of this name lies, and what was asked for them: one
        answer a tenant."""
        told = self.hints(session_id=session_id, tenant=tenant)
        spaces = self.explain(session_id=session_id, tenant=tenant)
        idle_s = {one["tenant"]: one["idle_s"] for one in told["sessions"]}
        tenants = dict.fromkeys([*idle_s, *(one["tenant"] for one in told["outcomes"])])
        return [
            {
                "tenant": name,
                "idle_s": idle_s.get(name, 0.0),
                "key_spaces": [one for one in spaces if one["tenant"] == name],
                "outcomes": [one for one in told["outcomes"] if one["tenant"] == name],
            }
            for name in tenants
        ]

    def hints(
        self, message_id: str = "", page_size: int = 0, session_id: str = "", tenant: str = ""
    ) -> dict[str, Any]:
        """The latest `outcomes` of routers' hints, of all tenants, and what `tenants` have."""
        return self.tell(
            "hints",
            message_id=message_id,
            page_size=page_size,
            session_id=session_id,
            tenant=tenant,
        )

    def residencies(self, page_size: int = 0) -> dict[str, Any]:
        """Residencies, those with the most room first, the engines that wait for room, and
        totals."""
        return self.tell("residencies", page_size=page_size)

    def savings(self, since_s: float = 0.0) -> dict[str, Any]:
        """What the cache has brought, a row an engine, and what a larger one would bring, by the
        requests of the last seconds; 0 for all."""
        return self.tell("savings", since_s=since_s)

    def sparse_layers(self) -> list[dict[str, Any]]:
        """Counters of sparse decode per engine and layer, and figures derived from them."""
        return list(self.tell("sparse_layers")["layers"])

    def _call(self, name: str, **fields: Any) -> dict[str, Any]:
        metadata = self._signed() if name in CHANGING else self._metadata
        return _admin_wire.call(self._stubs, name, self._timeout_s, metadata, **fields)

    def _signed(self) -> channels.Metadata:
        """Metadata that also say who calls, for the server's audit log. Without them if the server
        gives this user no ticket."""
        path = descriptor_socket(self._target)
        if path is None:
            return self._metadata
        try:
            return (*self._metadata, (TICKET_KEY, fetch_ticket(path, self._timeout_s)))
        except (OSError, HotKVError):
            return self._metadata
