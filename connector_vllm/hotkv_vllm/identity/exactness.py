"""Tracks the inexact KV on the device. Inexact KV differs from the KV that its key stands for, and
so must not be stored.

KV is inexact if it was computed in a step that decoded sparsely, from other inexact KV, or with
weights that the engine no longer has. KV that another connector has loaded (in a MultiConnector)
counts as inexact too, because that connector may have stored inexact KV.

Always true: a token is exact only if it and every token before it was computed exactly. A block
loses its mark only when vLLM reallocates the block, or copies an exact block into it. A request
whose admission was not seen has no exact tokens. Scheduler thread only.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hotkv_vllm.compat import NULL_BLOCK

EVERYTHING = 1 << 62


class Exactness:
    """Marks inexact blocks, and counts the exact tokens of each running request.

    Has no cost while all blocks are exact.
    """

    def __init__(self, tokens_per_block: Sequence[int], num_blocks: int) -> None:
        """`tokens_per_block`: tokens of a block, per vLLM group; 0 if the group's blocks do not
        follow token order."""
        self._block_tokens = tuple(tokens_per_block)
        self._inexact = np.zeros(num_blocks, np.bool_)
        self._exact_tokens: dict[str, int] = {}
        self._own_tokens: dict[str, int] = {}
        self.is_watching = False
        """True in an engine that decodes sparsely; set before its first step."""

    def __repr__(self) -> str:
        watching = "watching" if self.is_watching else "nothing to watch"
        return (
            f"Exactness({watching}, {int(self._inexact.sum())} inexact blocks, "
            f"{len(self._exact_tokens)} requests)"
        )

    def exact_tokens(self, request_id: str) -> int:
        """Returns the number of leading tokens of a running request that are exact, or will be;
        EVERYTHING if all are exact."""
        return self._exact_tokens.get(request_id, 0) if self.is_watching else EVERYTHING

    def distrust_all(self) -> None:
        """Marks as inexact all blocks on the device, and all KV that running requests compute from
        now on."""
        self.is_watching = True
        self._inexact[:] = True
        self._inexact[NULL_BLOCK] = False
        self._exact_tokens.clear()

    def step_was_lost(self) -> None:
        """Marks all blocks and running requests as inexact, because a step that vLLM has planned
        was not processed. Does nothing while all blocks are exact."""
        if self.is_watching:
            self.distrust_all()

    def matched(self, request_id: str, device_tokens: int) -> None:
        """Records vLLM's question for a request's hit. vLLM's own hit is `device_tokens` long."""
        self._own_tokens[request_id] = device_tokens

    def loads(self, request_id: str, num_tokens: int) -> None:
        """Records that hotkv loads `num_tokens` behind vLLM's own hit for the request."""
        if request_id in self._own_tokens:
            self._own_tokens[request_id] += num_tokens

    def step(
        self, scheduler_output: Any, allocated: Iterable[int], sparse_requests: Iterable[str]
    ) -> None:
        """Processes a step that vLLM has planned.

        allocated: blocks reallocated since the last step, or in this step.
        sparse_requests: requests whose row attends sparsely, as `sparse.rows` has decided.
        """
        if not self.is_watching:
            return
        state = scheduler_output.kv_connector_block_state
        copies = scheduler_output.kv_cache_block_copies or ()
        copied = [c.dst_block_id for c in copies if self._inexact[c.src_block_id]]
        # A session of streamed input comes again, with a block that it has begun to fill.
        begun = {
            block
            for new in scheduler_output.scheduled_new_reqs
            for tokens, ids in zip(self._block_tokens, new.block_ids, strict=False)
            if tokens and new.num_computed_tokens % tokens
            for block in ids[new.num_computed_tokens // tokens :][:1]
        }.difference(c.dst_block_id for c in copies)
        self._inexact[list({*allocated} - begun)] = False
        self._inexact[copied] = True
        if state is None:
            return
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        admitted = {*computed, *cached.resumed_req_ids}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sparse = frozenset(sparse_requests)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._scheduled(
                request_id,
                computed[request_id],
                num_tokens,
                state,
                request_id in admitted,
                request_id in sparse,
            )

    def _scheduled(
        self,
        request_id: str,
        computed: int,
        num_tokens: int,
        state: Any,
        is_admitted: bool,
        is_sparse: bool,
    ) -> None:
        if is_admitted:
            tables = state.get_block_ids(request_id)
            own = self._own_tokens.pop(request_id, computed)
            # Of a hit that ends within a block vLLM tells the whole blocks only.
            if any(size and computed // size > own // size for size in self._block_tokens):
                self._mark(tables or (), own, computed)
            self._exact_tokens[request_id] = (
                0 if tables is None else self._exact_prefix(tables, computed)
            )
        exact = self.exact_tokens(request_id)
        if is_sparse and computed < exact:
            exact = self._exact_tokens[request_id] = computed
        if exact < computed + num_tokens:
            # The block in which exactness ends was filled while it was exact, or is being filled in
            # this step.
            tables = state.get_block_ids(request_id)
            self._mark(tables or (), max(exact, computed), computed + num_tokens)

    def _mark(self, tables: Sequence[Sequence[int]], first: int, stop: int) -> None:
        """Marks the blocks of the tokens [first, stop) as inexact."""
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            part = slice(first // tokens, -(-stop // tokens)) if tokens else slice(None)
            self._inexact[ids[part]] = True
        self._inexact[NULL_BLOCK] = False

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended. The request's inexact blocks stay marked."""
        self._exact_tokens.pop(request_id, None)
        self._own_tokens.pop(request_id, None)

    def _exact_prefix(self, tables: Sequence[Sequence[int]], computed: int) -> int:
        """Returns the number of tokens before the first block that is marked as inexact, among the
        blocks of the first `computed` tokens; EVERYTHING if no block is marked."""
        exact = EVERYTHING
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            marked = np.flatnonzero(
                self._inexact[ids[: -(-computed // tokens) if tokens else None]]
            )
            if len(marked):
                exact = min(exact, int(marked[0]) * tokens)
        return exact
