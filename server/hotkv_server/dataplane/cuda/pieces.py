"""Splits the plans of a job into pieces.

Always true: no run crosses the border between two registrations of the arena. The host memory of a
piece is pinned as a whole or not at all. Its bytes and runs are bounded.

Plans of the same blocks are planned together, a block's runs in the order of their addresses in the
arena, so that they adjoin there even if its layers lie in several memories of the engine.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto import native
from hotkv_server.dataplane.cuda.values import (
    MAX_PIECE_RUNS,
    CudaCopySettings,
    Direction,
    Method,
    PinnedArena,
)
from hotkv_server.dataplane.plan import BlockCopies
from hotkv_server.device.runtime import Int64s

Choose = Callable[[int, int], Method]
"""Method for a piece, given the bytes of a page and of a run in the arena."""
BLOCK, HAS_SKIPPED = 0, 3
"""Of a cursor, as in `piece_kernels`."""
ALIGN_BYTES = 16
"""A contiguous range begins in staging memory at a multiple of this: a kernel moves so many
bytes at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Runs that are copied at once; arrays are int64 [runs].

    `method`: None if the host memory is not pinned.
    `device`, `host`: addresses.
    `registration`: number of each run's registration.
    `num_blocks`: how many of the job's blocks, in its plans' order, this and earlier pieces copy
        wholly; blocks of plans that are planned together count once.
    """

    direction: Direction
    method: Method | None
    device: Int64s
    host: Int64s
    num_bytes: Int64s
    registration: Int64s
    total_bytes: int
    num_blocks: int = 0

    @property
    def dst(self) -> Int64s:
        return self.device if self.direction is Direction.LOAD else self.host

    @property
    def src(self) -> Int64s:
        return self.host if self.direction is Direction.LOAD else self.device


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A piece's layout in staging memory.

    `offsets`: of its runs there, int64 [runs].

    Copies between staging and host memory, each of runs that adjoin in host memory; int64 [copies]:

    `starts`: offsets in staging memory.
    `hosts`: addresses.
    `num_bytes`: sizes.
    """

    offsets: Int64s
    starts: Int64s
    hosts: Int64s
    num_bytes: Int64s


@dataclass(frozen=True, slots=True)
class _Section:
    """Plans of the same blocks, as one: `block_ids` and `hosts`, the slots' addresses, int64
    [blocks]; the others as of `Recipe`, int64 [runs], `bases` as addresses."""

    block_ids: Int64s
    hosts: Int64s
    bases: Int64s
    strides: Int64s
    places: Int64s
    sizes: Int64s


def pieces(
    plans: Sequence[BlockCopies],
    direction: Direction,
    arena: PinnedArena,
    settings: CudaCopySettings,
    choose: Choose,
) -> Iterator[Piece]:
    """Yields pieces that copy each byte of the plans once. Whether memory is pinned is determined
    before a plan's first piece. `choose`: for pinned memory; `settings`: bounds of a piece."""
    num_before = 0
    for section in _sections(plans):
        pinned_end = arena.address + arena.pinned_bytes
        for is_pinned in (True, False):
            cursor = np.zeros(4, np.int64)
            for columns, method, total_bytes in _columns(
                section, arena, settings, choose if is_pinned else None, pinned_end, cursor
            ):
                is_partial = bool(cursor[HAS_SKIPPED]) and is_pinned
                num_blocks = num_before + (0 if is_partial else int(cursor[BLOCK]))
                device, host, sizes, registrations = columns
                yield Piece(
                    direction, method, device, host, sizes, registrations, total_bytes, num_blocks
                )
            if not cursor[HAS_SKIPPED]:
                break
        num_before += len(section.block_ids)


def _sections(plans: Sequence[BlockCopies]) -> Iterator[_Section]:
    """Of plans that copy anything."""
    for _, same in itertools.groupby(plans, lambda plan: id(plan.block_ids)):
        together = list(same)
        first, recipes = together[0], [plan.recipe for plan in together]
        if not len(first.block_ids):
            continue
        hosts = first.slot_offsets + first.arena.address
        if len(together) == 1:
            recipe, bases = first.recipe, first.recipe.bases + first.engine.address
            if len(bases):
                yield _Section(
                    first.block_ids,
                    hosts,
                    bases,
                    recipe.strides,
                    recipe.slot_offsets,
                    recipe.num_bytes,
                )
            continue
        columns = [
            np.concatenate([plan.recipe.bases + plan.engine.address for plan in together]),
            np.concatenate([recipe.strides for recipe in recipes]),
            np.concatenate([recipe.slot_offsets for recipe in recipes]),
            np.concatenate([recipe.num_bytes for recipe in recipes]),
        ]
        order = np.argsort(columns[2], kind="stable")
        if len(order):
            yield _Section(first.block_ids, hosts, *(column[order] for column in columns))


def _columns(
    section: _Section,
    arena: PinnedArena,
    settings: CudaCopySettings,
    choose: Choose | None,
    pinned_end: int,
    cursor: Int64s,
) -> Iterator[tuple[Int64s, Method | None, int]]:
    """Rows of `Piece` (device, host, sizes, registrations), int64 [4, runs], its method, which the
    first piece decides, and its bytes. `choose`: None for what is not pinned."""
    plan = native.require("hotkv_server.dataplane.cuda.piece_kernels").next_piece
    method, room_bytes, extra_bytes = None, settings.piece_bytes, 0
    num_blocks, num_runs = len(section.block_ids), len(section.bases)
    while (block := int(cursor[BLOCK])) < num_blocks:
        begin = cursor.copy()
        columns = np.empty((4, min(MAX_PIECE_RUNS, (num_blocks - block) * num_runs + 16)), np.int64)
        count, num_ranges, least, most, total = plan(
            section.block_ids,
            section.hosts,
            section.bases,
            section.strides,
            section.places,
            section.sizes,
            arena.address,
            arena.piece_bytes,
            pinned_end,
            choose is not None,
            room_bytes,
            extra_bytes,
            cursor,
            columns,
        )
        columns = columns[:, :count]
        if count and choose is not None and method is None:
            page_bytes = most if least == most else _middle(columns[2])
            method = choose(page_bytes, total // num_ranges)
            if method is Method.STAGED:
                room_bytes, extra_bytes = settings.slot_staging_bytes, ALIGN_BYTES
                cursor[:] = begin
                continue
        if count:
            yield columns, method, total


def _middle(num_bytes: Int64s) -> int:
    """The upper median."""
    middle = len(num_bytes) // 2
    return int(np.partition(num_bytes, middle)[middle])


def plan_staged(host: Int64s, num_bytes: Int64s, registration: Int64s) -> StagedPlan:
    """Runs that adjoin in host memory, in one registration, also adjoin in staging memory, so
    that one copy moves them. Alignment adds at most ALIGN_BYTES for each. Arrays are int64
    [runs]."""
    apart = (host[1:] != host[:-1] + num_bytes[:-1]) | (registration[1:] != registration[:-1])
    begins: NDArray[np.bool_] = np.concatenate(([True], apart))
    firsts = np.flatnonzero(begins)
    lengths = np.add.reduceat(num_bytes, firsts)
    padded = -(-lengths // ALIGN_BYTES) * ALIGN_BYTES
    starts = np.cumsum(padded) - padded
    group = np.cumsum(begins) - 1
    return StagedPlan(starts[group] + host - host[firsts][group], starts, host[firsts], lengths)
