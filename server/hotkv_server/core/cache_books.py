"""All books of the core in one value: what its calls read and change.

`CacheCore` makes them and checks that they agree; `Uses`, `ReadLeases`, `Loads`, `Reservations` and
`Stores` each act on them for one kind of call.
"""

from dataclasses import dataclass

from hotkv_server.core.catalog import Catalog
from hotkv_server.core.leases import LeaseBook
from hotkv_server.core.pins import RetentionPins
from hotkv_server.core.sessions import SessionBook
from hotkv_server.core.space import Space
from hotkv_server.core.transfers import TransferBook
from hotkv_server.core.values import CoreConfig, Counters


@dataclass(frozen=True, slots=True)
class CacheBooks:
    """The books of one node's cache."""

    config: CoreConfig
    counters: Counters
    space: Space
    catalog: Catalog
    sessions: SessionBook
    leases: LeaseBook
    transfers: TransferBook
    retention_pins: RetentionPins
