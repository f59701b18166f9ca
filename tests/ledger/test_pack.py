"""Tests the ledger's file: it comes back unchanged, also to other tiers; damaged or
contradictory ones are refused."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from bench.policies import POLICIES
from hotkv_proto.reports import Miss
from hotkv_server.ledger.book import pack
from hotkv_server.ledger.book.accounts import Account, Accounts, Columns, Usage
from hotkv_server.ledger.book.forecast import GIB, Forecast, RequestDemand

MINUTE = 29_000_000
ONE, TWO = Account("blue", "small", "00ff", "a"), Account("", "large", "11ff", "b")


def ledger(tiers: tuple[str, ...] = ("disk",), minute: int = MINUTE) -> tuple[Accounts, Forecast]:
    return Accounts(Columns(tiers), minute), Forecast(POLICIES["lru"], minute)


def demand() -> RequestDemand:
    keys = np.arange(1, 50, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return RequestDemand(keys, 800, 16, 1 << 20, 0)


def filled() -> tuple[Accounts, Forecast]:
    accounts, forecast = ledger()
    hits, misses = {"host": 20, "disk": 30}, {Miss.EVICTED: 40}
    values = accounts.columns.values(Usage(1, 100, 10, 0.5, 0.25, 0, 7, 8, hits, misses))
    for minute in (MINUTE, MINUTE + 3, MINUTE + 200):
        for who in (ONE, TWO):
            accounts.add(who, values, minute)
        forecast.observe(demand(), GIB, 1.0, minute)
    assert accounts.saved_s("one", 100, 0.0, 500.0) == 0.2
    return accounts, forecast


def file_of(accounts: Accounts, forecast: Forecast) -> bytes:
    return pack.seal(pack.pack(accounts, forecast, forecast.seen(), forecast.seen_share))


def test_a_ledger_goes_on_where_it_was() -> None:
    accounts, forecast = filled()
    kept, now = pack.unpack(file_of(accounts, forecast)), MINUTE + 200
    back, other = ledger(minute=now)
    pack.put_back(kept, back, other)
    for seconds in (0, 60, 7200, 86_400):
        old, new = (dict(one.since(seconds, now)) for one in (accounts, back))
        assert old.keys() == new.keys() and all(np.array_equal(old[k], new[k]) for k in old)
        assert forecast.outlook(seconds, GIB, now) == other.outlook(seconds, GIB, now)
    assert back.began_minute == MINUTE and back.speeds == accounts.speeds == {"one": 500.0}
    back.check_invariants()
    other.check_invariants()
    # The block is not new.
    before = other.sums.total.copy()
    other.observe(demand(), GIB, 2.0, now)
    assert (other.sums.total - before)[2] == 0


def test_newer_ledger_with_more_accounts_loses_nothing() -> None:
    accounts, forecast = filled()
    for number in range(6):
        who = Account("blue", "small", "00ff", f"engine {number}")
        accounts.add(who, accounts.columns.values(Usage(requests=1)), MINUTE)
    kept = pack.unpack(file_of(accounts, forecast))
    back = Accounts(accounts.columns, MINUTE, max_accounts=4)
    pack.put_back(kept, back, Forecast(POLICIES["lru"], MINUTE))
    back.check_invariants()
    assert len(back) <= 4 and np.array_equal(back.total.total, accounts.total.total)


def test_tiers_may_come_and_go_between_two_servers() -> None:
    accounts, forecast = filled()
    kept = pack.unpack(file_of(accounts, forecast))
    columns = pack.columns_for(["valkey"], kept)
    assert columns.tiers == ("host", "valkey", "disk")
    back = Accounts(columns, MINUTE + 200)
    pack.put_back(kept, back, Forecast(POLICIES["lru"], MINUTE))
    usage = columns.usage(back.total.total)
    assert usage.hit_tokens == {"host": 120, "valkey": 0, "disk": 180}
    assert usage.missed_tokens[Miss.EVICTED] == 240 and usage.prompt_tokens == 600


@given(data=st.data())
def test_damaged_or_cut_file_is_refused(data: st.DataObject) -> None:
    content = bytearray(file_of(*filled()))
    at, flip = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 255))
    content[at] ^= flip
    with pytest.raises(pack.PackError):
        pack.unpack(bytes(content if flip else content[:at]))


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 7},
        {"accounts": [["a", "b"]]},
        {"accounts": [["a", "b", "c", "d", 1, 10**9]]},
        {"accounts": [["a", "b", "c", "d", 1, -1]]},
        {"forecast": [1]},
        {"seen": 10**9},
        {"seen_share": 0},
        {"began_minute": None},
    ],
)
def test_a_text_that_contradicts_the_arrays_is_refused(change: dict[str, object]) -> None:
    """The checksum is valid."""
    accounts, forecast = filled()
    text, *arrays = pack.pack(accounts, forecast, forecast.seen(), forecast.seen_share)
    spoiled = json.dumps({**json.loads(text), **change}).encode()
    with pytest.raises(pack.PackError, match="damaged"):
        pack.unpack(pack.seal([spoiled, *arrays]))
