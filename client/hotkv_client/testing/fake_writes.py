"""The write side of `FakeServer`: leases that ranks join, and results block by block, as the real
server gives them.

Always true: a block that is not ready belongs to at most one lease; the first call under a lease id
decides which blocks are its own, later ones name no others; a block becomes ready when every shard
is written, and never after any copy of it was given up. There is no bound on room and no expiry:
`expire` ends what ranks have left behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotkv_client.types import BlockResult
from hotkv_proto.errors import HotKVError, Reason

Key = tuple[bytes, int, bytes]
"""Key space, group index or a representation's salt, block hash."""
LeaseName = tuple[str, str]
"""Engine id, lease id."""
Shards = dict[int, bytes]


@dataclass(frozen=True, slots=True)
class WriteRun:
    """Blocks of one run. `blocks`: of representations, the blocks that they go with; else None."""

    keys: Sequence[Key]
    blocks: Sequence[Key] | None = None


@dataclass(slots=True, eq=False)
class WriteLease:
    """`listed`: what the first call named. `parts`: blocks of its own that are not ready, with the
    shards written of each."""

    name: LeaseName
    session: object
    num_shards: int
    listed: set[Key]
    parts: dict[Key, Shards] = field(default_factory=dict)
    aborted: set[Key] = field(default_factory=set)
    shards_seen: set[int] = field(default_factory=set)
    stores: list["FakeStore"] = field(default_factory=list)
    released: bool = False


@dataclass(slots=True, eq=False)
class FakeStore:
    """A store of one shard that has begun: what it writes has the result RESERVED."""

    lease: WriteLease
    shard: int
    runs: Sequence[WriteRun]
    results: list[list[BlockResult]]
    ended: bool = False

    def writes(self) -> set[Key]:
        rows = zip(self.runs, self.results, strict=True)
        return {
            key
            for run, row in rows
            for key, result in zip(run.keys, row, strict=True)
            if result is BlockResult.RESERVED
        }


class FakeWrites:
    """All write leases. `is_ready` and `publish` reach the blocks of the server."""

    def __init__(
        self, is_ready: Callable[[Key], bool], publish: Callable[[Key, Shards], None]
    ) -> None:
        self._is_ready = is_ready
        self._publish = publish
        self._owners: dict[Key, WriteLease] = {}
        self.leases: dict[LeaseName, WriteLease] = {}

    def begin(
        self,
        session: object,
        name: LeaseName,
        runs: Sequence[WriteRun],
        shard: int,
        num_shards: int,
    ) -> FakeStore:
        """Reserves what no earlier call under the lease has. Raises DUPLICATE_ID for blocks that
        its first call did not name."""
        named = {key for run in runs if run.blocks is None for key in run.keys}
        lease = self.leases.get(name)
        decides = lease is None
        if lease is None:
            lease = WriteLease(name, session, num_shards, named)
        elif named - lease.listed:
            raise HotKVError(
                Reason.DUPLICATE_ID,
                f"lease_id {name[1]!r} is in use for other blocks; choose a new id",
            )
        taken = {key for store in lease.stores if store.shard == shard for key in store.writes()}
        store = FakeStore(lease, shard, runs, [[] for _ in runs])
        for at in sorted(range(len(runs)), key=lambda at: runs[at].blocks is not None):
            blocks = runs[at].blocks
            for position, key in enumerate(runs[at].keys):
                block = None if blocks is None else blocks[position]
                result = self._begun(lease, key, block, decides, shard)
                again = result is BlockResult.RESERVED and key in taken
                store.results[at].append(BlockResult.IN_FLIGHT if again else result)
                taken.add(key)
        if decides and (lease.parts or num_shards > 1):
            self.leases[name] = lease
        lease.stores.append(store)
        return store

    def _begun(
        self, lease: WriteLease, key: Key, block: Key | None, decides: bool, shard: int
    ) -> BlockResult:
        if self._is_ready(key):
            return BlockResult.PRESENT
        if key not in self._owners and decides:
            if (
                block is not None
                and not self._is_ready(block)
                and self._owners.get(block) is not lease
            ):
                return BlockResult.IN_FLIGHT if block in self._owners else BlockResult.NO_SPACE
            self._owners[key] = lease
            lease.parts[key] = {}
        if key not in self._owners:
            return BlockResult.NO_SPACE
        if self._owners[key] is not lease:
            return BlockResult.IN_FLIGHT
        if key in lease.aborted:
            return BlockResult.ABORTED
        return BlockResult.WRITTEN if shard in lease.parts[key] else BlockResult.RESERVED

    def end(self, store: FakeStore, read: Callable[[int, int], bytes] | None) -> int:
        """Ends a store, once: results take the place of RESERVED. `read`: the bytes of a run's
        block; None if nothing is kept.

        Returns bytes written.
        """
        if store.ended:
            return 0
        store.ended = True
        lease, num_bytes = store.lease, 0
        lease.stores.remove(store)
        for at in sorted(range(len(store.runs)), key=lambda at: store.runs[at].blocks is not None):
            run, row = store.runs[at], store.results[at]
            for position, key in enumerate(run.keys):
                if row[position] is BlockResult.RESERVED:
                    data = read(at, position) if read is not None else None
                    num_bytes += len(data or b"")
                    row[position] = self._ended(
                        lease, key, run.blocks[position] if run.blocks else None, store.shard, data
                    )
        lease.shards_seen.add(store.shard)
        self._settle(lease)
        return num_bytes

    def _ended(
        self, lease: WriteLease, key: Key, block: Key | None, shard: int, data: bytes | None
    ) -> BlockResult:
        if self._owners.get(key) is not lease:
            return BlockResult.ABORTED
        if data is None:
            lease.aborted.add(key)
        else:
            lease.parts[key][shard] = data
        is_whole = len(lease.parts[key]) == lease.num_shards
        if is_whole and block is not None and not self._is_ready(block):
            lease.aborted.add(key)
        if key in lease.aborted:
            return BlockResult.ABORTED
        if not is_whole:
            return BlockResult.WRITTEN
        self._publish(key, lease.parts[key])
        self._drop(lease, [key])
        return BlockResult.STORED

    def _drop(self, lease: WriteLease, keys: Sequence[Key]) -> None:
        for key in keys:
            del lease.parts[key], self._owners[key]

    def _settle(self, lease: WriteLease) -> None:
        """Drops what was given up once no store is at it, and ends the lease when every shard was
        seen and nothing is outstanding."""
        if lease.stores or self.leases.get(lease.name) is not lease:
            return
        self._drop(lease, [key for key in lease.parts if key in lease.aborted or lease.released])
        if lease.released or (len(lease.shards_seen) == lease.num_shards and not lease.parts):
            del self.leases[lease.name]

    def flush(self, space: bytes) -> None:
        """What is reserved or being written in a key space never becomes ready."""
        for lease in list(self.leases.values()):
            lease.aborted |= {key for key in lease.parts if key[0] == space}
            self._settle(lease)

    def expire(self, session: object = None) -> None:
        """Ends the leases that a session has taken, or all; those with stores in flight end with
        the stores."""
        for lease in list(self.leases.values()):
            if session is None or lease.session is session:
                lease.released = True
                self._settle(lease)

    def forget(self) -> None:
        """The server is dead: stores that have begun keep nothing."""
        self.leases.clear()
        self._owners.clear()
