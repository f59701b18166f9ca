"""Admin calls for operators and scripts. Calls accept and return plain Python values."""

from collections.abc import Iterator, Sequence
from typing import Any

from hotkv_client import channels
from hotkv_client.link import descriptor_socket, fetch_ticket
from hotkv_client.types import NO_CREDENTIALS, Credentials, WatchedRequest
from hotkv_client.wire import admin as _admin_wire
from hotkv_proto.errors import HotKVError
from hotkv_proto.messages.fields import whole_ms

DEFAULT_TARGET = "unix:/run/hotkv/grpc.sock"
EXPORT_TIMEOUT_S = 300.0
CHANGING = frozenset(("evict", "flush", "drain"))
"""Calls that change the server's state. The server records their callers in its audit log."""
TICKET_KEY = "hotkv-ticket-bin"


class AdminClient:
    """A client of the server's admin API. Calls raise HotKVError if the server refuses or does not
    answer.

    Calls block for at most `timeout_s`, except the streams (`watch_requests`, `events`) and
    `export_blocks`. The constructor raises HotKVError for credentials that can't be used.

    target: `unix:/path/grpc.sock` or `host:port`. For a Unix socket, calls go to `admin.sock` in
        the same folder.
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

    def __exit__(self, *raised: object) -> None:
        self._channel.close()

    def ping(self, service: str = "") -> bool:
        """Asks gRPC's health service whether a service of the server is serving. The call goes to
        the engines' socket, not to the admin socket.

        service: "live": True if the server is healthy, even while it drains (ends its work before
            it stops). Empty: True if the server accepts work.
        """
        with channels.open_channel(self._target, self._credentials) as channel:
            return _admin_wire.is_serving(channel, service, self._timeout_s, self._metadata)

    def tell(self, topic: str = "", **filters: str | float) -> dict[str, Any]:
        """Returns one of the server's reports, as parsed JSON. docs/monitoring_api.md lists the
        topics, their filters and the fields of each report.

        topic: the subject of the report, such as `savings`. Empty: returns the names of all topics
            and the filters of each topic.
        filters: filters of this topic, such as `since_s`.
        """
        given = {name: str(value) for name, value in filters.items() if value}
        return _admin_wire.tell(self._stubs, topic, self._timeout_s, self._metadata, given)

    def info(self) -> dict[str, Any]:
        """Returns the server's version, epoch, state, devices, and `counters` by name. The epoch is
        a number that changes when the server loses the cache's contents."""
        return self.tell("server")

    def tiers(self) -> list[dict[str, Any]]:
        """Returns the tiers with their capacity and use."""
        return list(self.tell("tiers")["tiers"])

    def key_spaces(self, key_space_id: int = 0) -> list[dict[str, Any]]:
        """Returns the key spaces with the number and the total bytes of their blocks. Engines share
        blocks only within a key space (same model, weights and settings).

        key_space_id: limits the list to this key space; 0: all key spaces.
        """
        return list(self.tell("key_spaces", key_space_id=key_space_id)["key_spaces"])

    def sessions(self) -> list[dict[str, Any]]:
        """Returns the live sessions."""
        return list(self.tell("sessions")["sessions"])

    def blocks(
        self,
        key_space_id: int = 0,
        page_size: int = 0,
        page_token: str = "",
        hash_prefix: str = "",
    ) -> dict[str, Any]:
        """Returns a page of the list of blocks, with a `next_page_token`.

        key_space_id: limits the list to this key space; 0: all key spaces.
        page_size: largest number of blocks in the page; 0: the server's default.
        page_token: the `next_page_token` that came with the previous page; empty: the first page.
        hash_prefix: limits the list to hashes that begin with these hexadecimal digits.
        """
        return self.tell(
            "blocks",
            key_space_id=key_space_id,
            page_size=page_size,
            page_token=page_token,
            hash_prefix=hash_prefix,
        )

    def hot_blocks(self, key_space_id: int = 0, page_size: int = 0) -> list[dict[str, Any]]:
        """Returns the blocks that the server would evict last; the very last comes first.

        key_space_id: limits the list to this key space; 0: all key spaces.
        page_size: largest number of blocks; 0: the server's default.
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
        """Drops blocks that are not pinned: the blocks with the packed `hashes` (concatenated), or,
        with `everything`, all blocks of a key space (a model in a configuration).

        key_space_id: the key space; with `everything`, 0 means all key spaces.
        dry_run: drops no blocks; the answer has the blocks and bytes that a real call would drop.
        """
        return self._call(
            "preview_evict" if dry_run else "evict",
            key_space_id=key_space_id,
            group_index=group_index,
            hashes=hashes,
            all=everything,
        )

    def flush(self, key_space_id: int) -> dict[str, Any]:
        """Drops all blocks of a key space, including pinned blocks."""
        return self._call("flush", key_space_id=key_space_id)

    def watch_requests(
        self, key_space_id: int = 0, seconds: float = 0
    ) -> Iterator[tuple[list[WatchedRequest], int]]:
        """Yields pairs: the next requests that engines reported, and the number of requests after
        them that this stream missed because the caller read it too slowly.

        The first pair is empty. Every request that is reported after the first pair is either
        yielded or counted as missed. The stream ends after `seconds`; 0: never.
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
        """Yields pairs: the next cache events, and the number of events after them that this stream
        missed because the caller read it too slowly.

        The first pair is empty. Every event after the first pair is either yielded or counted as
        missed. The stream ends after `seconds`; 0: never.

        tiers: include events of blocks in lower tiers; False: host memory only.
        state: begin with events for the cached blocks whose tokens the server knows.
        """
        return _admin_wire.subscribe(
            self._stubs, key_space_id, seconds, tiers, state, self._metadata
        )

    def drain(self, timeout_s: float = 0) -> dict[str, Any]:
        """Asks the server to drain. The server then refuses new work, and stops when all work has
        ended or `timeout_s` has passed. Returns when draining has begun.

        timeout_s: 0: the server's default.
        """
        return self._call("drain", timeout_ms=whole_ms(timeout_s))

    def explain(
        self,
        key_space_id: int = 0,
        hashes: bytes = b"",
        token_ids: bytes = b"",
        session_id: str = "",
        tenant: str = "",
    ) -> list[dict[str, Any]]:
        """Returns for each block of a prompt whether a lookup would hit the block, and if not, the
        reason. The result has one entry per key space (a model in a configuration).

        Name the prompt by `hashes`, `token_ids` or `session_id`:
        hashes: packed (concatenated) block hashes.
        token_ids: packed little-endian int32.
        session_id: explains the latest prompts of this user session instead of a given prompt.
        tenant: limits `session_id` to this tenant; empty: all tenants.
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
        """Yields the key space (a model in a configuration) as a dict, and then lists that name its
        blocks, those that the server would evict last first. A list has pairs of a group index and
        packed (concatenated) hashes; in each pair the block that would be evicted last comes first.

        byte_count: approximate total size of the named blocks; 0: all blocks.
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
        """Asks the server to promote blocks from lower tiers to host memory. Returns four numbers:
        how many of the blocks were in host memory before, were promoted, are still in a lower tier,
        and are in no tier.

        key_space: the dict that `export_blocks` yielded, or a key space id.
        groups: the blocks, as pairs of a group index and packed (concatenated) hashes.
        prompts: further blocks, named by their prompts. A prompt is a pair of packed hashes and
            packed token ids; one of the two may be empty.
        wait_s: longest time that the server waits for the promotions before it answers; 0: 10 s.
        """
        return _admin_wire.prefetch(
            self._warm_start, key_space, groups, prompts, wait_s, self._timeout_s, self._signed()
        )

    def explain_session(self, session_id: str, tenant: str = "") -> list[dict[str, Any]]:
        """Returns a report about the user sessions with this id: a dict for each tenant that has
        such a session, or whose hints have named this id.

        The dict says where the session's blocks are stored, which hints named these blocks, and the
        totals of the session's requests (prompt tokens, hits, saved time).
        """
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
        """Returns a dict about routers' hints, such as hints to pin or prefetch blocks. `outcomes`
        has the latest outcomes of hints, and `tenants` has the totals of each tenant's hints.

        message_id, session_id: limit the outcomes to this message or user session; empty: all. With
            `session_id`, the dict also has `sessions`: the totals of that session's requests for
            each tenant.
        tenant: limits the answer to this tenant; empty: all tenants.
        """
        return self.tell(
            "hints",
            message_id=message_id,
            page_size=page_size,
            session_id=session_id,
            tenant=tenant,
        )

    def residencies(self, page_size: int = 0) -> dict[str, Any]:
        """Returns the open residencies (largest first), the engines that wait for room for a
        residency, and totals. A residency is the server's record of a running request whose KV is
        in host memory: the room that is reserved for the request's blocks, and the blocks that are
        pinned for it."""
        return self.tell("residencies", page_size=page_size)

    def savings(self, since_s: float = 0.0) -> dict[str, Any]:
        """Returns, per engine, the time and tokens that the cache has saved, and an estimate of
        what a larger cache would have saved in addition.

        since_s: counts only the requests of the last `since_s` seconds; 0: all requests.
        """
        return self.tell("savings", since_s=since_s)

    def sparse_layers(self) -> list[dict[str, Any]]:
        """Returns counters of sparse decode per engine and layer, and figures derived from them."""
        return list(self.tell("sparse_layers")["layers"])

    def _call(self, name: str, **fields: Any) -> dict[str, Any]:
        metadata = self._signed() if name in CHANGING else self._metadata
        return _admin_wire.call(self._stubs, name, self._timeout_s, metadata, **fields)

    def _signed(self) -> channels.Metadata:
        """Returns the metadata of a call, with a one-time ticket. By the ticket the server's audit
        log identifies the caller. If no ticket can be fetched, the metadata has no ticket."""
        path = descriptor_socket(self._target)
        if path is None:
            return self._metadata
        try:
            return (*self._metadata, (TICKET_KEY, fetch_ticket(path, self._timeout_s)))
        except (OSError, HotKVError):
            return self._metadata
