"""Features whose pairs the simulated engines test."""

import itertools
import time
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from hotkv_client.admin import AdminClient
from hotkv_client.command import warm_start
from hotkv_vllm.scheduler.find import hits
from tests.doubles.otlp_receiver import OtlpReceiver
from tests.pairs.servers import lose_disk
from tests.pairs.world import Play, World, ours
from tests.sparse.engines.approximate import SPARSE, Approximate, without_layers
from tests.support.waiting import WAIT_S
from tests.vllm.changing_weights import load, may_load, show_weights, weights_of
from tests.vllm.engine_core import Core
from tests.vllm.harness import Engine, Named, prompt
from tests.vllm.lora_manager import lora, with_adapters
from tests.vllm.other_connectors import PLAN, beside, loads_into
from tests.vllm.processes import Daemon
from tests.vllm.ranked import RankedEngine
from tests.vllm.specs import hybrid_model, states_and_windows_model
from tests.vllm.speculation import SpeculatingEngine, speculating
from tests.vllm.tiny import BLOCK_TOKENS
from tests.vllm.whole_prompts import Pooling

ALL_CALLS = ["store", "load", "acquire", "lookup"]


# ------------------------------------------------------------------------------ models and requests


class Lora(Play):
    """Engines disagree about the second adapter's bytes, so they must not share its blocks."""

    adapters = (None, lora(1, "a", "/a"), lora(2, "b", "/b"))

    def begin(self, world: World, one: Engine, number: int) -> None:
        files = {"/a": 1, "/b": 2 + number}
        with_adapters(one, files)
        adapters = ours(one)._scheduler._adapters
        keys_of = adapters.keys

        def named(request: Any) -> Any:
            keys = keys_of(request)
            if request.lora_request is not None:
                # The harness records nothing of a request that ends before it runs.
                one.contents.setdefault(request.request_id, files[request.lora_request.lora_path])
                for place, key in enumerate(keys, 1):
                    one.named[key] = Named(one, request, place * one.hash_block_tokens)
            return keys

        adapters.keys = named

    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        asked["lora_request"] = world.dice.choice(self.adapters)

    def met(self, world: World) -> bool:
        return any(one.contents for one in world.engines)


class Sparse(Play):
    def start(self, world: World) -> None:
        without_layers(world.monkeypatch)

    def models_of(self, number: int) -> tuple[type[Engine], ...]:
        return (Approximate,) if number == 0 else ()

    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"extra": SPARSE} if number == 0 else {}

    def after(self, world: World) -> None:
        one = world.engines[0]
        world.ask(one, prompt(0, 150), max_tokens=60)
        world.run(one)

    def met(self, world: World) -> bool:
        return world.engines[0].num_sparse_rows > 0


class Ranks(Play):
    models = (RankedEngine,)

    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"num_ranks": 2}

    def met(self, world: World) -> bool:
        return all(len(one.ranks) > 1 for one in world.engines)


class Pipeline(Ranks):
    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"num_stages": 2} | ({} if "ranks" in world else {"num_ranks": 1})


class Hybrid(Play):
    """It has no recurrent states beside sparse decode or another connector that loads."""

    def settings(self, world: World, number: int) -> dict[str, Any]:
        has_states = {"sparse", "multi_first", "multi_second"}.isdisjoint(world.plays)
        specs = states_and_windows_model() if has_states else hybrid_model()
        return {"specs": specs} | ({} if "preemption" in world else {"blocks": 128})

    def met(self, world: World) -> bool:
        return all(len(one.kv_config.kv_cache_groups) > 1 for one in world.engines)


class Pools(Play):
    models = (Pooling,)

    def met(self, world: World) -> bool:
        return all(one.pooled for one in world.engines)


class Embeds(Play):
    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"enable_prompt_embeds": True}

    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        if world.dice.random() < 0.5:
            tokens = torch.tensor(asked["prompt"], dtype=torch.float32)
            asked["prompt_embeds"] = tokens[:, None].repeat(1, 4).to(torch.bfloat16)
            asked["prompt"] = []
            self.count += 1


class Images(Play):
    place = PlaceholderRange(offset=20, length=40)

    def begin(self, world: World, one: Engine, number: int) -> None:
        one.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        one.scheduler.max_num_encoder_input_tokens = 1000

    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        if len(asked["prompt"]) < 80 or world.dice.random() < 0.5:
            return
        self.count += 1
        image = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=world.dice.choice(["picture", "drawing"]),
            mm_position=self.place,
        )
        first, end = self.place.offset, self.place.offset + self.place.length
        asked["prompt"][first:end] = [2] * self.place.length
        asked["mm_features"] = [image]


