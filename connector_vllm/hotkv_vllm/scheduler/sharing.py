"""Whether this engine shares KV now, and over which key space.

What is always true: there is a `cache` only while the ranks of one engine agree on a key space; it
is the one that stands for the engine's weights as far as ranks have said; and nothing is offered or
stored while a rank is without a session, while weights may be others, or while a reset is under
way. Scheduler thread only; waits for the server at the start and after changed weights, else never.
"""

import threading
import time
from dataclasses import replace
from typing import Any

from hotkv_proto import native
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.identity.agreement import Agreement, agree
from hotkv_vllm.identity.rekeying import RECONNECT_S, Rekeying
from hotkv_vllm.link import logger
from hotkv_vllm.metadata import HotKVHandshake, HotKVWorkerMetadata
from hotkv_vllm.scheduler.assembly import Assembly, Engine, assemble
from hotkv_vllm.scheduler.joining import Joining
from hotkv_vllm.scheduler.worker_links import WorkerLinks

LINKS_PATIENCE_S = 0.25
"""How long a request may wait for the workers to say that they, too, have a session with a server
that has come back."""


class Sharing:
    """See the module. `joining`: while handshakes are awaited that vLLM does not forward."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_ranks = engine.vllm_config.parallel_config.world_size
        self._handshakes: list[HotKVHandshake] = []
        self._agreement: Agreement | None = None
        self.cache: Assembly | None = None
        self.joining: Joining | None = None
        self.links = WorkerLinks()
        self.weights = Rekeying(self._num_ranks, "")

    def __repr__(self) -> str:
        return f"Sharing({'on' if self.cache else 'off'}, {self.weights}, {self.links})"

    @property
    def is_connected(self) -> bool:
        return self.cache is not None and self.cache.session.connected

    @property
    def may_offer(self) -> bool:
        """Returns True if hits may be offered now."""
        cache = self.cache
        return (
            cache is not None
            and self.links.are_complete
            and not cache.reset.under_way
            and not self.weights.under_way
        )

    def makes_wait(self, arrived_s: float, now_s: float) -> bool:
        """Returns True if a request should ask again: workers are about to say that they are there,
        or what their weights are."""
        if not self.is_connected:
            # Whoever asks for a hit makes the ranks look at weights that are in doubt.
            self.weights.waits(now_s)
            return False
        if self.links.will_say and now_s < arrived_s + LINKS_PATIENCE_S:
            return True
        return self.weights.waits(now_s)

    # ---------------------------------------------------------------------------------------- start

    def replaces(self, handshakes: list[HotKVHandshake]) -> bool:
        """Returns True if these handshakes end a session whose ranks said something else."""
        return (
            bool(handshakes)
            and self.cache is not None
            and _without_links(handshakes) != self._handshakes
        )

    def connect(self, handshakes: list[HotKVHandshake]) -> None:
        """Opens the session for the key space that all ranks agree on; waits a moment for the
        server. May load numba's kernels.

        Without handshakes the workers are asked for theirs with the first steps (`joining`). vLLM
        0.33 calls it after each wake-up, too: a session whose ranks say the same as before goes on.
        """
        if not handshakes:
            if self.cache is None:
                native.load("hotkv_proto.kernels")
                self.joining = Joining(self._num_ranks)
            return
        self.joining = None
        self.links.told(
            {h.rank: h.absent for h in handshakes}, time.monotonic(), is_connected=False
        )
        if self.cache is not None:
            if not self.replaces(handshakes):
                return
            self.turn_off()
        self._handshakes = _without_links(handshakes)
        try:
            agreement = agree(handshakes, self._engine.vllm_config, self._engine.kv_cache_config)
        except Unsupported as why:
            logger.warning("hotkv is off: %s; the engine runs without it", why)
            return
        identity = agreement.space.weights_identity
        if self.weights.identity:
            self.weights.go_on(identity)
        else:
            in_doubt = any(h.weights_in_doubt for h in handshakes)
            self.weights = Rekeying(self._num_ranks, identity, in_doubt)
        self._start(agreement, self._engine.config.startup_wait_s)

    def _start(self, agreement: Agreement, wait_s: float) -> None:
        """Makes what works over this key space, and waits a moment for the server."""
        # Before the first request: numba takes a second to load and some kernels to compile.
        native.load("hotkv_proto.kernels")
        cache = assemble(self._engine, agreement)
        self._agreement, self.cache = agreement, cache
        if self._engine.counts_media:
            logger.warning(
                "hotkv: requests with images or other media do not use the shared cache: vLLM "
                "names media by a counter where mm_processor_cache_gb is 0 and prefix caching is "
                "off; turn one of them on"
            )
        if cache.session.wait_connected(wait_s):
            # The workers have waited as long.
            self.links.check(True, time.monotonic(), 0.0)
            # Touches the mapped table once, so that no request pays for it.
            for index in range(len(agreement.space.groups)):
                cache.session.probe(index, [bytes(agreement.space.hash_bytes)])

    # ---------------------------------------------------------------------------------------- steps

    def is_other(self, identity: str) -> bool:
        """Returns True if `adopt` would begin another key space."""
        return self.cache is not None and identity != self.weights.identity

    def adopt(self, identity: str) -> None:
        """All ranks have said which weights they have. If these are others, all is made anew for
        their key space."""
        is_other, agreement = self.is_other(identity), self._agreement
        self.weights.adopt(identity)
        if not is_other or agreement is None or self.cache is None:
            return
        logger.info(
            "hotkv: the engine's weights have changed; from now on it shares KV with engines "
            "that have the same (%s)",
            identity,
        )
        # Changed weights are worth a moment, so that the first request can hit; without a server
        # there is nothing to wait for.
        wait_s = min(self._engine.config.startup_wait_s, RECONNECT_S) if self.is_connected else 0.0
        # Closing waits for the server.
        close = self.cache.session.close
        threading.Thread(target=close, name="hotkv-close", daemon=True).start()
        space = replace(agreement.space, weights_identity=identity)
        self._handshakes = [replace(h, key_space=space) for h in self._handshakes]
        self._start(replace(agreement, space=space), wait_s)

    def join(self, report: HotKVWorkerMetadata) -> list[Any]:
        """Connects once all ranks have reported their handshakes. Returns the requests that came
        before."""
        joining = self.joining
        handshakes = joining.handshakes(report) if joining is not None else []
        if joining is None or not handshakes:
            return []
        self.connect(handshakes)
        return joining.take_requests()

    # ------------------------------------------------------------------------------------------ end

    def turn_off(self) -> None:
        """This engine runs without hotkv from now on."""
        cache, self.cache, self._agreement = self.cache, None, None
        if cache is not None:
            cache.session.close()
        if self._engine.traces is not None:
            self._engine.traces.flush()


def _without_links(handshakes: list[HotKVHandshake]) -> list[HotKVHandshake]:
    """What ranks have found, whether they have a session or not."""
    return [replace(h, absent="") for h in handshakes]
