"""Sparse offloading under the names of vLLM's RFC #37263: host memory holds every block, hot slots
those that are attended.

`SparseOffloadingManager` (`offloading_manager`) is the scheduler's part: it says which blocks of a
prefix matter, pins them while they are loaded, and gives out new blocks of host memory.
`SparseOffloadingHandler` is the worker's part: one layer's step and the copies that it asks for.
`BlockReprManager` (`pool`) keeps representations by host block. All three are thin: selection and
hot sets are those of `hotkv_sparse`. Host memory is an array of this process or a residency of
hotkv-server (`offloading_pages`).

Always true: a block is attended only in a hot slot that holds its bytes; a new block stays
in its hot slot until its copy in host memory is complete; a pinned host block is not given out
again.

Shapes: Q query heads, H KV heads, D channels, T tokens of a block, C blocks of the context.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from hotkv.errors import HotKVError, Reason
from hotkv_sparse import HotSet, SparseConfig, span
from hotkv_sparse.selector import exact_log_mass, select_layer
from hotkv_vllm.sparse.offloading_manager import NO_BLOCKS
from hotkv_vllm.sparse.offloading_pages import HostPages
from hotkv_vllm.sparse.pool import BlockReprManager, LayerShape

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SwapSpec:
    """Copies of one sequence and layer: host block `blocks[i]`, at `positions[i]` of the context,
    and hot slot `slots[i]`; int32 arrays.

    The copies go to the slots if `is_load`, else to host memory.
    """

    sequence_id: str
    layer_idx: int
    positions: I32
    blocks: I32
    slots: I32
    is_load: bool


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """One sequence in one layer. `block_table` int32: what to attend to, in order; the last block
    holds the tokens up to `seq_len`.

    Given to `handle_layer`, it names host blocks of the whole context; what comes back names hot
    slots.
    """

    sequence_id: str
    block_table: I32
    seq_len: int


@dataclass(slots=True)
class _LayerState:
    """A sequence in one layer. `pending` int32: complete blocks whose swap-out is yet to be asked
    for, as positions in the context."""

    hot: HotSet
    has_begun: bool = False
    pending: I32 = field(default_factory=lambda: NO_BLOCKS)


class SparseOffloadingHandler:
    """Hot slots of every layer, cut into one region per sequence, and the copies between them and
    host memory.

    `host`: pages of all blocks (`offloading_pages`). `hot`: uint8 [layers, slots, page bytes].
    `keys_of(pages)`: unpacked keys float32 [n, T, H, D] of pages uint8 [n, page bytes].
    `slots_per_sequence` is what a hot set may hold. Decides in the caller's thread; copies run in
    one of its own, in the order they were given.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: Mapping[int, LayerShape],
        slots_per_sequence: int,
        host: HostPages,
        hot: U8,
        keys_of: Callable[[U8], F32],
    ) -> None:
        if slots_per_sequence > hot.shape[1]:
            raise HotKVError(
                Reason.INVALID_FIELD,
                (
                    f"slots_per_sequence is {slots_per_sequence}; there are {hot.shape[1]} hot "
                    "slots, use no more"
                ),
            )
        self._config = config
        self._layers = dict(layers)
        self._slots = slots_per_sequence
        self._host, self._hot = host, hot
        self._keys_of = keys_of
        self.representations = BlockReprManager(
            layers, {index: partial(self._host_keys, index) for index in layers}
        )
        self._regions = list(range(hot.shape[1] // slots_per_sequence - 1, -1, -1))
        self._region_of: dict[str, int] = {}
        self._states: dict[tuple[str, int], _LayerState] = {}
        self._jobs: dict[int, tuple[SwapSpec, Future[None]]] = {}
        self._copier = ThreadPoolExecutor(1, "hotkv-swap")

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingHandler(sequences {len(self._region_of)}, layers "
            f"{len(self._states)}, jobs {len(self._jobs)})"
        )

    # ------------------------------------------------------------------------------------ sequences

    def begin(self, sequence_id: str) -> None:
        """Begins a sequence whose complete blocks are all in host memory.

        OVERLOADED if all regions are taken."""
        if not self._regions:
            raise HotKVError(
                Reason.OVERLOADED,
                f"all {len(self._region_of)} regions of hot slots are taken; end a sequence first",
            )
        self._region_of[sequence_id] = self._regions.pop()

    def end(self, sequence_id: str) -> None:
        """Ends a sequence. Wait for its jobs first."""
        self._regions.append(self._region_of.pop(sequence_id))
        for owner in [owner for owner in self._states if owner[0] == sequence_id]:
            del self._states[owner]

    def extend(self, sequence_id: str, layer_idx: int, seq_len: int) -> int:
        """The context has `seq_len` tokens; returns the hot slot of the last one's block. Call
        before the step's keys are written."""
        block_tokens = self._layers[layer_idx].block_tokens
        where = span(self._config, seq_len, block_tokens)
        state = self._states.get((sequence_id, layer_idx))
        # The last block counts as incomplete even when this step fills it: its keys are about to be
        # written.
        num_complete = where.count - 1
        num_host = 0
        if state is None:
            state = self._states[sequence_id, layer_idx] = _LayerState(
                HotSet(self._slots, 0, self._config.cache_policy)
            )
            num_host = num_complete
        swap_out = state.hot.extend(where, num_complete, num_host).swap_out
        state.pending = np.concatenate([state.pending, swap_out])
        return int(self._slots_of(sequence_id, state.hot, np.array([num_complete], np.int32))[0])

    def _slots_of(self, sequence_id: str, hot: HotSet, positions: I32) -> I32:
        """The hot slots int32 of resident blocks."""
        present = hot.map()
        slots: I32 = present.slots[np.searchsorted(present.blocks, positions)] + np.int32(
            self._region_of[sequence_id] * self._slots
        )
        return slots

    # ---------------------------------------------------------------------------------------- steps

    def handle_layer(
        self, attn_metadata: DecodeMetadata, layer_idx: int, query: F32
    ) -> tuple[DecodeMetadata, SwapSpec, SwapSpec]:
        """(new_attn_metadata, swap_in_spec, swap_out_spec) of one layer's step with a query float32
        [Q, D].

        Carry out the swap-in, attend with the new metadata, then carry out the swap-out. A
        sequence's first step loads its whole selection, every other one at most
        `max_correction_blocks`.
        """
        sequence_id, table, seq_len = (
            attn_metadata.sequence_id,
            attn_metadata.block_table,
            attn_metadata.seq_len,
        )
        state = self._states[sequence_id, layer_idx]
        hot, shape = state.hot, self._layers[layer_idx]
        log_mass = self._always_log_mass(attn_metadata, layer_idx, query)
        sources = self.representations.sources(layer_idx)
        selection = select_layer(
            self._config, layer_idx, query, sources, table, log_mass, seq_len, shape.block_tokens
        )
        step = hot.step(
            selection, self._config.max_correction_blocks if state.has_begun else hot.span.count
        )
        state.has_begun = True
        pending, state.pending = state.pending, NO_BLOCKS
        region = np.int32(self._region_of[sequence_id] * self._slots)
        loads = step.load
        num_left_out = hot.span.count - len(step.map.blocks)
        return (
            DecodeMetadata(
                sequence_id, step.map.slots + region, seq_len - num_left_out * shape.block_tokens
            ),
            SwapSpec(
                sequence_id,
                layer_idx,
                loads.blocks,
                table[loads.blocks],
                loads.slots + region,
                True,
            ),
            SwapSpec(
                sequence_id,
                layer_idx,
                pending,
                table[pending],
                self._slots_of(sequence_id, hot, pending),
                False,
            ),
        )

    def _always_log_mass(self, metadata: DecodeMetadata, layer_idx: int, query: F32) -> F32:
        """Exact log mass float32 [Q] of what is always kept, from hot slots where it is resident,
        else from host memory."""
        hot, block_tokens = (
            self._states[metadata.sequence_id, layer_idx].hot,
            self._layers[layer_idx].block_tokens,
        )
        always = hot.span.always
        resident = np.isin(always, hot.map().blocks)
        pages = np.empty((len(always), self._hot.shape[2]), np.uint8)
        pages[~resident] = self._host.read(layer_idx, metadata.block_table[always[~resident]])
        pages[resident] = self._hot[
            layer_idx, self._slots_of(metadata.sequence_id, hot, always[resident])
        ]
        keys = self._keys_of(pages)
        keys_RHD = keys.reshape(-1, *keys.shape[2:])
        excess = hot.span.count * block_tokens - metadata.seq_len
        return exact_log_mass(query, keys_RHD[: len(keys_RHD) - excess])

    def _host_keys(self, layer_idx: int, blocks: I32) -> F32:
        """Keys of host blocks; waits for copies that write them."""
        wait_futures(
            [
                job
                for spec, job in self._jobs.values()
                if not spec.is_load and np.isin(blocks, spec.blocks).any()
            ]
        )
        return self._keys_of(self._host.read(layer_idx, blocks))

    # --------------------------------------------------------------------------------------- copies

    def transfer_async(self, job_id: int, spec: SwapSpec) -> None:
        """Begins the copies; INVALID_FIELD for an id that is in use."""
        if job_id in self._jobs:
            raise HotKVError(
                Reason.INVALID_FIELD, f"job_id {job_id} is in use; wait for it, or choose another"
            )
        self._jobs[job_id] = spec, self._copier.submit(self._copy, spec)

    def _copy(self, spec: SwapSpec) -> None:
        copy = self._host.load if spec.is_load else self._host.store
        copy(spec.layer_idx, spec.blocks, self._hot[spec.layer_idx], spec.slots)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Waits until these jobs have ended; raises what they raised.

        Blocks that were swapped out may leave their hot slots from then on."""
        jobs = [self._jobs.pop(job_id) for job_id in job_ids]
        wait_futures([job for _, job in jobs])
        for spec, job in jobs:
            if (
                not spec.is_load
                and (state := self._states.get((spec.sequence_id, spec.layer_idx))) is not None
            ):
                state.hot.swapped_out(spec.positions, job.exception() is None)
        for _, job in jobs:
            job.result()

    def close(self) -> None:
        """Waits for all copies."""
        self._copier.shutdown()
