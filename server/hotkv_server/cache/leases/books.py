"""`CacheBooks` holds all state of the core; the classes of `reading` and `writing` change it
too, each for one kind of call. `Uses` answers lookups and records uses of ready blocks."""

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_proto.table import BlockTable
from hotkv_server.cache.leases.leases import LeaseBook, TransferBook
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.readers import Grace, ReaderMemory, ReaderWords, no_readers
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.shares import FairBound, PinBudget
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
    """The state of a node's cache, which starts empty.

    client_memory: bounds the memory outside the arena for clients' leases, transfers and sequences.
    pin_budget: bounds the bytes that are pinned for long.
    words, marks, grace: of clients that read the arena (`cache.readers`).
    """

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
            part_starts=config.part_starts,
        )
        self.catalog = Catalog(self.space.books, len(config.tenants), self.below)
        self.sessions = SessionBook(self.catalog, self.space.tenants)
        self.client_memory = FairBound(config.client_memory_bytes)
        # A single owner of a `FairBound` gets half of it.
        unwritten = FairBound(int(2 * config.unwritten_share * config.arena_bytes))
        self.leases = LeaseBook(config.max_leases, self.client_memory, unwritten)
        self.transfers = TransferBook()
        self.pin_budget = PinBudget(self.space.tenants)
        self.retention_pins = RetentionPins(
            self.space.index,
            self.space.tenants,
            config.held_share,
            self.pin_budget,
            self.space.pool.floors,
        )
        self.words = ReaderWords(readers.words)
        self.marks = readers.marks
        self.grace = Grace(self.space.removal, self.words, self.marks)


# Lookups and uses of ready blocks. A lookup changes only counters.


class Uses:
    def __init__(self, books: CacheBooks) -> None:
        self._books = books

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Rarely wrong, because it compares only 32 bits of each hash (`BlockIndex.probe`), as
        clients do that read the table themselves."""
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
        """Raises INVALID_FIELD if `groups` names sketches."""
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
        """Pins the ready ones of the named blocks, as far as `CoreConfig.held_share` allows."""
        self._pin(self._ready(session, hash_list), until_s)

    def note(
        self, entries: Entries, retention: Retention, now_s: float, *, is_private: bool = False
    ) -> None:
        """Ready entries, in prompt order; pinned if `retention.pin`, offered to the tiers unless
        `is_private`."""
        self._books.space.touch(entries, now_s, retention)
        for one in self._books.below if not is_private else ():
            one.offer_used(entries)
        self.retain(entries, retention, now_s)

    def retain(self, entries: Entries, retention: Retention, now_s: float) -> None:
        """Pins ready entries if `retention.pin`, as far as `CoreConfig.held_share` allows."""
        if retention.pin:
            self._pin(entries, now_s + retention.ttl_s)

    def _pin(self, entries: Entries, until_s: float) -> None:
        self._books.counters.held_blocks += self._books.retention_pins.hold(entries, until_s)

    def _ready(self, session: SessionRecord, hash_list: HashList) -> Entries:
        """In the order of the hashes."""
        words = self._books.space.index.find(
            session.key_space_id, hash_list.group_index, hash_list.hashes
        )
        return words[table.is_ready(words)]
