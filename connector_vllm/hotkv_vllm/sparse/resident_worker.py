"""Decides what each row attends to where old blocks of a context are in host memory only.

Decode rows choose a hot set as `worker.SparseWorker` does. What of it is not on the device is
copied from the mapped arena into the request's hot slots, which are blocks of vLLM's pool, so one
call of vLLM's attention serves the whole batch. Rows that attend to everything (prefill, and rows
whose selection breaks) do so over a staging area of one layer, in which the whole context is put
together.

What is always true: attention reads no block that was given back; a page that was copied out of
the arena counts only if the server still pinned it afterwards (`take_lost`). Where that fails the
request is named as lost, its token is dropped, and it is computed anew.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotkv_client.arena import Arena
from hotkv_sparse import SparseConfig, build, span
from hotkv_sparse.selector import Source
from hotkv_vllm import link
from hotkv_vllm.sparse.batch import Batch, Plan, Rewrite, Row, SparseLayer
from hotkv_vllm.sparse.kept_rows import KeptRows
from hotkv_vllm.sparse.page_copies import PageCopier
from hotkv_vllm.sparse.resident_sequence import NOT_KEPT, ResidentSequence
from hotkv_vllm.sparse.resident_step import KeptBlocks, ResidentRow, ResidentStep
from hotkv_vllm.sparse.slot_places import SlotPlaces
from hotkv_vllm.sparse.worker import SparseWorker

logger = link.logger
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
BUILD_PAGES = 64
"""Blocks at a time whose representations are built from pages that only the server has."""


class LostError(Exception):
    """Bytes of a request can't be had any more; the text says why."""


@dataclass(slots=True)
class _BatchRow:
    """A row of the batch. `blocks` int32: its block table; ids of blocks that were given back mean
    nothing."""

    row: int
    sequence: ResidentSequence
    computed_tokens: int
    context_tokens: int
    blocks: I32


@dataclass(slots=True)
class ResidentPlan(Plan):
    """A step's plan. `residents`: all rows of the batch that the scheduler has named, by row.
    `unknown`: rows that it hasn't."""

    residents: dict[int, _BatchRow] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)


