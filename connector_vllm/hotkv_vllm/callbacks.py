"""Keeps every exception of a callback away from vLLM.

- If a callback raises, the exception is logged, and counted except by `class_callback`. vLLM gets
  the result of the callback's fallback; `FALLBACKS` says why it is safe.
- If the fallback raises too, vLLM gets the decorator's `last`.
- A fallback shares as little state as possible with its callback, so that one fault does not
  break both.
"""

import functools
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from hotkv_vllm import link
from hotkv_vllm.stats import OUTSIDE_STEPS, CallbackClock

logger = link.logger

# ---------------------------------------------------------------------------------------- fallbacks

FALLBACKS: dict[str, str] = {
    # ------------------------------------------------------------------------------- worker's start
    "register_kv_caches": (
        "The rank opens no session, and reports that hotkv is off. The scheduler then switches "
        "hotkv off for the whole engine."
    ),
    "unregister_kv_caches": (
        "The session and all its transfers are closed, so no copy reaches memory that vLLM frees."
    ),
    "restore_kv_caches": (
        "The rank opens no session, and reports that hotkv is off. The scheduler then switches "
        "hotkv off for the whole engine."
    ),
    "get_handshake_metadata": (
        "The scheduler switches hotkv off for an engine if one of its ranks is off."
    ),
    # ------------------------------------------------------------------------------- worker's steps
    "handle_preemptions": (
        "All stores are revoked, or their session is closed. A companion's requests go vLLM's way."
    ),
    "_before_forward": (
        "Loads of this step that were not begun are reported as failed; those that were begun go "
        "on."
    ),
    "start_load_kv": (
        "Loads of this step that were not begun are reported as failed; those that were begun go "
        "on."
    ),
    "wait_for_save": "Stores of this step that were not sent are reported as failed, never sent.",
    "get_transfer_results": (
        "Loads that have ended, so that the server no longer writes to their blocks, are reported "
        "as failed: their requests compute the blocks."
    ),
    "get_block_ids_with_load_errors": (
        "All requests that a companion may have lost are computed again."
    ),
    "build_connector_worker_meta": (
        "A later step reports the missing results. The scheduler forgets stores that are never "
        "reported."
    ),
    "_state_report": (
        "The next step reports the states again. Until then, the request of a hung load waits, or "
        "its blocks stay out of use."
    ),
    "_step_report": (
        "The scheduler asks again for a handshake. It treats no step as done whose end was not "
        "reported."
    ),
    # ------------------------------------------------------------------------------------ scheduler
    "set_xfer_handshake_metadata_pp_aware": "The scheduler plans no loads and no stores.",
    "bind_kv_cache_manager": (
        "Without vLLM's block pool, no block is held back, so a request whose load hangs waits for "
        "the server. Without the manager, no block is freed early."
    ),
    "has_pending_block_frees": "vLLM preempts, as without hotkv.",
    "on_new_request": (
        "The request is unknown to hotkv: it neither loads nor stores blocks. A companion may end "
        "it with an error."
    ),
    "get_num_new_matched_tokens": (
        "A miss. The request's lease is released, and the request is unknown to hotkv from now "
        "on. A companion may end it with an error."
    ),
    "update_state_after_alloc": (
        "The request's load is reported as failed, and the next step revokes all stores."
    ),
    "build_connector_meta": (
        "The step revokes all stores, and a companion's requests go vLLM's way. Loads that were to "
        "begin are reported as failed."
    ),
    "update_connector_output": (
        "Loads that the step reports count as failed for hotkv, its stores count as ended."
    ),
    "request_finished_all_groups": (
        "The lease is released and the request forgotten. vLLM may reuse its blocks: steps that "
        "reuse them wait for the stores that read them."
    ),
    "reset_cache": (
        "The reset fails for its caller. No block is loaded or stored until a later flush has "
        "succeeded."
    ),
    "has_pending_push_work": "A reset ends only with the engine's next request.",
    "_take_events": "A later step publishes the events of the shared cache's blocks.",
    "_take_stats": "A later step reports the counters.",
    # ----------------------------------------------------------- the tier of vLLM's own offloading
    "tier.on_new_request": "The request is unknown: its blocks are neither looked up nor stored.",
    "tier.lookup": "A miss.",
    "tier.submit_load": "The load has failed, and the request computes.",
    "tier.submit_store": "The store has failed; vLLM frees the rows.",
    "tier._collect_rows": "Rows stay out of use.",
    "tier._note_end": "The job's end is still reported to vLLM.",
    "tier.serve_external_requests": (
        "The next step tries again. Until then no row can be held, and a load that hangs is waited "
        "for."
    ),
    "tier.on_schedule_end": "Promotions count as under way for longer, and keep their room.",
    "tier.on_request_finished": "The server does not learn which chunks the request used.",
    "tier.get_stats": "A later step reports the counters.",
    "tier.shutdown": "The session ends with the process, which the server notices.",
    # ------------------------------------------------------------- the connector beside that tier
    "door.register": "The rank reports that hotkv is off, so no session is opened.",
    "door.before_step": "The rank does not name its weights, so no block is shared.",
    "door.report": "The scheduler asks again.",
    "door.connect": "There is no session, so every lookup misses.",
    "door.arrived": "The request is left out: its blocks are neither looked up nor stored.",
    "door.comes": "Loads of other requests begin, as without hotkv.",
    "door.has_room": "The load begins, as without hotkv.",
    "door.awaits": "The request does not wait for blocks that another engine computes.",
    "door.matched": "The report about the request is incomplete.",
    "door.allocated": "The request is not reported.",
    "door.got_blocks": "Nothing is looked up or stored until the caches are emptied.",
    "door.tell_written": "Nothing is looked up or stored until the caches are emptied.",
    "door.load_failed": "Nothing is looked up or stored until the caches are emptied.",
    "door.leave_out_holes": "Nothing is looked up or stored until the caches are emptied.",
    "door.planned": "Nothing is looked up or stored until the caches are emptied.",
    "door.stop_at_computed": "Nothing is looked up or stored until the caches are emptied.",
    "door.finished": "The request's end is not reported.",
    "door.begin_step": "Nothing is looked up or stored until a later step has settled it.",
    "door.promote": "vLLM looks the request up again in the next step, as without this callback.",
    "door.end_step": "The engine asks for its promotions again at once.",
    "door.update": "Nothing is looked up or stored until the ranks have named their weights.",
    "door.take_events": "A later step publishes the events of the shared cache's blocks.",
    "door.reset": (
        "The reset fails for its caller, unless the engine pauses. No block is looked up or stored "
        "until a later flush has succeeded."
    ),
    "door.wants_steps": "A reset ends only with the engine's next request.",
    # ---------------------------------------------------------------------------- both, and neither
    "shutdown": "The session ends with the process, which the server notices.",
    "supports_sleep_mode": "vLLM starts, and hotkv is off if the memory can't be shared.",
    "get_required_kvcache_layout": "vLLM uses its own layout.",
    "build_kv_connector_stats": "The counters are lost.",
    "build_prom_metrics": "vLLM has no metrics of hotkv's.",
}
"""By callback: what happens if it raises; so no request is lost and no wrong KV served.

Some names are methods that a callback calls (`is_part`): if one raises, the rest of the callback
still runs. `callback` refuses a method whose name is missing here, unless it is given the text.
"""


