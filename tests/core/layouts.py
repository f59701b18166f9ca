"""KV memory of ranks in any layout, and the bytes that a copy must move between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor

Bytes = NDArray[np.uint8]
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Axes of an engine's KV memory, outermost first: L layer, B block, H head, N token, C content."""
LAYER, BLOCK, KERNEL, HEAD, TOKEN, CONTENT = range(6)


@dataclass(frozen=True)
class Shape:
    """A group's KV on one rank. A kernel block is the attention kernel's unit. `content`: bytes
    per head and token."""

    num_layers: int
    num_kernel: int
    num_heads: int
    num_tokens: int
    content: int

    @property
    def all_bytes(self) -> int:
        return self.num_layers * self.num_kernel * self.num_heads * self.num_tokens * self.content


def view_of(memory: Bytes, order: str, shape: Shape, num_blocks: int) -> Bytes:
    """A view [layer, block, kernel block, head, token, content] of `memory`, whose rows are the
    outermost axis of `order`."""
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
    """Order of the axes within a page, outermost first. Engines share blocks only if it is
    equal."""
    letters = order.replace("L", "").replace("B", "B" if num_kernel > 1 else "").replace("C", "")
    return tuple("LBKHNC".index("K" if letter == "B" else letter) for letter in letters)


def page_bytes(view: Bytes, layer: int, block: int, order: str) -> Bytes:
    """A page's bytes in the order in which a slot stores them."""
    axes = inner_axes(order, view.shape[KERNEL])
    page = view[layer, block]
    left_out = [axis for axis in (KERNEL, HEAD, TOKEN) if axis not in axes]
    return page.transpose([axis - KERNEL for axis in (*left_out, *axes, CONTENT)]).reshape(-1)


@dataclass
class Rank:
    """A rank's KV memory. `views` has for each group (name of a memory, view), of all layers or
    of one."""

    order: str
    num_blocks: int
    memories: dict[str, Bytes] = field(default_factory=dict)
    views: list[list[tuple[str, Bytes]]] = field(default_factory=list)

    def layer(self, group: int, layer: int) -> Bytes:
        """Axes: [1, block, ...]."""
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
    """Allocates a rank's memory. `placing`: a memory for each layer (`layers`), for each group
    (`apart`), or one for all groups, side by side (`packed`) or on the same bytes (`overlaid`)."""
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
    # With blocks outermost, a row holds one kernel block of every group; else a region per
    # group.
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
    """An engine that stores and one that loads, in different memory layouts.

    shapes: for each shard and group.
    storing, loading: (order, placing) of each rank.
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
    """One or two pipeline stages, each over one or two ranks. A stage may lack layers of a
    group."""
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
        # Groups of unequal shape can be overlaid only if blocks are outermost.
        for ranks, its_order in ((storing, order), (loading, draw(st.sampled_from(reference)))):
            overlaid = ["overlaid"] if alike or its_order.startswith("B") else []
            ranks.append(
                (its_order, draw(st.sampled_from(["layers", "apart", "packed", *overlaid])))
            )
    return Case(tuple(shapes), num_blocks, tuple(storing), tuple(loading))


def ranks_of(case: Case, places: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[Rank]:
    """A rank per shard, its memory full of random bytes."""
    ranks = [
        make_rank(order, placing, shapes, case.num_blocks)
        for (order, placing), shapes in zip(places, case.shapes, strict=True)
    ]
    for rank in ranks:
        for memory in rank.memories.values():
            memory[:] = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    return ranks


def dealt(case: Case, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Random block ids for each group."""
    ids = rng.permutation(case.num_blocks)
    return [ids[group :: len(case.groups)] for group in range(len(case.groups))]


def shard_bytes(rank: Rank, group: int, num_layers: int, block: int) -> Bytes:
    """The bytes that a rank contributes to a block's slot."""
    return np.concatenate(
        [
            np.empty(0, np.uint8),
            *(page_bytes(rank.layer(group, n), 0, block, rank.order) for n in range(num_layers)),
        ]
    )
