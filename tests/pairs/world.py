"""A `World` runs features together: simulated engines, a server, random traffic.

At the end every answer is right, no lease, reservation, quarantined or lost block is left,
caches hold the model's values, and each feature has acted (`Play.met`). Features and seed decide
all random choices.
"""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotkv_vllm.connector import HotKVConnector
from hotkv_vllm.scheduler.store import stores
from tests.support.waiting import WAIT_S, wait_for
from tests.vllm.harness import Engine, next_token, prompt
from tests.vllm.oracle import check_cached, check_nothing_left
from tests.vllm.other_connectors import our_connector
from tests.vllm.ranked import RankedEngine

TURNS = 4
MOST_MORE = 60
"""They are added until every feature has acted."""
FAMILIES = 3
"""Prompts of one family are prefixes of each other."""


class Play:
    """A feature, as changes to one `World`. These do nothing."""

    models: tuple[type[Engine], ...] = ()
    may_not_hit = False
    """The feature may prevent all loads."""
    count = 0

    def settings(self, world: "World", number: int) -> dict[str, Any]:
        """The key `extra` has the connector's settings."""
        return {}

    def role(self, number: int) -> str:
        """`kv_role`; empty for `kv_both`."""
        return ""

    def beside(self, world: "World", number: int, ours: dict[str, Any]) -> dict[str, Any]:
        """`kv_transfer_config`, given that of hotkv alone."""
        return ours

    def models_of(self, number: int) -> tuple[type[Engine], ...]:
        return self.models

    def start(self, world: "World") -> None:
        """Before engines are created."""

    def begin(self, world: "World", one: Engine, number: int) -> None: ...

    def request(self, world: "World", one: Engine, name: str, asked: dict[str, Any]) -> None:
        """Changes the arguments of `Engine.add`."""

    def between(self, world: "World") -> None: ...

    def happens(self, world: "World") -> bool:
        """At random, and in the middle turn if it has not acted yet."""
        is_now = world.dice.random() < 0.4 or (
            world.turn == world.num_turns // 2 and not self.count
        )
        self.count += is_now
        return is_now

    def after(self, world: "World") -> None: ...

    def met(self, world: "World") -> bool:
        return self.count > 0


