"""All books of the core in one value: what its calls read and change.

`Uses`, `ReadLeases`, `Loads`, `Reservations` and `Stores` each act on them for one kind of call;
`CacheCore` checks that they agree.
"""

from dataclasses import dataclass, field

from hotkv_proto.table import BlockTable
from hotkv_server.cache.below import Below
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
from hotkv_server.cache.values import CoreConfig, Counters


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
    catalog = Catalog(space, len(config.tenants), below)
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
        below,
    )
