"""The engine's KV memory as the server sees it: exported when vLLM has made it, let go of before
vLLM discards it, exported anew when it is there again.

What is always true: the server reaches no memory that the engine gets after it was let go of.
"""

from concurrent.futures import wait as wait_futures
from typing import Any

from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.link import logger
from hotkv_vllm.sparse.rank import SparseRank
from hotkv_vllm.worker.rank_loads import RankLoads
from hotkv_vllm.worker.rank_stores import FENCE_GRACE_S, RankStores
from hotkv_vllm.worker.rank_transfers import RankTransfers
from hotkv_vllm.worker.session import RankSession


class ExportedMemory:
    """Exports the memory and begins the rank's session. `*_broke`: what makes up for a hook that
    has raised."""

    def __init__(
        self,
        rank: RankSession,
        sparse: SparseRank,
        transfers: RankTransfers,
        loads: RankLoads,
        stores: RankStores,
        config: ConnectorConfig,
    ) -> None:
        self._rank = rank
        self._sparse = sparse
        self._transfers = transfers
        self._loads = loads
        self._stores = stores
        self._config = config
        self._kv_caches: dict[str, Any] = {}
        self._is_unregistered = False

    def __repr__(self) -> str:
        return f"ExportedMemory({len(self._kv_caches)} layers)"

    def register(self, kv_caches: dict[str, Any]) -> None:
        """vLLM has made its KV caches: a tensor per layer."""
        self._kv_caches = kv_caches
        # First the memory moves, then others look at it; the session tells the server of all of it
        # at once.
        self._export()
        self._sparse.install_sparse(kv_caches)
        if self._sparse.lacks_residency:
            self._rank.turn_off("its layers can't attend to blocks in host memory; see its log")
            return
        self._rank.open(self._sparse.worker, self._sparse.centres)
        self._sparse.opened()

    def unregister(self) -> None:
        """vLLM is about to discard the KV memory."""
        if self._rank.session is None:
            return
        self._is_unregistered = True
        self._let_go()
        self._sparse.will_write_all()

    def unregister_broke(self) -> None:
        """The memory is given up, and it is not known what still reaches it."""
        self._rank.shutdown()

    def restore(self) -> None:
        """The KV memory is there again, with other contents."""
        if self._is_unregistered:
            self._is_unregistered = False
            self._export()
            self._rank.open(self._sparse.worker, self._sparse.centres)

    def broke(self, what: str) -> None:
        """The memory could not be `what`."""
        self._rank.turn_off(f"its memory could not be {what}; see the engine's log")

    def shutdown(self) -> None:
        """Closes the session and the export."""
        self._kv_caches = {}
        self._rank.shutdown()

    def _export(self) -> None:
        """Lets go of memory that was exported before, and exports what there is now."""
        if self._rank.memory is not None:
            self._let_go()
        if self._rank.export(self._kv_caches):
            self._transfers.watch_adapters()

    def _let_go(self) -> None:
        """Ends all transfers, the session and the export of memory that the engine is about to
        unmap.

        Waits for the server as long as for the end of a store. A hung server keeps mappings of its
        own, so what it still writes reaches no memory that the engine gets afterwards; a load that
        it has not ended stays unreported, and vLLM keeps its blocks.
        """
        if self._rank.session is not None:
            self._loads.make_void()
            answers = [answer for answer in self._loads.answers if answer is not None]
            answers += self._stores.end_early()
            if wait_futures(answers, self._config.store_timeout_s + FENCE_GRACE_S).not_done:
                logger.error(
                    "hotkv: the server did not end all transfers before the engine sleeps; its "
                    "session is closed"
                )
                self._stores.fail_all()
        self._rank.shutdown(keeps_fence=True)
