"""A naive model of `HotSet`, of sets and dicts: it knows which blocks have a slot, not which
slot."""

from dataclasses import dataclass, field


@dataclass
class NaiveHotSet:
    capacity: int
    spare: int
    policy: str
    first: int = 0
    last: int = 0
    count: int = 0
    clock: int = 0
    used_at: dict[int, int] = field(default_factory=dict)  # mapped blocks
    loading: dict[int, int] = field(default_factory=dict)  # slot: block, -1 if cancelled
    ready: dict[int, int] = field(default_factory=dict)  # slot: block
    has_copy: set[int] = field(default_factory=set)
    swapping: set[int] = field(default_factory=set)
    num_slots: int = 0

    def __post_init__(self) -> None:
        self.num_slots = self.capacity + self.spare

    def free(self) -> int:
        return self.num_slots - len(self.used_at) - len(self.loading) - len(self.ready)

    def pending(self) -> set[int]:
        return (set(self.loading.values()) | set(self.ready.values())) - {-1}

    def pinned(self, block: int) -> bool:
        return block < self.first or block >= self.last or block not in self.has_copy

    def victims(self, count: int, protected: bool) -> list[int]:
        able = [
            b
            for b, at in self.used_at.items()
            if not self.pinned(b) and not (protected and at >= self.clock)
        ]
        return sorted(able, key=lambda b: (self.used_at[b], b))[: max(count, 0)]

    def room(self, count: int, protected: bool) -> tuple[int, list[int]]:
        growth = self.capacity - len(self.used_at)
        num_free = min(max(min(count, growth), 0), self.free())
        victims = self.victims(count - num_free + max(-growth, 0), protected)
        return min(num_free + len(victims), count), victims

    def extend(
        self, first: int, last: int, count: int, num_complete: int, num_host: int
    ) -> tuple[list[int], list[int], list[int]] | None:
        """Extends the context to `count` blocks, `num_host` of them in host memory and
        `num_complete` full; those before `first` and from `last` are kept. Returns (new,
        evicted, to copy to host memory), or None without room."""
        fresh = list(range(max(self.count, num_host), count))
        before = (self.first, self.last)
        self.first, self.last = first, last
        able, victims = self.room(len(fresh), protected=False)
        growth = self.capacity - len(self.used_at)
        wanted = len(fresh) - min(max(min(len(fresh), growth), 0), self.free()) + max(-growth, 0)
        if len(victims) < wanted:
            able, victims = able - len(victims), []
        if able < len(fresh):
            self.first, self.last = before
            return None
        for block in victims:
            del self.used_at[block]
        for block in range(count, self.count):
            self.used_at.pop(block, None)
            self.abandon(block)
            self.has_copy.discard(block)
        self.has_copy |= set(range(self.count, num_host))
        self.swapping = {b for b in self.swapping if b < num_complete}
        self.count = count
        for block in fresh:
            self.used_at[block] = self.clock
        self.has_copy -= {b for b in self.used_at if b >= num_complete}
        out = sorted(
            b
            for b in self.used_at
            if b < num_complete and b not in self.has_copy and b not in self.swapping
        )
        self.swapping |= set(out)
        return fresh, victims, out

    def abandon(self, block: int) -> None:
        self.ready = {s: b for s, b in self.ready.items() if b != block}
        self.loading = {s: -1 if b == block else b for s, b in self.loading.items()}

    def swapped_out(self, blocks: list[int], success: bool) -> None:
        for block in blocks:
            if block in self.swapping:
                self.swapping.discard(block)
                if success:
                    self.has_copy.add(block)

    def seed(self, blocks: list[int]) -> list[int]:
        taken = []
        for block in dict.fromkeys(blocks):
            if block in self.used_at or block in self.pending():
                continue
            if self.free() <= 0 or len(self.used_at) >= self.capacity:
                break
            self.used_at[block] = self.clock
            self.has_copy.add(block)
            taken.append(block)
        return taken

    def step(
        self, weights: dict[int, float], max_loads: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Returns (to load, to prefetch, evicted).

        weights: of the selected blocks; infinity: always kept.
        max_loads: always-kept blocks may exceed it.
        """
        self.clock += 1
        victims = []
        mapped = [b for b in weights if b in self.used_at]
        for block in mapped:
            self.used_at[block] = self.clock
        if self.policy == "none":
            victims = [b for b in self.used_at if b not in weights and not self.pinned(b)]
            for block in victims:
                del self.used_at[block]
        missing = sorted((b for b in weights if b not in mapped), key=lambda b: (-weights[b], b))
        num_kept = sum(weights[b] == float("inf") for b in missing)
        able, more = self.room(min(len(missing), max(num_kept, max_loads)), protected=True)
        for block in more:
            del self.used_at[block]
        # An always-kept block may even take a selected block's slot.
        selected = self.victims(num_kept - able, protected=False)
        for block in selected:
            del self.used_at[block]
        able += len(selected)
        loaded = missing[:able]
        for block in loaded:
            self.abandon(block)
            self.used_at[block] = self.clock
        rest = sorted(missing[able:] + selected, key=lambda b: (-weights[b], b))
        return loaded, [b for b in rest if b not in self.pending()], victims + more + selected

    def begin_prefetch(self, blocks: list[int]) -> list[int]:
        able = [
            b
            for b in dict.fromkeys(blocks)
            if b not in self.used_at and b not in self.pending() and b in self.has_copy
        ]
        return able[: self.free()]

    def finish_prefetch(self, slot: int) -> None:
        block = self.loading.pop(slot)
        if block >= 0:
            self.ready[slot] = block

    def adopt(self) -> tuple[list[int], list[int]]:
        """Prefetched blocks become part of the hot set. Returns (added, evicted)."""
        excess = len(self.used_at) + len(self.ready) - self.capacity if self.ready else 0
        victims = self.victims(excess, protected=False)
        slots = sorted(self.ready)
        kept = slots[: max(len(slots) - max(excess - len(victims), 0), 0)]
        for block in victims:
            del self.used_at[block]
        adopted = [self.ready[slot] for slot in kept]
        self.ready = {}
        for block in adopted:
            self.used_at[block] = self.clock
        return adopted, victims

    def resize(self, capacity: int) -> list[int]:
        self.capacity = capacity
        self.num_slots = max(self.num_slots, capacity + self.spare)
        victims = self.victims(len(self.used_at) - capacity, protected=False)
        for block in victims:
            del self.used_at[block]
        return victims
