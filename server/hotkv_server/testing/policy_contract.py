"""What every eviction policy must do, whatever it thinks is cold.

`PolicyWorld` is a small cache round one policy: it hands out entry numbers as the index does, knows which are ready and pinned,
and checks each answer. Drive it from a property test, or let `check_policy` drive it at random.
"""

import functools
from collections.abc import Callable

import numpy as np

from hotkv_server.core.policy import Entries, Policy

MakePolicy = Callable[[int], Policy]
"""Makes a policy for entry numbers 1 to the given capacity."""


class PolicyWorld:
    """Entries that come, are used and go. Checks that the policy answers by the rules, and two of a kind alike."""

    def __init__(self, make_policy: MakePolicy, capacity: int) -> None:
        self.capacity = capacity
        self.policy = make_policy(capacity)
        self.now_s = 0.0
        self.size_of: dict[int, int] = {}
        self.pinned: set[int] = set()
        self._twin = make_policy(capacity)

    def free_numbers(self) -> list[int]:
        """Entry numbers that are not in use; the last one freed may be the first one used anew."""
        return [number for number in range(1, self.capacity + 1) if number not in self.size_of]

    def arrive(self, numbers: list[int], slot_bytes: int, now_s: float) -> None:
        """Blocks of one chain become ready."""
        assert not set(numbers) & set(self.size_of)
        self.size_of |= dict.fromkeys(numbers, slot_bytes)
        self.use(numbers, now_s)

    def use(self, numbers: list[int], now_s: float) -> None:
        """A touch, in chain order."""
        assert now_s >= self.now_s
        self.now_s = now_s
        for policy in (self.policy, self._twin):
            entries = _entries(numbers)
            policy.touch(entries, now_s)
            assert entries.tolist() == numbers, "touch changed its argument"

    def leave(self, numbers: list[int]) -> None:
        """Blocks go for another reason than eviction."""
        for number in numbers:
            del self.size_of[number]
            self.pinned.discard(number)
        for policy in (self.policy, self._twin):
            policy.forget(_entries(numbers))

    def evict(self, slot_bytes: int, count: int) -> list[int]:
        """Asks for victims of a slot size (0: of any), checks them, and lets them go. Coldest first."""
        answers = []
        for policy in (self.policy, self._twin):
            evictable = functools.partial(self._evictable, slot_bytes)
            answers.append(policy.victims(slot_bytes, count, lambda: self._candidates(slot_bytes), evictable).tolist())
        victims: list[int] = answers[0]
        eligible = {n for n, size in self.size_of.items() if slot_bytes in (0, size) and n not in self.pinned}
        assert victims == answers[1], "two policies with one history disagree"
        assert len(set(victims)) == len(victims), "a victim is named twice"
        assert set(victims) <= eligible, "a victim is pinned, gone or of another size"
        assert len(victims) == min(count, len(eligible)), "fewer victims than could be had, or more than asked for"
        self.leave(victims)
        return victims

    def check(self) -> None:
        """Raises AssertionError where `last_used_s` can't order entries."""
        entries = _entries(sorted(self.size_of))
        used_s = self.policy.last_used_s(entries)
        assert used_s.shape == entries.shape and used_s.dtype == np.float64
        assert np.isfinite(used_s).all()

    def _candidates(self, slot_bytes: int) -> Entries:
        return _entries([number for number in sorted(self.size_of) if slot_bytes in (0, self.size_of[number])])

    def _evictable(self, slot_bytes: int, entries: Entries) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        numbers = entries.tolist()
        return np.array(
            [slot_bytes in (0, self.size_of.get(n, -1)) and n in self.size_of and n not in self.pinned for n in numbers], np.bool_
        )


def _entries(numbers: list[int]) -> Entries:
    return np.array(numbers, np.uint32)


def check_policy(make_policy: MakePolicy, *, seed: int, num_steps: int = 300, capacity: int = 60) -> None:
    """Drives a world at random. Raises AssertionError where the policy breaks a rule."""
    rng = np.random.default_rng(seed)
    world = PolicyWorld(make_policy, capacity)
    for _ in range(num_steps):
        now_s = world.now_s + float(rng.choice([0.0, 1e-9, 1.0, 1e6]))
        in_use = sorted(world.size_of)
        some = [int(n) for n in rng.permutation(in_use)[: rng.integers(0, 12)]] if in_use else []
        match int(rng.integers(0, 6)):
            case 0 | 1:
                fresh = [int(n) for n in rng.permutation(world.free_numbers())[: rng.integers(0, 16)]]
                world.arrive(fresh, int(rng.choice([4096, 8192])), now_s)
            case 2:
                world.use(some, now_s)
            case 3:
                world.evict(int(rng.choice([0, 4096, 8192])), int(rng.integers(0, 20)))
            case 4:
                world.pinned ^= set(some)
            case _:
                world.leave(some[:3])
        world.check()


def check_leaves_go_first(make_policy: MakePolicy, num_blocks: int = 20) -> None:
    """Of blocks that were only ever used together, the tail of the chain goes before its head. Raises AssertionError where not."""
    world = PolicyWorld(make_policy, num_blocks)
    chain = list(range(1, num_blocks + 1))
    world.arrive(chain, 4096, 1.0)
    world.use(chain, 2.0)
    victims = [world.evict(4096, 1)[0] for _ in range(num_blocks // 2)] + world.evict(4096, num_blocks)
    assert victims == chain[::-1], "a block went before one that only it leads to"
