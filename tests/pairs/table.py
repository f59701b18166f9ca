"""How each pair of features is tested, or why it is impossible; `tools/pairs_table.py` writes it
into docs/deployments.md.

Exactly one answer a pair:

- The simulated engines run both (`features.PLAYS`), with real servers for a tier.
- Another test, with real parts, covers it.
- hotkv refuses it; a test checks the message.
- The features can't meet, for a reason that a reader can check.
"""

import functools
import itertools
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_T = TypeVar("_T")

FEATURES = {
    "lora": "LoRA adapters",
    "residency": "residency",
    "sparse": "sparse",
    "ranks": "ranks",
    "pipeline": "pipeline",
    "hybrid": "several KV cache groups",
    "pooling": "pooling",
    "embeds": "prompts of embeddings",
    "images": "images",
    "multi_first": "hotkv first in MultiConnector",
    "multi_second": "hotkv second",
    "producer": "producer",
    "consumer": "consumer",
    "speculation": "speculation",
    "asynchronous": "asynchronous",
    "preemption": "preemption",
    "hints": "hints",
    "sessions": "conversations",
    "load_choice": "load or compute",
    "reset": "reset",
    "weights": "changed weights",
    "sleep": "sleep",
    "tenants": "tenants",
    "tracing": "tracing",
    "restart": "restart",
    "away": "no server",
    "slow": "slow server",
    "disk": "disk",
    "shared": "a shared tier",
    "warm": "warm start",
    "offloading": "vLLM's own",
}
"""In the order of docs/deployments.md."""
TIERS = ("disk", "shared", "warm")
REAL_ONLY = ("residency", "offloading")
"""Residency needs a real model's layers, and the harness runs only hotkv's own connector."""


WORLD_SIZE = 4
"""With more, some hide the effect of others. Tiers don't count."""


class Kind(Enum):
    HARNESS = "harness"
    DAEMON = "daemon"
    REAL = "real"
    REFUSED = "refused"
    APART = "apart"


@dataclass(frozen=True, slots=True)
class Answer:
    """test: empty if the features can't meet.
    words: the refusal, the reason, or a description of the test.
    """

    kind: Kind
    test: str = ""
    words: str = ""


Pair = frozenset[str]
_PAIRS = "tests/pairs/test_pairs.py::"
_NODES = "tests/pairs/test_nodes.py::"
_REFUSED = "tests/pairs/test_refused.py::test_a_pair_that_is_refused"
_BESIDE = f"{_REFUSED}_beside_another_connector"
_ENGINES = "tests/sparse/engines"
_RESIDENCY = f"{_ENGINES}/test_residency.py::"
_FAULTS = f"{_ENGINES}/test_residency_faults.py::"
_DOOR = "tests/offloading/test_door_pairs.py::"
_DOOR_ENGINES = "tests/offloading/test_engines.py::"
_RESETS = "test_reset_empties_server_weights_update_waits"
_OUTLIVES = "test_engines_share_answers_too_and_outlive_the_server"
_DOOR_REFUSES = f"{_DOOR}test_a_setting_that_this_door_can_not_serve"

