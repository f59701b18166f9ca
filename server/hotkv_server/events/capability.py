"""Connects events to the node. Imports ZMQ only if the settings name an endpoint."""

import asyncio
import importlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import extras
from hotkv_proto.blocks import RunContent
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupKind
from hotkv_proto.keys import KeySpace
from hotkv_proto.table import Words, is_ready
from hotkv_proto.v1 import events_pb2, events_pb2_grpc, session_pb2
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.values import (
    DISK_TIER,
    BoolMask,
    Entries,
    EvictionNotice,
    HashList,
    Medium,
    Run,
)
from hotkv_server.events.contents import Contents
from hotkv_server.events.drive import (
    EventHub,
    RemovedEvent,
    StoredEvent,
    edges,
    moved_events,
    removed_events,
    stored_events,
)
from hotkv_server.events.questions import PromptIndex
from hotkv_server.events.service import EngineReader, EventService
from hotkv_server.memory.arena import CONTENTS_FILE
from hotkv_server.node.capability import Capability, Service, SessionCall
from hotkv_server.node.health import Health
from hotkv_server.node.live_session import LiveSession
from hotkv_server.node.node import STALLED_WORK_S, Node
from hotkv_server.settings import Settings
from hotkv_server.settings.outlets import EventSettings
from hotkv_server.startup import StartError
from hotkv_server.wire.edge import Edge, full_name

if TYPE_CHECKING:
    from hotkv_server.events.publisher import HasBlocks, ZmqPublisher

log = logging.getLogger(__name__)

TOPICS = {
    "node": "kv@node:{node}@{model}",
    "pool": "kv@pool:{pool}@{model}",
    "engine": "",
}
"""Default topic for each `events.identity`, in the form of llm-d-router#2586. With `engine` the
engines publish, not the server."""
BUFFER_STEPS = 10_000
"""Messages kept for replay, per topic."""
BUFFER_BYTES = 64 << 20
"""That wait to be sent, and as many that are kept for replay; of all topics together. A message
that finds no room is lost. If it was a removal, readers are told to forget the topic's blocks."""
ANSWER_WAIT_S = 1.0
"""How long `check_blocks` waits for shared tiers; the HTTP server answers within 2 s in any
case."""
MOST_NAMES = 16
"""Names per key space under which events are published; bounded, as clients choose them."""


def check(settings: Settings) -> None:
    """Raises StartError if an endpoint is set and ZMQ is not installed."""
    if settings.events.endpoint:
        _zmq()


def check_addresses(settings: Settings) -> None:
    """Raises StartError if another program uses an endpoint that would be bound: binds it for a
    moment. Does not connect to the others, as ZMQ might wait for DNS before it frees the ports."""
    events = settings.events
    if not events.endpoint:
        return
    try:
        zmq = _zmq()
    except StartError:
        return  # `check` says so.
    from hotkv_server.events.publisher import binds

    bound = [one for one in (events.endpoint,) if binds(one)]
    bound += [one for one in (events.replay_endpoint,) if one]
    context = zmq.Context()
    try:
        for endpoint in bound:
            if endpoint.startswith("ipc://"):
                _check_socket(endpoint)
                continue
            probe = context.socket(zmq.PUB)
            probe.linger, probe.ipv6 = 0, "[" in endpoint
            probe.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartError(_in_use(events, error)) from error
    finally:
        context.destroy(0)


def _check_socket(endpoint: str) -> None:
    """Raises StartError if a program listens: ZMQ would delete its socket and bind its own."""
    path = endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect("\0" + path[1:] if path.startswith("@") else path)
        except OSError:
            return
    raise StartError(f"events: another program listens on {endpoint}; stop it, or name another")


def _in_use(settings: EventSettings, error: Exception) -> str:
    replay = settings.replay_endpoint or "(no replay_endpoint)"
    return f"events: {error}; is {settings.endpoint} or {replay} in use?"


def attach(settings: Settings, node: Node) -> "EventsCapability":
    return EventsCapability(node, settings.events)


def _zmq() -> ModuleType:
    try:
        import hotkv_server.events.publisher  # noqa: F401 - needs more than zmq

        return importlib.import_module("zmq")
    except ImportError as missing:
        raise StartError(
            f"events.endpoint is set, but {missing.name} is not installed: "
            f"{extras.advice('events')}"
        ) from missing


