"""Epochs in a Valkey, as commands of a client see them."""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hotkv_server.testing.tier_contract import SLOT_BYTES, Bench
from hotkv_server.tiers.protocol import Blocks, Epochs, Shown, Write
from hotkv_server.tiers.valkey.tier import ValkeyTier
from tests.support.waiting import wait_for

T = TypeVar("T")
NAME = "00ff" * 8


def answer(call: Callable[[Callable[[T], None]], None]) -> T:
    """What a call answers."""
    done: list[T] = []
    call(done.append)
    wait_for(lambda: done, "the call did not end")
    return done[0]


def epoch(tier: ValkeyTier) -> int | None:
    def call(on_done: Callable[[int | None], None]) -> None:
        def done(shown: Shown | None) -> None:
            on_done(None if shown is None else shown.epochs.get(NAME))

        tier.epochs([NAME], time.monotonic() + 9, done)

    return answer(call)


def flush(tier: ValkeyTier) -> int | None:
    return answer(lambda on_done: tier.raise_epoch(NAME, 0, on_done))


def keys_of(at: int, count: int) -> list[bytes]:
    return [b"hotkv/1/%b/%d/0/%064x" % (NAME.encode(), at, number) for number in range(count)]


def blocks_of(keys: list[bytes], first_slot: int, epochs: Epochs) -> Blocks:
    slots = np.arange(first_slot, first_slot + len(keys), dtype=np.int64) * SLOT_BYTES
    return Blocks(keys, slots, np.full(len(keys), SLOT_BYTES, np.int64), epochs=epochs)


def write(bench: Bench, keys: list[bytes], epochs: Epochs) -> None:
    bench.fill(range(len(keys)), range(len(keys)))
    codes = answer(
        lambda on_done: bench.tier.write(
            blocks_of(keys, 0, epochs), lambda codes, seals: on_done(codes)
        )
    )
    assert (codes == Write.STORED).all()


def read(tier: ValkeyTier, keys: list[bytes], epochs: Epochs) -> list[int]:
    blocks = blocks_of(keys, 8, epochs)
    return answer(
        lambda on_done: tier.read(
            blocks, time.monotonic() + 20, lambda codes: on_done(codes.tolist())
        )
    )
