"""Answers come in the client's threads while the scheduler's begins more."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotkv_client.types import TransferStatus
from hotkv_vllm.compat.primary_rows import PrimaryRows
from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.offloading.transfers import GroupRows, TierTransfers
from tests.offloading.test_standing import FakePrimary
from tests.support.waiting import wait_for

NUM_JOBS = 3000


class Session:
    """Grants and loads all, from four threads."""

    has_tiers = False

    def __init__(self) -> None:
        self.names: list[str] = []
        self._threads = ThreadPoolExecutor(4)

    def acquire(self, name: str, hashes: Any, ttl_s: float) -> "Future[Any]":
        self.names.append(name)
        pinned = tuple(np.ones(len(group.hashes), bool) for group in hashes)
        return self._threads.submit(lambda: SimpleNamespace(pinned=pinned))

    def load(self, name: str, lease: str, runs: Any, timeout_s: float) -> "Future[Any]":
        self.names.append(name)
        return self._threads.submit(lambda: SimpleNamespace(status=TransferStatus.DONE))

    def release(self, name: str) -> None:
        """Keeps no leases."""

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def session() -> Iterator[Session]:
    """Python switches threads as often as it can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    one = Session()
    yield one
    one.close()
    sys.setswitchinterval(interval_s)


def test_no_job_is_lost_between_threads(session: Session) -> None:
    transfers = TierTransfers(session, ConnectorConfig(), PrimaryRows())
    for _ in range(NUM_JOBS):
        job = SimpleNamespace(keys=(b"k",))
        transfers.load(job, [GroupRows(0, [b"k"], [b"h"], np.zeros(1, np.int32))])
    wait_for(lambda: transfers.is_idle, "the end of all jobs")
    ended = transfers.take_ended()
    loaded = sum(one.is_complete for one in ended)
    assert (len(ended), loaded) == (NUM_JOBS, NUM_JOBS)
    assert len(set(session.names)) == 2 * NUM_JOBS


@pytest.mark.parametrize("error", [RuntimeError("gone"), None], ids=str)
def test_a_job_ends_whatever_the_server_answers(session: Session, error: Exception | None) -> None:
    def odd(*_: Any) -> "Future[Any]":
        answer: Future[Any] = Future()
        answer.set_exception(error) if error else answer.set_result(None)
        return answer

    transfers, job = (
        TierTransfers(session, ConnectorConfig(), PrimaryRows()),
        SimpleNamespace(keys=(b"k",)),
    )
    groups = [GroupRows(0, [b"k"], [b"h"], np.zeros(1, np.int32))]
    for call in ("load", "acquire", "store"):
        setattr(session, call, odd)
        transfers.store(job, []) if call == "store" else transfers.load(job, groups)
        wait_for(lambda: transfers.is_idle, f"the end of {call}")
        assert [one.is_complete for one in transfers.take_ended()] == [False]
    assert not transfers.is_hung


@pytest.mark.parametrize("is_ready", [True, False])
def test_lease_and_copy_are_sent_together(is_ready: bool) -> None:
    """Only if the block table has all chunks; the server answers nothing."""
    rows, sent = PrimaryRows(), []
    rows.bind(SimpleNamespace(_m=SimpleNamespace(primary_tier=FakePrimary([]))))  # type: ignore[arg-type]
    session: Any = SimpleNamespace(
        has_tiers=False,
        probe=lambda _, hashes: np.array([True] * (len(hashes) - 1) + [is_ready]),
        acquire=lambda name, *_: sent.append(("lease", name)) or Future(),
        load=lambda _, lease, runs, __: (
            sent.append(("copy", lease, len(runs[0].block_ids))) or Future()
        ),
    )
    job = SimpleNamespace(keys=(b"k", b"l"))
    transfers = TierTransfers(session, ConnectorConfig(), rows)
    transfers.load(job, [GroupRows(0, [b"k", b"l"], [b"h", b"i"], np.arange(2, dtype=np.int32))])
    lease = sent[0][1]
    assert sent == [("lease", lease), ("copy", lease, 2)][: 1 + is_ready]
