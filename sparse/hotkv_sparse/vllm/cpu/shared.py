"""Describes a rank's sketches to the server, which stores and loads them with the blocks.

There is one *kind* per group with sparse layers. A slot holds a block's sketches, one part per
rank: all sparse layers of the group in the model's order, in each the formats in the
configuration's order.

A kind's version hashes all that determines the meaning of the bytes: formats, sparse layers,
centres, axes. Engines that calibrate themselves from their first prompt share none.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotkv_proto.keys import Sketch
from hotkv_proto.layout import MemoryHandle, PageTensor
from hotkv_sparse.centre import Centres
from hotkv_sparse.formats import needs_axes, version
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.pool import BlockReprManager
from hotkv_sparse.vllm.settings import CENTRE
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.worker.layout import ExportedMemory

HANDLE = "sketches"


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A rank's pool, described for the server to map.

    kinds: in the order of the groups.
    tensors: `group_index` is the index in `kinds`.
    """

    kinds: tuple[Sketch, ...]
    tensors: tuple[PageTensor, ...]
    num_bytes: int
    fd: int

    def beside(self, memory: ExportedMemory, num_groups: int) -> ExportedMemory:
        """The KV memory and the pool together. The result takes over the descriptors of `memory`:
        don't close `memory` itself.

        num_groups: of the key space. Tensors of kind i get the group index `num_groups + i`.
        """
        tensors = tuple(
            replace(tensor, group_index=num_groups + tensor.group_index) for tensor in self.tensors
        )
        layout = replace(
            memory.layout,
            handles=(*memory.layout.handles, MemoryHandle(HANDLE, self.num_bytes)),
            tensors=(*memory.layout.tensors, *tensors),
        )
        return ExportedMemory(layout, {**memory.fds, HANDLE: os.dup(self.fd)})


def shared_pool(
    pool: BlockReprManager,
    layers: Sequence[SparseLayer],
    groups: Sequence[CacheGroup],
    num_shards: int,
    centres: Centres | None,
) -> SharedPool:
    """Raises Unsupported if the pool can't be shared."""
    if pool.fd is None:
        raise Unsupported("the system gives no memory to share")
    if not all(layer.shape.is_calibrated for layer in layers):
        raise Unsupported(
            "this engine calibrates itself, so that they mean nothing to others; calibrate once "
            f"and name the file in {CENTRE} to share them"
        )
    kinds: list[Sketch] = []
    tensors: list[PageTensor] = []
    for index, group in enumerate(groups):
        mine = sorted(
            (layer for layer in layers if layer.group == group.vllm_group),
            key=lambda layer: layer.index,
        )
        if not mine:
            continue
        num_bytes = 0
        for layer in mine:
            for rows in (rows for rows in pool.rows if rows.layer == layer.index):
                tensors.append(
                    PageTensor(
                        len(kinds),
                        HANDLE,
                        rows.offset,
                        rows.row_bytes,
                        rows.row_bytes,
                        num_bytes,
                        layer_names=(layer.name,),
                    )
                )
                num_bytes += rows.row_bytes
        kinds.append(Sketch(index, _name(mine), _version(mine, centres), (num_bytes,) * num_shards))
    if not kinds:
        raise Unsupported("no group that hotkv keeps has sparse layers")
    return SharedPool(tuple(kinds), tuple(tensors), pool.num_bytes, pool.fd)


def _name(layers: Sequence[SparseLayer]) -> str:
    """Names of all formats, each once, joined with `+`."""
    return "+".join(dict.fromkeys(name for layer in layers for name in layer.shape.formats))


def _version(layers: Sequence[SparseLayer], centres: Centres | None) -> int:
    """A hash of 63 bits. It covers the centres of all heads, so all ranks get the same."""
    parts = []
    for layer in layers:
        mu = centres.mu(layer.index) if centres is not None else None
        axes = centres.axes(layer.index) if centres is not None else None
        for name in layer.shape.formats:
            centre = mu if layer.shape.centre_of(name) is not None else None
            of_axes = axes.to_bytes() if axes is not None and needs_axes(name) else b""
            meaning = version(name, layer.shape.head_size, centre, of_axes)
            parts.append(f"{layer.index}:{name}:{meaning}")
    digest = hashlib.sha256(("hotkv-engine-sketches-1;" + ";".join(parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
