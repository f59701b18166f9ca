"""Builds KV memory layouts of ranks with a given shape, and computes the bytes that a copy must
move between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor

Bytes = NDArray[np.uint8]
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of the axes of an engine's KV memory, outermost first: L layer, B block, H head, N token,
C content."""
LAYER, BLOCK, KERNEL, HEAD, TOKEN, CONTENT = range(6)


@dataclass(frozen=True)
class Shape:
    """The shape of a group's KV on one rank.

    num_kernel: number of kernel blocks (the attention kernel's unit) in a block.
    num_tokens: tokens in a kernel block.
    content: bytes per head and token.
    """

    num_layers: int
    num_kernel: int
    num_heads: int
    num_tokens: int
    content: int

    @property
    def all_bytes(self) -> int:
        """Returns the bytes of a block over all layers."""
        return self.num_layers * self.num_kernel * self.num_heads * self.num_tokens * self.content


def view_of(memory: Bytes, order: str, shape: Shape, num_blocks: int) -> Bytes:
    """Returns a view of `memory` with the axes [layer, block, kernel block, head, token, content].
    A kernel block is the attention kernel's unit; a block may have several.

    memory: has the outermost axis of `order` as its rows.
    order: the order of the axes in memory, outermost first: L layer, B kernel block, H head, N
        token, C content.
    """
    sizes = {
        "L": shape.num_layers,
        "B": num_blocks * shape.num_kernel,
        "H": shape.num_heads,
        "N": shape.num_tokens,
        "C": shape.content,
    }
    axes = memory.reshape([sizes[letter] for letter in order]).transpose(
        [order.index(letter) for letter in "LBHNC"]
    )
    view = axes.reshape(shape.num_layers, num_blocks, shape.num_kernel, *axes.shape[2:])
    assert np.shares_memory(view, memory)
    return view


def inner_axes(order: str, num_kernel: int) -> tuple[int, ...]:
    """Returns the order of the axes within a page (a block's bytes in one layer) in memory,
    outermost first, as axis numbers. Two engines can share blocks only if they have the same order.
    """
    letters = order.replace("L", "").replace("B", "B" if num_kernel > 1 else "").replace("C", "")
    return tuple("LBKHNC".index("K" if letter == "B" else letter) for letter in letters)


def page_bytes(view: Bytes, layer: int, block: int, order: str) -> Bytes:
    """Returns the bytes of a page in the order in which a slot stores them. `order`: order of the
    axes in the rank's memory (see `view_of`)."""
    axes = inner_axes(order, view.shape[KERNEL])
    page = view[layer, block]
    left_out = [axis for axis in (KERNEL, HEAD, TOKEN) if axis not in axes]
    return page.transpose([axis - KERNEL for axis in (*left_out, *axes, CONTENT)]).reshape(-1)


@dataclass
class Rank:
    """The KV memory of one rank.

    memories: the allocated memories by name.
    views: for each group, a list of (name of a memory, view of that memory). A view contains all
        layers of the group, or one layer.
    """

    order: str
    num_blocks: int
    memories: dict[str, Bytes] = field(default_factory=dict)
    views: list[list[tuple[str, Bytes]]] = field(default_factory=list)

    def layer(self, group: int, layer: int) -> Bytes:
        """Returns the view of one layer of a group, with the axes [1, block, ...]."""
        views = [view[i : i + 1] for _, view in self.views[group] for i in range(view.shape[LAYER])]
        return views[layer]

    def layout(self, shard_index: int) -> Layout:
        tensors = []
        for group, views in enumerate(self.views):
            at = 0
            for handle_id, view in views:
                dims = [
                    (view.shape[axis], view.strides[axis])
                    for axis in (LAYER, *inner_axes(self.order, view.shape[KERNEL]))
                ]
                base = view.__array_interface__["data"][0] - self.memories[handle_id].ctypes.data
                tensors.append(
                    PageTensor(
                        group,
                        handle_id,
                        base,
                        view.strides[BLOCK],
                        view.shape[CONTENT],
                        at,
                        tuple(dims),
                    )
                )
                at += tensors[-1].page_bytes
        handles = tuple(MemoryHandle(name, memory.nbytes) for name, memory in self.memories.items())
        return Layout(shard_index, self.num_blocks, handles, tuple(tensors), self.order)


