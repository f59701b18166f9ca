"""The canonical KV layout: where the pages of a block lie in engine memory and in its slot.

A slot (a block's place in the server's arena) holds the shards of all ranks in order. A shard holds
the pages of that rank's tensors, each page at its `shard_offset_bytes`. A page holds its runs
(contiguous bytes) in order, without gaps. All copies between slots and engine memory use the
`Recipe`s of this module. No other code computes the places of bytes. The code never assumes a
single group or a single rank.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import Sketch

Int64s = NDArray[np.int64]

FENCE_HANDLE = "hotkv-fence"
"""Id under which an engine sends the server the descriptor of its fence: a page of shared memory in
which the engine writes which stores it has revoked. The fence is not part of a layout."""
FENCE_WORDS = 1024

MAX_RUNS = 1 << 19
"""Largest number of runs (contiguous byte ranges) of a block, summed over all tensors of a layout.
At 32 bytes per run, the copy plans (`Recipe`) of a layout need at most 16 MiB."""
MAX_DIMS = 8
"""Largest number of entries in the `dims` of a `PageTensor`."""


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A piece of an engine's memory: CUDA memory, or a file whose descriptor the engine sends to
    the server over the descriptor socket (the server's Unix socket for file descriptors).

    handle_id: name of this memory in the layout.
    base_offset_bytes: start of the memory in the file or in the CUDA allocation.
    cuda_handle: CUDA's IPC handle, 64 bytes; empty for a file.
    device_uuid: UUID of the GPU; empty for a file.
    """

    handle_id: str
    num_bytes: int
    base_offset_bytes: int = 0
    cuda_handle: bytes = b""
    device_uuid: bytes = b""

    @property
    def is_cuda(self) -> bool:
        return bool(self.cuda_handle)


@dataclass(frozen=True, slots=True)
class PageTensor:
    """The pages of one or several layers of a group, for all blocks. Instead of a group, a tensor
    may belong to a kind of sketch (compact form of blocks' keys).

    base_offset_bytes, block_stride_bytes: the page of block b starts at base + b * stride in the
        memory of `handle_id`.
    run_bytes: a page consists of runs of `run_bytes` contiguous bytes.
    dims: how the runs repeat within a page: a (count, stride_bytes) for each of several nested
        loops, the outermost loop first.
    shard_offset_bytes: start of the page in the rank's shard of the slot.
    """

    group_index: int
    handle_id: str
    base_offset_bytes: int
    block_stride_bytes: int
    run_bytes: int
    shard_offset_bytes: int
    dims: tuple[tuple[int, int], ...] = ()
    layer_names: tuple[str, ...] = ()

    @property
    def page_bytes(self) -> int:
        """Returns the size of a block's page in this tensor, in bytes."""
        return self.run_bytes * math.prod(count for count, _ in self.dims)

    def run_offsets(self) -> Int64s:
        """Returns the offset of each run (contiguous bytes) from the start of the page in engine
        memory [runs]. The runs have the order that they have in the slot."""
        offsets = np.zeros(1, np.int64)
        for count, stride in self.dims:
            offsets = (
                offsets[:, None] + np.arange(count, dtype=np.int64)[None, :] * stride
            ).reshape(-1)
        return offsets


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """The runs (contiguous bytes) to copy between the engine memory of one handle and the arena.

    engine_offsets: start of each run in the memory of `handle_id`, int64 [runs].
    slot_offsets: start of each run in the arena, int64 [runs].
    num_bytes: length of each run, int64 [runs].
    """

    handle_id: str
    engine_offsets: Int64s
    slot_offsets: Int64s
    num_bytes: Int64s