# ----------------------------------------------------------------------------------------- the edge


T = TypeVar("T")

CALLBACKS: dict[str, FunctionType] = {}
"""The undecorated functions, by callback."""


class CallbackEdge:
    """Time and exceptions of a connector's callbacks, which `callback` records.

    broken: callbacks that have raised.
    count: increments the counter of a name.
    """

    def __init__(self, clock: CallbackClock, count: Callable[[str], None]) -> None:
        self.clock = clock
        self.broken: set[str] = set()
        self._count = count

    def __repr__(self) -> str:
        return f"CallbackEdge(broken: {sorted(self.broken)})"

    def broke(self, name: str) -> None:
        """Counts the exception that is being handled. Logs the first one of each callback."""
        self._count("callback_errors")
        if name not in self.broken:
            self.broken.add(name)
            logger.exception(
                "hotkv: callback %s broke; the engine goes on without its result", name
            )


def callback(
    otherwise: Callable[..., Any],
    *,
    last: Any = None,
    is_part: bool = False,
    of: str = "",
    unless: str = "",
    safe: str = "",
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Times a method and catches its exceptions. Its object needs an attribute `edge`, a
    `CallbackEdge`.

    otherwise: the fallback, called with the object and the callback's arguments.
    last: what vLLM gets if the fallback raises too.
    is_part: a callback calls the method, not vLLM; it is not timed separately.
    of: prefix of the name in `FALLBACKS`, such as "tier"; empty for the connector.
    unless: attribute of the object. While it is True, vLLM gets `last`; the method is neither
        called nor timed.
    safe: the text for `FALLBACKS`, of a companion's method.
    """

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        name = f"{of}.{method.__name__}" if of else method.__name__
        if safe:
            FALLBACKS[name] = safe
        _add(name, method)

        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> T:
            if unless and getattr(self, unless):
                return cast(T, last)
            began_s = time.perf_counter()
            try:
                return method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001 - callback edge: a fault of ours must not become the engine's
                self.edge.broke(name)
            finally:
                if not is_part:
                    seconds, clock = time.perf_counter() - began_s, self.edge.clock
                    clock.by_callback[name] += seconds
                    if seconds > clock.longest_s and name not in OUTSIDE_STEPS:
                        clock.longest_s = seconds
            return _answer(self, name, otherwise, last, args, kwargs)

        return guarded

    return wrap


def _add(name: str, method: Callable[..., Any]) -> None:
    assert name in FALLBACKS, f"nobody has said what makes the fallback of {name} safe"
    CALLBACKS[name] = cast(FunctionType, method)


def _answer(
    self: Any, name: str, otherwise: Callable[..., Any], last: Any, args: Any, kwargs: Any
) -> Any:
    try:
        return otherwise(self, *args, **kwargs)
    except Exception:  # noqa: BLE001 - callback edge, as above
        self.edge.broke(f"{name} (its fallback)")
        return last


def class_callback(
    otherwise: Callable[..., Any], last: Any = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Like `callback`, for callbacks on the class, before a connector exists. Neither counts nor
    times. The default `last` is what vLLM's base class returns."""

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        _add(method.__name__, method)

        @functools.wraps(method)
        def guarded(cls: type, *args: Any, **kwargs: Any) -> T:
            try:
                return method(cls, *args, **kwargs)
            except Exception:
                logger.exception(
                    "hotkv: callback %s broke; the engine goes on without its result",
                    method.__name__,
                )
            try:
                answer: T = otherwise(cls, *args, **kwargs)
            except Exception:
                logger.exception("hotkv: the fallback of callback %s broke, too", method.__name__)
                answer = last
            return answer

        return guarded

    return wrap


def nothing(*_: Any, **__: Any) -> None:
    """Fallback of callbacks that may return no result."""