class Speculation(Play):
    models = (SpeculatingEngine,)

    def settings(self, world: World, number: int) -> dict[str, Any]:
        return speculating(world.monkeypatch, world.folder) | {"pipelined": True}

    def after(self, world: World) -> None:
        for one in world.engines:
            world.ask(one, max_tokens=60)
            world.run(one)

    def met(self, world: World) -> bool:
        return all(one.drafts > one.rejected > 0 for one in world.engines)


# ------------------------------------------------------------------------------- ways of the engine


class OtherFirst(Play):
    """Another connector, listed first, loads some requests. Beside `OtherLast`, only in the
    first engine."""

    ours_first = False
    number_of_both = 0

    def beside(self, world: World, number: int, ours: dict[str, Any]) -> dict[str, Any]:
        if {"multi_first", "multi_second"} <= world.plays.keys() and number != self.number_of_both:
            return ours
        return beside("LoadingConnector", ours_first=self.ours_first)(ours)

    def start(self, world: World) -> None:
        PLAN.__init__()  # type: ignore[misc]
        PLAN.fill = self.fill(world)

    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        # All whole blocks but the last; also for prompts of embeddings or images.
        length = len(asked["prompt"]) // BLOCK_TOKENS * BLOCK_TOKENS
        if length > BLOCK_TOKENS and world.dice.random() < 0.6:
            PLAN.tokens[name] = length - BLOCK_TOKENS

    def after(self, world: World) -> None:
        for seed in range(50, 70):
            for one in () if self.met(world) else world.engines:
                world.ask(one, prompt(seed, 200))
                world.run(one)

    def fill(self, world: World) -> Any:
        def load_into(name: str, tables: Any, tokens: int) -> None:
            PLAN.num_loads += 1
            (one,) = [one for one, other in world.asked if other == name]
            loads_into(one)(name, tables, tokens)

        return load_into

    def met(self, world: World) -> bool:
        return PLAN.num_loads > 0


class OtherLast(OtherFirst):
    """Another connector is listed last. Beside `OtherFirst`, only in the second engine."""

    ours_first = True
    number_of_both = 1


class Producer(Play):
    def role(self, number: int) -> str:
        return "kv_producer" if number == 0 else ""

    def met(self, world: World) -> bool:
        produced = world.engines[0].counters
        return "loads" not in produced and "stores" in produced


class Consumer(Play):
    def role(self, number: int) -> str:
        return "kv_consumer" if number == 1 else ""

    def met(self, world: World) -> bool:
        return "stores" not in world.engines[1].counters


class Asynchronous(Play):
    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"pipelined": True}

    def met(self, world: World) -> bool:
        return all(one.pipelined for one in world.engines)


class Preemption(Play):
    def start(self, world: World) -> None:
        # A fast machine would resume a preempted request while hotkv remembers its miss.
        world.monkeypatch.setattr(hits, "MISS_MEMORY_S", 0.0)

    def settings(self, world: World, number: int) -> dict[str, Any]:
        # A pooling engine is preempted only within a prompt, which vLLM starts by default only
        # if it fits whole.
        chunks = {"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 32}
        return {"blocks": 44 if "hybrid" in world else 18} | chunks

    def between(self, world: World) -> None:
        if world.turn % 3 == 0:
            self.crowd(world, world.turn)

    def after(self, world: World) -> None:
        # A crowd rarely preempts where another connector loads most of each prompt.
        for number in range(100, 200):
            if not self.met(world):
                self.crowd(world, number)

    def crowd(self, world: World, number: int) -> None:
        """`number` decides the prompts."""
        one = world.dice.choice(world.engines)
        for seed in range(3):
            fresh = prompt(100 + 3 * number + seed, world.dice.randrange(180, 300))
            world.ask(one, fresh, max_tokens=60)
        for _ in range(world.dice.randrange(20, 70)):
            one.step()

    def met(self, world: World) -> bool:
        return any(one.preemptions for one in world.engines)


class LoadChoice(Play):
    may_not_hit = True

    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"extra": {"load": "auto"}}

    def met(self, world: World) -> bool:
        return bool(world.count("loads") or world.count("left_requests"))


