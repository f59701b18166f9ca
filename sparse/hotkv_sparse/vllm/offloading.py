"""Sparse decode over the server's memory for engines that call it layer by layer, by the names of
vLLM's RFC #37263 (docs/rfc.md). hotkv's own engines use the same hot sets, sketches and copies.

- `SparseOffloadingManager`, vLLM's manager for a scheduler, looks up, selects and pins blocks.
- `SparseOffloadingHandler`, vLLM's worker, chooses what each step and layer attends to. Its base
  `OptimizedSwapHandler` (`cpu.swap`) copies pages, `BlockReprManager` (`cpu.pool`) has sketches.

Both share a `HostBlocks`, so they are in one process. Used by one thread.

Always true:
- A block leaves the device only when its host block is ready.
- Attention reads a page only where it has been written or copied to.

Shapes: C blocks of the context, n blocks of one call.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

from hotkv_proto.errors import HotKVError, Reason, invalid
from hotkv_sparse import CandidateSpan, SparseConfig, span
from hotkv_sparse.selection import estimated_log_mass, select_layer
from hotkv_sparse.vllm.cpu.batch import SparseLayer
from hotkv_sparse.vllm.cpu.pool import BlockReprManager
from hotkv_sparse.vllm.cpu.resident_pages import ResidentPages, slot_places
from hotkv_sparse.vllm.cpu.resident_sequences import NOT_KEPT, ResidentSequence
from hotkv_sparse.vllm.cpu.sequence import LayerDecoder, LayerSequence
from hotkv_sparse.vllm.cpu.swap import OptimizedSwapHandler, PageCopier, SwapIn, SwapOut
from hotkv_sparse.vllm.host_blocks import NOT_HELD, HostBlocks

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
Blocks = Collection[OffloadKey] | I32
"""Keys, as in vLLM, or host blocks, as in `SwapOut.blocks`."""
SPARE_SLOTS = 8
"""Of a `HotSet`, beyond its capacity."""
NO_ROOM = (Reason.OVERLOADED, Reason.NO_ROOM_FOR_RESIDENCY, Reason.RESIDENCY_TOO_LARGE)
UNNAMED = ReqContext("")
"""The request of calls that name none, as in the RFC."""


# ---------------------------------------------------------------------------------------- scheduler


class HostLoadStoreSpec(BlockIDsLoadStoreSpec):
    """block_ids: host blocks."""


class SparseOffloadingManager(OffloadingManager):
    """vLLM's manager. A request's blocks stay pinned until it has finished; then they are the
    server's to evict.

    sketches: of `host`'s blocks.
    """

    def __init__(self, config: SparseConfig, host: HostBlocks, sketches: BlockReprManager) -> None:
        self._config, self._host, self._sketches = config, host, sketches
        # Host blocks whose load or store has been prepared and not completed, by request.
        self._loads: defaultdict[str, set[int]] = defaultdict(set)
        self._stores: defaultdict[str, set[int]] = defaultdict(set)
        self._finished: set[str] = set()

    def __repr__(self) -> str:
        return f"SparseOffloadingManager({self._host!r})"

    # ---------------------------------------------------------------------------------- of the RFC

    def lookup_with_sparse(
        self,
        block_hashes: Sequence[bytes],
        query: F32,
        layer_idx: int,
        req_context: ReqContext = UNNAMED,
    ) -> tuple[list[OffloadKey], F32]:
        """Selects from the longest prefix that the server has, which it then pins. Returns
        (selected_blocks, scores): keys in the context's order, and their estimated shares of the
        mass, float32, inf for a block that is always kept. Raises one of NO_ROOM.

        query: float32 [query heads, channels], after RoPE.
        """
        request_id, hashes = req_context.req_id, list(block_hashes)
        hashes = hashes[: _num_leading(self._is_there(request_id, hashes))]
        rows = self._hold(request_id, hashes)
        rows = rows[: _num_leading(self._host.is_ready(rows))]
        if not len(rows):
            return [], np.empty(0, np.float32)
        self._sketches.update(layer_idx, rows)
        sources = self._sketches.sources(layer_idx)
        block_tokens = self._sketches.shape(layer_idx).block_tokens
        context_tokens = len(rows) * block_tokens
        always = rows[span(self._config, context_tokens, block_tokens).always]
        log_mass = estimated_log_mass(query, sources, always)
        selection = select_layer(
            self._config, layer_idx, query, sources, rows, log_mass, context_tokens, block_tokens
        )
        keys = [make_offload_key(hashes[place], 0) for place in selection.blocks.tolist()]
        return keys, selection.weights

    def prepare_sparse_load(
        self, selected_blocks: Blocks, req_context: ReqContext = UNNAMED
    ) -> HostLoadStoreSpec:
        """The RFC's name of `prepare_load`."""
        return self.prepare_load(selected_blocks, req_context)

    # ------------------------------------------------------------------------------------- of vLLM

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request_id, hashes = req_context.req_id, [_hash_of(key)]
        if self._is_there(request_id, hashes)[0]:
            return LookupResult.HIT
        is_pending = self._host.of(request_id, hashes)[0] in self._stores[request_id]
        return LookupResult.HIT_PENDING if is_pending else LookupResult.MISS

    def prepare_load(self, keys: Blocks, req_context: ReqContext = UNNAMED) -> HostLoadStoreSpec:
        """Names and pins host blocks. Raises INVALID_FIELD if the server lacks one, or one of
        NO_ROOM."""
        blocks = self._blocks(keys, req_context, holds=True)
        self._host.check_ready(blocks)
        self._loads[req_context.req_id].update(blocks.tolist())
        return HostLoadStoreSpec(blocks.tolist())

    def complete_load(self, keys: Blocks, req_context: ReqContext = UNNAMED) -> None:
        """May be called again, as in the RFC's loop over layers."""
        blocks = self._blocks(keys, req_context)
        self._loads[req_context.req_id].difference_update(blocks.tolist())
        self._end(req_context.req_id)

    def prepare_store(
        self, keys: Blocks, req_context: ReqContext = UNNAMED
    ) -> PrepareStoreOutput | None:
        """Gives all `keys` host blocks (`host_blocks`), and returns those to store: the server
        lacks them, and their store has not been prepared. None without room."""
        try:
            blocks = self._blocks(keys, req_context, holds=True)
        except HotKVError as error:
            if error.reason not in NO_ROOM:
                raise
            return None
        pending = self._stores[req_context.req_id]
        is_there = self._host.is_ready(blocks) | np.isin(blocks, list(pending))
        new = {
            block: key
            for block, key, there in zip(blocks.tolist(), keys, is_there.tolist(), strict=True)
            if not there
        }
        pending.update(new)
        return PrepareStoreOutput(list(new.values()), HostLoadStoreSpec(list(new)), [])

    def complete_store(
        self, keys: Blocks, req_context: ReqContext = UNNAMED, success: bool = True
    ) -> None:
        """Makes blocks ready that the worker has stored; waits for stores under way. Others are
        missed by lookups. May be called again, and before the last layer has swapped out."""
        blocks = self._blocks(keys, req_context)
        self._host.finish(blocks)
        ended = blocks[self._host.is_ready(blocks)] if success else blocks
        self._stores[req_context.req_id].difference_update(ended.tolist())
        self._end(req_context.req_id)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Unpins its blocks once its loads and stores are completed."""
        self._finished.add(req_context.req_id)
        self._end(req_context.req_id)

    def reset_cache(self) -> None:
        """Ends all requests. The server keeps their blocks as long as it has room."""
        for request_id in self._host.request_ids:
            self._release(request_id)

    def shutdown(self) -> None:
        self.reset_cache()

    # ------------------------------------------------------------------------------------ requests

    def host_blocks(self, keys: Collection[OffloadKey], req_context: ReqContext = UNNAMED) -> I32:
        """int32, for `DecodeMetadata.block_table`, of keys that the request has prepared or
        looked up."""
        return self._blocks(keys, req_context)

    def _blocks(self, keys: Blocks, req_context: ReqContext, holds: bool = False) -> I32:
        """holds: for keys without a host block too; otherwise these are left out."""
        if isinstance(keys, np.ndarray):
            return keys
        hashes, request_id = [_hash_of(key) for key in keys], req_context.req_id
        if holds:
            return self._hold(request_id, hashes)
        blocks = self._host.of(request_id, hashes)
        return blocks[blocks != NOT_HELD]

    def _hold(self, request_id: str, hashes: Sequence[bytes]) -> I32:
        is_new = self._host.of(request_id, hashes) == NOT_HELD
        blocks = self._host.hold(request_id, hashes)
        self._sketches.forget(blocks[is_new])
        return blocks

    def _is_there(self, request_id: str, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Whether blocks are in the server, also if a flush hides pinned ones from lookups."""
        blocks, is_there = self._host.of(request_id, hashes), self._host.is_in_server(hashes)
        is_held = blocks != NOT_HELD
        is_there[is_held] |= self._host.is_ready(blocks[is_held])
        return is_there

    def _end(self, request_id: str) -> None:
        is_busy = self._loads[request_id] or self._stores[request_id]
        if request_id in self._finished and not is_busy:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        self._finished.discard(request_id)
        self._loads.pop(request_id, None)
        self._stores.pop(request_id, None)
        if request_id in self._host.request_ids:
            self._sketches.forget(self._host.release(request_id))


