"""The checks that every eviction policy must pass. Call the methods of `PolicyWorld` from a
property test, or at random with `check_policy`."""

import functools
import itertools
from collections.abc import Callable

import numpy as np

from hotkv_proto.blocks import NO_RETENTION, Retention
from hotkv_server.cache.room.policies.protocol import Entries, Keys, Policy

MakePolicy = Callable[[int], Policy]
"""Takes the capacity; blocks have entry numbers from 1."""


class PolicyWorld:
    """A small cache that numbers entries as `BlockIndex` does. Two policies of a kind hear every
    event, must keep the rules, and must agree.

    size_of, key_of: by entry number.
    """

    def __init__(self, make_policy: MakePolicy, capacity: int) -> None:
        self.capacity = capacity
        self.policy = make_policy(capacity)
        self.now_s = 0.0
        self.size_of: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.demoted: set[int] = set()
        self._reference = make_policy(capacity)
        self._may_keep = True
        self._fresh_keys = itertools.count(1)
        self._gone: list[int] = []

    def free_numbers(self) -> list[int]:
        """May include numbers freed just now."""
        return [number for number in range(1, self.capacity + 1) if number not in self.size_of]

    def arrive(
        self,
        numbers: list[int],
        slot_bytes: int,
        now_s: float,
        *,
        come_back: bool = False,
        retention: Retention = NO_RETENTION,
    ) -> None:
        """Consecutive blocks of a prompt become ready. `come_back`: with the keys of those
        removed last."""
        assert not set(numbers) & set(self.size_of)
        self.size_of |= dict.fromkeys(numbers, slot_bytes)
        for number in numbers:
            self.key_of[number] = (
                self._gone.pop() if come_back and self._gone else self._fresh_key()
            )
        self._tell("admit", numbers, now_s, retention)
        if not come_back:
            used_s = self.policy.last_used_s(_entries(numbers))
            assert np.allclose(used_s, now_s + retention.ttl_s, rtol=0, atol=0.1), (
                "a use of the block that had the number before counts"
            )

    def use(self, numbers: list[int], now_s: float, retention: Retention = NO_RETENTION) -> None:
        """In the order of the prompt."""
        self._tell("touch", numbers, now_s, retention)

    def refresh(self, numbers: list[int], now_s: float) -> None:
        """Blocks arrive that follow `numbers` in a prompt, which counts as their use."""
        assert now_s >= self.now_s
        self.now_s = now_s
        self.demoted -= set(numbers)
        for policy in (self.policy, self._reference):
            policy.refresh(_entries(numbers), now_s)

    def decline(self, count: int, now_s: float) -> None:
        """`count` blocks of a prompt found no room."""
        assert now_s >= self.now_s
        self.now_s = now_s
        keys = np.array([self._fresh_key() for _ in range(count)], np.uint64)
        for policy in (self.policy, self._reference):
            given = keys.copy()
            policy.decline(given, int(given[0] % 9) if count else 0, now_s)
            assert np.array_equal(given, keys), "decline changed its arguments"

    def allow_keeping(self, allowed: bool) -> None:
        """Whether `Policy.victims` may name fewer than it could."""
        self._may_keep = allowed
        for policy in (self.policy, self._reference):
            policy.allow_keeping(allowed)

    def hold(self, numbers: list[int], until_s: float) -> None:
        for policy in (self.policy, self._reference):
            policy.hold(_entries(numbers), until_s)

    def demote(self, numbers: list[int]) -> None:
        """In the order of the prompt: evicted first until they are used again."""
        self.demoted |= set(numbers)
        for policy in (self.policy, self._reference):
            policy.demote(_entries(numbers), self._keys(numbers), self.now_s)

    def _tell(self, what: str, numbers: list[int], now_s: float, retention: Retention) -> None:
        assert now_s >= self.now_s
        self.now_s = now_s
        self.demoted -= set(numbers)
        for policy in (self.policy, self._reference):
            entries, keys = _entries(numbers), self._keys(numbers)
            getattr(policy, what)(entries, keys, now_s, retention)
            assert entries.tolist() == numbers and np.array_equal(keys, self._keys(numbers)), (
                f"{what} changed its arguments"
            )

    def leave(self, numbers: list[int], *, evicted: bool = False) -> None:
        """`evicted`: the policy chose them."""
        for policy in (self.policy, self._reference):
            policy.forget(_entries(numbers), self._keys(numbers), evicted=evicted)
        for number in numbers:
            del self.size_of[number]
            self.pinned.discard(number)
            self.demoted.discard(number)
            self._gone.append(self.key_of.pop(number))

    def _fresh_key(self) -> int:
        return next(self._fresh_keys) * 0x9E37_79B9_7F4A_7C15 % (1 << 64)

    def _keys(self, numbers: list[int]) -> Keys:
        return np.array([self.key_of[number] for number in numbers], np.uint64)

    def evict(
        self, slot_bytes: int, count: int, *, refusable_at_s: float | None = None
    ) -> list[int]:
        """Victims, coldest first, checked and removed. `slot_bytes`: 0: any; `refusable_at_s`: now,
        if the policy may keep what it expects to be used soon, else None."""
        answers = []
        for policy in (self.policy, self._reference):
            evictable = functools.partial(self._evictable, slot_bytes)
            answers.append(
                policy.victims(slot_bytes, count, evictable, refusable_at_s=refusable_at_s).tolist()
            )
        victims: list[int] = answers[0]
        eligible = {
            n
            for n, size in self.size_of.items()
            if slot_bytes in (0, size) and n not in self.pinned
        }
        assert victims == answers[1], "two policies with one history disagree"
        assert len(set(victims)) == len(victims), "a victim is named twice"
        assert set(victims) <= eligible, "a victim is pinned, gone or of another size"
        assert len(victims) <= count, "more victims than asked for"
        if refusable_at_s is None or not self._may_keep:
            assert len(victims) == min(count, len(eligible)), "fewer victims than could be had"
        num_first = min(count, len(eligible & self.demoted))
        assert set(victims[:num_first]) <= self.demoted, "a demoted entry was not evicted first"
        self.leave(victims, evicted=True)
        return victims

    def check(self) -> None:
        """Heat is finite, and lowest for demoted entries."""
        entries = _entries(sorted(self.size_of))
        if self.demoted and len(self.demoted) < len(entries):
            rest = _entries(sorted(set(self.size_of) - self.demoted))
            coldest = self.policy.heat(_entries(sorted(self.demoted))).max()
            assert coldest < self.policy.heat(rest).min(), "a demoted entry is not the coldest"
        for figures in (self.policy.heat(entries), self.policy.last_used_s(entries)):
            assert figures.shape == entries.shape and figures.dtype == np.float64
            assert np.isfinite(figures).all()
        self.policy.check_invariants()

    def _evictable(
        self, slot_bytes: int, entries: Entries
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        numbers = entries.tolist()
        return np.array(
            [
                slot_bytes in (0, self.size_of.get(n, -1))
                and n in self.size_of
                and n not in self.pinned
                for n in numbers
            ],
            np.bool_,
        )


def _entries(numbers: list[int]) -> Entries:
    return np.array(numbers, np.uint32)


def check_policy(
    make_policy: MakePolicy, *, seed: int, num_steps: int = 300, capacity: int = 60
) -> None:
    """Runs random events."""
    rng = np.random.default_rng(seed)
    world = PolicyWorld(make_policy, capacity)
    for _ in range(num_steps):
        now_s = world.now_s + float(
            rng.choice([0.0, 1e-9, 1.0, 90.0, 1e6], p=[0.3, 0.2, 0.2, 0.2, 0.1])
        )
        in_use = sorted(world.size_of)
        some = [int(n) for n in rng.permutation(in_use)[: rng.integers(0, 12)]] if in_use else []
        retention = (
            NO_RETENTION
            if rng.random() < 0.8
            else Retention(int(rng.integers(-8, 9)), float(rng.choice([0.0, 5.0, 1e4])))
        )
        match int(rng.integers(0, 11)):
            case 0 | 1:
                fresh = [
                    int(n) for n in rng.permutation(world.free_numbers())[: rng.integers(0, 16)]
                ]
                world.arrive(
                    fresh,
                    int(rng.choice([4096, 8192])),
                    now_s,
                    come_back=bool(rng.integers(0, 2)),
                    retention=retention,
                )
            case 2:
                world.use(some, now_s, retention)
            case 3:
                world.evict(
                    int(rng.choice([0, 4096, 8192])),
                    int(rng.integers(0, 20)),
                    refusable_at_s=now_s if rng.random() < 0.5 else None,
                )
            case 4:
                world.pinned ^= set(some)
            case 5:
                world.refresh(some, now_s)
            case 6:
                world.demote(some)
            case 7:
                world.decline(int(rng.integers(0, 9)), now_s)
            case 9:
                world.hold(some, now_s + 5.0)
            case 8:
                world.allow_keeping(bool(rng.integers(0, 2)))
            case _:
                world.leave(some[:3])
        world.check()


def check_leaves_go_first(make_policy: MakePolicy, num_blocks: int = 20) -> None:
    """A prompt whose blocks are used together is evicted from its end."""
    world = PolicyWorld(make_policy, num_blocks)
    chain = list(range(1, num_blocks + 1))
    world.arrive(chain, 4096, 1.0)
    world.use(chain, 2.0)
    victims = [world.evict(4096, 1)[0] for _ in range(num_blocks // 2)] + world.evict(
        4096, num_blocks
    )
    assert victims == chain[::-1], "a block went before one that only it leads to"


def check_demoted_go_first(make_policy: MakePolicy, num_blocks: int = 20) -> None:
    """A demoted prompt goes first, from its end; one that is used again does not."""
    world = PolicyWorld(make_policy, 3 * num_blocks + 1)
    ended = list(range(1, num_blocks + 1))
    used = list(range(num_blocks + 1, 2 * num_blocks + 1))
    world.arrive(list(range(2 * num_blocks + 1, 3 * num_blocks + 2)), 4096, 1.0)
    for chain in (ended, used):
        world.arrive(chain, 4096, 2.0, retention=Retention(8, 8e4))
    for chain in (ended, used):
        world.use(chain, 1000.0)
    # The policy may now have chosen its next victims in advance; the demotion must still take
    # effect.
    gone = world.evict(4096, 1)
    ended, used = ([n for n in chain if n not in gone] for chain in (ended, used))
    world.demote(used)
    world.demote(ended)
    world.use(used, 1001.0)
    world.check()
    assert world.evict(4096, len(ended)) == ended[::-1], (
        "demoted blocks were kept, or used ones not"
    )