class Tracing(Play):
    def start(self, world: World) -> None:
        self.collector = OtlpReceiver()
        self.collector.__enter__()

    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"extra": {"tracing": self.collector.url, "tracing_sample_ratio": 1.0}}

    def met(self, world: World) -> bool:
        for one in world.engines:
            ours(one)._scheduler.requests._traces.close()
        self.collector.__exit__(None, None, None)
        return bool(self.collector.spans)


# --------------------------------------------------------------------------- what clients ask for


class Hints(Play):
    """Clients hint in `kv_transfer_params`, routers in `kv_hints`, which pooling requests need."""

    wishes = (
        {"hotkv.priority": 3},
        {"hotkv.ttl_s": 9, "hotkv.pin": True},
        {"hotkv.demote": True},
        {"hotkv.release": True},
    )
    actions = (("pin", {"ttl_s": 60}), ("demote", {}), ("kv.release", {}))

    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        if world.dice.random() < 0.5:
            asked["transfer"] = dict(world.dice.choice(self.wishes))
        else:
            kind, payload = world.dice.choice(self.actions)
            action = KvHintAction("a", kind, "1.0", payload)
            asked["kv_hints"] = KvHintsEnvelope("0.1", name, [action])

    def met(self, world: World) -> bool:
        return any(report.hints for report in world.server.told)


class Sessions(Play):
    def request(self, world: World, one: Engine, name: str, asked: dict[str, Any]) -> None:
        asked["session_id"] = world.dice.choice(["chat", "agent"])

    def met(self, world: World) -> bool:
        return any(report.session_id for report in world.server.told)


class Reset(Play):
    def between(self, world: World) -> None:
        if not self.happens(world):
            return
        one = world.dice.choice(world.engines)
        world.run(one)
        cache = ours(one)._scheduler.cache
        # hotkv has none within a MultiConnector before the first step.
        if cache is None or world.dice.random() < 0.5:
            is_empty = one.scheduler.reset_prefix_cache(reset_connector=True)
            assert is_empty or not world.server.is_well
        else:
            cache.session.flush()

    def after(self, world: World) -> None:
        one = world.engines[0]
        assert one.scheduler.reset_prefix_cache(reset_connector=True)
        world.end(one)
        space = ours(one)._scheduler.cache.session.config.key_space
        assert not world.server.num_blocks(space.fingerprint, 0)


class Weights(Play):
    def start(self, world: World) -> None:
        may_load(world.monkeypatch)
        self.seeds = itertools.cycle((7, 0, 8))

    def begin(self, world: World, one: Engine, number: int) -> None:
        world.weights_of = weights_of
        with torch.no_grad():
            for value in one.model.parameters():
                value.zero_()
        show_weights(one)
        world.weights.add(weights_of(one))

    def between(self, world: World) -> None:
        if not self.happens(world):
            return
        one = world.dice.choice(world.engines)
        world.abort_all(one)
        one.scheduler.reset_prefix_cache()
        load(one, next(self.seeds))
        world.weights.add(weights_of(one))

    def met(self, world: World) -> bool:
        return len(world.weights) > 1


class Sleep(Play):
    def between(self, world: World) -> None:
        if not self.happens(world):
            return
        one = world.dice.choice(world.engines)
        world.abort_all(one)
        core = Core(one)
        if world.dice.random() < 0.5:
            core.sleep()
            core.wake_up()
        else:
            core.pause()
            core.core.resume_scheduler()


class Tenants(Play):
    def settings(self, world: World, number: int) -> dict[str, Any]:
        return {"extra": {"tenant": "ab"[number % 2]}}

    def met(self, world: World) -> bool:
        sessions = [ours(one)._scheduler.cache.session for one in world.engines]
        spaces = {session.config.key_space.fingerprint for session in sessions}
        assert len(spaces) == len(world.engines), "two tenants have one key space"
        numbers = range(len(world.engines))
        num_stored = sum(
            any(world.server.num_blocks(space, number) for number in numbers) for space in spaces
        )
        return num_stored >= (1 if "consumer" in world else 2)


# ------------------------------------------------------------------------------------- the server


class Restart(Play):
    def between(self, world: World) -> None:
        if not self.happens(world):
            return
        world.server.die(empty=world.dice.random() < 0.5)
        if world.dice.random() < 0.5:
            world.dice.choice(world.engines).step()
        world.server.come_back()


class Away(Play):
    def between(self, world: World) -> None:
        if world.server.up and self.happens(world):
            world.server.die(empty=False)
        elif not world.server.up and world.dice.random() < 0.4:
            world.server.come_back()


