"""Where the pages of a block lie in engine memory and in its slot.

A slot holds the shards of all ranks in order; a shard the pages of that rank's tensors, each at
its `shard_offset_bytes`; a page its *runs* of contiguous bytes in order, without gaps. All
copies use the `Recipe`s of this module; no other code computes places of bytes or assumes a
single group or rank.
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
"""Id under which an engine sends its fence: shared memory in which it writes which stores it has
revoked. Not part of a layout."""
FENCE_WORDS = 1024
ENDS_HANDLE = "hotkv-ends"
"""Id under which an engine sends its page of ends: shared memory in which the server writes which
transfers are done. Not part of a layout."""
END_WORDS = 512
DONE_FLAG = 1 << 63
"""In a word of the page; the other bits are the bytes copied."""

MAX_RUNS = 1 << 19
"""Of a block, over all tensors of a layout. At 32 bytes per run its recipes take at most 16 MiB."""
MAX_DIMS = 8
MAX_BACKINGS = 8192
"""Of a layout: PyTorch's expandable segments have one for each 20 MiB, so this is 160 GiB."""
MAX_BACKED_BYTES = 1 << 40
"""Of all ranges of a layout."""


@dataclass(frozen=True, slots=True)
class CudaBacking:
    """Device memory behind a part of a range of addresses (`hotkv_proto.cuda_memory`).

    backing_id: of its descriptor, which may be behind several ranges.
    num_bytes: all of the device memory, which is mapped as a whole.
    """

    backing_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """A piece of an engine's memory: a CUDA allocation with an IPC handle, a range of CUDA's
    virtual memory, or a file. Descriptors of ranges and files are sent over the server's Unix
    socket.

    base_offset_bytes: in the file, the CUDA allocation or the range.
    cuda_handle: CUDA's IPC handle, 64 bytes; empty for the other two.
    device_uuid: of the GPU; empty for a file.
    backings: of a range, in the order of addresses; empty for the other two.
    """

    handle_id: str
    num_bytes: int
    base_offset_bytes: int = 0
    cuda_handle: bytes = b""
    device_uuid: bytes = b""
    backings: tuple[CudaBacking, ...] = ()

    @property
    def is_cuda(self) -> bool:
        return bool(self.cuda_handle or self.backings)


