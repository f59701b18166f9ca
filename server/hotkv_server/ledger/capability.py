"""Connects the ledger to the node."""

from collections.abc import Iterable, Mapping

from hotkv_server.ledger import figures
from hotkv_server.ledger.drive import LiveLedger
from hotkv_server.ledger.history import LiveHistory
from hotkv_server.node.capability import Capability, Figures, Filters, Samples, Topic
from hotkv_server.node.node import Node
from hotkv_server.settings import Settings


def attach(settings: Settings, node: Node) -> "LedgerCapability":
    """The ledger continues an earlier server's."""
    tiers = node.tiers.names if node.tiers is not None else ()
    return LedgerCapability(node, LiveLedger(node.core, node.sessions, settings.arena_dir, tiers))


class LedgerCapability(Capability):
    def __init__(self, node: Node, ledger: LiveLedger) -> None:
        self._clerk = node.clerk
        self._names = node.names
        self.ledger = ledger
        self.history = LiveHistory(node.core, ledger, node.lag)
        node.events.saving.add(ledger.save)
        node.events.request_scheduled.add(ledger.report)
        node.events.load_ended.add(ledger.load_ended)
        node.events.session_closed.add(lambda session, is_last: ledger.session_closed(session))

    def __repr__(self) -> str:
        return f"LedgerCapability({self.ledger!r})"

    async def tick(self, now_s: float) -> None:
        self.history.turn(now_s)
        await self.ledger.turn(self._clerk)

    async def close(self) -> None:
        await self.ledger.close()

    def topics(self) -> Mapping[str, Topic]:
        def savings(filters: Filters) -> Figures:
            has_rows = filters.text("rows") != "no"
            found = self.ledger.savings(filters.seconds("since_s"), has_rows=has_rows)
            return figures.savings_figures(found, self._names)

        return {"savings": Topic(savings, ("since_s", "rows"))}

    def status(self, *, has_names: bool) -> Figures:
        return figures.status(self.ledger, self.history, self._names, has_names=has_names)

    def counters(self) -> Mapping[str, float]:
        return {
            "ledger_folded_rows_total": float(self.ledger.num_folded),
            "ledger_lost_reports_total": float(self.ledger.num_lost),
            "ledger_saved_seconds_total": self.ledger.grown.saved_s,
            "ledger_taken_back_seconds_total": self.ledger.taken_back_s,
            "ledger_waited_seconds_total": self.ledger.grown.waited_s,
        }

    def gauges(self) -> Mapping[str, float]:
        outlook = self.ledger.outlook(figures.RECENT_S)
        return {
            "ledger_rows": float(len(self.ledger.accounts)),
            "ledger_ceiling_ratio": outlook.ceiling_ratio,
            "ledger_next_gib_ratio": outlook.gib_gain_ratio,
        }

    def samples(self) -> Iterable[Samples]:
        return figures.tokens(self.ledger)