class Slow(Play):
    def settings(self, world: World, number: int) -> dict[str, Any]:
        waits = {"lookup_timeout_s": 0.01, "load_timeout_s": 0.02, "store_timeout_s": 0.05}
        return {"extra": {name: world.server.pace * wait_s for name, wait_s in waits.items()}}

    def between(self, world: World) -> None:
        server, dice = world.server, world.dice
        self.count += bool(server.hold or server.late)
        server.settle(dice.choice(["", *ALL_CALLS]))
        # If nothing was delayed in the first half, delays one call.
        least = int(world.turn == world.num_turns // 2 and not self.count)
        server.hold = set(dice.sample(ALL_CALLS, dice.randrange(least, 4)))
        server.late = set(dice.sample(ALL_CALLS, dice.randrange(2)))
        server.ack_cancels = dice.random() < 0.5


# ------------------------------------------------------------------------- tiers of real daemons


class Tier(Play):
    came = went = ""
    """Counters of promoted (`came`) and demoted (`went`) blocks."""
    has_come = False

    def after(self, world: World) -> None:
        # A `producer` loads nothing.
        number = 1 if "producer" in world else 0
        one = world.engines[number]
        names = [world.ask(one, prompt(family, 280), max_tokens=2) for family in range(3)]
        world.end(one)
        until_s = time.monotonic() + 2 * WAIT_S
        while not self.has_come:
            assert time.monotonic() < until_s, f"nothing comes by {type(self).__name__}"
            self.lose(world, one, number)
            daemon = world.server.of(number)
            world.drop_local(one)
            for name in names:
                world.repeat(one, world.arguments[name])
            world.end(one)
            # With `load_choice`, engines may have computed all hits.
            may_leave = "load_choice" in world and world.count("left_requests") > 0
            self.has_come = may_leave or daemon.counter(self.came) > 0
            if not self.has_come:
                wait_for_copies(daemon, type(self))

    def lose(self, world: World, one: Engine, number: int) -> None:
        """Loses the disk's blocks too, unless the disk is the tested tier."""
        daemon = world.server.of(number)
        daemon.lose_arena()
        if not isinstance(self, Disk):
            lose_disk(daemon)
        daemon.start()
        world.server.until_connected(one)

    def met(self, world: World) -> bool:
        return self.has_come


def wait_for_copies(daemon: Daemon, tier: type[Tier]) -> None:
    """A kill loses copies in flight. Gives up after WAIT_S / 12: there may be nothing to copy."""
    until_s = time.monotonic() + WAIT_S / 12
    while not daemon.counter(tier.went) and time.monotonic() < until_s:
        time.sleep(0.02)


class Disk(Tier):
    came, went = "tier_promoted_blocks_total", "tier_demoted_blocks_total"


class Shared(Tier):
    came, went = "shared_fetched_blocks_total", "shared_copied_blocks_total"


class Warm(Tier):
    """Empty after a restart, the node fetches the blocks whose hashes it had exported."""

    came, went = "shared_fetched_blocks_total", "shared_copied_blocks_total"

    def lose(self, world: World, one: Engine, number: int) -> None:
        daemon, file = world.server.of(number), world.folder / "blocks"
        space = ours(one)._scheduler.cache.session.config.key_space.fingerprint.hex()
        with AdminClient(daemon.target, WAIT_S) as client:
            known = {one["fingerprint"]: one["key_space_id"] for one in client.key_spaces()}
            if space in known:
                warm_start.export(client, file, known[space], 0)
        super().lose(world, one, number)
        with AdminClient(daemon.target, WAIT_S) as client:
            warm_start.fetch(client, file, 5.0)


PLAYS: dict[str, type[Play]] = {
    "lora": Lora,
    "sparse": Sparse,
    "ranks": Ranks,
    "pipeline": Pipeline,
    "hybrid": Hybrid,
    "pooling": Pools,
    "embeds": Embeds,
    "images": Images,
    "multi_first": OtherLast,
    "multi_second": OtherFirst,
    "producer": Producer,
    "consumer": Consumer,
    "speculation": Speculation,
    "asynchronous": Asynchronous,
    "preemption": Preemption,
    "hints": Hints,
    "sessions": Sessions,
    "load_choice": LoadChoice,
    "reset": Reset,
    "weights": Weights,
    "sleep": Sleep,
    "tenants": Tenants,
    "tracing": Tracing,
    "restart": Restart,
    "away": Away,
    "slow": Slow,
    "disk": Disk,
    "shared": Shared,
    "warm": Warm,
}
