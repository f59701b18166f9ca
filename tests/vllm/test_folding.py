"""Neighbouring layers at equal distances are described as one tensor, others as several."""

import dataclasses
import itertools

import numpy as np
import pytest

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.layout import Layout, MemoryHandle, PageTensor
from hotkv_vllm.worker.layout import LayerPages, _folded, _page_tensor

NUM_BLOCKS = 4


def pages(bases: list[int], *, dims: tuple[tuple[int, int], ...] = ()) -> list[LayerPages]:
    return [LayerPages(f"layer{n}", "kv", base, 1024, 8, dims) for n, base in enumerate(bases)]


@pytest.mark.parametrize(
    ("bases", "dims", "runs"),
    [
        ([0, 8, 16, 24], (), [4]),
        ([64, 96, 128], ((2, 16),), [3]),
        # One tensor would overlap itself.
        ([0, 8], ((4, 16),), [1, 1]),
        ([0, 8, 16, 24], ((2, 32),), [1, 1, 1, 1]),
        # 0 and 2 would fit, but only neighbours may fold.
        ([0, 8, 64, 72], ((2, 16),), [1, 2, 1]),
        # Adjacent is one tensor, a byte of overlap is two.
        ([0, 24], ((2, 16),), [2]),
        ([0, 23], ((2, 16),), [1, 1]),
    ],
)
def test_equally_spaced_layers_are_one_tensor(
    bases: list[int], dims: tuple[tuple[int, int], ...], runs: list[int]
) -> None:
    """dims: (count, stride in bytes).
    runs: layers in each tensor.
    """
    layers = pages(bases, dims=dims)
    folded = _folded(layers)
    assert [len(run) for run in folded] == runs and list(itertools.chain(*folded)) == layers
    tensors, offset = [], 0
    for run in folded:
        tensors.append(_page_tensor(0, run, offset))
        offset += sum(layer.page_bytes for layer in run)
    num_bytes = max(bases) + NUM_BLOCKS * 1024
    layout = Layout(0, NUM_BLOCKS, (MemoryHandle("kv", num_bytes),), tuple(tensors))
    layout.validate((GroupSpec(GroupKind.FULL_ATTENTION, 16, (offset,)),))
    alone = [PageTensor(0, "kv", one.base, one.block_stride, one.run, 0, dims) for one in layers]
    found, expected = (
        np.concatenate([tensor.base_offset_bytes + tensor.run_offsets() for tensor in them])
        for them in (tensors, alone)
    )
    assert found.tolist() == expected.tolist()


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
