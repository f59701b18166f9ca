"""Records the sequences of sessions. A sequence is a context that is decoded sparsely: the hashes
of its complete blocks.

Always true: a sequence belongs to a session and ends with it; repeated calls change nothing;
sequences per session and the memory of all, also per owner, are bounded. `sparse.drive` leases
and selects.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.errors import Reason, invalid
from hotkv_proto.table import Words
from hotkv_server.cache.room.shares import FairBound
from hotkv_sparse.server.select.book import KeptHotSet, SelectSpec

I32 = NDArray[np.int32]
HASH_BYTES = 32
SEQUENCE_BYTES = 1024
"""Of a sequence without blocks."""
SEQUENCES = "sequences"
"""Their kind in the bound of clients' memory."""
TOUCH_INTERVAL_S = 1.0
"""A block used in every step counts as used once per interval."""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence and what its selections need.

    spec: None if the engine selects.
    owner: for which bounds count it.
    used: bool [n], blocks used since uses were last counted.
    noted_s: when they were.

    If the server selects:
    lease_id: pins the covered blocks, the leading ones ready with their sketches; empty without
        any.
    entries: of the covered sketches, uint32 [covered].
    slots: their offsets in the arena, in bytes, int64 [covered].
    hot_sets: by (layer, shard): the client's stream, and its hot set.
    lock: held during a selection.
    """

    sequence_id: str
    group_index: int
    hashes: Words
    spec: SelectSpec | None
    created_blocks: int
    owner: str = ""
    lease_id: str = ""
    entries: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    slots: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    hot_sets: dict[tuple[int, int], tuple[int, KeptHotSet]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    noted_s: float = -np.inf

    def __repr__(self) -> str:
        return (
            f"LiveSequence({self.sequence_id!r}, {len(self.hashes)} blocks, {len(self.slots)} "
            "covered)"
        )

    def weight(self, num_blocks: int) -> int:
        """Memory with `num_blocks`, in bytes.

        If the server selects, a block takes 13 bytes more (in `entries`, `slots` and `used`),
        and a hot set 14 bytes per slot and 6 per block.
        """
        own_bytes = SEQUENCE_BYTES + HASH_BYTES * num_blocks
        if self.spec is None:
            return own_bytes
        num_hot_sets = (
            len(self.spec.layer_indices) * self.spec.num_shards if self.spec.hot_blocks else 0
        )
        return (
            own_bytes
            + self.spec.centre_bytes
            + 13 * num_blocks
            + num_hot_sets * (14 * self.spec.hot_blocks + 6 * num_blocks)
        )

    def hot_set(self, spec: SelectSpec, layer: int, shard: int, stream: int) -> KeptHotSet | None:
        """None if none are recorded. A new stream begins with an empty one: its client may have
        missed the last answer of an earlier stream, and so not loaded what it named."""
        if not spec.hot_blocks:
            return None
        of, hot = self.hot_sets.get((layer, shard), (-1, None))
        if hot is None or of != stream:
            hot = KeptHotSet(spec.config, spec.hot_blocks)
            self.hot_sets[layer, shard] = stream, hot
        return hot

    def use(self, positions: I32, now_s: float) -> I32:
        """Records uses. After TOUCH_INTERVAL_S: positions of all used since the last count,
        ascending; before: none."""
        if len(self.used) < len(self.hashes):
            self.used = np.concatenate(
                [self.used, np.zeros(len(self.hashes) - len(self.used), np.bool_)]
            )
        self.used[positions[positions < len(self.hashes)]] = True
        return (
            self.take_used(now_s)
            if now_s >= self.noted_s + TOUCH_INTERVAL_S
            else np.empty(0, np.int32)
        )

    def take_used(self, now_s: float) -> I32:
        """Uncounted positions, ascending. The caller must count them: they are not returned
        again."""
        self.noted_s = now_s
        positions = np.flatnonzero(self.used).astype(np.int32)
        self.used[:] = False
        return positions


class SequenceBook:
    """By session number and id."""

    def __init__(self, max_sequences: int, max_sequence_blocks: int, bound: FairBound) -> None:
        self.max_sequences = max_sequences
        """Of a session."""
        self.max_sequence_blocks = max_sequence_blocks
        self.bound = bound
        """Of clients' memory in bytes."""
        self.num_blocks = 0
        self._sessions: dict[int, dict[str, LiveSequence]] = {}

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._sessions.values())

    def __repr__(self) -> str:
        return f"SequenceBook({len(self)} sequences, {self.num_blocks} blocks)"

    def find(self, session_number: int, sequence_id: str) -> LiveSequence | None:
        return self._sessions.get(session_number, {}).get(sequence_id)

    def get(self, session_number: int, sequence_id: str) -> LiveSequence:
        """Raises INVALID_FIELD if it is unknown."""
        sequence = self.find(session_number, sequence_id)
        if sequence is None:
            raise invalid(
                f"sequence_id {sequence_id!r} is unknown in this session; create it first"
            )
        return sequence

    def create(
        self,
        session_number: int,
        sequence_id: str,
        group_index: int,
        hashes: Words,
        spec: SelectSpec | None,
        owner: str,
    ) -> tuple[LiveSequence, bool]:
        """The sequence, and False if the same one existed. Raises INVALID_FIELD if the id is
        empty, DUPLICATE_ID if another sequence has it, OVERLOADED or TOO_LARGE at a bound."""
        if not sequence_id:
            raise invalid("sequence_id is empty; choose an id that is unique in the session")
        existing = self.find(session_number, sequence_id)
        if existing is not None:
            is_same = (existing.group_index, existing.created_blocks, existing.spec) == (
                group_index,
                len(hashes),
                spec,
            )
            if not is_same or not np.array_equal(existing.hashes[: len(hashes)], hashes):
                raise invalid(
                    f"sequence_id {sequence_id!r} is in use for another sequence; choose a new id",
                    Reason.DUPLICATE_ID,
                )
            return existing, False
        sequences = self._sessions.get(session_number, {})
        if len(sequences) >= self.max_sequences:
            raise invalid(
                f"sequence_id: the session has {self.max_sequences} sequences; delete some first",
                Reason.OVERLOADED,
            )
        sequence = LiveSequence(sequence_id, group_index, hashes, spec, len(hashes), owner)
        weight = sequence.weight(len(hashes))
        self._check_room(owner, weight, len(hashes))
        self._sessions.setdefault(session_number, sequences)[sequence_id] = sequence
        self.num_blocks += len(hashes)
        self.bound.take(owner, weight, SEQUENCES)
        return sequence, True

    def append(
        self, session_number: int, sequence_id: str, first_position: int, hashes: Words
    ) -> LiveSequence:
        """Appends blocks that the sequence lacks. Raises INVALID_FIELD if it is unknown or not
        continued, TOO_LARGE or OVERLOADED at a bound.

        first_position: of `hashes` in the sequence; known blocks must have the same hashes.
        """
        sequence = self.get(session_number, sequence_id)
        count = len(sequence.hashes)
        if not 0 <= first_position <= count:
            raise invalid(
                f"first_position is {first_position}; the sequence has {count} blocks, go on at "
                f"{count}"
            )
        known = min(count - first_position, len(hashes))
        if not np.array_equal(
            sequence.hashes[first_position : first_position + known], hashes[:known]
        ):
            raise invalid(
                "hashes differ from those of blocks that the sequence has already; create "
                "another sequence"
            )
        fresh = hashes[known:]
        growth = sequence.weight(count + len(fresh)) - sequence.weight(count)
        self._check_room(sequence.owner, growth, count + len(fresh))
        if len(fresh):
            sequence.hashes = np.concatenate([sequence.hashes, fresh])
            self.num_blocks += len(fresh)
            self.bound.take(sequence.owner, growth, SEQUENCES)
        return sequence

    def _check_room(self, owner: str, more_bytes: int, num_blocks: int) -> None:
        if num_blocks > self.max_sequence_blocks:
            raise invalid(
                f"hashes: a sequence of {num_blocks} blocks; at most {self.max_sequence_blocks} "
                "are accepted",
                Reason.TOO_LARGE,
            )
        if more_bytes > self.bound.room(owner):
            raise invalid(
                f"hashes: {-(-more_bytes // HASH_BYTES)} blocks' worth of memory more; "
                f"{self.bound.refusal(owner, 'bytes', SEQUENCES)}",
                Reason.OVERLOADED,
            )

    def pop(self, session_number: int, sequence_id: str) -> LiveSequence | None:
        """None if it is unknown."""
        sequences = self._sessions.get(session_number, {})
        sequence = sequences.pop(sequence_id, None)
        if sequence is not None:
            self._ended(sequence)
            if not sequences:
                del self._sessions[session_number]
        return sequence

    def drop_session(self, session_number: int) -> None:
        for sequence in self._sessions.pop(session_number, {}).values():
            self._ended(sequence)

    def _ended(self, sequence: LiveSequence) -> None:
        self.num_blocks -= len(sequence.hashes)
        self.bound.give(sequence.owner, sequence.weight(len(sequence.hashes)), SEQUENCES)

    def check_invariants(self) -> None:
        everything = [
            sequence for sequences in self._sessions.values() for sequence in sequences.values()
        ]
        assert self.num_blocks == sum(len(sequence.hashes) for sequence in everything), (
            "blocks miscounted"
        )
        held: Counter[str] = Counter()
        for sequence in everything:
            held[sequence.owner] += sequence.weight(len(sequence.hashes))
        self.bound.check(held, SEQUENCES)
        assert all(
            0 < len(sequences) <= self.max_sequences for sequences in self._sessions.values()
        ), "too many sequences, or an empty session"
        assert all(
            s.created_blocks <= len(s.hashes) <= self.max_sequence_blocks for s in everything
        ), "a sequence is too long"
