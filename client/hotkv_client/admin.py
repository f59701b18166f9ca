"""Admin calls for operators and scripts, in plain Python values."""

from collections.abc import Iterator, Sequence
from typing import Any

from hotkv_client import channels
from hotkv_client.targets import (
    DEFAULT_TARGET,
    NO_CREDENTIALS,
    Credentials,
    admin_target,
    descriptor_socket,
)
from hotkv_client.tickets import fetch_ticket
from hotkv_client.wire import admin as _admin_wire
from hotkv_client.wire.admin import WatchedRequest
from hotkv_proto.errors import HotKVError
from hotkv_proto.messages.fields import whole_ms

EXPORT_TIMEOUT_S = 300.0
CHANGING = frozenset(("evict", "flush", "drain", "resize"))
"""Calls that change the server's state, and whose callers its audit log records."""
TICKET_KEY = "hotkv-ticket-bin"


class AdminClient:
    """Calls block for at most `timeout_s`, except the streams (`watch_requests`, `events`) and
    `export_blocks`, and raise HotKVError if the server refuses or does not answer. So does the
    constructor for credentials that can't be used.

    target: `unix:/path/grpc.sock` or `host:port`. For a Unix socket, calls go to `admin.sock`
        beside it.
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
        self._channel = channels.open_channel(admin_target(target), credentials)
        self._stubs = _admin_wire.Stubs(self._channel)
        self._warm_start = _admin_wire.WarmStartStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, *raised: object) -> None:
        self._channel.close()

    def ping(self, service: str = "") -> bool:
        """Asks gRPC's health service, on the engines' socket.

        service: "live": healthy, even while the server drains; empty: accepts work.
        """
        with channels.open_channel(self._target, self._credentials) as channel:
            return _admin_wire.is_serving(channel, service, self._timeout_s, self._metadata)

    def tell(self, topic: str = "", **filters: str | float) -> dict[str, Any]:
        """One of the server's reports, as parsed JSON. docs/monitoring_api.md lists topics, filters
        and fields.

        topic: such as `savings`; empty: the names of all topics and their filters.
        filters: such as `since_s`.
        """
        given = {name: str(value) for name, value in filters.items() if value}
        return _admin_wire.tell(self._stubs, topic, self._timeout_s, self._metadata, given)

    def info(self) -> dict[str, Any]:
        """Version, epoch, state, devices, and `counters` by name. The epoch changes when the
        server loses the cache's contents."""
        return self.tell("server")

    def tiers(self) -> list[dict[str, Any]]:
        return list(self.tell("tiers")["tiers"])

    def key_spaces(self, key_space_id: int = 0) -> list[dict[str, Any]]:
        """key_space_id: 0: all."""
        return list(self.tell("key_spaces", key_space_id=key_space_id)["key_spaces"])

    def sessions(self) -> list[dict[str, Any]]:
        return list(self.tell("sessions")["sessions"])

    def blocks(
        self,
        key_space_id: int = 0,
        page_size: int = 0,
        page_token: str = "",
        hash_prefix: str = "",
    ) -> dict[str, Any]:
        """A page of the list of blocks, with a `next_page_token`.

        key_space_id: 0: all.
        page_size: 0: the server's default.
        page_token: of the previous page; empty: the first page.
        hash_prefix: hexadecimal digits with which hashes begin.
        """
        return self.tell(
            "blocks",
            key_space_id=key_space_id,
            page_size=page_size,
            page_token=page_token,
            hash_prefix=hash_prefix,
        )

    def hot_blocks(self, key_space_id: int = 0, page_size: int = 0) -> list[dict[str, Any]]:
        """The blocks that would be evicted last, the very last first.

        key_space_id: 0: all.
        page_size: 0: the server's default.
        """
        answer = self.tell("hot_blocks", key_space_id=key_space_id, page_size=page_size)
        return list(answer["blocks"])

    def evict(
        self,
        key_space_id: int = 0,
        group_index: int = 0,
        hashes: bytes = b"",
        *,
        everything: bool = False,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Drops unpinned blocks: those of the packed `hashes`, or, with `everything`, all of a key
        space.

        key_space_id: with `everything`, 0 means all.
        dry_run: drops none, and says what a real call would drop.
        """
        return self._call(
            "preview_evict" if dry_run else "evict",
            key_space_id=key_space_id,
            group_index=group_index,
            hashes=hashes,
            all=everything,
        )

    def flush(self, key_space_id: int) -> dict[str, Any]:
        """Drops pinned blocks too."""
        return self._call("flush", key_space_id=key_space_id)

    def watch_requests(
        self, key_space_id: int = 0, seconds: float = 0
    ) -> Iterator[tuple[list[WatchedRequest], int]]:
        """Yields the next requests that engines reported, and how many after them were missed
        because the caller read too slowly.

        The first pair is empty; every later request is yielded or counted. Ends after `seconds`;
        0: never.
        """
        return _admin_wire.watch_requests(self._stubs, key_space_id, seconds, self._metadata)

    def events(
        self,
        key_space_id: int = 0,
        seconds: float = 0,
        *,
        tiers: bool = False,
        state: bool = False,
    ) -> Iterator[tuple[list[dict[str, Any]], int]]:
        """Yields the next cache events, and how many after them were missed because the caller read
        too slowly.

        The first pair is empty; every later event is yielded or counted. Ends after `seconds`; 0:
        never.

        tiers: also events of lower tiers.
        state: begin with the cached blocks whose tokens the server knows.
        """
        return _admin_wire.subscribe(
            self._stubs, key_space_id, seconds, tiers, state, self._metadata
        )

    def drain(self, timeout_s: float = 0) -> dict[str, Any]:
        """Returns when draining has begun. The server stops when all work has ended or `timeout_s`
        has passed.

        timeout_s: 0: the server's default.
        """
        return self._call("drain", timeout_ms=whole_ms(timeout_s))

    def resize(self, arena_bytes: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Makes the arena larger or smaller, until the next start. Returns its size, and what moved
        and went.

        timeout_s: for which a smaller one waits for pinned blocks.
        """
        return self._call(
            "resize",
            lasts_s=timeout_s,
            arena_byte_count=arena_bytes,
            timeout_ms=whole_ms(timeout_s),
        )

    def explain(
        self,
        key_space_id: int = 0,
        hashes: bytes = b"",
        token_ids: bytes = b"",
        session_id: str = "",
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """Whether a lookup would hit each block of a prompt, and if not, why. One entry per key
        space.

        Name the prompt by one of:
        hashes: packed block hashes.
        token_ids: packed little-endian int32.
        session_id: the latest prompts of this user session, of `tenant` or of all.
        """
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
        """Yields the key space as a dict, then lists that name its blocks, as pairs of group index
        and packed hashes; in all of them, blocks that would be evicted last come first.

        byte_count: approximate size of the named blocks; 0: all.
        """
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
        """Promotes blocks to host memory. Returns how many were there before, were promoted, are
        still in a lower tier, and are in no tier.

        key_space: the dict of `export_blocks`, or an id.
        groups: pairs of group index and packed hashes.
        prompts: pairs of packed hashes and packed token ids, one of which may be empty.
        wait_s: how long the server may wait for the promotions; 0: 10 s.
        """
        return _admin_wire.prefetch(
            self._warm_start, key_space, groups, prompts, wait_s, self._timeout_s, self._signed()
        )

    def explain_session(self, session_id: str, tenant: str = "") -> list[dict[str, Any]]:
        """A dict for each tenant with such a user session, or whose hints named it: where the
        session's blocks are, which hints named them, and totals of its requests (prompt tokens,
        hits, saved time)."""
        told = self.hints(session_id=session_id, tenant=tenant)
        spaces = self.explain(session_id=session_id, tenant=tenant)
        known = {one["tenant"]: one for one in told["sessions"]}
        tenants = dict.fromkeys([*known, *(one["tenant"] for one in told["outcomes"])])
        return [
            {
                **known.get(name, {"tenant": name, "idle_s": 0.0}),
                "key_spaces": [one for one in spaces if one["tenant"] == name],
                "outcomes": [one for one in told["outcomes"] if one["tenant"] == name],
            }
            for name in tenants
        ]

    def hints(
        self, message_id: str = "", page_size: int = 0, session_id: str = "", tenant: str = ""
    ) -> dict[str, Any]:
        """Latest `outcomes` of routers' hints, and `tenants` with the totals of each.

        message_id, session_id: limit the outcomes. With `session_id`, also `sessions`: totals of
            its requests per tenant.
        tenant: empty: all.
        """
        return self.tell(
            "hints",
            message_id=message_id,
            page_size=page_size,
            session_id=session_id,
            tenant=tenant,
        )

    def residencies(self, page_size: int = 0) -> dict[str, Any]:
        """Open residencies, largest first, the engines that wait for room, and totals."""
        return self.tell("residencies", page_size=page_size)

    def savings(self, since_s: float = 0.0) -> dict[str, Any]:
        """Time and tokens that the cache has saved, per engine, and an estimate of what more memory
        would have saved.

        since_s: only requests of the last so many seconds; 0: all.
        """
        return self.tell("savings", since_s=since_s)

    def slow(self, page_size: int = 0) -> dict[str, Any]:
        """`requests` that waited longest for the cache and `transfers` that took longest, of the
        last hour at most."""
        return self.tell("slow", page_size=page_size)

    def proof(
        self, request_id: str = "", page_size: int = 0, first_block: int = 0
    ) -> dict[str, Any]:
        """`requests`: what the latest loaded, the newest first. If `request_id`, or its first
        characters, name one, with its `blocks` from `first_block` on."""
        return self.tell(
            "proof", request_id=request_id, page_size=page_size, first_block=first_block
        )

    def config(self) -> dict[str, Any]:
        """`settings`: name, value and origin of each; `waiting`: names of those that differ since
        the last reload, and need a restart."""
        return self.tell("config")

    def sparse_layers(self) -> list[dict[str, Any]]:
        """Counters of sparse decode per engine and layer, and figures derived from them."""
        return list(self.tell("sparse_layers")["layers"])

    def _call(self, name: str, *, lasts_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        """`lasts_s`: that the call itself may take."""
        metadata = self._signed() if name in CHANGING else self._metadata
        return _admin_wire.call(self._stubs, name, self._timeout_s + lasts_s, metadata, **fields)

    def _signed(self) -> channels.Metadata:
        """Adds a one-time ticket, by which the audit log identifies the caller, if one can be
        fetched."""
        path = descriptor_socket(self._target)
        if path is None:
            return self._metadata
        try:
            return (*self._metadata, (TICKET_KEY, fetch_ticket(path, self._timeout_s)))
        except (OSError, HotKVError):
            return self._metadata