@dataclass(frozen=True, slots=True)
class Recipe:
    """The places of a block's bytes in the memory of one handle and in the block's slot. The bytes
    are given as runs (contiguous bytes), in the order of the slot. Runs that are adjacent both in
    engine memory and in the slot are merged, also across tensors.

    All arrays are int64 [runs]:
    bases: offset of each run in the handle's memory, for block 0.
    strides: bytes from a block's run to the same run of the next block.
    slot_offsets: offset of each run in the slot.
    num_bytes: length of each run.
    """

    handle_id: str
    bases: Int64s
    strides: Int64s
    slot_offsets: Int64s
    num_bytes: Int64s

    @property
    def block_bytes(self) -> int:
        """Returns how many bytes of a block are in the memory of this handle."""
        return int(self.num_bytes.sum())

    def copy_runs(self, block_ids: Int64s, slot_offsets: Int64s) -> CopyRuns:
        """Returns the runs (contiguous bytes) to copy for these blocks, block by block.

        block_ids: id of each block in engine memory [blocks].
        slot_offsets: start of each block's slot in the arena [blocks].
        """
        engine = block_ids[:, None] * self.strides[None, :] + self.bases[None, :]
        slot = slot_offsets[:, None] + self.slot_offsets[None, :]
        return CopyRuns(
            self.handle_id,
            engine.reshape(-1),
            slot.reshape(-1),
            np.tile(self.num_bytes, len(block_ids)),
        )

    @staticmethod
    def of(tensors: Sequence[PageTensor], shard_start: int) -> "Recipe":
        """Makes the recipe (the places of a block's bytes in engine memory and in a slot) of a
        group's tensors, all of which lie in the memory of the same handle.

        shard_start: offset of the rank's shard in the slot.
        """
        parts: list[list[Int64s]] = [[], [], [], []]
        for tensor in sorted(tensors, key=lambda t: t.shard_offset_bytes):
            inner = tensor.run_offsets()
            parts[0].append(tensor.base_offset_bytes + inner)
            parts[1].append(np.full(len(inner), tensor.block_stride_bytes, np.int64))
            parts[2].append(
                shard_start
                + tensor.shard_offset_bytes
                + np.arange(len(inner), dtype=np.int64) * tensor.run_bytes
            )
            parts[3].append(np.full(len(inner), tensor.run_bytes, np.int64))
        bases, strides, slot_offsets, num_bytes = (np.concatenate(part) for part in parts)
        follows = (bases[1:] == bases[:-1] + num_bytes[:-1]) & (
            slot_offsets[1:] == slot_offsets[:-1] + num_bytes[:-1]
        )
        starts = np.flatnonzero(
            np.concatenate(([True], ~(follows & (strides[1:] == strides[:-1]))))
        )
        return Recipe(
            tensors[0].handle_id,
            bases[starts],
            strides[starts],
            slot_offsets[starts],
            np.add.reduceat(num_bytes, starts),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV memory of a rank. `validate` must pass before any copy.

    shard_index: index, in each slot, of the shard that this rank holds.
    num_blocks: number of blocks in the memory; block ids are less than this.
    name: name of the layout for people, such as `LBHNC`: the order of the axes in memory (L layers,
        B blocks, H heads, N tokens, C channels); empty: unknown. Copies do not use it.
    """

    shard_index: int
    num_blocks: int
    handles: tuple[MemoryHandle, ...]
    tensors: tuple[PageTensor, ...]
    name: str = ""
    _recipes: dict[int, list[Recipe]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_bytes(self) -> int:
        """Returns the total size of all memory handles, in bytes."""
        return sum(handle.num_bytes for handle in self.handles)

    def covers(self, group_index: int) -> bool:
        """Returns whether the layout has pages of this group."""
        return any(tensor.group_index == group_index for tensor in self.tensors)

    def validate(
        self,
        groups: Sequence[GroupSpec],
        sketches: Mapping[int, Sketch] | None = None,
    ) -> None:
        """Raises ValueError, with the name of the field, if the layout contradicts itself, `groups`
        or `sketches`, or if its tensors do not fit into its handles.

        sketches: kinds of sketch (compact forms of blocks' keys, for sparse
            attention), by group index. The layout must have tensors for all groups, but may omit
            sketches.
        """
        handles = {handle.handle_id: handle for handle in self.handles}
        if len(handles) != len(self.handles):
            raise ValueError("handles has two entries with the same handle_id")
        if self.num_blocks <= 0 or self.num_blocks > np.iinfo(np.int32).max:
            raise ValueError(
                f"block_count is {self.num_blocks}; it must be positive and fit 31 bits"
            )
        if not 0 <= self.shard_index < len(groups[0].shard_bytes):
            raise ValueError(
                f"shard_index is {self.shard_index}; this key space has "
                f"{len(groups[0].shard_bytes)} shards"
            )
        for index, handle in enumerate(self.handles):
            if handle.num_bytes <= 0 or handle.base_offset_bytes < 0:
                raise ValueError(
                    f"handles[{index}] needs a positive byte_count and an offset that is not "
                    "negative"
                )
            if handle.is_cuda and (len(handle.cuda_handle) != 64 or len(handle.device_uuid) != 16):
                raise ValueError(
                    f"handles[{index}].cuda_ipc needs a handle of 64 bytes and a device_uuid of "
                    "16 bytes"
                )
        num_runs = 0
        for index, tensor in enumerate(self.tensors):
            self._validate_tensor(f"tensors[{index}]", tensor, handles)
            num_runs += math.prod(count for count, _ in tensor.dims)
            if num_runs > MAX_RUNS:
                raise ValueError(
                    f"tensors[{index}].dims and those before enumerate more than {MAX_RUNS} runs "
                    "of a block"
                )
            if not 0 <= tensor.group_index < len(groups) and tensor.group_index not in (
                sketches or {}
            ):
                raise ValueError(
                    f"tensors[{index}].group_index is {tensor.group_index}; this key space has "
                    f"{len(groups)} groups and {len(sketches or {})} sketches"
                )
        tensors_of = self._by_group()
        for group_index, group in enumerate(groups):
            self._validate_coverage(
                group_index, tensors_of.get(group_index, []), group.shard_bytes[self.shard_index]
            )
        for group_index, sketch in (sketches or {}).items():
            if group_index in tensors_of:
                self._validate_coverage(
                    group_index,
                    tensors_of[group_index],
                    sketch.shard_bytes[self.shard_index],
                )

    def _by_group(self) -> dict[int, list[PageTensor]]:
        """Returns, by group index, the tensors of the group. Omits groups without tensors."""
        tensors_of: dict[int, list[PageTensor]] = {}
        for tensor in self.tensors:
            tensors_of.setdefault(tensor.group_index, []).append(tensor)
        return tensors_of

    def prepare(self, groups: Sequence[GroupSpec], sketches: Mapping[int, Sketch]) -> None:
        """Validates the layout and computes all recipes (places of blocks' bytes, by which
        transfers copy) in advance, so that the first transfer is as fast as later transfers. Raises
        ValueError if the layout is not valid, for example because it does not fit the KV cache
        groups of the key space, or the kinds of sketches (compact forms of blocks' keys, by
        group index)."""
        self.validate(groups, sketches)
        shapes: dict[int, GroupSpec | Sketch] = {
            **dict(enumerate(groups)),
            **sketches,
        }
        for group_index, shape in shapes.items():
            self.recipes(group_index, shape)

    def _validate_tensor(
        self, name: str, tensor: PageTensor, handles: dict[str, MemoryHandle]
    ) -> None:
        if tensor.handle_id not in handles:
            raise ValueError(
                f"{name}.handle_id is {tensor.handle_id!r}, which is not among handles"
            )
        if len(tensor.dims) > MAX_DIMS:
            raise ValueError(
                f"{name}.dims has {len(tensor.dims)} entries; at most {MAX_DIMS} are supported"
            )
        numbers = (tensor.base_offset_bytes, tensor.block_stride_bytes, tensor.shard_offset_bytes)
        if min(numbers) < 0 or max(*numbers, tensor.run_bytes) >= 1 << 48:
            raise ValueError(f"{name} has a negative or absurdly large offset or stride")
        if tensor.run_bytes <= 0 or any(count <= 0 or stride < 0 for count, stride in tensor.dims):
            raise ValueError(
                f"{name}.run_byte_count and dims need positive counts and strides that are not "
                "negative"
            )
        if math.prod(count for count, _ in tensor.dims) > MAX_RUNS:
            raise ValueError(f"{name}.dims enumerate more than {MAX_RUNS} runs of a block")
        # Checks that no two runs overlap. The order of runs in the slot may differ from their order
        # in memory, so the dimensions are sorted by stride. Each stride must be at least the extent
        # of the dimensions below it. The blocks are treated as one more dimension, with
        # `block_stride_bytes` as its stride.
        span = tensor.run_bytes
        named = {f"dims[{index}].stride_byte_count": dim for index, dim in enumerate(tensor.dims)}
        named["block_stride_byte_count"] = (self.num_blocks, tensor.block_stride_bytes)
        for field, (count, stride) in sorted(named.items(), key=lambda item: item[1][1]):
            if count > 1 and stride < span:
                raise ValueError(f"{name}.{field} is {stride}, so its runs overlap")
            span += (count - 1) * stride
        page_span = tensor.run_bytes + sum((count - 1) * stride for count, stride in tensor.dims)
        end = (
            tensor.base_offset_bytes + (self.num_blocks - 1) * tensor.block_stride_bytes + page_span
        )
        if end > handles[tensor.handle_id].num_bytes:
            raise ValueError(
                f"{name} ends at byte {end}, beyond the {handles[tensor.handle_id].num_bytes} "
                "bytes of its handle"
            )

    def _validate_coverage(
        self, group_index: int, tensors: Sequence[PageTensor], shard_bytes: int
    ) -> None:
        pages = sorted((t.shard_offset_bytes, t.page_bytes) for t in tensors)
        at = 0
        for offset, page_bytes in pages:
            if offset != at:
                raise ValueError(
                    f"tensors of group {group_index} leave a gap or overlap at byte {at} of the "
                    "shard"
                )
            at += page_bytes
        if at != shard_bytes:
            raise ValueError(
                f"tensors of group {group_index} fill {at} bytes of a shard of {shard_bytes}"
            )

    def recipes(self, group_index: int, group: GroupSpec | Sketch) -> list[Recipe]:
        """Returns where the bytes of a group's blocks are in the engine's memory: a recipe (strides
        and runs of bytes) for each memory handle that holds a part of them. They are computed once.

        group: the group, or a kind of sketch (compact form of blocks' keys).
        """
        if group_index not in self._recipes:
            mine = [tensor for tensor in self.tensors if tensor.group_index == group_index]
            shard_start = sum(group.shard_bytes[: self.shard_index])
            handles = dict.fromkeys(tensor.handle_id for tensor in mine)
            self._recipes[group_index] = [
                Recipe.of([t for t in mine if t.handle_id == handle_id], shard_start)
                for handle_id in handles
            ]
        return self._recipes[group_index]

    def copy_runs(
        self,
        group_index: int,
        group: GroupSpec | Sketch,
        block_ids: Int64s,
        slot_offsets: Int64s,
    ) -> list[CopyRuns]:
        """Returns the runs (contiguous bytes) to copy for blocks of a group: one `CopyRuns` per
        memory handle."""
        return [
            recipe.copy_runs(block_ids, slot_offsets) for recipe in self.recipes(group_index, group)
        ]