@dataclass(frozen=True, slots=True)
class PageTensor:
    """The pages of one or several layers of a group, or of a kind of sketch, for all blocks.

    base_offset_bytes, block_stride_bytes: block b's page starts at base + b * stride of
        `handle_id`.
    run_bytes: of each run of a page.
    dims: (count, stride_bytes) of the nested loops that repeat the runs, outermost first.
    shard_offset_bytes: of the page in the rank's shard.
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
        return self.run_bytes * math.prod(count for count, _ in self.dims)

    def run_offsets(self) -> Int64s:
        """Offsets of runs in a page of engine memory, in the slot's order [runs]."""
        offsets = np.zeros(1, np.int64)
        for count, stride in self.dims:
            offsets = (
                offsets[:, None] + np.arange(count, dtype=np.int64)[None, :] * stride
            ).reshape(-1)
        return offsets


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Runs to copy between a handle's memory and the arena, int64 [runs].

    slot_offsets: in the arena.
    """

    handle_id: str
    engine_offsets: Int64s
    slot_offsets: Int64s
    num_bytes: Int64s


@dataclass(frozen=True, slots=True)
class Recipe:
    """A block's runs in one handle's memory and in its slot, in the slot's order. Runs that are
    adjacent on both sides are merged, also across tensors.

    All int64 [runs]:
    bases: offset in the handle's memory, for block 0.
    strides: bytes to the same run of the next block.
    slot_offsets: in the slot.
    num_bytes: of each run.
    """

    handle_id: str
    bases: Int64s
    strides: Int64s
    slot_offsets: Int64s
    num_bytes: Int64s

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in this handle's memory."""
        return int(self.num_bytes.sum())

    def copy_runs(self, block_ids: Int64s, slot_offsets: Int64s) -> CopyRuns:
        """Block by block.

        slot_offsets: of the slots in the arena [blocks].
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
        """Merges a group's runs.

        tensors: of a group, all in the same handle's memory.
        shard_start: of the rank's shard in the slot.
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

    shard_index: of the rank in each slot.
    num_blocks: block ids are less.
    name: for people, such as `LBHNC`: the axes in memory (L layers, B blocks, H heads, N tokens,
        C channels); empty: unknown.
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
        return sum(handle.num_bytes for handle in self.handles)

    @property
    def backing_ids(self) -> list[str]:
        """Each once."""
        return list(
            dict.fromkeys(one.backing_id for handle in self.handles for one in handle.backings)
        )

    def covers(self, group_index: int) -> bool:
        return any(tensor.group_index == group_index for tensor in self.tensors)

    def validate(
        self,
        groups: Sequence[GroupSpec],
        sketches: Mapping[int, Sketch] | None = None,
    ) -> None:
        """Raises ValueError, with the name of the field, if the layout contradicts itself or its
        arguments, or if tensors do not fit into their handles. All groups must have tensors,
        sketches need not.

        sketches: by group index.
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
            if handle.cuda_handle and (
                len(handle.cuda_handle) != 64 or len(handle.device_uuid) != 16
            ):
                raise ValueError(
                    f"handles[{index}].cuda_ipc needs a handle of 64 bytes and a device_uuid of "
                    "16 bytes"
                )
        self._validate_backings()
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

    def _validate_backings(self) -> None:
        sizes: dict[str, int] = {}
        num_backings = backed_bytes = 0
        for index, handle in enumerate(self.handles):
            if not handle.backings:
                continue
            name = f"handles[{index}].cuda_range"
            if handle.cuda_handle or len(handle.device_uuid) != 16:
                raise ValueError(f"{name} needs a device_uuid of 16 bytes, and no other source")
            range_bytes = sum(one.num_bytes for one in handle.backings)
            num_backings += len(handle.backings)
            backed_bytes += range_bytes
            if num_backings > MAX_BACKINGS or backed_bytes > MAX_BACKED_BYTES:
                raise ValueError(
                    f"{name}.backings and those before are {num_backings} of {backed_bytes} bytes; "
                    f"at most {MAX_BACKINGS} of {MAX_BACKED_BYTES} bytes are supported"
                )
            for at, one in enumerate(handle.backings):
                if one.num_bytes <= 0 or sizes.setdefault(one.backing_id, one.num_bytes) != (
                    one.num_bytes
                ):
                    raise ValueError(
                        f"{name}.backings[{at}].byte_count is {one.num_bytes}; it must be positive "
                        "and the same wherever the backing comes"
                    )
            end = handle.base_offset_bytes + handle.num_bytes
            if end > range_bytes:
                raise ValueError(
                    f"handles[{index}].byte_count: {handle.handle_id!r} ends at byte {end}, beyond "
                    f"the {range_bytes} bytes of its backings"
                )

    def _by_group(self) -> dict[int, list[PageTensor]]:
        tensors_of: dict[int, list[PageTensor]] = {}
        for tensor in self.tensors:
            tensors_of.setdefault(tensor.group_index, []).append(tensor)
        return tensors_of

    def prepare(self, groups: Sequence[GroupSpec], sketches: Mapping[int, Sketch]) -> None:
        """Validates (ValueError) and computes all recipes, so that the first transfer is as fast
        as later ones."""
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
        # No two runs may overlap. Runs in the slot may have another order than in memory, so
        # dimensions are sorted by stride: each stride must be at least the extent of those below
        # it. The blocks are one more dimension.
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
        """One per handle with a part of the group; computed once."""
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
        return [
            recipe.copy_runs(block_ids, slot_offsets) for recipe in self.recipes(group_index, group)
        ]
