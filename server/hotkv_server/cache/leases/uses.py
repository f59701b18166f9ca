"""Lookups and uses of blocks that are ready.

Owns nothing: the policy and the retention pins do. Always true: a lookup changes nothing but
counters; a use counts for the eviction policy, and pins the blocks if the request asks for it.
"""

from hotkv_proto import table
from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_proto.keys import MAX_GROUPS
from hotkv_server.cache.cache_books import CacheBooks
from hotkv_server.cache.sessions import check_named
from hotkv_server.cache.values import BoolMask, Entries, HashList, SessionRecord


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
