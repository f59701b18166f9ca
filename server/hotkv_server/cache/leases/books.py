"""All books of the core in one value: what its calls read and change, and what a use of ready
blocks notes in them.

`ReadLeases`, `Loads`, `Reservations` and `Stores` each act on them for one kind of call;
`CacheCore` checks that they agree.
"""

from dataclasses import dataclass, field

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import BlockTable
from hotkv_server.cache.leases.leases import LeaseBook, TransferBook
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.readers import Grace, Marks, ReaderMemory, ReaderWords, no_readers
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.shares import BoundShare, FairBound, PinBudget
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.seams import Below, Pinner
from hotkv_server.cache.sessions import Catalog, SessionBook, check_named
from hotkv_server.cache.values import (
    BoolMask,
    CoreConfig,
    Counters,
    Entries,
    HashList,
    SessionRecord,
)


@dataclass(frozen=True, slots=True)
class CacheBooks:
    """The books of one node's cache. `client_memory`: bounds what the books of clients take.
    `words`, `marks`, `grace`: of those who read the arena in place, here and of an earlier
    server."""

    config: CoreConfig
    counters: Counters
    space: Space
    catalog: Catalog
    sessions: SessionBook
    client_memory: FairBound
    leases: LeaseBook
    transfers: TransferBook
    retention_pins: RetentionPins
    pin_budget: PinBudget
    words: ReaderWords
    marks: Marks
    grace: Grace
    below: list[Below]
    pinners: list[Pinner] = field(default_factory=list)


def make_books(
    config: CoreConfig,
    block_table: BlockTable,
    policy: Policy,
    readers: ReaderMemory | None = None,
) -> CacheBooks:
    """Books of a cache that is empty. `readers`: None if nobody reads the arena."""
    readers = readers or no_readers(config.capacity)
    space = Space(
        block_table,
        config.arena_bytes,
        config.slab_bytes,
        policy,
        config.tenants,
        is_backed=config.is_backed,
    )
    below: list[Below] = []
    catalog = Catalog(space.books, len(config.tenants), below)
    client_memory = FairBound(config.client_memory_bytes)
    sessions, pin_budget = SessionBook(catalog, space.tenants), PinBudget(space.tenants)
    words = ReaderWords(readers.words)
    return CacheBooks(
        config,
        Counters(),
        space,
        catalog,
        sessions,
        client_memory,
        LeaseBook(config.max_leases, BoundShare(client_memory)),
        TransferBook(),
        RetentionPins(space.index, space.tenants, config.held_share, pin_budget),
        pin_budget,
        words,
        readers.marks,
        Grace(space.removal, words, readers.marks),
        below,
    )


# Lookups and uses of blocks that are ready.
#
# Owns nothing: the policy and the retention pins do. Always true: a lookup changes nothing but
# counters; a use counts for the eviction policy, and pins the blocks if the request asks for it.


class Uses:
    """Answers lookups, and notes uses in the books."""

    def __init__(self, books: CacheBooks) -> None:
        self._books = books

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Which blocks are ready, one mask a list: a hint, from the table as readers see it."""
        books = self._books
        check_named(
            books.catalog.record(key_space_id),
            [g.group_index for g in groups],
            sum(len(g.hashes) for g in groups),
            books.config.max_blocks_per_call,
        )
        masks = [
            table.is_ready(books.space.index.probe(key_space_id, g.group_index, g.hashes))
            for g in groups
        ]
        of_blocks = [
            mask for g, mask in zip(groups, masks, strict=True) if g.group_index < MAX_GROUPS
        ]
        books.counters.lookup_blocks += sum(len(mask) for mask in of_blocks)
        books.counters.lookup_hit_blocks += sum(int(mask.sum()) for mask in of_blocks)
        return masks

    def touch(
        self,
        session: SessionRecord,
        groups: list[HashList],
        now_s: float,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Notes a use of those blocks that are ready. Raises INVALID_FIELD for representations."""
        books = self._books
        check_named(
            books.catalog.record(session.key_space_id),
            [g.group_index for g in groups],
            sum(len(g.hashes) for g in groups),
            books.config.max_blocks_per_call,
            only_blocks=True,
        )
        for g in groups:
            self.note(self._ready(session, g), retention, now_s)

    def hold(self, session: SessionRecord, hash_list: HashList, until_s: float) -> None:
        """Pins those of the blocks that are ready until then, as far as the budget allows."""
        self._pin(self._ready(session, hash_list), until_s)

    def note(self, entries: Entries, retention: Retention, now_s: float) -> None:
        """Touches ready entries, in chain order, and pins them for as long as `retention` asks."""
        self._books.space.touch(entries, now_s, retention)
        for one in self._books.below:
            one.offer_used(entries)
        self.retain(entries, retention, now_s)

    def retain(self, entries: Entries, retention: Retention, now_s: float) -> None:
        """Pins ready entries for as long as `retention` asks, as far as the budget allows."""
        if retention.pin:
            self._pin(entries, now_s + retention.ttl_s)

    def _pin(self, entries: Entries, until_s: float) -> None:
        self._books.counters.held_blocks += self._books.retention_pins.hold(entries, until_s)

    def _ready(self, session: SessionRecord, hash_list: HashList) -> Entries:
        """Entries of those blocks that are ready, in the order of their hashes."""
        words = self._books.space.index.find(
            session.key_space_id, hash_list.group_index, hash_list.hashes
        )
        return words[table.is_ready(words)]
