"""A rank's worker side without an engine."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from hotkv_client.types import BlockResult, BlockRun, LoadRun, TransferResult, TransferStatus
from hotkv_proto.order import OrderKind
from hotkv_vllm import link
from hotkv_vllm.callbacks import CallbackEdge
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.metadata import HotKVMetadata, LoadJob, StepReport, StoreJob
from hotkv_vllm.report_ids import SeenReports
from hotkv_vllm.stats import CallbackClock
from hotkv_vllm.worker import rank_loads, rank_stores, side
from hotkv_vllm.worker.side import HotKVWorker
from tests.vllm.parts import ids

STORED, WRITTEN = BlockResult.STORED, BlockResult.WRITTEN
FAILED = b""
"""The store failed as a whole."""


class Session:
    """answers: by the transfer's name."""

    def __init__(self) -> None:
        self.connected = True
        self.order_kind, self.order_message = OrderKind.HOST, ""
        self.answers: dict[str, Future[Any]] = {}
        self.sent: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.ends_cancelled = True
        self.is_closed = False
        self.num_revocations = 0
        self.breaks = False
        self.waited_s: list[float] = []

    def _begin(self, name: str, what: Any) -> Any:
        if self.breaks:
            raise RuntimeError("told to break")
        self.sent[name] = what
        return self.answers.setdefault(name, Future())

    def load(
        self, name: str, lease_id: str, runs: Any, timeout_s: float, *more: Any, polls: bool
    ) -> Any:
        return self._begin(name, (lease_id, runs, timeout_s, *more))

    def store(self, name: str, lease_id: str, runs: Any, *more: Any, polls: bool) -> Any:
        return self._begin(name, (lease_id, runs, *more))

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)
        if self.ends_cancelled:
            self.answers[name].set_result(TransferResult(name, TransferStatus.CANCELLED))

    def revoke_stores(self) -> None:
        if self.breaks:
            raise RuntimeError("told to break")
        self.num_revocations += 1

    def wait_connected(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return True

    def wait_opened(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True

    def end(self, name: str, *results: Any, num_bytes: int = 0, status: Any = None) -> None:
        blocks = tuple(map(list, results))
        answer = TransferResult(name, status or TransferStatus.DONE, num_bytes, blocks)
        self.answers[name].set_result(answer)


class Device:
    """Marks have passed while `is_there`."""

    uuid, stream = bytes(16), 1

    def __init__(self) -> None:
        self.is_there = True

    def new_event(self, *, interprocess: bool) -> Any:
        return SimpleNamespace(query=lambda: self.is_there)

    def record(self, event: Any) -> None:
        pass


class AtOnce:
    """A Thread whose `start` runs the target."""

    def __init__(self, *, target: Any, **_: Any) -> None:
        self.start = target


class Rig:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, flush_timeout_s: float = 0.0, **settings: Any
    ) -> None:
        self.now_s = 100.0
        for module in (rank_loads, side, rank_stores):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now_s)
        vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(engine_id="engine"),
            parallel_config=SimpleNamespace(rank=0),
        )
        kv = SimpleNamespace(num_blocks=64)
        edge = CallbackEdge(CallbackClock("test"), lambda name: None)
        monkeypatch.setattr(rank_stores, "FLUSH_TIMEOUT_S", flush_timeout_s)
        self.config = ConnectorConfig(**settings)
        self.worker = HotKVWorker(vllm_config, kv, self.config, edge)
        self.rank: Any = self.worker.rank
        self.session = Session()
        self.device = Device()
        self.rank.marks._device = self.device
        self.rank.session = self.session
        self.rank.memory = SimpleNamespace(close=lambda: None)
        self.rank._session_config = SimpleNamespace()
        self.opened: list[Session] = []
        monkeypatch.setattr(link, "threading", SimpleNamespace(Thread=AtOnce))
        monkeypatch.setattr(self.rank, "begin", self._begin)

    def _begin(self) -> None:
        self.rank.session = Session()
        self.opened.append(self.rank.session)

    def step(self, **meta: Any) -> None:
        """All callbacks of a step."""
        told = HotKVMetadata(**meta)
        self.worker.before_step(told)
        if told.loads:
            self.worker.before_forward(told)
        self.worker.start_loads(told)
        self.worker.save(told)

    def report(self) -> StepReport:
        """Empty if it sends none."""
        said = self.worker.take_report(None)
        return StepReport() if said is None else said.joined(SeenReports())

    def results(self) -> dict[int, bytes]:
        return {store_id: results[0] for store_id, results in self.report().stores.items()}

    @property
    def counters(self) -> dict[str, float]:
        return dict(self.worker.report._next.counters)


def load(name: str = "a", *, timeout_s: float = 10.0, **more: Any) -> LoadJob:
    runs = (LoadRun(0, ids([0, 1]), ids([3, 4])),)
    return LoadJob(name, f"t-{name}", f"l-{name}", runs, timeout_s, **more)


def store(number: int = 1, blocks: int = 2, **more: Any) -> StoreJob:
    runs = (BlockRun(0, [b"h"] * blocks, ids(list(range(blocks)))),) if blocks else ()
    return StoreJob(number, f"w{number}", runs, **more)


ATTACHED = BlockRun(1, [b"h"], ids([5]))


class Companion:
    """Of a `RankCompanion`, what a store needs.

    lost: requests whose new KV is wrong.
    """

    def __init__(self) -> None:
        self.built: list[Any] = []
        self.breaks, self.lost = False, set[str]()

    def find_lost(self, request_ids: Any) -> set[str]:
        return {*request_ids} & self.lost

    def build(self, runs: Any) -> bool:
        if not self.breaks:
            self.built += [(run.group_index, run.block_ids.tolist()) for run in runs]
        return not self.breaks

    def begin_step(self, meta: Any) -> None: ...
    def add_report(self, report: Any) -> None: ...


def with_companion(one: Rig) -> Companion:
    companion: Any = Companion()
    one.worker.companion = companion
    one.rank.has_attachments = True
    return companion