def make_rank(order: str, placing: str, shapes: Sequence[Shape], num_blocks: int) -> Rank:
    """Allocates the KV memory of a rank. A group without layers has no memory and no views.

    order: the order of the axes in memory (see `view_of`).
    placing: how the groups are placed in memory: `layers`, one memory for each layer; `apart`, one
        memory for each group; `packed`, side by side in one memory; `overlaid`, all groups on the
        same bytes.
    """
    rank = Rank(order, num_blocks)
    if placing in ("layers", "apart"):
        for group, shape in enumerate(shapes):
            parts = shape.num_layers if placing == "layers" else min(1, shape.num_layers)
            own = replace(shape, num_layers=shape.num_layers // max(1, parts))
            names = [f"group {group} part {part}" for part in range(parts)]
            rank.memories |= {
                name: np.empty(num_blocks * own.all_bytes, np.uint8) for name in names
            }
            rank.views.append(
                [(name, view_of(rank.memories[name], order, own, num_blocks)) for name in names]
            )
        return rank
    # If blocks are the outermost axis, each row of memory holds one kernel block of every group.
    # Otherwise a single row holds one region per group.
    num_rows = num_blocks * shapes[0].num_kernel if order.startswith("B") else 1
    widths = [num_blocks * shape.all_bytes // num_rows for shape in shapes]
    starts = (
        [0] * len(shapes)
        if placing == "overlaid"
        else [sum(widths[:group]) for group in range(len(shapes))]
    )
    rows = np.empty(
        (num_rows, max(start + width for start, width in zip(starts, widths, strict=True))),
        np.uint8,
    )
    rank.memories = {"m": rows.reshape(-1)} if rows.size else {}
    for start, width, shape in zip(starts, widths, shapes, strict=True):
        rank.views.append(
            [("m", view_of(rows[:, start : start + width], order, shape, num_blocks))]
            if width
            else []
        )
    return rank


@dataclass(frozen=True)
class Case:
    """A test case: an engine that stores and an engine that loads. Both have KV of the same shapes,
    but in different memory layouts.

    shapes: for each shard (a rank's part of blocks), the shape of each group's KV.
    storing, loading: for each rank of the storing and of the loading engine, the order of the axes
        in memory (see `view_of`) and how the groups are placed in memory (see `make_rank`).
    """

    shapes: tuple[tuple[Shape, ...], ...]
    num_blocks: int
    storing: tuple[tuple[str, str], ...]
    loading: tuple[tuple[str, str], ...]

    @property
    def groups(self) -> list[GroupSpec]:
        sizes = zip(*([shape.all_bytes for shape in shapes] for shapes in self.shapes), strict=True)
        return [GroupSpec(GroupKind.FULL_ATTENTION, 16, shards) for shards in sizes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a case with one to three groups. The engine has one or two pipeline stages, each
    divided over one or two ranks by tensor parallelism. A stage may lack layers of a group."""
    num_groups, num_kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pages = [
        Shape(1, num_kernel, *draw(st.tuples(*[st.integers(1, 4)] * 2)), draw(st.integers(1, 40)))
        for _ in range(num_groups)
    ]
    alike = draw(st.booleans())
    stages = draw(
        st.lists(
            st.lists(st.integers(0, 3), min_size=num_groups, max_size=num_groups),
            min_size=1,
            max_size=2,
        )
    )
    stages[0] = [max(1, layers) for layers in stages[0]]
    shapes = []
    for layers in stages:
        for _ in range(draw(st.integers(1, 2))):
            own = [replace(page, num_layers=n) for n, page in zip(layers, pages, strict=True)]
            shapes.append(tuple(own[:1] * num_groups) if alike else tuple(own))
    num_blocks = draw(st.integers(num_groups, 6))
    storing, loading = [], []
    for _ in shapes:
        order = draw(st.sampled_from(ORDERS))
        reference = [
            other
            for other in ORDERS
            if inner_axes(other, num_kernel) == inner_axes(order, num_kernel)
        ]
        # Groups of unequal shape can be overlaid only if blocks are the outermost axis.
        for ranks, its_order in ((storing, order), (loading, draw(st.sampled_from(reference)))):
            overlaid = ["overlaid"] if alike or its_order.startswith("B") else []
            ranks.append(
                (its_order, draw(st.sampled_from(["layers", "apart", "packed", *overlaid])))
            )
    return Case(tuple(shapes), num_blocks, tuple(storing), tuple(loading))


def ranks_of(case: Case, places: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[Rank]:
    """Returns a rank for each shard of the case, with memory full of random bytes. `places`: for
    each rank, the order of its axes and how its groups are placed in memory."""
    ranks = [
        make_rank(order, placing, shapes, case.num_blocks)
        for (order, placing), shapes in zip(places, case.shapes, strict=True)
    ]
    for rank in ranks:
        for memory in rank.memories.values():
            memory[:] = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    return ranks


def dealt(case: Case, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Distributes the block ids of the case over its groups in random order. Returns the ids of
    each group; no id belongs to two groups."""
    ids = rng.permutation(case.num_blocks)
    return [ids[group :: len(case.groups)] for group in range(len(case.groups))]


def shard_bytes(rank: Rank, group: int, num_layers: int, block: int) -> Bytes:
    """Returns the bytes that a rank contributes to the slot of a block: those of the group's first
    `num_layers` layers, read through the rank's views."""
    return np.concatenate(
        [
            np.empty(0, np.uint8),
            *(page_bytes(rank.layer(group, n), 0, block, rank.order) for n in range(num_layers)),
        ]
    )
