"""Tests generations in an S3 bucket, where each is an object. `test_remote_faults` tests flushes
during reads."""

import time
from collections.abc import Iterator
from functools import partial

import pytest

pytest.importorskip("obstore", reason="obstore speaks S3")

from hotkv_server.tiers import check as tier_check
from hotkv_server.tiers.protocol import NO_GENERATION, begun
from hotkv_server.tiers.remote.client import LostError, UnusableError
from hotkv_server.tiers.s3 import generation_objects as generation_objects
from hotkv_server.tiers.s3.bucket import FullError
from hotkv_server.tiers.s3.tier import S3Tier
from tests.contracts.flush_contract import NAME, answer, flush, generation
from tests.support.waiting import wait_for
from tests.tiers.s3_support import QUICK, Server, new_prefix, proxied, settings_of, tier_over
from tests.tiers.support import Gate

PATH = f"generations/1/{NAME}"


@pytest.fixture
def prefix() -> str:
    return new_prefix()


@pytest.fixture
def node_a(s3_server: Server, prefix: str) -> Iterator[S3Tier]:
    with tier_over(s3_server, prefix) as (tier, _):
        yield tier


def test_a_flush_that_is_late_does_nothing(s3_server: Server, prefix: str, node_a: S3Tier) -> None:
    # Node B's write arrives after two flushes of node A: no old generation may come back.
    first = generation(node_a)
    with proxied(s3_server) as (proxy, over_it):
        gate = Gate(b"PUT", "/generations/1/")
        with tier_over(s3_server, prefix, **over_it) as (node_b, _):
            assert generation(node_b) == first
            proxy.on_command = gate
            raised: list[int | None] = []
            node_b.raise_generation(NAME, 0, raised.append)
            assert gate.is_full.wait(60)
            flushed = [flush(node_a), flush(node_a)]
            gate.opened.set()
            wait_for(lambda: raised, "the flush did not end")
            assert raised[0] > max(first, *flushed) and generation(node_a) == raised[0]


def test_full_buckets_flush_removes_the_generation(s3_server: Server, prefix: str) -> None:
    puts = list[bytes]()

    def note(piece: bytes) -> Iterator[bytes]:
        puts.extend([piece] * (piece.startswith(b"PUT ") and b"/generations/1/" in piece[:500]))
        yield piece

    def refuse(piece: bytes) -> Iterator[bytes]:
        yield piece.replace(b" 200 OK", b" 507 Insufficient Storage", len(puts))
        puts.clear()

    with proxied(s3_server) as (proxy, over), tier_over(s3_server, prefix, **over) as (tier, _):
        assert generation(tier)
        proxy.on_command, proxy.on_reply = note, refuse
        assert flush(tier) == NO_GENERATION
        assert f"{prefix}/{PATH}" not in s3_server.paths(prefix)


def test_unreadable_generation_costs_its_key_space_only(s3_server: Server, prefix: str) -> None:
    """If all reads but listings break, the tier has a problem until they work."""
    lost = list[bytes]()

    def cut(piece: bytes) -> Iterator[bytes]:
        if piece.startswith(b"GET ") and any(part in piece[:500] for part in lost):
            raise ConnectionAbortedError
        yield piece

    with proxied(s3_server) as (proxy, over), tier_over(s3_server, prefix, **over) as (tier, _):
        first = generation(tier)
        proxy.on_command = cut
        lost.append(b"/generations/1/0a")
        shown = answer(lambda done: tier.generations([NAME, "0a"], time.monotonic() + 20, done))
        assert shown.generations == {NAME: first} and not tier.problem()
        lost[:] = [b"/generations/1/", b"/check"]
        assert generation(tier) is None
        wait_for(lambda: generation(tier) or tier.problem(), "no problem is known")
        lost.clear()
        wait_for(lambda: not tier.problem() and generation(tier) == first, "it did not come back")


class Objects:
    """A bucket in memory.

    is_full: writes fail.
    ignores: If-Match or If-None-Match.
    """

    def __init__(self, *, is_full: bool = False, ignores: str = "") -> None:
        self._bytes: dict[str, bytes] = {}
        self.is_full = is_full
        self._ignores = ignores

    def get(self, path: str, until_s: float) -> tuple[bytes, str] | None:
        found = self._bytes.get(path)
        return None if found is None else (found, f'"{found!r}"')

    def objects(self, paths: list[str], until_s: float) -> list[tuple[bytes, str] | None]:
        return [self.get(path, until_s) for path in paths]

    def put(self, path: str, body: bytes, until_s: float, version: str = "") -> bool:
        known = self.get(path, until_s)
        if version and self._ignores != "If-Match" and (known is None or known[1] != version):
            return False
        if not version and known is not None and self._ignores != "If-None-Match":
            return False
        if self.is_full:
            raise FullError("has no room")
        self._bytes[path] = body
        return True

    def delete(self, path: str, until_s: float) -> None:
        self._bytes.pop(path, None)


def test_a_flush_of_a_full_store_counts() -> None:
    store, first = Objects(), begun(5000)
    assert generation_objects.begin_generation(store, NAME, 5000, 0.0) == first
    assert generation_objects.raise_generation(store, NAME, 0, 6000, 0.0) == begun(6000) > first
    assert generation_objects.raise_generation(store, NAME, 0, 6000, 0.0) == begun(6000) + 1
    known = begun(6500)
    assert generation_objects.raise_generation(store, NAME, known, 6400, 0.0) == known + 1
    store.is_full = True
    assert generation_objects.raise_generation(store, NAME, 0, 7000, 0.0) == NO_GENERATION
    with pytest.raises(LostError, match="full"):
        generation_objects.raise_generation(store, NAME, 0, 7000, 0.0)
    assert generation_objects.read_generation(store, NAME, 0.0) == NO_GENERATION
    assert generation_objects.begin_generation(store, NAME, 8000, 0.0) == NO_GENERATION
    store.is_full = False
    assert generation_objects.begin_generation(store, NAME, 9000, 0.0) == begun(9000) > known + 1


def test_ever_changed_generation_is_given_up() -> None:
    store = Objects()
    store.put = lambda *arguments: False  # type: ignore[method-assign]
    for call in (
        generation_objects.begin_generation,
        partial(generation_objects.raise_generation, floor=0),
    ):
        with pytest.raises(LostError, match="again and again"):
            call(store, NAME, now_us=5000, until_s=0.0)
    with pytest.raises(LostError, match="has lost an object"):
        generation_objects.check_conditions(store, 0.0)


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
def test_store_ignoring_conditions_is_not_used(condition: str) -> None:
    for _ in range(2):
        generation_objects.check_conditions(Objects(), 0.0)
        with pytest.raises(UnusableError, match=f"ignores {condition}: "):
            generation_objects.check_conditions(Objects(ignores=condition), 0.0)


def test_malformed_generation_is_not_raised(s3_server: Server, prefix: str, node_a: S3Tier) -> None:
    s3_server.store.put(f"{prefix}/{PATH}", b"0")
    assert generation(node_a) is None and flush(node_a) is None


def test_check_leaves_no_generation_behind(s3_server: Server, prefix: str) -> None:
    arena, _ = tier_check._arena()
    tier_check.check_shared(S3Tier(arena, settings_of(s3_server, prefix), bounds=QUICK), arena)
    assert not s3_server.paths(f"{prefix}/generations")
