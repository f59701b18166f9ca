"""Describes a rank's sketches (compact forms of blocks' keys, for sparse attention) to the
server, so that the server can store and load them together with the blocks.

There is one *kind* of sketch for each KV cache group that has sparse layers. A slot in the
server's arena holds the sketches of one block: one part per rank. A rank's part has all
sparse layers of the group, in the model's order. A layer may have sketches in several
formats, in the order of the configuration.

A kind has a version: a hash of everything that determines the meaning of the bytes. So engines with
different formats, sparse layers, centres (mean keys) or principal axes never share sketches.
Engines that calibrate themselves from their first prompt (measure centres and axes there) share no
sketches.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hotkv_proto.keys import Sketch
from hotkv_proto.layout import MemoryHandle, PageTensor
from hotkv_sparse.centre import Centres
from hotkv_sparse.formats import needs_axes, version
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.kv_groups import CacheGroup
from hotkv_vllm.config import CENTRE
from hotkv_vllm.sparse.batch import SparseLayer
from hotkv_vllm.sparse.pool import BlockReprManager
from hotkv_vllm.worker.layout import ExportedMemory

HANDLE = "sketches"


@dataclass(frozen=True, slots=True)
class SharedPool:
    """The description of a rank's pool of sketches (compact forms of keys) for the server,
    which maps the pool.

    kinds: the kinds of sketches, one per KV cache group with sparse layers, in the order of
        the groups.
    tensors: where the sketches are in the pool. `group_index` of a tensor is the index of
        its kind in `kinds`.
    num_bytes: size of the pool.
    fd: descriptor of the pool's file.
    """

    kinds: tuple[Sketch, ...]
    tensors: tuple[PageTensor, ...]
    num_bytes: int
    fd: int

    def beside(self, memory: ExportedMemory, num_groups: int) -> ExportedMemory:
        """Returns a description of the rank's KV memory (`memory`) and the pool together. The
        result owns the descriptors of `memory`, so `memory` must not be closed.

        num_groups: number of KV cache groups of the key space. The tensors of kind i get the group
            index `num_groups + i`.
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
    """Returns the description of a rank's pool of sketches (compact forms of keys) for the
    server. Raises Unsupported if the pool can't be shared.

    layers: the layers whose sketches are in the pool.
    groups: the KV cache groups of the key space.
    num_shards: number of ranks that each hold a part (shard) of a block.
    centres: the model's mean keys, by which the sketches are computed; None without them.
    """
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
    """Returns the names of all formats of the layers, each once, joined with `+`."""
    return "+".join(dict.fromkeys(name for layer in layers for name in layer.shape.formats))


def _version(layers: Sequence[SparseLayer], centres: Centres | None) -> int:
    """Returns the version of a kind of sketch (compact form of keys), so that engines share
    only sketches whose bytes mean the same: a hash of 63 bits over the layers' numbers,
    their formats, and the centres (mean keys) and axes that determine the meaning of the bytes. All
    ranks get the same result, because the hash covers the centres of all heads."""
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
