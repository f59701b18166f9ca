"""All books of the core in one value: what its calls read and change.

`Uses`, `ReadLeases`, `Loads`, `Reservations` and `Stores` each act on them for one kind of call;
`CacheCore` checks that they agree.
"""

from dataclasses import dataclass, field

from hotkv_proto.table import BlockTable
from hotkv_server.cache.catalog import Catalog
from hotkv_server.cache.leases.leases import LeaseBook
from hotkv_server.cache.leases.pin_budget import PinBudget
from hotkv_server.cache.leases.retentions import RetentionPins
from hotkv_server.cache.leases.transfers import TransferBook
from hotkv_server.cache.pinner import Pinner
from hotkv_server.cache.room.bounds import Account, FairBound
from hotkv_server.cache.room.policies.protocol import Policy
from hotkv_server.cache.room.space import Space
from hotkv_server.cache.sessions import SessionBook
from hotkv_server.cache.table.grace import Grace
from hotkv_server.cache.table.reader_words import Marks, ReaderMemory, ReaderWords, no_readers
from hotkv_server.cache.values import CoreConfig, Counters, Entries
from hotkv_server.tiers.book.arrivals import Arrivals
from hotkv_server.tiers.book.copies import Copies
from hotkv_server.tiers.book.lower import LowerTier
from hotkv_server.tiers.book.moves import Moves


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
    moves: Moves
    arrivals: Arrivals
    lower: LowerTier | None = None
    copies: list[Copies] = field(default_factory=list)
    pinners: list[Pinner] = field(default_factory=list)

    def offer_stored(self, entries: Entries) -> None:
        """Blocks were stored, in chain order: tiers may have them."""
        for one in self.copies:
            one.add_stored(entries)
        self.offer_used(entries)

    def offer_used(self, entries: Entries) -> None:
        """Blocks were used, in chain order: what the tier below has refused, it may take now."""
        if self.lower is not None:
            self.lower.down.waiting.add(entries)


def make_books(
    config: CoreConfig,
    block_table: BlockTable,
    policy: Policy,
    readers: ReaderMemory | None = None,
    below: Space | None = None,
) -> CacheBooks:
    """Books of a cache that is empty. `readers`: None if nobody reads the arena. `below`: places of
    a tier below host memory; None without one."""
    readers = readers or no_readers(config.capacity)
    space = Space(
        block_table,
        config.arena_bytes,
        config.slab_bytes,
        policy,
        config.tenants,
        is_backed=config.is_backed,
    )
    moves = Moves(space)
    arrivals = Arrivals(moves)
    lower = (
        None
        if below is None
        else LowerTier(moves, arrivals, below, config.write_bytes_per_day, config.encoded_bytes)
    )
    catalog = Catalog(space, len(config.tenants), lower)
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
        LeaseBook(config.max_leases, Account(client_memory)),
        TransferBook(),
        RetentionPins(space.index, space.tenants, config.held_share, pin_budget),
        pin_budget,
        words,
        readers.marks,
        Grace(space, words, readers.marks),
        moves,
        arrivals,
        lower,
    )
