"""Blocks through the server's copy engine, in every layout an engine may have, compared byte by
byte with numpy views.

The views are the reference: an engine's memory reshaped to its axes (layer, block, kernel block,
head, token, content). `Layout` knows the same memory by offsets and strides only.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Int64s, Layout, MemoryHandle, PageTensor, Recipe
from hotkv_server.dataplane.engines import CopyJob, Outcome
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region, block_copies

Bytes = NDArray[np.uint8]

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Axes of an engine's memory, outermost first: layer, block, head, token, content."""
LAYER, BLOCK, KERNEL, HEAD, TOKEN, CONTENT = range(6)


@dataclass(frozen=True)
class Shape:
    """One group on one rank. `num_kernel`: kernel blocks in a block; `content`: bytes of one head
    and token."""

    num_layers: int
    num_kernel: int
    num_heads: int
    num_tokens: int
    content: int

    @property
    def all_bytes(self) -> int:
        """Of one block, all layers."""
        return self.num_layers * self.num_kernel * self.num_heads * self.num_tokens * self.content


def view_of(memory: Bytes, order: str, shape: Shape, num_blocks: int) -> Bytes:
    """View [layer, block, kernel, head, token, content] of memory whose axes lie as in `order`;
    rows of `memory` are its outermost axis."""
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
    """Axes of a page as they lie in memory, outermost first; engines share blocks only where these
    are equal."""
    letters = order.replace("L", "").replace("B", "B" if num_kernel > 1 else "").replace("C", "")
    return tuple("LBKHNC".index("K" if letter == "B" else letter) for letter in letters)


def page_bytes(view: Bytes, layer: int, block: int, order: str) -> Bytes:
    """The bytes of one page in slot order."""
    axes = inner_axes(order, view.shape[KERNEL])
    page = view[layer, block]
    left_out = [axis for axis in (KERNEL, HEAD, TOKEN) if axis not in axes]
    return page.transpose([axis - KERNEL for axis in (*left_out, *axes, CONTENT)]).reshape(-1)


@dataclass
class Rank:
    """A rank's memories, the views of each group's layers (one view, or one a layer, each in a
    memory), and its layout."""

    order: str
    num_blocks: int
    memories: dict[str, Bytes] = field(default_factory=dict)
    views: list[list[tuple[str, Bytes]]] = field(default_factory=list)

    def layer(self, group: int, layer: int) -> Bytes:
        """View [1, block, ...] of one layer."""
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
    """`placing` of the groups: `layers`, a memory for each layer; `apart`, one for each group;
    `packed`, side by side in one memory; `overlaid`, on the same bytes of one. A group without
    layers has neither memory nor views."""
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
    # With blocks outermost a row holds one kernel block of all groups; else there is one row with a
    # region for each group.
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


@pytest.fixture(scope="module")
def engine() -> Iterator[HostCopyEngine]:
    engine = HostCopyEngine(2)
    yield engine
    engine.close()


def run(
    engine: HostCopyEngine,
    recipes: Sequence[Recipe],
    blocks: Int64s,
    slots: Int64s,
    arena: Bytes,
    rank: Rank,
    *,
    to_engine: bool,
) -> None:
    """Copies, and waits for the end."""
    done = threading.Event()
    outcomes: list[tuple[Outcome, str]] = []
    regions = {
        name: Region(memory.ctypes.data, memory.nbytes, name)
        for name, memory in rank.memories.items()
    }

    def on_done(outcome: Outcome, error: str) -> None:
        outcomes.append((outcome, error))
        done.set()

    region = Region(arena.ctypes.data, arena.nbytes, "arena")
    engine.submit(
        CopyJob(block_copies(recipes, blocks, slots, region, regions, to_engine=to_engine), on_done)
    )
    assert done.wait(60) and outcomes == [(Outcome.DONE, "")]


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
    """One to three groups, on one or two pipeline stages (a stage may lack layers of a group) of
    one or two tensor shards each."""
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
    """A rank for each shard, its memory full of noise."""
    ranks = [
        make_rank(order, placing, shapes, case.num_blocks)
        for (order, placing), shapes in zip(places, case.shapes, strict=True)
    ]
    for rank in ranks:
        for memory in rank.memories.values():
            memory[:] = rng.integers(0, 256, memory.nbytes, dtype=np.uint8)
    return ranks


