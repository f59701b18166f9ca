"""Layouts of ranks for a given shape, with the bytes that a copy must move."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor

Bytes = NDArray[np.uint8]
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Axes of an engine's memory, outermost first: layer, block, head, token, content."""
LAYER, BLOCK, KERNEL, HEAD, TOKEN, CONTENT = range(6)


@dataclass(frozen=True)
class Shape:
    """A group on a rank.

    num_kernel: kernel blocks in a block.
    content: bytes of a head and token.
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

    order: the axes as they lie in memory, outermost first: L layer, B kernel block, H head, N
        token, C content. Rows of `memory` are the outermost axis.
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
    """Returns the order of a page's axes in memory, outermost first, as axis numbers. Engines share
    blocks only if their orders are equal."""
    letters = order.replace("L", "").replace("B", "B" if num_kernel > 1 else "").replace("C", "")
    return tuple("LBKHNC".index("K" if letter == "B" else letter) for letter in letters)


def page_bytes(view: Bytes, layer: int, block: int, order: str) -> Bytes:
    """Returns the bytes of a page in slot order."""
    axes = inner_axes(order, view.shape[KERNEL])
    page = view[layer, block]
    left_out = [axis for axis in (KERNEL, HEAD, TOKEN) if axis not in axes]
    return page.transpose([axis - KERNEL for axis in (*left_out, *axes, CONTENT)]).reshape(-1)


@dataclass
class Rank:
    """A rank's memories by name, and for each group the views of its layers, each with the name of
    its memory: one view of all layers, or a view for each layer."""

    order: str
    num_blocks: int
    memories: dict[str, Bytes] = field(default_factory=dict)
    views: list[list[tuple[str, Bytes]]] = field(default_factory=list)

    def layer(self, group: int, layer: int) -> Bytes:
        """Returns the view [1, block, ...] of a layer."""
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
    """Makes a rank. A group without layers has no memory and no views.

    placing: where the groups lie: `layers`, a memory for each layer; `apart`, a memory for each
        group; `packed`, side by side in a memory; `overlaid`, on the same bytes of a memory.
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
    # With blocks outermost a row holds a kernel block of all groups; else a single row has a region
    # for each group.
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
    """Two engines of equal shape: shapes[shard][group], and for each rank how its memory is laid
    out."""

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
    """Draws one to three groups, on one or two pipeline stages (a stage may lack layers of a group)
    with one or two tensor shards each."""
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
        # Overlaid groups of unequal shape need a record for each block.
        for ranks, its_order in ((storing, order), (loading, draw(st.sampled_from(reference)))):
            overlaid = ["overlaid"] if alike or its_order.startswith("B") else []
            ranks.append(
                (its_order, draw(st.sampled_from(["layers", "apart", "packed", *overlaid])))
            )
    return Case(tuple(shapes), num_blocks, tuple(storing), tuple(loading))


def ranks_of(case: Case, places: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[Rank]:
    """Returns a rank for each shard, its memory full of noise."""
    ranks = [
        make_rank(order, placing, shapes, case.num_blocks)
        for (order, placing), shapes in zip(places, case.shapes, strict=True)
    ]
    for rank in ranks:
        for memory in rank.memories.values():
            memory[:] = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    return ranks


def dealt(case: Case, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Deals block ids to each group; no block belongs to two."""
    ids = rng.permutation(case.num_blocks)
    return [ids[group :: len(case.groups)] for group in range(len(case.groups))]


def shard_bytes(rank: Rank, group: int, num_layers: int, block: int) -> Bytes:
    """Returns a rank's bytes of a block's slot, by its views."""
    return np.concatenate(
        [
            np.empty(0, np.uint8),
            *(page_bytes(rank.layer(group, n), 0, block, rank.order) for n in range(num_layers)),
        ]
    )
