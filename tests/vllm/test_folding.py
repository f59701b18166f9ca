"""Layers that one tensor of the layout may describe, and those that it may not."""

import dataclasses
import itertools

import numpy as np
import pytest

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_vllm.worker.layout import LayerPages, _folded, _page_tensor

NUM_BLOCKS = 4


def pages(
    bases: list[int],
    *,
    run: int = 8,
    dims: tuple[tuple[int, int], ...] = (),
    block_stride: int = 1024,
) -> list[LayerPages]:
    return [
        LayerPages(f"layer{n}", "kv", base, block_stride, run, dims) for n, base in enumerate(bases)
    ]


def check(layers: list[LayerPages], names: list[list[str]]) -> None:
    """Layers are folded so; what comes of it is a valid layout of the same bytes, in the same
    order."""
    folded = _folded(layers)
    assert [[layer.name for layer in run] for run in folded] == names
    tensors, offset = [], 0
    for run in folded:
        tensors.append(_page_tensor(0, run, offset))
        offset += sum(layer.page_bytes for layer in run)
    num_bytes = max(layer.base for layer in layers) + NUM_BLOCKS * 1024
    layout = Layout(0, NUM_BLOCKS, (MemoryHandle("kv", num_bytes),), tuple(tensors))
    layout.validate((GroupSpec(GroupKind.FULL_ATTENTION, 16, (offset,)),))
    alone = [
        PageTensor(0, "kv", layer.base, layer.block_stride, layer.run, 0, layer.dims)
        for layer in layers
    ]
    expected = np.concatenate([tensor.base_offset_bytes + tensor.run_offsets() for tensor in alone])
    assert (
        np.concatenate(
            [tensor.base_offset_bytes + tensor.run_offsets() for tensor in tensors]
        ).tolist()
        == expected.tolist()
    )


def test_layers_at_equal_distances_are_one_tensor() -> None:
    check(pages([0, 8, 16, 24]), [["layer0", "layer1", "layer2", "layer3"]])
    check(pages([64, 96, 128], dims=((2, 16),)), [["layer0", "layer1", "layer2"]])


def test_interleaved_layers_are_not() -> None:
    """The runs of each lie between those of the other; a tensor whose layers step over less than a
    layer would overlap itself."""
    check(pages([0, 8], dims=((4, 16),)), [["layer0"], ["layer1"]])
    check(pages([0, 8, 16, 24], dims=((2, 32),)), [["layer0"], ["layer1"], ["layer2"], ["layer3"]])
    # Layers 0 and 2 could share a tensor, and don't, as they are no neighbours.
    check(pages([0, 8, 64, 72], dims=((2, 16),)), [["layer0"], ["layer1", "layer2"], ["layer3"]])


def test_layers_that_touch_are_folded_and_those_that_overlap_by_a_byte_are_not() -> None:
    span = 8 + 16
    check(pages([0, span], dims=((2, 16),)), [["layer0", "layer1"]])
    check(pages([0, span - 1], dims=((2, 16),)), [["layer0"], ["layer1"]])


@pytest.mark.parametrize(
    "bases",
    [[0, 8, 24], [0, 16, 24], [16, 8, 0], [0, 8, 8]],
    ids=["wider", "narrower", "backwards", "twice the same place"],
)
def test_other_distances_begin_another_tensor(bases: list[int]) -> None:
    layers = pages(bases)
    folded = _folded(layers)
    distances = [[b.base - a.base for a, b in itertools.pairwise(run)] for run in folded]
    assert all(len(set(ones)) <= 1 and all(d >= 8 for d in ones) for ones in distances)
    assert [layer for run in folded for layer in run] == layers and len(folded) > 1


@pytest.mark.parametrize("field", ["handle_id", "block_stride", "run", "dims"])
def test_layers_that_differ_are_not_folded(field: str) -> None:
    one, two = pages([0, 256])
    other = {"handle_id": "kv2", "block_stride": 2048, "run": 4, "dims": ((2, 8),)}[field]
    assert len(_folded([one, two])) == 1
    assert len(_folded([one, dataclasses.replace(two, **{field: other})])) == 2
