"""The parts of `FakeServer`'s state: memory of engines, residencies and write leases."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_client.arena import holds
from hotkv_client.types import BlockResult, Int64s, ResidencyOpened, SessionConfig
from hotkv_proto import words
from hotkv_proto.errors import HotKVError, Reason
from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import Sketch
from hotkv_proto.layout import Layout

Key = tuple[bytes, int, bytes]
"""Key space, group index (for a sketch its salt), block hash."""
LeaseName = tuple[str, str]
"""Engine id and lease id."""
Shards = dict[int, bytes]

# -------------------------------------------------------------------------------- memory of engines


class FakeMemory:
    """Reads and writes blocks in a session's engine memory. Without a layout it only tells the
    sizes of groups."""

    def __init__(
        self, config: SessionConfig, layout: Layout | None, fds: Mapping[str, int]
    ) -> None:
        self._config = config
        self._layout = layout
        self.maps = {
            name: np.memmap(os.fdopen(os.dup(fd), "r+b"), np.uint8, "r+")
            for name, fd in fds.items()
        }

    def shape(self, group: int) -> GroupSpec | Sketch:
        """An index behind the last group stands for a kind of sketch."""
        groups = self._config.key_space.groups
        return groups[group] if group < len(groups) else self._config.sketches[group - len(groups)]

    def number(self, group: int) -> int:
        """The group's index, or the sketch's salt, as in the server's keys."""
        shape = self.shape(group)
        return self._config.key_space.sketch_salt(shape) if isinstance(shape, Sketch) else group

    def shard(self) -> int:
        return self._layout.shard_index if self._layout is not None else 0

    def _runs(self, group: int, block: int) -> Iterator[tuple[str, int, int, int]]:
        assert self._layout is not None
        spec = self.shape(group)
        shard_start = sum(spec.shard_bytes[: self._layout.shard_index])
        for runs in self._layout.copy_runs(
            group, spec, np.array([block], np.int64), np.array([-shard_start], np.int64)
        ):
            yield from zip(
                [runs.handle_id] * len(runs.num_bytes),
                runs.engine_offsets.tolist(),
                runs.slot_offsets.tolist(),
                runs.num_bytes.tolist(),
                strict=True,
            )

    def read(self, group: int, block: int) -> bytes:
        """The block's shard."""
        data = bytearray(self.shape(group).shard_bytes[self.shard()])
        for handle, engine, slot, size in self._runs(group, block):
            data[slot : slot + size] = self.maps[handle][engine : engine + size].tobytes()
        return bytes(data)

    def copy(self, group: int, block: int, data: bytes) -> int:
        """Writes the block's shard. Returns the number of bytes."""
        for handle, engine, slot, size in self._runs(group, block):
            self.maps[handle][engine : engine + size] = np.frombuffer(
                data[slot : slot + size], np.uint8
            )
        return len(data)


# -------------------------------------------------------------------------------------- residencies

# The double's arena is plain memory. A slot is never reused, so a reader that comes too late
# reads the right bytes, and only the validity words (`hotkv_proto.words`) show it.


SLOT_ALIGN = 4096


class FakeArena:
    def __init__(self, num_bytes: int) -> None:
        self.memory: NDArray[np.uint8] = np.zeros(num_bytes, np.uint8)
        self.words: NDArray[np.uint64] = np.zeros(words.WORD_COUNT, np.uint64)
        self.words[words.OLDEST_START] = self.words[words.LATEST_START] = 1
        self.file_id = (0, id(self))

    def holds(self, opened: ResidencyOpened) -> bool:
        return holds(self.words, opened)


@dataclass
class FakeResidency:
    """asked: reserved blocks by group index.
    offsets, names: of pinned blocks, by (group index, position).
    """

    opened: ResidencyOpened
    asked: dict[int, int]
    offsets: dict[tuple[int, int], int] = field(default_factory=dict)
    names: dict[tuple[int, int], bytes] = field(default_factory=dict)