def _publisher(
    settings: EventSettings,
    state: Callable[[], Iterator[StoredEvent | None]] | None,
    has_blocks: "HasBlocks",
) -> "ZmqPublisher | None":
    """None if the settings name no endpoint. Raises StartError."""
    if not settings.endpoint:
        return None
    zmq = _zmq()
    from hotkv_server.events.publisher import ZmqPublisher

    node = settings.node or socket.gethostname()
    topic = settings.topic or TOPICS[settings.identity]

    def topic_of(number: int, key_space: KeySpace, model: str) -> str:
        return topic.format(
            node=node, pool=settings.pool, model=model, tenant=key_space.tenant, key_space=number
        )

    try:
        return ZmqPublisher(
            settings.endpoint,
            settings.replay_endpoint,
            topic_of,
            buffer_steps=BUFFER_STEPS,
            buffer_bytes=BUFFER_BYTES,
            per_endpoint=settings.numbering == "endpoint",
            state=state,
            has_blocks=has_blocks,
        )
    except zmq.ZMQError as error:
        raise StartError(_in_use(settings, error)) from error


def _asked_group(key_space: KeySpace, block_tokens: int) -> int | None:
    """The first group that attends to all tokens and has blocks of `block_tokens` (0: any size)."""
    kinds = (GroupKind.FULL_ATTENTION, GroupKind.MLA)
    for at, group in enumerate(key_space.groups):
        if group.kind in kinds and block_tokens in (0, group.block_tokens):
            return at
    return None


