"""Tests how an engine registers the arena with CUDA: the calls and their order, without a GPU."""

import mmap
import sys
import threading
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hotkv_proto.errors import HotKVError, Reason
from hotkv_sparse.cuda import mapped_arena as cuda_arena
from hotkv_sparse.cuda.device import address_of
from hotkv_sparse.cuda.mapped_arena import (
    PAGEABLE_ACCESS,
    READ_ONLY_REGISTER,
    REGISTER_FLAGS,
    SAME_ADDRESS,
    WRITABLE_FLAGS,
    Access,
    MappedArena,
)
from tests.sparse.cuda_support import PAGE, Cuda


def mapped(num_bytes: int) -> np.ndarray:
    """Mapped read-only, as by `hotkv_client.arena`."""
    return np.frombuffer(mmap.mmap(-1, num_bytes, prot=mmap.PROT_READ), np.uint8)


def made(
    patch: pytest.MonkeyPatch, cuda: Cuda, num_bytes: int, piece_bytes: int = PAGE, **more: bool
) -> MappedArena:
    patch.setitem(sys.modules, "cupy", cuda.module)
    return MappedArena(mapped(num_bytes), 1, piece_bytes, **more)


@given(
    num_pages=st.integers(1, 9),
    piece_pages=st.integers(1, 4),
    tail=st.integers(0, PAGE - 1),
    fits=st.integers(0, 10),
    is_writable=st.booleans(),
)
def test_readable_memory_is_registered_until_close(
    num_pages: int, piece_pages: int, tail: int, fits: int, is_writable: bool
) -> None:
    """tail: bytes that the last page lacks.
    fits: pages that the device can register.
    is_writable: it can register only writable mappings.
    """
    attributes, flags = (READ_ONLY_REGISTER, SAME_ADDRESS), REGISTER_FLAGS
    if is_writable:
        attributes, flags = attributes[1:], WRITABLE_FLAGS
    with pytest.MonkeyPatch.context() as patch:
        cuda, size = Cuda(*attributes, beyond=fits * PAGE, flags=flags), num_pages * PAGE - tail
        arena = made(patch, cuda, size, piece_pages * PAGE, is_writable=is_writable)
        assert (arena.access, arena.readable_bytes) == (Access.REGISTERED, 0)
        assert not arena.addresses(np.zeros(1, np.int64), 1).any(), "nothing before the start"
        arena.start()
        is_whole = arena.wait()
        pieces = -(-num_pages // piece_pages)
        assert is_whole == (fits >= num_pages) == (arena.error == "")
        assert len(cuda.registered) == (pieces if is_whole else fits // piece_pages)
        assert arena.readable_bytes == min(sum(cuda.registered.values()), arena.num_bytes)
        if not is_whole:
            assert "out of memory" in arena.error and "ulimit" in arena.error
        slots = np.arange(-1, 2 * num_pages, dtype=np.int64) * (PAGE // 2)
        slots = slots[slots + 100 <= arena.num_bytes]
        for offset, address in zip(slots.tolist(), arena.addresses(slots, 100), strict=True):
            at = arena.address + offset
            is_readable = offset >= 0 and offset + 100 <= arena.readable_bytes
            assert address == (at if is_readable else 0)
            pieces = cuda.registered.items()
            assert not address or any(start <= at < start + size for start, size in pieces)
        arena.close()
        arena.close()
        assert not cuda.registered and not arena.readable_bytes and not arena.wait(0)
        names = [name for name, *_ in cuda.calls]
        assert "unregister" not in names[: names.index("synchronize")], "the device is done first"


def test_the_mapping_stays_until_all_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(READ_ONLY_REGISTER, SAME_ADDRESS)
    monkeypatch.setitem(sys.modules, "cupy", cuda.module)
    mapping = mmap.mmap(-1, 4 * PAGE, prot=mmap.PROT_READ)
    gone, arena = weakref.ref(mapping), MappedArena(np.frombuffer(mapping, np.uint8), 1, PAGE)
    del mapping
    held: list[bool] = []
    # Holds the registration until a thread joins it.
    waits, join = threading.Event(), threading.Thread.join
    register, unregister = cuda.hostRegister, cuda.hostUnregister

    def watched(address: int) -> None:
        held.append(gone() is not None)
        unregister(address)

    def joined(thread: threading.Thread, timeout_s: float | None = None) -> None:
        waits.set()
        join(thread, timeout_s)

    monkeypatch.setattr(threading.Thread, "join", joined)
    monkeypatch.setattr(cuda, "hostRegister", lambda *call: (waits.wait(), register(*call)))
    monkeypatch.setattr(cuda, "hostUnregister", watched)
    arena.start()
    assert arena.wait()
    arena.close()
    assert held == [True] * 4 and gone() is None


@pytest.mark.parametrize(("piece", "ends"), [(1, [1, 2, 3]), (2, [2, 3]), (4, [3])])
def test_bytes_without_memory_are_not_registered(
    monkeypatch: pytest.MonkeyPatch, piece: int, ends: list[int]
) -> None:
    """Registering a page without memory would allocate it; the server's allocation stops after 3 of
    4 pages.

    ends: pages that each registration must reach.
    """
    cuda = Cuda(READ_ONLY_REGISTER, SAME_ADDRESS)
    monkeypatch.setitem(sys.modules, "cupy", cuda.module)
    monkeypatch.setattr(cuda_arena, "POLL_S", 0.0)
    monkeypatch.setattr(cuda_arena, "MOST_POLLS", 3)
    filled_bytes, register = 0, cuda.hostRegister
    seen: list[tuple[int, int]] = []

    def memory_end(start: int) -> int:
        nonlocal filled_bytes
        found, filled_bytes = filled_bytes, min(filled_bytes + PAGE // 2, 3 * PAGE)
        return max(start, found)

    def noted(address: int, num_bytes: int, flags: int) -> None:
        seen.append((address + num_bytes - arena.address, filled_bytes))
        register(address, num_bytes, flags)

    monkeypatch.setattr(cuda, "hostRegister", noted)
    arena = MappedArena(mapped(4 * PAGE), 1, piece * PAGE, memory_end=memory_end)
    arena.start()
    assert not arena.wait() and "brings no more memory in" in arena.error
    assert [end for end, _ in seen] == [end * PAGE for end in ends]
    assert arena.readable_bytes == 3 * PAGE
    assert all(end <= had for end, had in seen)
    arena.close()
    assert not cuda.registered


def test_pageable_memory_needs_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(PAGEABLE_ACCESS)
    arena = made(monkeypatch, cuda, 4 * PAGE)
    arena.start()
    assert arena.wait() and arena.access is Access.PAGEABLE
    addresses = [0, arena.address, arena.address + 3 * PAGE]
    assert arena.addresses(np.array([-1, 0, 3 * PAGE]), PAGE).tolist() == addresses
    arena.close()
    assert cuda.calls == [("synchronize", 1)] and arena.readable_bytes == 0


@pytest.mark.parametrize("attributes", [(), (READ_ONLY_REGISTER,), (SAME_ADDRESS,)])
def test_incapable_device_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, attributes: tuple[int, ...]
) -> None:
    with pytest.raises(HotKVError, match=r"Session\.load.*HMM") as caught:
        made(monkeypatch, Cuda(*attributes), 4 * PAGE)
    assert caught.value.reason is Reason.NOT_ALLOWED


@pytest.mark.parametrize(
    "call",
    [
        lambda arena: MappedArena(mapped(4 * PAGE)[1:], 1),
        lambda arena: MappedArena(mapped(4 * PAGE), 1, PAGE + 1),
        lambda arena: MappedArena(mapped(4 * PAGE), 1, 0),
        lambda arena: arena.addresses(np.array([3 * PAGE + 1]), PAGE),
        lambda arena: arena.addresses(np.array([0]), 0),
    ],
)
def test_refuses_other_memory_pieces_and_slots(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[MappedArena], object]
) -> None:
    arena = made(monkeypatch, Cuda(PAGEABLE_ACCESS), 4 * PAGE)
    with pytest.raises(HotKVError) as caught:
        call(arena)
    assert caught.value.reason is Reason.INVALID_FIELD
    arena.close()


class Tensor:
    """A torch tensor whose dtype numpy's array interface may lack."""

    shape = (1,)
    is_cuda = True

    def data_ptr(self) -> int:
        return 0x7F0000001000


class CupyArray:
    shape = (1,)
    __cuda_array_interface__ = {"data": (0x7F0000002000, False)}  # noqa: RUF012


def test_addresses_of_arrays() -> None:
    found = [address_of(value) for value in (Tensor(), CupyArray(), 4096, None)]
    assert found == [0x7F0000001000, 0x7F0000002000, 4096, 0]
    with pytest.raises(HotKVError, match="ndarray is no device memory") as caught:
        address_of(np.zeros(1))
    assert caught.value.reason is Reason.INVALID_FIELD
