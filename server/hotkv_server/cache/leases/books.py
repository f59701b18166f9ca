"""`CacheBooks` holds all state of the core (`CacheCore`, which decides which blocks are cached).
`Uses` answers lookups, and records uses of ready blocks.

The other classes that change the state are `ReadLeases`, `Loads`, `Reservations` and `Stores`
(modules `reading` and `writing`), each for one kind of call. `CacheCore` checks that all parts of
the state agree.
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
    """The state of a node's cache, which starts empty. `CacheCore` adds the operations.

    space: the slots of the arena, and the entries (records in the block table) that own them.
    catalog: the key spaces (each is a model in a configuration).
    client_memory: bounds the server's memory (outside the arena) that clients use by acquiring
        leases, starting transfers and opening sequences (contexts of sparse decode).
    pin_budget: bounds the bytes that are pinned for long.
    retention_pins: the pins that requests asked for.
    below: the tiers below host memory.
    pinners: optional parts of the server that pin entries.
    words: writes numbers in shared memory, by which clients that read blocks directly in the mapped
        arena check whether their blocks are still pinned.
    marks: for each entry a 1 if such clients may read its block.
    grace: for some seconds after a restart, pins entries that clients of the earlier server may
        still read.

    Argument `readers` of the constructor: the shared memory of `words` and `marks`; None if no
    client reads the arena.
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
        )
        self.catalog = Catalog(self.space.books, len(config.tenants), self.below)
        self.sessions = SessionBook(self.catalog, self.space.tenants)
        self.client_memory = FairBound(config.client_memory_bytes)
        # A single owner of a `FairBound` gets half of it.
        unwritten = FairBound(int(2 * config.unwritten_share * config.arena_bytes))
        self.leases = LeaseBook(config.max_leases, BoundShare(self.client_memory), unwritten)
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


# Lookups and uses of ready blocks.
#
# This section owns no state: it changes the eviction policy and the retention pins (which requests
# ask for). Always true: a lookup changes only counters. A use counts for the eviction policy, and
# pins the blocks if the request asks for it.


class Uses:
    """Answers lookups. Records uses of ready blocks for the eviction policy, and pins the blocks if
    the request asks to retain them."""

    def __init__(self, books: CacheBooks) -> None:
        self._books = books

    def lookup(self, key_space_id: int, groups: list[HashList]) -> list[BoolMask]:
        """Returns for each list of block hashes a mask of the blocks that are ready. In rare cases
        the mask is wrong, because a lookup compares only 32 bits of each hash
        (`BlockIndex.probe`). Clients that read the table in shared memory compare the same
        bits."""
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
        """Records a use of the named blocks that are ready, and pins them if `retention` asks for
        it. Raises INVALID_FIELD if `groups` names sketches (compact summaries of attention
        keys)."""
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
        """Pins the named blocks, if they are ready, as far as the budget for retention pins
        (`CoreConfig.held_share`) allows. The pins end at the time `until_s` (seconds on the same
        clock as `now_s` in `touch`)."""
        self._pin(self._ready(session, hash_list), until_s)

    def note(
        self, entries: Entries, retention: Retention, now_s: float, *, is_private: bool = False
    ) -> None:
        """Records a use of ready entries (records in the block table), given in the order of their
        prompt. `retention` decides how much the use counts for the eviction policy. If
        `retention.pin` is set, also pins the entries for `retention.ttl_s` seconds (`retain`).
        Offers the entries to the tiers unless `is_private` is True (`StoreOptions.is_private`)."""
        self._books.space.touch(entries, now_s, retention)
        for one in self._books.below if not is_private else ():
            one.offer_used(entries)
        self.retain(entries, retention, now_s)

    def retain(self, entries: Entries, retention: Retention, now_s: float) -> None:
        """Pins ready entries (records in the block table) for `retention.ttl_s` seconds if
        `retention.pin` is set, as far as the budget for pins that requests ask for
        (`CoreConfig.held_share`) allows."""
        if retention.pin:
            self._pin(entries, now_s + retention.ttl_s)

    def _pin(self, entries: Entries, until_s: float) -> None:
        self._books.counters.held_blocks += self._books.retention_pins.hold(entries, until_s)

    def _ready(self, session: SessionRecord, hash_list: HashList) -> Entries:
        """Returns the entries (records in the block table) of the named blocks that are ready, in
        the order of their hashes."""
        words = self._books.space.index.find(
            session.key_space_id, hash_list.group_index, hash_list.hashes
        )
        return words[table.is_ready(words)]
