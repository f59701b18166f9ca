"""Parts of the connector's scheduler side over a fake server. Requests are names and block
hashes."""

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hotkv_client.types import BlockResult, Role, SessionConfig
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace, Sketch
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.identity.exactness import Exactness
from hotkv_vllm.metadata import StepReport, StoreJob
from hotkv_vllm.scheduler.find.hits import HitFinder
from hotkv_vllm.scheduler.groups import Attachments, CachedGroups
from hotkv_vllm.scheduler.request import RequestState
from hotkv_vllm.scheduler.store.stores import StorePlanner
from hotkv_vllm.stats import HotKVStats
from tests.doubles.fake import FakeServer

TOKENS = 16
"""In every group, unless a test sets it."""
BLOCK_BYTES = 1 << 18
FULL = GroupSpec(GroupKind.FULL_ATTENTION, TOKENS, (BLOCK_BYTES,))
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, TOKENS, (BLOCK_BYTES,), 2 * TOKENS + 1)
"""A hit needs the two blocks before its end."""
STATES = GroupSpec(GroupKind.MAMBA, TOKENS, (BLOCK_BYTES,))


def block_hash(name: str, number: int) -> bytes:
    return f"{name}{number}".encode().ljust(32, b".")


def request(name: str, prompt_tokens: int, *, decoded: int = 0, computed: int = 0) -> Any:
    """decoded: answer tokens.
    computed: tokens with KV.
    """
    num_tokens = prompt_tokens + decoded
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_tokens,
        num_prompt_tokens=prompt_tokens,
        max_tokens=TOKENS,
        num_computed_tokens=computed,
        block_hashes=[block_hash(name, number) for number in range(num_tokens // TOKENS)],
        all_token_ids=list(range(num_tokens)),
        lora_request=None,
        priority=0,
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        skip_reading_prefix_cache=False,
        get_skip_reading_prefix_cache=lambda: False,
        kv_transfer_params=None,
        shared_prefix_boundary=0,
        resumable=False,
    )


class Parts:
    """attached: groups with attachments.
    by_handoff: groups of states that vLLM offers.
    left_out: blocks of a hit that stay in the server.
    counts_media: vLLM hashes media by a counter.
    unfinished: last tokens that the next step may change.
    stores: False for an engine that only loads.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec] = (FULL,),
        *,
        attached: Sequence[int] = (),
        num_ranks: int = 1,
        by_handoff: Sequence[int] = (),
        drafts: Sequence[int] = (),
        left_out: range = range(0),
        adapters: Any = None,
        counts_media: bool = False,
        keeper: Any = None,
        unfinished: int = 0,
        stores: bool = True,
        **settings: Any,
    ) -> None:
        self.server = FakeServer()
        self.specs = tuple(specs)
        kinds = tuple(Sketch(index, "test", 1, (64,)) for index in attached)
        space = KeySpace("model", "weights", "bfloat16", self.specs, TOKENS)
        self.space = space.fingerprint
        config = SessionConfig("unix:/none", "engine", Role.SCHEDULER, space, kinds)
        self.session = self.server.open(config)
        self.stats = HotKVStats()
        self.config = ConnectorConfig(**settings)
        shared = frozenset(drafts), adapters, counts_media
        self.groups = CachedGroups(self.specs, TOKENS, TOKENS, *shared)
        self.finder = HitFinder(
            self.session,
            self.groups,
            self.config,
            self.stats,
            "e",
            Attachments(len(self.specs), kinds),
            lambda hit_tokens: left_out,
            stores=stores,
            connection=lambda: self.connection,
        )
        self.connection = 1
        self.exactness = Exactness([spec.block_tokens for spec in self.specs], 100)
        cache_groups = [
            CacheGroup(
                index,
                spec.kind,
                spec.block_tokens,
                spec.window_tokens,
                states_by_handoff=index in by_handoff,
                is_draft=index in drafts,
            )
            for index, spec in enumerate(self.specs)
        ]
        self.planner = StorePlanner(
            self.session,
            self.groups,
            self.finder.attachments,
            self.finder.hidden,
            cache_groups,
            num_ranks,
            self.config,
            self.stats,
            "e",
            None,
            self.exactness,
            keeper,
            unfinished,
        )
        self.clock = 100.0

    def count(self, name: str) -> float:
        return float(self.stats.data.get(name, 0))

    def put(self, name: str, blocks: Sequence[int], group: int = 0) -> None:
        """group: of the model, or number of an attachment."""
        number = self.session.memory.number(group)
        for block in blocks:
            self.server.blocks[self.space, number, block_hash(name, block)] = {}

    def drop(self, name: str, blocks: Sequence[int], group: int = 0) -> None:
        number = self.session.memory.number(group)
        for block in blocks:
            del self.server.blocks[self.space, number, block_hash(name, block)]

    def state(self, one: Any) -> RequestState:
        return RequestState(one, self.planner.new_state())

    def match(self, state: RequestState, computed_tokens: int = 0) -> tuple[int | None, bool]:
        return self.finder.match(state, computed_tokens, self.clock)

    def hit(self, state: RequestState, computed_tokens: int = 0) -> int:
        """Asks again, as vLLM does."""
        for _ in range(5):
            tokens, is_async = self.match(state, computed_tokens)
            if tokens is not None:
                assert is_async == (tokens > 0)
                return tokens
            assert not is_async
        raise AssertionError("asked again and again")

    def load(self, state: RequestState, num_external: int, tables: Sequence[Sequence[int]]) -> Any:
        return self.finder.begin_load(state, tables, num_external, 0, self.clock)


def plan(
    parts: Parts,
    *scheduled: tuple[Any, int],
    tables: Sequence[Sequence[int]] | None = None,
    handoffs: Any = None,
    written: Collection[int] = (),
) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
    """Stores, and earlier ones that the step must wait for.

    scheduled: states, each with the tokens that the step computes.
    tables: for all requests.
    written: blocks that the step may overwrite.
    """
    ids_of = tables or [list(range(1 + 10 * at, 10 + 10 * at)) for at in range(len(parts.specs))]
    computed = [(state, state.request.num_computed_tokens + n) for state, n in scheduled]
    return parts.planner.plan(
        computed, lambda _: tuple(map(list, ids_of)), handoffs or {}, lambda: written
    )


def stored(jobs: Sequence[StoreJob]) -> list[tuple[int, list[int]]]:
    """Group and block ids of each run."""
    return [(run.group_index, run.block_ids.tolist()) for job in jobs for run in job.runs]


def report(*results: tuple[int, Sequence[BlockResult]], rank: int = 0) -> StepReport:
    """results: by store id, a result for each block."""
    return StepReport({store_id: {rank: bytes(blocks)} for store_id, blocks in results})


def ids(blocks: Sequence[int]) -> Any:
    return np.array(blocks, np.int32)


def admission(name: str, computed: int, num_tokens: int) -> SimpleNamespace:
    """A scheduler output with one request, whose block table is [1, 2]."""
    new = SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=([1, 2],))
    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda _: new.block_ids, boundary_state_offloads={}
        ),
        kv_cache_block_copies=None,
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(
            resumed_req_ids=(), req_ids=(), num_computed_tokens=()
        ),
        num_scheduled_tokens={name: num_tokens},
    )
