"""Tracks which device blocks have inexact KV, which must not be stored: it may differ from what
dense attention and the present weights would give for the block's hash.

KV is inexact if
- a companion's requests, other inexact KV or earlier weights computed it;
- another connector, which may have stored inexact KV, loaded it;
- it belongs to a later turn of streamed input that vLLM may have begun with wrong KV
  (`kv_groups.doubtful_tokens`).

A token is exact only if all before it are. A block stays inexact until vLLM reallocates it or
copies an exact block into it. A request has no exact tokens until `step` has processed its
admission. Scheduler thread only.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from hotkv_vllm.compat import NULL_BLOCK

EVERYTHING = 1 << 62


class InexactRequests(Protocol):
    def of_step(self, scheduler_output: Any) -> Any:
        """Its `request_ids` are those whose KV becomes inexact in the step. The first call for a
        step must come before vLLM adds its tokens to `num_computed_tokens`."""


_ANNOUNCED: "WeakValueDictionary[str, InexactRequests]" = WeakValueDictionary()


def announce(engine_id: str, requests: InexactRequests) -> None:
    """Lets all hotkv connectors of the engine (in vLLM's MultiConnector) find `requests`."""
    _ANNOUNCED[engine_id] = requests


def inexact_requests(engine_id: str, scheduler_output: Any) -> Sequence[str] | None:
    """None if no connector of the engine computes inexact KV."""
    found = _ANNOUNCED.get(engine_id)
    return None if found is None else found.of_step(scheduler_output).request_ids


class Exactness:
    """is_watching: blocks can be inexact: a companion's requests, weights that may have changed, or
    streamed input. Costs no time before. Set before the first inexact step."""

    def __init__(
        self, tokens_per_block: Sequence[int], num_blocks: int, doubtful_tokens: int | None = None
    ) -> None:
        """tokens_per_block: per vLLM group; 0 for recurrent states, whose blocks need not follow
            the tokens.
        doubtful_tokens: last tokens of earlier turns that may be wrong when a turn of streamed
            input begins; None if they are exact.
        """
        self._doubtful_tokens = doubtful_tokens
        self._block_tokens = tuple(tokens_per_block)
        self._inexact = np.zeros(num_blocks, np.bool_)
        self._exact_tokens: dict[str, int] = {}
        self._own_tokens: dict[str, int] = {}
        self._doubted: set[str] = set()
        self.is_watching = False
        self.distrusted: Callable[[], None] = lambda: None
        """Called by `distrust_all`."""

    def __repr__(self) -> str:
        watching = "watching" if self.is_watching else "nothing to watch"
        return (
            f"Exactness({watching}, {int(self._inexact.sum())} inexact blocks, "
            f"{len(self._exact_tokens)} requests)"
        )

    def exact_tokens(self, request_id: str) -> int:
        """Leading ones of a running request; EVERYTHING if all are, and those to come too."""
        return self._exact_tokens.get(request_id, 0) if self.is_watching else EVERYTHING

    def shareable_tokens(self, request: Any) -> int:
        """As `exact_tokens`, of a vLLM `Request`. Before `step` has processed its admission all
        count: what it hits or loads is exact if vLLM's own prefix cache has no other blocks."""
        request_id = request.request_id
        if request_id in self._doubted:
            return 0
        if not request.num_computed_tokens or request_id in self._own_tokens:
            return EVERYTHING
        return self.exact_tokens(request_id)

    def distrust_all(self) -> None:
        """Running requests compute only inexact KV from now on."""
        self.is_watching = True
        # They may have begun a load, whose bytes are old.
        self._doubted.update(self._own_tokens)
        self.distrusted()
        self._inexact[:] = True
        self._inexact[NULL_BLOCK] = False
        self._exact_tokens.clear()

    def matched(self, request_id: str, device_tokens: int, is_streamed: bool = False) -> None:
        self._own_tokens[request_id] = device_tokens
        self._doubted.discard(request_id)
        self.is_watching |= is_streamed and self._doubtful_tokens is not None

    def loads(self, request_id: str, num_tokens: int) -> None:
        if request_id in self._own_tokens:
            self._own_tokens[request_id] += num_tokens

    def step(
        self, scheduler_output: Any, allocated: Iterable[int], inexact_requests: Iterable[str]
    ) -> None:
        """allocated: reallocated since the last step or in this one.
        inexact_requests: as `inexact_requests` has returned.
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
        # Reallocated, but written only in part or not at all, so they stay inexact: the last
        # block of earlier turns of streamed input, and the last blocks of a hit whose tokens
        # vLLM computes again for sliding windows only (bounded replay).
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
        inexact = frozenset(inexact_requests)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self._scheduled(
                request_id,
                computed[request_id],
                num_tokens,
                state,
                request_id in admitted,
                request_id in inexact,
            )

    def _scheduled(
        self,
        request_id: str,
        computed: int,
        num_tokens: int,
        state: Any,
        is_admitted: bool,
        is_inexact: bool,
    ) -> None:
        if is_admitted:
            tables = state.get_block_ids(request_id)
            own = self._own_tokens.pop(request_id, None)
            if own is None:
                # Short and without computed tokens (`Admission.short`), or a later turn of
                # streamed input.
                own = computed
                if computed and self._doubtful_tokens is not None:
                    self._mark(tables or (), max(0, computed - self._doubtful_tokens), computed)
            # `own`: computed here or loaded by hotkv; another connector has loaded what is
            # between it and `computed`. In one block nothing was loaded: vLLM's own hit may
            # end within a block, and `own` covers whole blocks. With recurrent states only
            # there are no sizes, so every difference is a load.
            sizes = [*filter(None, self._block_tokens)] or [1]
            if any(computed // size > own // size for size in sizes):
                self._mark(tables or (), own, computed)
            self._exact_tokens[request_id] = (
                0 if tables is None else self._exact_prefix(tables, max(computed, own))
            )
        exact = self.exact_tokens(request_id)
        if is_inexact and computed < exact:
            exact = self._exact_tokens[request_id] = computed
        if exact < computed + num_tokens:
            # Blocks with earlier inexact tokens are marked already.
            tables = state.get_block_ids(request_id)
            self._mark(tables or (), max(exact, computed), computed + num_tokens)

    def _mark(self, tables: Sequence[Sequence[int]], first: int, stop: int) -> None:
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            part = slice(first // tokens, -(-stop // tokens)) if tokens else slice(None)
            self._inexact[ids[part]] = True
        self._inexact[NULL_BLOCK] = False

    def ended(self, request_id: str) -> None:
        """Its inexact blocks stay marked: other requests may hit them."""
        self._exact_tokens.pop(request_id, None)
        self._own_tokens.pop(request_id, None)
        self._doubted.discard(request_id)

    def _exact_prefix(self, tables: Sequence[Sequence[int]], computed: int) -> int:
        """Tokens before the first inexact block; EVERYTHING without one."""
        exact = EVERYTHING
        for tokens, ids in zip(self._block_tokens, tables, strict=False):
            marked = np.flatnonzero(
                self._inexact[ids[: -(-computed // tokens) if tokens else None]]
            )
            if len(marked):
                exact = min(exact, int(marked[0]) * tokens)
        return exact
