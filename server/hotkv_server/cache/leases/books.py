"""All books of the core: what its calls read and change, and what a use of ready blocks notes in
them.

`ReadLeases`, `Loads`, `Reservations` and `Stores` each act on them for one kind of call;
`CacheCore` checks that they agree.
"""

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import BlockTable
from hotkv_server.cache.leases.leases import LeaseBook, TransferBook
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.readers import Grace, ReaderMemory, ReaderWords, no_readers
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


class CacheBooks:
    """The books of one node's cache, which is empty at first. `client_memory`: bounds what the
    books of clients take. `words`, `marks`, `grace`: of those who read the arena in place, here and
    of an earlier server; `readers`: None if nobody does."""

    def __init__(
        self,
        config: CoreConfig,
        block_table: BlockTable,
        policy: Policy,
        readers: ReaderMemory | None = None,
    ) -> None:
        readers = readers or no_readers(config.capacity)
        self.config = config
        self.counters = Counters()
        self.below: list[Below] = []
        self.pinners: list[Pinner] = []
        self.space = Space(
            block_table,
            config.arena_bytes,
            config.slab_bytes,
            policy,
            config.tenants,
            is_backed=config.is_backed,
        )
        self.catalog = Catalog(self.space.books, len(config.tenants), self.below)
        self.sessions = SessionBook(self.catalog, self.space.tenants)
        self.client_memory = FairBound(config.client_memory_bytes)
        self.leases = LeaseBook(config.max_leases, BoundShare(self.client_memory))
        self.transfers = TransferBook()
        self.pin_budget = PinBudget(self.space.tenants)
        self.retention_pins = RetentionPins(
            self.space.index, self.space.tenants, config.held_share, self.pin_budget
        )
        self.words = ReaderWords(readers.words)
        self.marks = readers.marks
        self.grace = Grace(self.space.removal, self.words, self.marks)


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