def dealt(case: Case, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Block ids for each group; no block belongs to two."""
    ids = rng.permutation(case.num_blocks)
    return [ids[group :: len(case.groups)] for group in range(len(case.groups))]


def shard_bytes(rank: Rank, group: int, num_layers: int, block: int) -> Bytes:
    """What one block's slot holds of a rank, by its views."""
    return np.concatenate(
        [
            np.empty(0, np.uint8),
            *(page_bytes(rank.layer(group, n), 0, block, rank.order) for n in range(num_layers)),
        ]
    )


@settings(max_examples=200)
@given(case=cases(), seed=st.integers(0, 1 << 20))
def test_blocks_come_back_in_any_layout_of_equal_pages(
    engine: HostCopyEngine, case: Case, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = case.groups
    slot_stride = max(group.slot_bytes for group in groups) + 7
    arena = rng.integers(0, 256, case.num_blocks * slot_stride, dtype=np.uint8)
    expected = arena.copy()
    old_ids, new_ids = dealt(case, rng), dealt(case, rng)
    slots = np.split(
        rng.permutation(case.num_blocks) * slot_stride,
        np.cumsum([len(ids) for ids in old_ids])[:-1],
    )
    for shard, (rank, other) in enumerate(
        zip(ranks_of(case, case.storing, rng), ranks_of(case, case.loading, rng), strict=True)
    ):
        stored_from = {name: memory.copy() for name, memory in rank.memories.items()}
        loaded_into = {name: memory.copy() for name, memory in other.memories.items()}
        for layout in (rank.layout(shard), other.layout(shard)):
            layout.validate(groups)
        for g, group in enumerate(groups):
            run(
                engine,
                rank.layout(shard).recipes(g, group),
                old_ids[g],
                slots[g],
                arena,
                rank,
                to_engine=False,
            )
            run(
                engine,
                other.layout(shard).recipes(g, group),
                new_ids[g],
                slots[g],
                arena,
                other,
                to_engine=True,
            )
            start = sum(group.shard_bytes[:shard])
            for slot, block in zip(slots[g].tolist(), old_ids[g].tolist(), strict=True):
                page = shard_bytes(rank, g, case.shapes[shard][g].num_layers, block)
                expected[slot + start : slot + start + len(page)] = page
        assert np.array_equal(arena, expected)
        assert all(np.array_equal(rank.memories[name], stored_from[name]) for name in stored_from)
        # Once more by views alone, into what was there before: no other byte has changed.
        by_engine = {name: memory.copy() for name, memory in other.memories.items()}
        for name, memory in loaded_into.items():
            other.memories[name][:] = memory
        for g in range(len(groups)):
            for n in range(case.shapes[shard][g].num_layers):
                other.layer(g, n)[0, new_ids[g]] = rank.layer(g, n)[0, old_ids[g]]
        assert all(np.array_equal(other.memories[name], by_engine[name]) for name in by_engine)


@pytest.mark.parametrize(
    ("order", "runs_per_block"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 12)],
)
@pytest.mark.parametrize("split", [False, True])
def test_a_block_is_as_many_runs_as_its_layout_has_breaks(
    order: str, runs_per_block: int, split: bool
) -> None:
    """Three layers and four heads; told as one tensor or as one for each layer. Contiguous over the
    layers means one run a block."""
    shape = Shape(3, 1, 4, 5, 8)
    rank = make_rank(order, "packed", [shape], 6)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,))
    if split:
        rank.views = [[("m", rank.layer(0, layer)) for layer in range(3)]]
    blocks = np.array([4, 0, 2], np.int64)
    (recipe,) = rank.layout(0).recipes(0, group)
    runs = recipe.copy_runs(blocks, blocks * 4096)
    assert (
        len(runs.num_bytes) == 3 * runs_per_block and runs.num_bytes.sum() == 3 * group.slot_bytes
    )
    if runs_per_block == 1:
        assert runs.num_bytes.tolist() == [group.slot_bytes] * 3


def test_neighbours_in_the_first_block_only_are_no_run() -> None:
    """Two tensors that adjoin in block 0 and are blocks apart after it."""
    tensors = (PageTensor(0, "m", 0, 32, 16, 0), PageTensor(0, "m", 16, 64, 16, 16))
    layout = Layout(0, 2, (MemoryHandle("m", 96),), tensors)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (32,))
    layout.validate([group])
    (recipe,) = layout.recipes(0, group)
    runs = recipe.copy_runs(np.array([0, 1], np.int64), np.array([0, 32], np.int64))
    assert runs.engine_offsets.tolist() == [0, 16, 32, 80] and runs.slot_offsets.tolist() == [
        0,
        16,
        32,
        48,
    ]


def test_replicated_kv_is_stored_once_and_loaded_by_all(engine: HostCopyEngine) -> None:
    """Four ranks hold two distinct shards: the first of each pair writes, both read."""
    rng = np.random.default_rng(5)
    shape = Shape(2, 1, 2, 3, 16)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,) * 2)
    arena = np.zeros(3 * group.slot_bytes, np.uint8)
    writers = [make_rank(order, "apart", [shape], 4) for order in ("LBHNC", "BLHNC")]
    blocks, slots = np.array([3, 1], np.int64), np.array([0, 2], np.int64) * group.slot_bytes
    for shard, rank in enumerate(writers):
        rank.memories["group 0 part 0"][:] = rng.integers(
            0, 256, rank.memories["group 0 part 0"].nbytes, dtype=np.uint8
        )
        run(
            engine,
            rank.layout(shard).recipes(0, group),
            blocks,
            slots,
            arena,
            rank,
            to_engine=False,
        )
    for number in range(4):
        reader = make_rank("BHLNC", "layers", [shape], 4)
        run(
            engine,
            reader.layout(number // 2).recipes(0, group),
            blocks,
            slots,
            arena,
            reader,
            to_engine=True,
        )
        for layer in range(2):
            assert np.array_equal(
                reader.layer(0, layer)[0, blocks], writers[number // 2].layer(0, layer)[0, blocks]
            )