class ResidentWorker(SparseWorker):
    """See the module. `arena_of`: the arena that this process maps now. One thread."""

    def __init__(
        self,
        config: SparseConfig,
        layers: list[SparseLayer],
        places: SlotPlaces,
        recall_steps: int = 0,
    ) -> None:
        super().__init__(config, layers, recall_steps)
        self._places = places
        tokens = layers[0].shape.block_tokens
        self._num_sinks = -(-config.sink_tokens // tokens)
        self._kept = KeptRows(self._reprs)
        self._residents: dict[str, ResidentSequence] = {}
        self._row_of: dict[int, ResidentSequence] = {}
        self._arenas: dict[tuple[int, int], Arena] = {}
        self._copier = PageCopier()
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._lost: dict[int, str] = {}
        self._counted: Counter[str] = Counter()
        self.arena_of: Callable[[], Arena | None] = lambda: None

    def __repr__(self) -> str:
        return f"ResidentWorker(sequences {len(self._residents)}, {self._kept}, {self._reprs})"

    # ---------------------------------------------------------------------------------------- steps

    def begin_resident(self, step: ResidentStep) -> None:
        """Takes in what the scheduler says of the coming step's requests."""
        for request_id in step.ended:
            self._end(request_id)
        self._row_of = {}
        for row in step.rows:
            self._row_of[row.written_block] = self._follow(row)
        for request_id in step.lost:
            sequence = self._residents.get(request_id)
            if sequence is not None:
                self._lose(sequence, "the server has lost it")

    def start_over(self) -> None:
        """It is not known which rows the step has: what needs bytes of the arena is lost."""
        for sequence in self._residents.values():
            if sequence.num_freed:
                self._lose(sequence, "a step's plan was lost")
        self._row_of = {}
        super().start_over()

    def take_lost(self) -> set[int]:
        """First blocks of the requests whose bytes were lost since the last call, or were read
        while the server did not pin them. Call it after a step's last layer."""
        for sequence in self._residents.values():
            if sequence.has_read and not sequence.is_lost and not sequence.still_holds():
                self._lose(sequence, "the server pins it no more")
            sequence.has_read = False
        lost, self._lost = self._lost, {}
        return set(lost)

    def all_away(self) -> set[int]:
        """First blocks of all requests that have blocks in host memory only. Shares nothing with
        `take_lost`."""
        return {one.first_block for one in self._residents.values() if one.num_freed}

    def _follow(self, row: ResidentRow) -> ResidentSequence:
        sequence = self._residents.get(row.request_id)
        if sequence is None:
            sequence = self._residents[row.request_id] = ResidentSequence(row.request_id)
        sequence.first_block = row.first_block
        sequence.may_outgrow, sequence.num_freed = row.may_outgrow, row.num_freed
        if row.hot_blocks:
            sequence.hot_blocks = np.array(row.hot_blocks, np.int32)
            sequence.content.clear()
        if row.pin is not None:
            sequence.pin = row.pin
        for kept in row.kept:
            self._take_in(sequence, kept)
        return sequence

    def _take_in(self, sequence: ResidentSequence, kept: KeptBlocks) -> None:
        """Finds the addresses of blocks that the server keeps. Where this process doesn't map their
        arena they have none."""
        arena = self._arenas.get(kept.file_id)
        if arena is None:
            arena = self.arena_of()
            if arena is None or arena.file_id != kept.file_id:
                return
            self._arenas[kept.file_id] = arena
        if arena not in sequence.arenas:
            sequence.arenas.append(arena)
        base = arena.memory.ctypes.data
        found = [
            np.where(offsets >= 0, offsets + base, NOT_KEPT)
            for offsets in (kept.offsets, kept.representations)
        ]
        sequence.kept(kept.first, *found)

    def _end(self, request_id: str) -> None:
        sequence = self._residents.pop(request_id, None)
        self._sequences.pop(request_id, None)
        if sequence is not None:
            self._kept.give_back(sequence.rows)

    def _lose(self, sequence: ResidentSequence, why: str) -> None:
        """The request's bytes are gone: it is named with this step, whatever its rows attend to."""
        if not sequence.is_lost:
            logger.warning("hotkv: request %s is computed anew: %s", sequence.request_id, why)
        sequence.is_lost = True
        self._lost[sequence.first_block] = sequence.request_id

    def take_counters(self) -> dict[str, float]:
        counted, self._counted = self._counted, Counter()
        return {**super().take_counters(), **counted}

    def gave_up(self, layer_name: str) -> None:
        """The layer's step was left to vLLM's own attention: whoever has blocks in host memory
        only is lost."""
        super().gave_up(layer_name)
        for sequence in self._row_of.values():
            if sequence.num_freed > self._num_sinks:
                self._lose(sequence, f"attention of {layer_name} broke")

    # --------------------------------------------------------------------------------------- layers

    def attend(
        self,
        layer: SparseLayer,
        key: object,
        batch: Callable[[], Batch],
        query_of: Callable[[int], F32],
    ) -> Rewrite | None:
        """As `SparseWorker.attend`. The answer may name a staging area to attend to in place of the
        layer's pages; None: everything, in the layer's pages."""
        plan = self._plans.get(layer.group)
        if not isinstance(plan, ResidentPlan) or plan.key is not key:
            plan = self._plans[layer.group] = self._resident_plan(layer, key, batch())
        for one in plan.residents.values():
            try:
                self._keep(layer, one)
            except (LostError, IndexError, ValueError) as error:
                self._lose(one.sequence, f"its representations can't be had: {error}")
        chosen = self._chosen(layer, plan, query_of)
        return self._rewritten(layer, plan, chosen)

    def _resident_plan(self, layer: SparseLayer, key: object, batch: Batch) -> ResidentPlan:
        """Forgets what the step has overwritten, and finds out whose row each is."""
        tokens, plan = layer.shape.block_tokens, ResidentPlan(key, batch)
        written = batch.written_slots[batch.written_slots >= 0] // tokens
        indices = [other.index for other in self.layers.values() if other.group == layer.group]
        self._reprs.forget(np.unique(written).astype(np.int32), indices)
        num_queries = np.diff(batch.starts)
        for row in np.flatnonzero(num_queries > 0).tolist():
            context = int(batch.seq_lens[row])
            blocks = batch.tables[row, : -(-context // tokens)].copy()
            sequence = self._row_of.get(int(blocks[-1]))
            if sequence is None:
                plan.unknown.append(row)
                continue
            one = _BatchRow(row, sequence, context - int(num_queries[row]), context, blocks)
            plan.residents[row] = one
            self._give_rows(one, tokens)
            request_id = self._request_of.get(int(blocks[-1])) if num_queries[row] == 1 else None
            if request_id is not None and context >= self._config.min_context_tokens:
                plan.rows.append(self._sparse_row(one, int(batch.starts[row]), tokens))
        return plan

    def _sparse_row(self, one: _BatchRow, token: int, block_tokens: int) -> Row:
        always = one.blocks[span(self._config, one.context_tokens, block_tokens).always]
        # The partial block is the last one, so the tokens that do not exist yet are at the end.
        missing = len(one.blocks) * block_tokens - one.context_tokens
        return Row(
            one.row,
            token,
            one.sequence.request_id,
            one.context_tokens,
            one.sequence.rows[: len(one.blocks)],
            always,
            len(always) * block_tokens - missing,
        )

    # ------------------------------------------------------------------------------ representations

    def _give_rows(self, one: _BatchRow, block_tokens: int) -> None:
        """Sees to it that each block of a context that may become sparse has a row."""
        sequence, count = one.sequence, len(one.blocks)
        if not self._is_kept(one) or count <= len(sequence.rows):
            return
        more = max(count - len(sequence.rows), min(len(sequence.rows), 64), 16)
        sequence.rows = np.concatenate([sequence.rows, self._kept.take(more)])

    def _is_kept(self, one: _BatchRow) -> bool:
        return one.sequence.may_outgrow or one.context_tokens >= self._config.min_context_tokens

    def _keep(self, layer: SparseLayer, one: _BatchRow) -> None:
        """Puts the representations of blocks that have become complete into the request's rows."""
        if not self._is_kept(one):
            return
        sequence, index = one.sequence, layer.index
        if not self._reprs.is_calibrated(index):
            return
        known = sequence.num_kept.get(index, 0)
        complete = one.context_tokens // layer.shape.block_tokens
        if complete <= known:
            return
        positions = np.arange(known, complete)
        is_away = self._is_away(one, positions)
        here = positions[~is_away]
        if len(here):
            blocks = one.blocks[here]
            self._update(index, [blocks])
            self._kept.copy(index, sequence.rows[here], blocks)
        if is_away.any():
            self._keep_away(layer, sequence, positions[is_away])
        sequence.num_kept[index] = complete

    def _is_away(self, one: _BatchRow, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which positions are not on the device."""
        away: npt.NDArray[np.bool_] = (positions >= self._num_sinks) & (
            positions < one.sequence.num_freed
        )
        return away

    def _keep_away(
        self, layer: SparseLayer, sequence: ResidentSequence, positions: npt.NDArray[np.int64]
    ) -> None:
        """The same for blocks that only the server has: their representations are copied from
        there, or built from their keys."""
        sequence.has_read = True
        addresses = sequence.representations[positions]
        there = positions[addresses >= 0]
        for name, source in self._kept.sources(layer.index).items():
            place = self._places.representations[layer.index][name]
            row_bytes = layer.shape.row_bytes(name)
            to = source.pool.ctypes.data + sequence.rows[there].astype(np.int64) * row_bytes
            self._copier.copy(to, addresses[addresses >= 0] + place, row_bytes)
        missing = positions[addresses < 0]
        for start in range(0, len(missing), BUILD_PAGES):
            part = missing[start : start + BUILD_PAGES]
            pages = self._staged(layer, len(part))
            self._copier.copy(
                self._page_addresses(pages, np.arange(len(part)), layer),
                self._away_addresses(sequence, part) + self._places.pages[layer.index],
                layer.pages.page_bytes,
            )
            keys = layer.pages.over(pages).keys_of(np.arange(len(part), dtype=np.int32))
            for name, source in self._kept.sources(layer.index).items():
                source.pool[sequence.rows[part]] = build(name, keys, source.mu, axes=source.axes)
            self._counters.add(layer.index, "built_blocks", len(part))

    # ------------------------------------------------------------------------------------- choosing

    def _chosen(
        self, layer: SparseLayer, plan: ResidentPlan, query_of: Callable[[int], F32]
    ) -> dict[int, I32]:
        """By row: positions of the blocks to attend to. A row whose selection breaks, or that
        attends to everything, is left out."""
        chosen: dict[int, I32] = {}
        if not self._reprs.is_calibrated(layer.index):
            return chosen
        if self.is_off or self._faults.rests(layer.name, self._num_steps):
            return chosen
        for row in plan.rows:
            if plan.residents[row.row].sequence.is_lost:
                continue
            try:
                found = self._select(layer, row, query_of(row.token))
            except Exception:  # noqa: BLE001 - as in `backend`: the row attends to everything
                self.fault(layer.name)
                continue
            if self._leaves_out(row, found):
                chosen[row.row] = found
        if plan.rows:
            self._faults.good_step(layer.name)
        return chosen

    def _sources(self, layer: SparseLayer) -> Mapping[str, Source]:
        return self._kept.sources(layer.index)

    def _is_sampled(self, layer: SparseLayer) -> bool:
        """Never: most keys of the context are not on the device."""
        return False

    # ------------------------------------------------------------------------------------ rewriting

    def _rewritten(
        self, layer: SparseLayer, plan: ResidentPlan, chosen: dict[int, I32]
    ) -> Rewrite | None:
        staged = [
            one
            for row, one in plan.residents.items()
            if row not in chosen and one.sequence.num_freed > self._num_sinks
        ]
        tables: dict[int, I32] = {}
        for row, positions in chosen.items():
            one = plan.residents[row]
            try:
                tables[row] = self._with_hot_slots(layer, one, positions)
            except (LostError, IndexError) as error:
                self._lose(one.sequence, str(error))
                tables[row] = one.blocks[positions]
        if not tables and not staged:
            return None
        rewrite = plan.restored()
        for row, table in tables.items():
            one = plan.residents[row]
            rewrite.tables[row, : len(table)] = table
            rewrite.seq_lens[row] -= (len(one.blocks) - len(table)) * layer.shape.block_tokens
        plan.rewritten = list(tables)
        if staged:
            self._stage(layer, plan, rewrite, staged)
        return rewrite

    def _with_hot_slots(self, layer: SparseLayer, one: _BatchRow, positions: I32) -> I32:
        """The block table of a decode row: blocks on the device, and hot slots for the others,
        whose pages are copied in if they aren't there."""
        table, sequence = one.blocks[positions], one.sequence
        # Positions rise, so those that are not on the device are a run of them.
        run = slice(
            int(positions.searchsorted(self._num_sinks)),
            int(positions.searchsorted(sequence.num_freed)),
        )
        if run.start >= run.stop:
            return table
        away = positions[run]
        slots = self._sequences[sequence.request_id].layers[layer.name].slots_of(away)
        # Negative numbers are large ones where the sign is a digit.
        if np.maximum.reduce(slots.view(np.uint32)) >= len(sequence.hot_blocks):
            raise LostError(
                f"a hot set uses slot {slots.max()} of the {len(sequence.hot_blocks)} it has"
            )
        content = sequence.hot_content(layer.index)
        at = (content[slots] != away).nonzero()[0]
        blocks = sequence.hot_blocks[slots]
        if len(at):
            missing = away[at]
            self._copier.copy(
                self._page_addresses(layer.pages.tensor, blocks[at], layer),
                self._away_addresses(sequence, missing) + self._places.pages[layer.index],
                layer.pages.page_bytes,
            )
            content[slots[at]] = missing
            self._counted["resident_pulled_pages"] += len(at)
        table[run] = blocks
        return table

    def _stage(
        self,
        layer: SparseLayer,
        plan: ResidentPlan,
        rewrite: Rewrite,
        staged: Iterable[_BatchRow],
    ) -> None:
        """Puts the pages that the whole batch attends to side by side, and points its tables
        there."""
        tokens = layer.shape.block_tokens
        whole = {one.row: one for one in staged}
        rows = np.flatnonzero(np.diff(plan.batch.starts) > 0).tolist()
        counts = {row: -(-int(rewrite.seq_lens[row]) // tokens) for row in rows}
        pages = self._staged(layer, sum(counts.values()))
        kv, at = layer.pages.tensor, 0
        to, source = [], []
        for row in rows:
            count = counts[row]
            addresses = self._page_addresses(kv, rewrite.tables[row, :count], layer)
            if row in whole:
                one = whole[row]
                away = np.flatnonzero(self._is_away(one, np.arange(count)))
                try:
                    found = self._away_addresses(one.sequence, away)
                    addresses[away] = found + self._places.pages[layer.index]
                except LostError as error:
                    self._lose(one.sequence, str(error))
                self._counted["resident_staged_pages"] += count
            to.append(self._page_addresses(pages, np.arange(at, at + count), layer))
            source.append(addresses)
            rewrite.tables[row, :count] = np.arange(at, at + count)
            at += count
        plan.rewritten = rows
        self._copier.copy(np.concatenate(to), np.concatenate(source), layer.pages.page_bytes)
        rewrite.pages = pages

    def _away_addresses(self, sequence: ResidentSequence, positions: npt.NDArray[Any]) -> I64:
        """Addresses of blocks that only the server has; their positions rise. Raises LostError."""
        if sequence.is_lost:
            raise LostError("it was lost before")
        if len(positions) and positions[-1] >= len(sequence.addresses):
            raise LostError("it is not known where the server keeps its blocks")
        addresses = sequence.addresses[positions]
        if len(addresses) and np.minimum.reduce(addresses) < 0:
            raise LostError("it is not known where the server keeps some of its blocks")
        sequence.has_read = True
        return addresses

    def _page_addresses(
        self, pages: torch.Tensor, blocks: npt.NDArray[Any], layer: SparseLayer
    ) -> I64:
        addresses: I64 = pages.data_ptr() + blocks.astype(np.int64) * layer.pages.page_bytes
        return addresses

    def _staged(self, layer: SparseLayer, num_pages: int) -> torch.Tensor:
        """The staging area as pages of a layer, at least so many. Its memory stays."""
        num_bytes = num_pages * layer.pages.page_bytes
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(
                max(num_bytes, 2 * self._staging.numel()), dtype=torch.uint8
            )
        kv = layer.pages.tensor
        room = self._staging.numel() // layer.pages.page_bytes
        flat = self._staging[: room * layer.pages.page_bytes].view(kv.dtype)
        return flat.view(room, *kv.shape[1:])