_DRAFTER = "hotkv.sparse: a drafter with KV of its own (eagle) would draft from sparse attention"
_GROUP = (
    "hotkv.sparse.residency = 'host': it needs one KV cache group of plain full attention, with "
    "hotkv's attention in vLLM"
)
REFUSALS: dict[tuple[str, str], str] = {
    ("pipeline", "pooling"): "pooling with pipeline_parallel_size = 2: vLLM's model runner V1 ends",
    ("sparse", "pipeline"): "hotkv.sparse: it does not work with pipeline or context parallelism",
    ("sparse", "speculation"): _DRAFTER,
    ("residency", "pipeline"): "hotkv.sparse: it does not work with pipeline or context "
    "parallelism",
    ("residency", "speculation"): _DRAFTER,
    ("residency", "hybrid"): _GROUP,
    ("residency", "consumer"): "hotkv.sparse.residency = 'host': with kv_role 'kv_consumer' this "
    "engine stores nothing, and what is not stored can't leave the device; set kv_role to "
    "'kv_both'",
    ("residency", "multi_first"): _GROUP,
    ("residency", "multi_second"): _GROUP,
    ("residency", "offloading"): "hotkv.sparse: vLLM's offloading keeps whole contexts on the "
    "device; this needs kv_connector HotKVConnector",
    ("sparse", "offloading"): "hotkv.sparse: vLLM's offloading keeps whole contexts on the "
    "device; this needs kv_connector HotKVConnector",
    ("tracing", "offloading"): "hotkv.tracing = 'http://localhost:4318': "
    "vLLM's offloading makes no spans of requests; leave it out, or use kv_connector "
    "HotKVConnector",
}
"""What the user reads when the engine does not start."""
REFUSED_ELSEWHERE = {
    ("residency", "consumer"): "tests/sparse/engines/test_resident_manager.py::"
    "test_engine_unfit_for_residency_learns_why",
    ("residency", "offloading"): f"{_DOOR_REFUSES}[residency]",
    ("sparse", "offloading"): f"{_DOOR_REFUSES}[sparse]",
    ("tracing", "offloading"): f"{_DOOR_REFUSES}[tracing]",
}

APART: dict[tuple[str, str], str] = {
    ("sparse", "pooling"): "vLLM schedules no decode step for a pooling request",
    ("speculation", "pooling"): "a pooling request samples no tokens",
    ("load_choice", "offloading"): "vLLM's offloading loads every hit; `max_load_tokens` of a "
    "request bounds a load",
}

REAL: dict[tuple[str, str], Answer] = {
    ("residency", other): Answer(Kind.REAL, test)
    for other, test in {
        "lora": f"{_ENGINES}/test_residency_lora.py::test_adapters_context_in_host_memory_hits",
        "sparse": f"{_RESIDENCY}test_tokens_equal_a_device_that_holds_everything",
        "asynchronous": f"{_FAULTS}test_bytes_are_lost_again_and_again",
        "preemption": f"{_FAULTS}test_requests_are_preempted_and_resume",
        "restart": f"{_FAULTS}test_a_server_is_killed_and_comes_back",
        "away": f"{_FAULTS}test_a_server_is_gone_for_good",
        **{
            name: f"{_ENGINES}/test_residency_pairs.py::test_a_pair_of_features_works[{name}]"
            for name in (
                "ranks",
                "pooling",
                "embeds",
                "images",
                "producer",
                "hints",
                "sessions",
                "load_choice",
                "reset",
                "weights",
                "sleep",
                "tenants",
                "tracing",
                "slow",
                "disk",
                "shared",
                "warm",
            )
        },
    }.items()
} | {
    ("offloading", other): Answer(Kind.REAL, test)
    for other, test in {
        "lora": f"{_DOOR_ENGINES}test_adapters_are_left_out",
        **{
            name: f"{_DOOR_ENGINES}test_every_shape_that_vllms_offloading_takes_hits[{shape}]"
            for name, shape in {
                "ranks": "two ranks",
                "pipeline": "two stages",
                "hybrid": "windows beside full attention",
            }.items()
        },
        "multi_first": f"{_DOOR_ENGINES}test_both_doors_in_one_multiconnector[own last]",
        "multi_second": f"{_DOOR_ENGINES}test_both_doors_in_one_multiconnector[own first]",
        **dict.fromkeys(("reset", "weights"), f"{_DOOR_ENGINES}{_RESETS}"),
        **dict.fromkeys(("restart", "away"), f"{_DOOR_ENGINES}{_OUTLIVES}"),
        "slow": "tests/offloading/test_tier.py::test_hung_server_costs_only_the_requests_patience",
        "pooling": f"{_DOOR}test_vectors_are_equal_after_a_hit",
        "embeds": f"{_DOOR}test_embeddings_meet_only_where_they_are_equal",
        "images": f"{_DOOR}test_pictures_meet_only_where_they_are_equal",
        "producer": f"{_DOOR}test_a_producer_stores_and_hits_nothing",
        "consumer": f"{_DOOR}test_a_consumer_hits_and_stores_nothing",
        "speculation": f"{_DOOR}test_drafts_that_are_rejected_are_not_stored",
        "asynchronous": f"{_DOOR}test_asynchronous_scheduling",
        "preemption": f"{_DOOR}test_requests_that_are_preempted",
        "hints": f"{_DOOR}test_hints_and_sessions_reach_the_server",
        "sessions": f"{_DOOR}test_hints_and_sessions_reach_the_server",
        "sleep": f"{_DOOR}test_a_pause_keeps_the_cache_of_the_server",
        "tenants": f"{_DOOR}test_tenants_do_not_share",
        "disk": f"{_DOOR}test_blocks_lost_from_host_memory_come_from_disk",
        "shared": f"{_DOOR}test_other_nodes_server_hits_through_the_shared_tier",
        "warm": f"{_DOOR}test_warmed_node_hits_from_its_host_memory",
    }.items()
}


