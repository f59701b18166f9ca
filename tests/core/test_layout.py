"""Tests which bytes a `Layout` copies, and that an invalid one is refused with the field's name.
`dataplane/test_layouts.py` tests the copies."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from hotkv_proto.errors import HotKVError
from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import Sketch
from hotkv_proto.layout import MAX_DIMS, CudaBacking, Layout, MemoryHandle, PageTensor
from hotkv_proto.messages.layout import layout_message, read_layout
from tests.core.layouts import Shape, make_rank

GROUPS = (GroupSpec(GroupKind.FULL_ATTENTION, 16, (64, 64)),)
TENSOR = PageTensor(0, "m", 0, 64, 16, 0, ((4, 16),))
GOOD = Layout(1, 4, (MemoryHandle("m", 256),), (TENSOR,))
RANGE = MemoryHandle(
    "m", 256, device_uuid=b"u" * 16, backings=(CudaBacking("b", 200), CudaBacking("c", 56))
)
CUDA = MemoryHandle("m", 256, cuda_handle=b"h" * 64, device_uuid=b"u" * 16)


def with_tensor(**changes: object) -> Layout:
    return replace(GOOD, tensors=(replace(TENSOR, **changes),))


def test_layout_before_the_refusals_is_good() -> None:
    GOOD.validate(GROUPS)
    replace(GOOD, handles=(CUDA,)).validate(GROUPS)
    with_tensor(dims=((1, 0),) * (MAX_DIMS - 1) + TENSOR.dims).validate(GROUPS)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (replace(GOOD, handles=GOOD.handles * 2), "handles has two"),
        (replace(GOOD, num_blocks=0), "block_count"),
        (replace(GOOD, num_blocks=1 << 31), "block_count"),
        (replace(GOOD, num_blocks=5), r"tensors\[0\] ends at byte 320"),
        (replace(GOOD, shard_index=2), "shard_index"),
        (replace(GOOD, shard_index=-1), "shard_index"),
        (replace(GOOD, handles=(MemoryHandle("m", 0),)), r"handles\[0\]"),
        (replace(GOOD, handles=(MemoryHandle("m", 256, -1),)), r"handles\[0\]"),
        (replace(GOOD, handles=(replace(CUDA, cuda_handle=b"short"),)), r"handles\[0\].cuda_ipc"),
        (replace(GOOD, handles=(replace(CUDA, device_uuid=b""),)), r"handles\[0\].cuda_ipc"),
        (
            replace(GOOD, handles=(replace(RANGE, device_uuid=b""),)),
            r"handles\[0\].cuda_range needs",
        ),
        (
            replace(GOOD, handles=(replace(RANGE, cuda_handle=b"h" * 64),)),
            r"handles\[0\].cuda_range needs",
        ),
        (replace(GOOD, handles=(replace(RANGE, base_offset_bytes=1),)), "ends at byte 257, beyond"),
        (
            replace(GOOD, handles=(replace(RANGE, backings=(CudaBacking("b", 0),)),)),
            r"handles\[0\].cuda_range.backings\[0\].byte_count is 0",
        ),
        (replace(GOOD, tensors=()), "group 0 fill 0 bytes"),
        (replace(GOOD, tensors=(TENSOR, TENSOR)), "group 0 leave a gap or overlap"),
        (with_tensor(handle_id="n"), r"tensors\[0\].handle_id"),
        (with_tensor(group_index=1), r"tensors\[0\].group_index"),
        (with_tensor(group_index=-1), r"tensors\[0\].group_index"),
        (with_tensor(base_offset_bytes=-1), r"tensors\[0\] has a negative"),
        (with_tensor(base_offset_bytes=1), r"tensors\[0\] ends at byte 257"),
        (with_tensor(block_stride_bytes=-64), r"tensors\[0\] has a negative"),
        (with_tensor(block_stride_bytes=1 << 48), r"tensors\[0\] has a negative or absurdly large"),
        (with_tensor(block_stride_bytes=0), r"tensors\[0\].block_stride_byte_count is 0"),
        (with_tensor(block_stride_bytes=48), r"tensors\[0\].block_stride_byte_count is 48"),
        (with_tensor(run_bytes=0), r"tensors\[0\].run_byte_count"),
        (with_tensor(dims=((0, 16),)), r"tensors\[0\].run_byte_count and dims"),
        (with_tensor(dims=((4, -16),)), r"tensors\[0\].run_byte_count and dims"),
        (with_tensor(dims=((4, 15),)), r"tensors\[0\].dims\[0\].stride_byte_count is 15"),
        (with_tensor(dims=((2, 16), (2, 16))), r"tensors\[0\].dims\[\d\].stride_byte_count is 16"),
        (with_tensor(run_bytes=1, dims=((1 << 20, 1),)), r"tensors\[0\].dims enumerate more than"),
        (with_tensor(dims=((1, 0),) * (MAX_DIMS + 1)), r"tensors\[0\].dims has"),
        (with_tensor(shard_offset_bytes=8), "gap or overlap at byte 0"),
        (with_tensor(run_bytes=8, dims=((4, 16),)), "fill 32 bytes of a shard of 64"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(layout: Layout, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        layout.validate(GROUPS)


def test_a_range_has_the_same_message_and_layout() -> None:
    layout = replace(GOOD, handles=(RANGE,))
    layout.validate(GROUPS)
    message = layout_message(layout)
    assert read_layout(message) == layout and layout.backing_ids == ["b", "c"]
    message.handles[0].cuda_range.ClearField("backings")
    with pytest.raises(HotKVError, match=r"layout.handles\[0\].cuda_range.backings is empty"):
        read_layout(message)
    message.handles[0].ClearField("source")
    with pytest.raises(HotKVError, match="give file_mapping, cuda_ipc or cuda_range"):
        read_layout(message)


def test_the_runs_of_all_tensors_together_are_bounded() -> None:
    pages = tuple(
        PageTensor(0, "m", n << 19, 2 << 19, 1, n << 19, ((1 << 19, 1),)) for n in range(2)
    )
    layout = Layout(0, 1, (MemoryHandle("m", 1 << 20),), pages)
    with pytest.raises(ValueError, match=r"tensors\[1\].dims and those before enumerate more"):
        layout.validate([replace(GROUPS[0], shard_bytes=(1 << 20,))])


def test_sketches_are_covered_wholly_or_not_at_all() -> None:
    kinds = {1: Sketch(0, "rot2u", 1, (8, 24)), 2: Sketch(0, "rot2u", 2, (8, 24))}
    GOOD.validate(GROUPS, kinds)
    good = replace(TENSOR, group_index=2, block_stride_bytes=24, run_bytes=24, dims=())
    layout = replace(GOOD, tensors=(TENSOR, good))
    layout.validate(GROUPS, kinds)
    assert layout.covers(2) and not layout.covers(1)
    (runs,) = layout.copy_runs(2, kinds[2], np.array([3], np.int64), np.array([4096], np.int64))
    found = (runs.engine_offsets, runs.slot_offsets, runs.num_bytes)
    assert [one.tolist() for one in found] == [[72], [4104], [24]]
    for bad, field in [
        (replace(good, group_index=3), r"tensors\[1\].group_index is 3"),
        (replace(good, run_bytes=16), "group 2 fill 16 bytes of a shard of 24"),
    ]:
        with pytest.raises(ValueError, match=field):
            replace(layout, tensors=(TENSOR, bad)).validate(GROUPS, kinds)
    with pytest.raises(ValueError, match="group_index is 2"):
        layout.validate(GROUPS)


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70)


def some(*names: str) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, NUMBERS))


@settings(max_examples=300)
@given(
    data=st.data(),
    of_tensor=some(
        "group_index",
        "base_offset_bytes",
        "block_stride_bytes",
        "run_bytes",
        "shard_offset_bytes",
    ),
    of_layout=some("shard_index", "num_blocks"),
    of_handle=some("num_bytes", "base_offset_bytes"),
)
def test_any_numbers_are_refused_or_stay_inside(
    data: st.DataObject,
    of_tensor: dict[str, int],
    of_layout: dict[str, int],
    of_handle: dict[str, int],
) -> None:
    """Protobuf can carry any of these numbers."""
    tensor = replace(TENSOR, **of_tensor)
    if data.draw(st.booleans()):
        dims = data.draw(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=10))
        tensor = replace(tensor, dims=tuple(dims))
    handle = replace(GOOD.handles[0], **of_handle)
    layout = replace(GOOD, tensors=(tensor,), handles=(handle,), **of_layout)
    try:
        layout.validate(GROUPS)
    except ValueError as error:
        assert str(error)
        return
    blocks = np.array([0, layout.num_blocks - 1], np.int64)
    for runs in layout.copy_runs(0, GROUPS[0], blocks, np.array([0, 128], np.int64)):
        assert runs.engine_offsets.min() >= 0 and runs.slot_offsets.min() >= 0
        assert (runs.engine_offsets + runs.num_bytes).max() <= layout.num_bytes
        assert (runs.slot_offsets + runs.num_bytes).max() <= 256
    assert math.prod(count for count, _ in tensor.dims) * tensor.run_bytes == 64


@pytest.mark.parametrize(
    ("order", "runs_per_block"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 12), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 12)],
)
@pytest.mark.parametrize("split", [False, True])
def test_block_has_a_run_per_layout_break(order: str, runs_per_block: int, split: bool) -> None:
    """The layers are one tensor, or one each (`split`)."""
    shape = Shape(3, 1, 4, 5, 8)
    rank = make_rank(order, "packed", [shape], 6)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (shape.all_bytes,))
    if split:
        rank.views = [[("m", rank.layer(0, layer)) for layer in range(3)]]
    blocks = np.array([4, 0, 2], np.int64)
    (recipe,) = rank.layout(0).recipes(0, group)
    runs = recipe.copy_runs(blocks, blocks * 4096)
    assert len(runs.num_bytes) == 3 * runs_per_block
    assert runs.num_bytes.sum() == 3 * group.slot_bytes


def test_neighbours_in_the_first_block_only_differ() -> None:
    """They are adjacent in block 0 only, as the strides differ."""
    tensors = (PageTensor(0, "m", 0, 32, 16, 0), PageTensor(0, "m", 16, 64, 16, 16))
    layout = Layout(0, 2, (MemoryHandle("m", 96),), tensors)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 16, (32,))
    layout.validate([group])
    (recipe,) = layout.recipes(0, group)
    runs = recipe.copy_runs(np.array([0, 1], np.int64), np.array([0, 32], np.int64))
    assert runs.engine_offsets.tolist() == [0, 16, 32, 80]
    assert runs.slot_offsets.tolist() == [0, 16, 32, 48]