class EventsCapability(Capability):
    """Raises StartError if the publisher can't start, or if the contents file is unusable.

    `hub`: None: made from the settings.
    """

    def __init__(self, node: Node, settings: EventSettings, hub: EventHub | None = None) -> None:
        self._node = node
        self._settings = settings
        self._fingerprints: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._readers: dict[LiveSession, EngineReader] = {}
        path = node.memory.directory / CONTENTS_FILE if self.wants_token_ids else None
        try:
            if not node.core.key_spaces:
                # None of an earlier server's blocks is cached.
                (node.memory.directory / CONTENTS_FILE).unlink(missing_ok=True)
            self._contents = Contents(path, settings.content_bytes, self._present, self._numbers)
        except OSError as error:
            # Not `events`: engines' sessions need the contents too, if no endpoint is set.
            raise StartError(f"arena.dir: {error}") from error
        is_of_pool = settings.identity == "pool"
        if hub is None:
            publisher = _publisher(settings, None if is_of_pool else self.state, self._has_blocks)
            hub = EventHub(publisher, of_pool=is_of_pool)
        self.hub = hub
        # Decided here, not at the timer's first turn: by then sessions may have stored blocks,
        # whose events readers get anyway.
        self._must_announce = self._contents.num_blocks > 0
        self._prompts = PromptIndex(self._contents)
        self._subscribe(node)

    def _subscribe(self, node: Node) -> None:
        told, offers = node.events, node.offers
        told.key_space_added.add(self.key_space_added)
        told.model_named.add(self.model_named)
        told.key_space_forgotten.add(self.key_space_forgotten)
        told.key_space_flushed.add(self.hub.flushed)
        told.blocks_stored.add(self.blocks_stored)
        told.blocks_moved.add(self.blocks_moved)
        told.blocks_removed.add(self.blocks_removed)
        told.session_closed.add(self.session_closed)
        offers.check_blocks = self.check_blocks
        offers.wants_token_ids = self.wants_token_ids
        offers.engines_publish_events = self.engines_publish_events

    def __repr__(self) -> str:
        return f"EventsCapability({self.hub!r}, {self._contents!r})"

    def start(self, health: Health) -> None:
        health.watch("the thread that keeps contents for events", self._contents.is_alive)
        if (publisher := self.hub.publisher) is not None:
            health.watch(
                "the event publisher", publisher.is_alive, publisher.stalled_s, STALLED_WORK_S
            )

    async def tick(self, now_s: float) -> None:
        if self.hub.publisher is not None:
            if self._must_announce:
                # Readers were told to drop all that they remember: tell them of the restored
                # blocks.
                self.hub.publisher.announce()
                self._must_announce = False
            self.hub.publisher.settle()

    def release(self) -> None:
        if self.hub.publisher is not None:
            self.hub.publisher.close()
        self._contents.close()

    def key_space_added(self, number: int, key_space: KeySpace, model_names: Sequence[str]) -> None:
        self._fingerprints[number] = key_space.fingerprint
        self._numbers[key_space.fingerprint] = number
        for name in model_names:
            self._add_name(number, name)
        self.hub.add_key_space(number, key_space, self._contents.names(key_space.fingerprint))

    def model_named(self, number: int, name: str) -> None:
        if self._add_name(number, name):
            self.hub.add_name(number, name)

    def _add_name(self, number: int, name: str) -> bool:
        """False, and nothing recorded, if the name is known, if there are MOST_NAMES, or if
        nobody uses names here."""
        is_used = self.hub.publisher is not None or self._settings.answers
        fingerprint = self._fingerprints[number]
        known = self._contents.names(fingerprint)
        if not is_used or name in known:
            return False
        if len(known) >= MOST_NAMES:
            log.warning(
                "events of key space %d are not published as %.80r: it has %d names",
                number,
                name,
                MOST_NAMES,
            )
            return False
        self._contents.add_name(fingerprint, name)
        return True

    def key_space_forgotten(self, number: int) -> None:
        del self._numbers[self._fingerprints.pop(number)]
        self.hub.forget_key_space(number)

    def session_closed(self, session: LiveSession, is_last: bool) -> None:
        if (reader := self._readers.pop(session, None)) is not None:
            reader.close()

    def blocks_stored(
        self,
        session: LiveSession,
        runs: Sequence[Run],
        contents: Sequence[RunContent],
        results: Sequence[NDArray[np.uint8]],
    ) -> None:
        if contents and (self._node.offers.wants_token_ids or self.hub.is_heard):
            events = stored_events(session.record.key_space_id, runs, contents, results)
            for event in events:
                self._contents.keep(session.key_space.fingerprint, event)
            self.hub.publish(events)

    def blocks_moved(self, entries: Entries, medium: Medium, tier: str) -> None:
        if self.hub.is_heard:
            space = self._spaces()[-1 if medium is Medium.DISK else 0]
            self.hub.publish(moved_events(space.index, entries, medium, tier, self._find))

    def blocks_removed(
        self,
        notices: Sequence[EvictionNotice],
        below: Sequence[EvictionNotice],
        flushed_key_space_id: int,
    ) -> None:
        if self.hub.is_heard:
            self.hub.publish(removed_events(notices, flushed_key_space_id, below))

    # The present state

    def _spaces(self) -> list[Space]:
        """Host memory's, and the disk's if there is one."""
        core = self._node.core
        return [core.space, *[one.space for one in core.below if one.space is not None][:1]]

    def _find(
        self, key_space_id: int, group_index: int, hashes: list[bytes]
    ) -> tuple[list[StoredEvent], list[int]]:
        return self._contents.find(self._fingerprints[key_space_id], group_index, hashes)

    def _present(self, fingerprint: bytes, group_index: int, hashes: Words) -> BoolMask:
        """Mask [n] of blocks ready in host memory or on disk."""
        masks = self._lying(fingerprint, group_index, hashes)
        return np.logical_or.reduce(masks) if masks else np.zeros(len(hashes), np.bool_)

    def _lying(self, fingerprint: bytes, group_index: int, hashes: Words) -> list[BoolMask]:
        """A mask [n] for host memory, and one for the disk if there is one; [] if the key space
        is unknown. Any thread."""
        number = self._numbers.get(fingerprint)
        if number is None:
            return []
        return [is_ready(space.index.find(number, group_index, hashes)) for space in self._spaces()]

    def _has_blocks(self, number: int, removed: RemovedEvent) -> BoolMask:
        """See `HasBlocks`. Any thread."""
        space = self._spaces()[-1 if removed.medium is Medium.DISK else 0]
        if not space.tenants.bytes_of(number):
            return np.zeros(len(removed.hashes), np.bool_)
        return is_ready(space.index.find(number, removed.group_index, removed.hashes))

    def state(self, fingerprint: bytes | None = None) -> Iterator[StoredEvent | None]:
        """Yields events for blocks in host memory and on disk with known token ids, and None for a
        run of which nothing is cached, so that steps stay short. Earlier blocks of a sequence come
        first. Blocks stored or removed meanwhile may be yielded or not; their own events are sent
        in either case. Any thread.

        `fingerprint`: None: all key spaces.
        """
        media = ((Medium.CPU, ""), (Medium.DISK, DISK_TIER))
        for known in self._contents.runs(fingerprint=fingerprint):
            number = self._numbers.get(known.fingerprint)
            masks = self._lying(known.fingerprint, known.group_index, known.hashes)
            found = [edges(mask & known.is_newest) for mask in masks]
            if number is None or not any(found):
                yield None
                continue
            run = known.run()
            for (medium, tier), places in zip(media, found, strict=False):
                for first, end in places:
                    yield replace(
                        run.part(first, end), key_space_id=number, medium=medium, tier=tier
                    )

    async def check_blocks(
        self, model: str, block_tokens: int, hashes: Sequence[int]
    ) -> BoolMask | None:
        if not self._settings.answers:
            return None
        found, until_s = np.zeros(len(hashes), np.bool_), time.monotonic() + ANSWER_WAIT_S
        for number, record in list(self._node.core.key_spaces.items()):
            key_space = record.key_space
            names = self._contents.names(key_space.fingerprint) or [key_space.model]
            group_index = _asked_group(key_space, block_tokens)
            if model not in names or group_index is None:
                continue
            words, known = await asyncio.to_thread(
                self._prompts.find, key_space.fingerprint, group_index, hashes
            )
            # For the disk ask the tiers: it may be down, or a flush may be unconfirmed.
            masks = self._lying(key_space.fingerprint, group_index, words)[:1]
            if self._node.tiers is not None:
                listed = [HashList(group_index, words)]
                wait_s = max(0.0, until_s - time.monotonic())
                try:
                    locations = await self._node.tiers.lookups.find(number, listed, wait_s)
                except HotKVError:
                    # The server has forgotten the key space meanwhile: its blocks are gone.
                    continue
                masks += [one.masks[0] for one in locations if one.is_up]
            for mask in masks:
                found |= mask & known
        return found

    # Reading by engines

    def _read(
        self, session: LiveSession, request: events_pb2.ReadEventsRequest
    ) -> session_pb2.ConnectResponse:
        if not self.engines_publish_events:
            raise HotKVError(
                Reason.NOT_ALLOWED,
                f"events.identity is {self._settings.identity}; only with engine do engines read "
                "events",
            )
        if (reader := self._readers.get(session)) is None:
            reader = self._readers[session] = EngineReader(
                self.hub,
                session.record.key_space_id,
                partial(self.state, session.key_space.fingerprint),
            )
        return reader.read(request.max_event_count, begins_state=request.begins_state)

    def session_calls(self) -> Mapping[str, SessionCall]:
        return {"read_events": self._read}

    @property
    def engines_publish_events(self) -> bool:
        return self._settings.identity == "engine"

    def counters(self) -> Mapping[str, float]:
        publisher = self.hub.publisher
        return {
            "events_lost_by_readers_total": float(self.hub.feeds.lost_items),
            "events_published_total": float(publisher.published_events if publisher else 0),
            "events_lost_total": float(publisher.lost_events if publisher else 0),
            "events_without_tokens_total": float(self._contents.unknown_blocks),
        }

    def gauges(self) -> Mapping[str, float]:
        publisher = self.hub.publisher
        return {
            "events_queued_bytes": float(publisher.queued_bytes if publisher else 0),
            "event_readers": float(len(self.hub.feeds)),
            "events_content_blocks": float(self._contents.num_blocks),
        }

    def services(self, edge: Edge) -> Iterable[Service]:
        return [
            Service(
                full_name(events_pb2, "EventService"),
                events_pb2_grpc.add_EventServiceServicer_to_server,
                EventService(self._node, self.hub, self.state),
                is_admin=True,
            )
        ]

    @property
    def wants_token_ids(self) -> bool:
        settings = self._settings
        return bool(settings.endpoint) or settings.answers or self.engines_publish_events
