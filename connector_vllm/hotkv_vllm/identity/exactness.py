"""Tracks which blocks on the device have inexact KV. Inexact KV may differ from the KV that an
engine with dense attention and the present weights would compute for the block's hash, so it must
not be stored.

KV counts as inexact if
- it was computed by sparse decode, from other inexact KV, or with earlier weights of the engine;
- another connector of a MultiConnector has loaded it, because that connector may have stored
  inexact KV;
- it belongs to a later turn of streamed input, and vLLM may have begun the turn with wrong KV
  (`kv_groups.doubtful_tokens`).

Always true:
- A token is exact only if it and every token before it was computed exactly.
- A block stays marked as inexact until vLLM reallocates the block, or copies an exact block into
  it.
- A request counts as having no exact tokens until `step` has processed its admission.

Scheduler thread only.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hotkv_vllm.compat import NULL_BLOCK

EVERYTHING = 1 << 62


class Exactness:
    """Marks inexact blocks (their KV may differ from what dense attention and the present weights
    would give, so it must not be stored), and counts the exact tokens of each running request.
    Costs no time until blocks can become inexact.

    is_watching: True once blocks can be inexact: in an engine with sparse decode, after the weights
        may have changed, or with streamed input. The caller sets it before the first sparse step.
    """

    def __init__(
        self, tokens_per_block: Sequence[int], num_blocks: int, doubtful_tokens: int | None = None
    ) -> None:
        """Begins with no block marked as inexact.

        tokens_per_block: number of tokens of a block, per vLLM group; 0 if the group's blocks need
            not be in the order of the tokens (recurrent states).
        num_blocks: number of blocks on the device.
        doubtful_tokens: number of tokens whose KV may be wrong when a later turn of streamed input
            begins: the last tokens of the earlier turns. None if the KV of earlier turns is exact.
        """
        self._doubtful_tokens = doubtful_tokens
        self._block_tokens = tuple(tokens_per_block)
        self._inexact = np.zeros(num_blocks, np.bool_)
        self._exact_tokens: dict[str, int] = {}
        self._own_tokens: dict[str, int] = {}
        self.is_watching = False

    def __repr__(self) -> str:
        watching = "watching" if self.is_watching else "nothing to watch"
        return (
            f"Exactness({watching}, {int(self._inexact.sum())} inexact blocks, "
            f"{len(self._exact_tokens)} requests)"
        )

    def exact_tokens(self, request_id: str) -> int:
        """Returns how many leading tokens of a running request have exact KV. Returns EVERYTHING if
        all its tokens have exact KV, and the tokens that it will compute will have exact KV too."""
        return self._exact_tokens.get(request_id, 0) if self.is_watching else EVERYTHING

    def distrust_all(self) -> None:
        """Marks all blocks on the device as inexact. Running requests have no exact tokens any
        more, so all KV that they compute from now on is inexact too."""
        self.is_watching = True
        self._inexact[:] = True
        self._inexact[NULL_BLOCK] = False
        self._exact_tokens.clear()

    def matched(self, request_id: str, device_tokens: int, is_streamed: bool = False) -> None:
        """Records the length of a request's hit in vLLM's own prefix cache. Called when vLLM asks
        how long the request's hit in the server is.

        device_tokens: length of the hit in vLLM's own prefix cache.
        is_streamed: True for a request with streamed input.
        """
        self._own_tokens[request_id] = device_tokens
        self.is_watching |= is_streamed and self._doubtful_tokens is not None

    def loads(self, request_id: str, num_tokens: int) -> None:
        """Records that hotkv loads `num_tokens` tokens of the request. These tokens follow the
        request's hit in vLLM's own prefix cache."""
        if request_id in self._own_tokens:
            self._own_tokens[request_id] += num_tokens

    def step(
        self, scheduler_output: Any, allocated: Iterable[int], sparse_requests: Iterable[str]
    ) -> None:
        """Processes a step that vLLM has planned: updates which blocks are marked as inexact, and
        each request's number of exact tokens (leading tokens whose KV is exact).

        scheduler_output: vLLM's `SchedulerOutput` of the step.
        allocated: ids of blocks that were reallocated since the last step or in this step.
        sparse_requests: ids of requests that attend sparsely, as `sparse.rows` has decided.
        """
        if not self.is_watching:
            return
        state = scheduler_output.kv_connector_block_state
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        admitted = {*computed, *cached.resumed_req_ids}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        copies = scheduler_output.kv_cache_block_copies or ()
        copied = [c.dst_block_id for c in copies if self._inexact[c.src_block_id]]
        # `kept`: reallocated blocks that nevertheless stay marked as inexact, because the step
        # writes them only in part or not at all. There are two kinds. The first is the last block
        # of earlier turns of streamed input. The second is the last blocks of a hit, if vLLM
        # computes their tokens again for the groups with a sliding window only (bounded replay).
        kept: set[int] = set()
        for name in admitted:
            hit = max(computed[name], self._own_tokens.get(name, 0))
            tables = state.get_block_ids(name) or ()
            for tokens, ids in zip(self._block_tokens, tables, strict=False):
                if tokens:
                    kept.update(ids[computed[name] // tokens : -(-hit // tokens)])
        kept.difference_update(c.dst_block_id for c in copies)
        self._inexact[list({*allocated} - kept)] = False
        self._inexact[copied] = True
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
            own = self._own_tokens.pop(request_id, None)
            if own is None:
                # A request without a recorded hit is short and has no computed tokens
                # (`Admission.short`), or it is in a later turn of streamed input: its earlier
                # tokens were computed in earlier steps.
                own = computed
                if computed and self._doubtful_tokens is not None:
                    self._mark(tables or (), max(0, computed - self._doubtful_tokens), computed)
            # `own`: tokens that this engine has computed or hotkv has loaded. If `computed` is
            # greater, another connector has loaded the tokens between, so they count as inexact.
            # But if both numbers lie in the same block, nothing was loaded: vLLM's own hit may end
            # within a block, and `own` covers only whole blocks. An engine that has only recurrent
            # states has no block sizes here, so every difference counts as a load.
            sizes = [*filter(None, self._block_tokens)] or [1]
            if any(computed // size > own // size for size in sizes):
                self._mark(tables or (), own, computed)
            self._exact_tokens[request_id] = (
                0 if tables is None else self._exact_prefix(tables, max(computed, own))
            )
        exact = self.exact_tokens(request_id)
        if is_sparse and computed < exact:
            exact = self._exact_tokens[request_id] = computed
        if exact < computed + num_tokens:
            # Marks only blocks of this step's tokens. Blocks with earlier inexact tokens are marked
            # already.
            tables = state.get_block_ids(request_id)
            self._mark(tables or (), max(exact, computed), computed + num_tokens)

    def _mark(self, tables: Sequence[Sequence[int]], first: int, stop: int) -> None:
        """Marks the blocks that contain the tokens [first, stop) as inexact.

        tables: block ids of the request, per vLLM group.
        """
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            part = slice(first // tokens, -(-stop // tokens)) if tokens else slice(None)
            self._inexact[ids[part]] = True
        self._inexact[NULL_BLOCK] = False

    def ended(self, request_id: str) -> None:
        """Forgets a request that has ended. Its inexact blocks stay marked, because other requests
        may hit them in vLLM's prefix cache."""
        self._exact_tokens.pop(request_id, None)
        self._own_tokens.pop(request_id, None)

    def _exact_prefix(self, tables: Sequence[Sequence[int]], computed: int) -> int:
        """Returns the number of the request's tokens before the first block that is marked as
        inexact; EVERYTHING if no block is marked.

        tables: block ids of the request, per vLLM group.
        computed: number of the request's computed tokens; later blocks are not examined.
        """
        exact = EVERYTHING
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            marked = np.flatnonzero(
                self._inexact[ids[: -(-computed // tokens) if tokens else None]]
            )
            if len(marked):
                exact = min(exact, int(marked[0]) * tokens)
        return exact