def _hash_of(key: OffloadKey) -> bytes:
    if get_offload_group_idx(key):
        raise invalid("keys are of several groups; only models with one KV cache group are served")
    return get_offload_block_hash(key)


def _num_leading(mask: npt.NDArray[np.bool_]) -> int:
    """Of True at its start."""
    return int(np.argmin(np.append(mask, False)))


# ------------------------------------------------------------------------------------------- worker


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """The blocks of a sequence in a layer.

    block_table: int32, in the context's order: as argument of `handle_layer` host blocks of the
        whole context, in its result the device blocks to attend to.
    seq_len: tokens in these blocks, the step's included.
    """

    sequence_id: str
    block_table: I32
    seq_len: int


@dataclass(slots=True)
class _Sequence:
    """record: the hot slots and what they contain.
    device_C: device blocks, int32; -1 where only host memory has the block.
    host_C: host blocks, int32.
    num_stored: leading blocks that are ready in host memory.
    layers: hot sets, by layer index.
    begun: layers that have sinks and recent window on the device.
    """

    record: ResidentSequence
    seq_len: int
    where: CandidateSpan
    device_C: I32
    host_C: I32
    num_stored: int
    layers: dict[int, LayerSequence] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)


class SparseOffloadingHandler(OptimizedSwapHandler):
    """vLLM's worker for offloading, which also decides what a layer attends to.

    layers: in the order in which they attend; all sparse, of one group and page size.
    device_blocks: of the KV cache, that the handler may use for sinks, recent windows, hot slots.
    sketches: of host blocks.
    """

    def __init__(
        self,
        config: SparseConfig,
        layers: Sequence[SparseLayer],
        host: HostBlocks,
        device_blocks: Iterable[int],
    ) -> None:
        dense = [layer.index for layer in layers if not config.scorers_of(layer.index)]
        if dense:
            raise invalid(
                f"sparse.dense_layers names layers {dense}, but no layer is dense; use ()"
            )
        places = slot_places(layers, [layer.name for layer in layers], 0)
        super().__init__(PageCopier(method=config.copy_method), layers, places.pages, host)
        self._config, self._blocks = config, host
        self._pages = ResidentPages(layers, places, self)
        self._layer_of = {layer.index: layer for layer in layers}
        self._decoders = {layer.index: LayerDecoder(config, layer) for layer in layers}
        self.sketches = BlockReprManager(
            {layer.index: replace(layer.shape, num_blocks=host.num_blocks) for layer in layers},
            {layer.index: partial(self._keys_of, layer) for layer in layers},
        )
        self._block_tokens = layers[0].shape.block_tokens
        self._num_sinks = -(-config.sink_tokens // self._block_tokens)
        self._free = sorted(device_blocks, reverse=True)
        self._sequences: dict[str, _Sequence] = {}

    def __repr__(self) -> str:
        return (
            f"SparseOffloadingHandler(sequences {len(self._sequences)}, free device blocks "
            f"{len(self._free)}, {self._blocks!r})"
        )

    # ---------------------------------------------------------------------------------------- steps

    def handle_layer(
        self, attn_metadata: DecodeMetadata, layer_idx: int, query: F32
    ) -> tuple[DecodeMetadata, SwapIn, SwapOut]:
        """Returns (new_attn_metadata, swap_in_spec, swap_out_spec). Swap in; write the step's keys
        and values to the last block of the new metadata, and attend with it; then swap out.

        A sequence begins with its first call. Host memory then has all blocks but the last, of
        which the first step writes all tokens; later steps add one token. Raises INVALID_FIELD if
        the metadata don't fit, OVERLOADED without free device blocks.

        query: float32 [query heads, channels], after RoPE.
        """
        layer, one = self._layer_of[layer_idx], self._followed(attn_metadata)
        is_first = layer_idx not in one.begun
        if is_first:
            self._begin_layer(layer, one)
        count, config = one.where.count, self._config
        if one.seq_len < config.min_context_tokens or config.covers(
            one.seq_len, self._block_tokens
        ):
            positions = np.arange(count, dtype=np.int32)
            self._give_hot_slots(one, max(0, one.record.num_freed - self._num_sinks))
            slots_of = self._slots_of_whole
        else:
            own = one.layers.get(layer_idx)
            if own is None:
                own = one.layers[layer_idx] = self._decoders[layer_idx].begin()
            budget = config.budget_blocks(one.seq_len, self._block_tokens)
            self._give_hot_slots(one, max(budget, one.where.num_always) + SPARE_SLOTS)
            num_tokens = (count - 1) * self._block_tokens if is_first else one.seq_len - 1
            positions, slots_of = self._selected(layer, one, own, query, num_tokens), own.slots_of
        table, swap_in = self._pages.hot_table(
            layer, one.record, slots_of, one.device_C, positions, self._num_sinks
        )
        complete = slice(one.num_stored, one.seq_len // self._block_tokens)
        hosts, devices = one.host_C[complete], one.device_C[complete]
        leaving = self._blocks.is_lacking(hosts)
        left_out_tokens = (count - len(positions)) * self._block_tokens
        return (
            DecodeMetadata(attn_metadata.sequence_id, table, one.seq_len - left_out_tokens),
            SwapIn(layer_idx, layer.pages.page_bytes)
            if swap_in is None
            else swap_in._replace(blocks=one.host_C[swap_in.blocks]),
            SwapOut(layer_idx, hosts[leaving], devices[leaving]),
        )

    def wait(self, job_ids: Iterable[int]) -> None:
        """Also raises UNKNOWN_RESIDENCY if a load may have copied wrong bytes."""
        super().wait(job_ids)
        self._blocks.check()

    def end(self, sequence_id: str) -> None:
        """Frees the sequence's device blocks, once no store reads them."""
        one = self._sequences[sequence_id]
        self._blocks.finish(one.host_C)
        del self._sequences[sequence_id]
        for block in one.host_C.tolist():
            self._leaving.pop(block, None)
        self._free.extend(one.device_C[one.device_C >= 0].tolist())
        self._free.extend(one.record.hot_blocks.tolist())

    def _selected(
        self,
        layer: SparseLayer,
        one: _Sequence,
        own: LayerSequence,
        query: F32,
        num_tokens: int,
    ) -> I32:
        """Positions to attend to, ascending.

        num_tokens: of the context, whose keys are written.
        """
        where = one.where
        self.sketches.update(layer.index, one.host_C[where.first : where.last])
        always = one.device_C[where.always]
        missing = where.count * self._block_tokens - num_tokens
        attended = self._decoders[layer.index].step(
            own,
            self.sketches.sources(layer.index),
            query,
            one.host_C,
            always,
            len(always) * self._block_tokens - missing,
            one.seq_len,
            where,
            np.zeros(where.count, np.bool_),
        )
        return attended.blocks

    def _slots_of_whole(self, positions: I32) -> I32:
        """Hot slot i is for the i-th block that is not on the device."""
        return positions - np.int32(self._num_sinks)

    # ------------------------------------------------------------------------------------ sequences

    def _followed(self, metadata: DecodeMetadata) -> _Sequence:
        """The sequence at the step's length."""
        one, seq_len = self._sequences.get(metadata.sequence_id), metadata.seq_len
        where = span(self._config, seq_len, self._block_tokens)
        if len(metadata.block_table) != where.count or seq_len < 1:
            raise invalid(
                f"block_table has {len(metadata.block_table)} blocks; {seq_len} tokens need "
                f"{where.count}"
            )
        if one is None:
            return self._begun(metadata, where)
        if seq_len == one.seq_len:
            return one
        if seq_len != one.seq_len + 1:
            raise invalid(
                f"seq_len is {seq_len} after {one.seq_len}; a step adds one token. Call "
                f"end({metadata.sequence_id!r}) first to begin anew"
            )
        added = self._take(where.count - one.where.count)
        one.device_C = np.concatenate([one.device_C, added])
        one.host_C = np.asarray(metadata.block_table, np.int32)
        one.seq_len, one.where = seq_len, where
        self._free_stored(one)
        return one

    def _begun(self, metadata: DecodeMetadata, where: CandidateSpan) -> _Sequence:
        host_C = np.array(metadata.block_table, np.int32)
        num_stored = where.count - 1
        addresses = self._blocks.addresses(host_C[:num_stored])
        device_C = np.full(where.count, -1, np.int32)
        device_C[where.always] = self._take(where.num_always)
        record = ResidentSequence(metadata.sequence_id, num_freed=where.last)
        record.kept(0, addresses, np.full(num_stored, NOT_KEPT, np.int64))
        one = _Sequence(record, metadata.seq_len, where, device_C, host_C, num_stored)
        self._sequences[metadata.sequence_id] = one
        return one

    def _begin_layer(self, layer: SparseLayer, one: _Sequence) -> None:
        """Copies sinks and recent window from host memory now: a selection needs their keys."""
        always = one.where.always[:-1]
        to = self._pages.on_device(layer, layer.pages.tensor, one.device_C[always])
        source = self._blocks.addresses(one.host_C[always]) + self._places[layer.index]
        self.copier.copy(to, source, layer.pages.page_bytes)
        one.begun.add(layer.index)

    def _free_stored(self, one: _Sequence) -> None:
        """Frees device blocks between sinks and recent window that are ready in host memory."""
        one.num_stored += _num_leading(self._blocks.is_ready(one.host_C[one.num_stored : -1]))
        first = max(one.record.num_freed, self._num_sinks)
        last = min(one.where.last, one.num_stored)
        if last <= first:
            return
        hosts = one.host_C[first:last]
        addresses = self._blocks.addresses(hosts)
        one.record.kept(first, addresses, np.full(last - first, NOT_KEPT, np.int64))
        self._free.extend(one.device_C[first:last].tolist())
        one.device_C[first:last] = -1
        one.record.num_freed = last

    def _take(self, count: int) -> I32:
        """Free device blocks, int32."""
        if count > len(self._free):
            raise HotKVError(
                Reason.OVERLOADED,
                f"{count} device blocks needed, {len(self._free)} of device_blocks free; end a "
                "sequence, or pass more",
            )
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def _give_hot_slots(self, one: _Sequence, count: int) -> None:
        missing = count - len(one.record.hot_blocks)
        if missing > 0:
            one.record.more_hot(self._take(missing))

    def _keys_of(self, layer: SparseLayer, blocks: I32) -> F32:
        """Of host blocks, float32 [n, tokens, KV heads, channels]; n > 0."""
        is_away, kv = self._blocks.is_ready(blocks), layer.pages.tensor
        source = np.empty(len(blocks), np.int64)
        source[is_away] = self._blocks.addresses(blocks[is_away]) + self._places[layer.index]
        here = [self._device_block(block) for block in blocks[~is_away].tolist()]
        source[~is_away] = self._pages.on_device(layer, kv, np.array(here, np.int32))
        pages = torch.empty((len(blocks), *kv.shape[1:]), dtype=kv.dtype)
        places = np.arange(len(blocks), dtype=np.int32)
        self.copier.copy(
            self._pages.on_device(layer, pages, places), source, layer.pages.page_bytes
        )
        return layer.pages.over(pages).keys_of(places)

    def _device_block(self, block: int) -> int:
        """Of a host block that is not ready."""
        for one in self._sequences.values():
            found = one.device_C[one.host_C == block]
            if len(found) and found[0] >= 0:
                return int(found[0])
        raise invalid(f"host block {block} is neither stored nor on the device")