def pairs() -> list[Pair]:
    return [frozenset(pair) for pair in itertools.combinations(FEATURES, 2)]


def names_of(pair: Pair) -> str:
    return "+".join(name for name in FEATURES if name in pair)


def answer(pair: Pair) -> Answer:
    """Raises KeyError without an answer, ValueError with several."""
    name = f"[{names_of(pair)}]"
    second = names_of(pair).rpartition("+")[2]
    found = []
    if words := _entry(REFUSALS, pair):
        ours = f"{_BESIDE if second.startswith('multi') else _REFUSED}{name}"
        found.append(Answer(Kind.REFUSED, _entry(REFUSED_ELSEWHERE, pair) or ours, words))
    if words := _entry(APART, pair):
        found.append(Answer(Kind.APART, "", words))
    if real := _entry(REAL, pair):
        found.append(real)
    if not found and not pair.intersection(REAL_ONLY):
        found.append(
            Answer(Kind.DAEMON, f"{_NODES}test_features_beside_every_tier")
            if pair.intersection(TIERS)
            else Answer(Kind.HARNESS, f"{_PAIRS}test_a_world_with_some_pairs")
        )
    if not found:
        raise KeyError(f"the pair {names_of(pair)} has no answer")
    if len(found) > 1:
        raise ValueError(f"the pair {names_of(pair)} has several answers")
    return found[0]


def of_kind(kind: Kind) -> list[Pair]:
    return [pair for pair in pairs() if answer(pair).kind is kind]


@functools.cache
def worlds() -> tuple[frozenset[str], ...]:
    """Sets that together contain every pair of the harness. Greedy: the first missing pair, then
    the feature that adds most."""
    order, made = of_kind(Kind.HARNESS), []
    left = set(order)

    def num_new(names: frozenset[str]) -> int:
        return len(left.intersection(map(frozenset, itertools.combinations(names, 2))))

    while left:
        names = next(pair for pair in order if pair in left)
        while len(names) < WORLD_SIZE:
            larger = [one for name in FEATURES if _is_played(one := names | {name})]
            best = max(larger, key=num_new, default=names)
            if num_new(best) == num_new(names):
                break
            names = best
        made.append(names)
        left.difference_update(map(frozenset, itertools.combinations(names, 2)))
    return tuple(made)


def beside_tiers() -> list[frozenset[str]]:
    """Sets to run with all tiers."""
    left, made = [name for name in FEATURES if _is_played(frozenset([name]))], []
    while left:
        names = frozenset([left[0]])
        for name in left:
            if len(names) < WORLD_SIZE and _is_played(names | {name}):
                names |= {name}
        made.append(names)
        left = [name for name in left if name not in names]
    return made


def _is_played(names: frozenset[str]) -> bool:
    """Beside both `producer` and `consumer` no engine stores and loads, so a third feature might
    do nothing."""
    is_split = {"producer", "consumer"} < names
    return not names.intersection((*TIERS, *REAL_ONLY)) and meets(names) and not is_split


def meets(names: frozenset[str]) -> bool:
    apart = (REFUSALS, APART)
    return not any(
        _entry(some, frozenset(two)) for some in apart for two in itertools.combinations(names, 2)
    )


def _entry(entries: dict[tuple[str, str], _T], pair: Pair) -> _T | None:
    first, second = pair
    return entries.get((first, second)) or entries.get((second, first))