class World:
    def __init__(
        self,
        plays: dict[str, Play],
        server: Any,
        seed: int,
        folder: Path,
        monkeypatch: Any,
    ) -> None:
        self.name = f"{'+'.join(sorted(plays))} {seed}"
        self.dice = random.Random(self.name)
        self.folder, self.monkeypatch = folder, monkeypatch
        # Smaller too, so that some blocks are stored before a short answer ends.
        num_blocks = random.Random(f"answers {self.name}").choice((1, 2, stores.ANSWER_BLOCKS))
        monkeypatch.setattr(stores, "ANSWER_BLOCKS", num_blocks)
        self.plays = plays
        self.server = server
        self.aborted: set[str] = set()
        self.asked: list[tuple[Engine, str]] = []
        self.arguments: dict[str, dict[str, Any]] = {}
        self.turn = self.num_turns = 0
        self.engines: list[Engine] = []
        self.weights = {0}
        """Numbers by which weights change KV values."""
        self.weights_of: Callable[[Engine], int] = lambda one: 0
        for play in plays.values():
            play.start(self)
        for number in range(2):
            self.make(number)

    def __contains__(self, feature: str) -> bool:
        return feature in self.plays

    def make(self, number: int) -> Engine:
        kinds = dict.fromkeys(
            kind for play in self.plays.values() for kind in play.models_of(number)
        )
        order = sorted(kinds, key=lambda kind: kind is RankedEngine)
        settings: dict[str, Any] = {"blocks": 64, "max_tokens_per_step": 128}
        extra: dict[str, Any] = self.server.settings(number)
        for play in self.plays.values():
            more = play.settings(self, number)
            extra |= more.pop("extra", {})
            settings |= more

        def within(ours: dict[str, Any]) -> dict[str, Any]:
            roles = [role for play in self.plays.values() if (role := play.role(number))]
            ours = ours | {"kv_role": roles[0] if roles else "kv_both"}
            for play in self.plays.values():
                ours = play.beside(self, number, ours)
            return ours

        one: Engine = type("Paired", (*order, Engine), {})(
            self.server,
            self.folder / "model",
            self.monkeypatch,
            within=within,
            extra=extra,
            **settings,
        )
        self.engines.append(one)
        for play in self.plays.values():
            play.begin(self, one, number)
        return one

    # ------------------------------------------------------------------------------------- traffic

    def ask(self, one: Engine, prompt_tokens: Sequence[int] | None = None, **more: Any) -> str:
        name = f"r{len(self.asked)}"
        if prompt_tokens is None:
            family, length = self.dice.randrange(FAMILIES), self.dice.randrange(20, 300)
            prompt_tokens = prompt(family, length)
        asked: dict[str, Any] = {
            "prompt": list(prompt_tokens),
            "max_tokens": self.dice.randrange(1, 40),
        } | more
        for play in self.plays.values():
            play.request(self, one, name, asked)
        return self.repeat(one, asked)

    def repeat(self, one: Engine, asked: dict[str, Any]) -> str:
        name = f"r{len(self.asked)}"
        one.add(name, **asked)
        self.asked.append((one, name))
        self.arguments[name] = asked
        return name

    def run(self, one: Engine) -> None:
        until_s = time.monotonic() + WAIT_S
        while one.scheduler.has_requests() or one.queue:
            assert time.monotonic() < until_s, f"not finished: {one.scheduler.requests}"
            one.step()
            self.server.settle()

    def abort(self, one: Engine, name: str) -> None:
        one.abort(name)
        self.aborted.add(name)

    def abort_all(self, one: Engine) -> None:
        for name in list(one.scheduler.requests):
            self.abort(one, name)
        self.run(one)

    def drop_local(self, one: Engine) -> None:
        self.run(one)
        assert one.scheduler.reset_prefix_cache()

    def play(self, num_turns: int = TURNS) -> None:
        """After the traffic, engines load what others stored."""
        self.num_turns = num_turns
        for self.turn in range(num_turns):
            one = self.dice.choice(self.engines)
            for _ in range(self.dice.randrange(1, 4)):
                self.ask(one)
            for _ in range(self.dice.randrange(12)):
                self.dice.choice(self.engines).step()
            for play in self.plays.values():
                play.between(self)
            if self.dice.random() < 0.15:
                self.abort(*self.dice.choice(self.asked))
            if self.dice.random() < 0.2:
                self.drop_local(self.dice.choice(self.engines))
        if not self.server.up:
            self.server.come_back()
        self.server.hold, self.server.late = set(), set()
        for one in self.engines:
            self.run(one)
        for play in self.plays.values():
            play.after(self)
        for one in self.engines:
            self.run(one)
        # Loads what others may have stored.
        for one in self.engines:
            self.server.until_connected(one)
            self.drop_local(one)
            names = [self.ask(one, prompt(family, 280), max_tokens=2) for family in range(FAMILIES)]
            self.end(one)
            self.drop_local(one)
            for name in names:
                self.repeat(one, self.arguments[name])
            self.end(one)
        for _ in range(MOST_MORE):
            if not self.missing():
                break
            one = self.dice.choice(self.engines)
            self.drop_local(one)
            self.ask(one)
            self.end(one)

    def end(self, one: Engine) -> None:
        """Short requests carry the last stores' results to the scheduler."""
        self.run(one)
        for seed in (90, 91):
            one.add(f"end {seed}", prompt(seed, 3), max_tokens=2)
            self.run(one)

    # --------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        for one, name in self.asked:
            if name not in self.aborted:
                check_answer(one, name)
        for one in self.engines:
            # A busy server ends stores late.
            wait_for(lambda one=one: self._knows_all(one), "the end of all stores")
            check_nothing_left(one)
        self.server.check(self.engines, sorted(self.weights))
        for one in self.engines:
            check_cached(one, self.weights_of(one))
        assert not self.missing(), f"has not shown itself: {self.missing()}"

    def _knows_all(self, one: Engine) -> bool:
        cache = our_connector(one.connector)._scheduler.sharing.cache
        if cache is None or not cache.planner.in_flight.stores:
            return True
        self.end(one)
        return False

    def missing(self) -> list[str]:
        """Also "loads", if nothing was loaded without excuse."""
        missing = [feature for feature, play in self.plays.items() if not play.met(self)]
        # A consumer finds nothing under another tenant or other weights.
        strangers = {"producer", "consumer"} <= self.plays.keys() and (
            {"tenants", "weights"} & self.plays.keys()
        )
        may_load = not strangers and not any(play.may_not_hit for play in self.plays.values())
        return missing + ["loads"] * (may_load and not self.count("loads"))

    def count(self, counter: str) -> float:
        return sum(one.counters.get(counter, 0) for one in self.engines)

    def close(self) -> None:
        for one in self.engines:
            one.shutdown()


def ours(one: Engine) -> HotKVConnector:
    """Also within a MultiConnector."""
    return our_connector(one.connector)


def check_answer(one: Engine, name: str) -> None:
    assert one.finished.get(name) in ("length", "stop"), f"{name}: {one.finished.get(name)}"
    request = one.requests[name]
    if request.pooling_params is not None:
        vector = one.values_of(name, request.all_token_ids)[-1]
        assert one.pooled[name] == [float(vector)], f"{name}: {one.pooled[name]}"
        return
    tokens = list(request.all_token_ids)
    assert len(tokens) == request.num_prompt_tokens + request.max_tokens, name
    assert one.outputs[name] == tokens[request.num_prompt_tokens :], name
    values = one.values_of(name, tokens)
    for place in range(request.num_prompt_tokens, len(tokens)):
        assert tokens[place] == next_token(values[:place]), f"{name}: token {place}"
