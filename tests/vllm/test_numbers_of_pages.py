"""Pages promise the times and numbers that the code has."""

from pathlib import Path

import pytest

from hotkv_client.connection import DEVICE_GRACE_S
from hotkv_server.cache.sessions import FORGET_S
from hotkv_server.hints.book import sessions
from hotkv_server.hints.drive import END_DELAY_S
from hotkv_server.logs import MAX_LINES_PER_S
from hotkv_server.node.transfers import MARK_TIMEOUT_S
from hotkv_server.tiers.remote.workers import LONGEST_WAIT_S
from hotkv_server.tiers.s3.tier import LINGER_S
from hotkv_server.tiers.valkey.generation_keys import GRACE_S
from hotkv_server.wire.guard.audit import MAX_REFUSED_PER_S
from hotkv_vllm.offloading.promotions import SHARE_ALONE, SHARE_TOGETHER
from hotkv_vllm.offloading.scheduler import IDLE_WAIT_S
from hotkv_vllm.offloading.tier import OWED_S
from hotkv_vllm.offloading.transfers import LEASE_PATIENCE_S
from hotkv_vllm.scheduler.events import ABSENCE_PATIENCE_S
from hotkv_vllm.scheduler.find.hits import LEASE_SHARE_BEFORE_LOAD
from hotkv_vllm.scheduler.store.stores import ANSWER_BLOCKS
from hotkv_vllm.worker.rank_loads import CANCEL_GRACE_S

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "words", "number", "value"),
    [
        ("cuda", "its own transfer, for at most ten minutes", 600, MARK_TIMEOUT_S),
        ("cuda", "the connector waits a second before it reports a load", 1, DEVICE_GRACE_S),
        ("doors", "For ten minutes after a failed store", 600, OWED_S),
        ("doors", "waits at most one second for a lease", 1, LEASE_PATIENCE_S),
        ("doors", "waits up to 10 ms for a promotion", 0.01, IDLE_WAIT_S),
        ("doors", "nine tenths of vLLM's CPU tier", 0.9, SHARE_ALONE),
        ("doors", "Simultaneous loads share half of the tier", 0.5, SHARE_TOGETHER),
        ("architecture", "within two seconds when the engine cancels the load", 2, CANCEL_GRACE_S),
        ("architecture", "blocks of an answer are stored eight at a time", 8, ANSWER_BLOCKS),
        ("routers", "After five seconds without the server", 5, ABSENCE_PATIENCE_S),
        ("security", "an empty key space 10 minutes after", 600, FORGET_S),
        ("security", "lines of the log**: 50 a second of each kind", 50, MAX_LINES_PER_S),
        ("security", "at most 10 a second; `left_out` counts", 10, MAX_REFUSED_PER_S),
        ("tiers", "after a second (S3: five seconds)", 5, LINGER_S),
        ("hints", "wait until a second after the request's end", 1, END_DELAY_S),
        ("hints", "the last ten minutes (at most 128 prompts)", 600, sessions.RECENT_S),
        ("hints", "the last ten minutes (at most 128 prompts)", 128, sessions.MAX_OTHERS),
    ],
)
def test_a_page_says_the_number(page: str, words: str, number: float, value: float) -> None:
    assert words in " ".join((DOCS / f"{page}.md").read_text().split())
    assert value == number


def test_what_one_time_needs_of_another() -> None:
    # A node that knows a lost flush connects before others trust the store.
    assert GRACE_S >= 2 * LONGEST_WAIT_S
    # A load ends before its lease.
    assert LEASE_SHARE_BEFORE_LOAD <= 0.5