class FakeResidencies:
    """By engine id and residency id.

    most, most_blocks: limits of open residencies and of their blocks, beyond which `add` raises
        NO_ROOM_FOR_RESIDENCY; None: no limit.
    refused: by `add`, and neither opened nor closed since.
    """

    def __init__(self, num_bytes: int) -> None:
        self.arena = FakeArena(num_bytes)
        self.open: dict[tuple[str, str], FakeResidency] = {}
        self.refused: set[tuple[str, str]] = set()
        self.most: int | None = None
        self.most_blocks: int | None = None
        # That stores named, in order. They need not pin blocks: this double never evicts any.
        self.stored_into: list[str] = []
        self.start_number = 1
        self._next_offset = 0
        self._next_word = 1

    def add(self, name: tuple[str, str], asked: dict[int, int]) -> ResidencyOpened:
        """Opens a residency, or reserves more room for an open one. Raises NO_ROOM_FOR_RESIDENCY
        beyond a limit, DUPLICATE_ID if it is open and `asked` has fewer blocks in a group.

        name: engine id, residency id.
        asked: by group index.
        """
        known = self.open.get(name)
        if known is not None and any(
            count > asked.get(group, 0) for group, count in known.asked.items()
        ):
            raise HotKVError(Reason.DUPLICATE_ID, f"residency_id {name[1]!r} is open")
        others = sum(sum(one.asked.values()) for one in self.open.values() if one is not known)
        is_many = known is None and self.most is not None and len(self.open) >= self.most
        is_much = self.most_blocks is not None and others + sum(asked.values()) > self.most_blocks
        if is_many or (is_much and (known is None or known.asked != asked)):
            self.refused.add(name)
            raise HotKVError(Reason.NO_ROOM_FOR_RESIDENCY, "told to refuse")
        self.refused.discard(name)
        if known is not None:
            known.asked = asked
            return known.opened
        index, self._next_word = self._next_word, self._next_word % words.MAX_SESSION_WORD + 1
        self.arena.words[index] += np.uint64(1)
        opened = ResidencyOpened(name[1], index, int(self.arena.words[index]), self.start_number)
        self.open[name] = FakeResidency(opened, asked)
        return opened

    def extend(
        self,
        name: tuple[str, str],
        group_index: int,
        first_position: int,
        hashes: Sequence[bytes],
        blocks: Sequence[Shards | None],
    ) -> Int64s:
        """Pins blocks. Returns their offsets; -1 if not pinned. Raises UNKNOWN_RESIDENCY, or
        DUPLICATE_ID if another block is pinned at a position.

        name: engine id, residency id.
        blocks: None for one that the server lacks.
        """
        residency = self.open.get(name)
        if residency is None:
            raise HotKVError(Reason.UNKNOWN_RESIDENCY, f"residency_id {name[1]!r} is unknown")
        found = np.full(len(blocks), -1, np.int64)
        for at, (name_of_block, shards) in enumerate(zip(hashes, blocks, strict=True)):
            place = (group_index, first_position + at)
            if residency.names.get(place, name_of_block) != name_of_block:
                raise HotKVError(Reason.DUPLICATE_ID, "another block at one of these positions")
            if shards is not None:
                residency.names[place] = name_of_block
            if place not in residency.offsets and shards is not None:
                residency.offsets[place] = self._slot(shards)
            found[at] = residency.offsets.get(place, -1)
        return found

    def _slot(self, shards: Shards) -> int:
        data = np.frombuffer(b"".join(shards[shard] for shard in sorted(shards)), np.uint8)
        offset = self._next_offset
        assert offset + len(data) <= self.arena.memory.size, "the double's arena is too small"
        self.arena.memory[offset : offset + len(data)] = data
        self._next_offset += -(-len(data) // SLOT_ALIGN) * SLOT_ALIGN
        return offset

    def close(self, name: tuple[str, str]) -> None:
        self.open.pop(name, None)
        self.refused.discard(name)

    def revoke(self, engine_id: str) -> None:
        """Ends an engine's residencies as a server that has lost a session: `Arena.holds`
        becomes False for them."""
        for name in [name for name in self.open if name[0] == engine_id]:
            self.arena.words[self.open.pop(name).opened.word_index] += np.uint64(1)
        self.refused = {name for name in self.refused if name[0] != engine_id}

    def restart(self) -> None:
        """The validity words stay as they are, so readers of the old residencies may continue."""
        self.open.clear()
        self.refused.clear()
        self.start_number += 1


# ------------------------------------------------------------------------------------------- writes


@dataclass(frozen=True, slots=True)
class WriteRun:
    """keys: of blocks or sketches.
    blocks: of a run of sketches, the keys of their blocks.
    """

    keys: Sequence[Key]
    blocks: Sequence[Key] | None = None


@dataclass(slots=True, eq=False)
class FakeWriteLease:
    """Ranks store their shards of the same blocks under it.

    listed: that the first call under the lease named.
    parts: written shards of what the lease has reserved and that is not ready yet.
    aborted: keys of `parts` that can't become ready.
    shards_seen: shards whose store has ended.
    stores: in flight.
    released: after `expire`; the lease ends with its last store.
    """

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
    """A store of one shard, in flight.

    results: per run and block; RESERVED: the store will write the block.
    """

    lease: FakeWriteLease
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
    """The write leases of `FakeServer`. Each block of a store gets the `BlockResult` of the real
    server.

    Always true: a block that is not ready belongs to at most one lease. The first call under a
    lease id decides which blocks belong to it. A block becomes ready when every shard is written
    and no copy was aborted. Room is unlimited. Leases end only by `expire`.

    publish: makes a block ready.
    """

    def __init__(
        self, is_ready: Callable[[Key], bool], publish: Callable[[Key, Shards], None]
    ) -> None:
        self._is_ready = is_ready
        self._publish = publish
        self._owners: dict[Key, FakeWriteLease] = {}
        self.leases: dict[LeaseName, FakeWriteLease] = {}

    def begin(
        self,
        session: object,
        name: LeaseName,
        runs: Sequence[WriteRun],
        shard: int,
        num_shards: int,
    ) -> FakeStore:
        """The first call under a lease reserves those blocks that are not ready and not reserved
        by another. Raises DUPLICATE_ID for blocks that it did not name."""
        named = {key for run in runs if run.blocks is None for key in run.keys}
        lease = self.leases.get(name)
        decides = lease is None
        if lease is None:
            lease = FakeWriteLease(name, session, num_shards, named)
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
        self, lease: FakeWriteLease, key: Key, block: Key | None, decides: bool, shard: int
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
        """Replaces each RESERVED by the final result. Returns the number of written bytes; 0 for an
        ended store.

        read: index of the run and position to bytes; None: the store is revoked and commits
            nothing.
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
        self, lease: FakeWriteLease, key: Key, block: Key | None, shard: int, data: bytes | None
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

    def _drop(self, lease: FakeWriteLease, keys: Sequence[Key]) -> None:
        for key in keys:
            del lease.parts[key], self._owners[key]

    def _settle(self, lease: FakeWriteLease) -> None:
        """Drops aborted blocks unless stores are in flight. Ends a released lease, and one of
        which all shards are stored and all blocks ready or dropped."""
        if lease.stores or self.leases.get(lease.name) is not lease:
            return
        self._drop(lease, [key for key in lease.parts if key in lease.aborted or lease.released])
        if lease.released or (len(lease.shards_seen) == lease.num_shards and not lease.parts):
            del self.leases[lease.name]

    def flush(self, space: bytes) -> None:
        for lease in list(self.leases.values()):
            lease.aborted |= {key for key in lease.parts if key[0] == space}
            self._settle(lease)

    def expire(self, session: object = None) -> None:
        """session: None: of all."""
        for lease in list(self.leases.values()):
            if session is None or lease.session is session:
                lease.released = True
                self._settle(lease)

    def forget(self) -> None:
        """A server's death: stores in flight can't commit."""
        self.leases.clear()
        self._owners.clear()
