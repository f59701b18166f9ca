"""Parts of `ResidentWorker`, such as `PageCopier` and `KeptRows`."""

import ctypes
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotkv_client.arena import Arena
from hotkv_client.types import ResidencyOpened
from hotkv_proto import words
from hotkv_sparse import SparseConfig
from hotkv_sparse.axes import Axes
from hotkv_sparse.config import COPY_METHODS
from hotkv_sparse.vllm.cpu import resident_worker as resident_worker_module
from hotkv_sparse.vllm.cpu.batch import Batch
from hotkv_sparse.vllm.cpu.pool import BlockReprManager, LayerShape
from hotkv_sparse.vllm.cpu.resident_pages import slot_places
from hotkv_sparse.vllm.cpu.resident_sequences import (
    FIRST_ROWS,
    KeptRows,
    ResidentSequence,
    ResidentSequences,
    num_rows_for,
)
from hotkv_sparse.vllm.cpu.resident_worker import ResidentWorker
from hotkv_sparse.vllm.cpu.swap import PageCopier
from hotkv_sparse.vllm.cpu.worker import MAX_IN_A_ROW
from hotkv_sparse.vllm.scheduler.resident import Resident
from hotkv_sparse.vllm.scheduler.rows import SparseRows
from hotkv_sparse.vllm.step import KeptBlocks, ResidentRow, ResidentStep
from tests.sparse.engines.sparse_parts import QUERIES, Cache

HEADS, TOKENS, SIZE = 2, 32, 32
ROT = "rot2u"


def addresses(pages: np.ndarray, chosen: list[int]) -> np.ndarray:
    return pages.ctypes.data + np.array(chosen, np.int64) * pages.shape[1]


@pytest.mark.parametrize("method", COPY_METHODS)
def test_pages_of_changing_counts_and_sizes_are_copied(method: str) -> None:
    copier = PageCopier(method=method)
    dice = np.random.default_rng(1)
    for count, page_bytes in ((3, 64), (200, 64), (5, 4096), (2, 64), (700, 16384), (0, 64)):
        source = dice.integers(0, 256, (count + 7, page_bytes), np.uint8)
        # Half in a row.
        chosen = dice.permutation(count + 7)[:count].tolist()
        chosen[: count // 2] = sorted(chosen[: count // 2])
        target = np.zeros((count + 1, page_bytes), np.uint8)
        copier.copy(addresses(target, list(range(count))), addresses(source, chosen), page_bytes)
        assert np.array_equal(target[:count], source[chosen]) and not target[count:].any()


def test_only_a_copy_of_a_mebibyte_starts_threads() -> None:
    copier, source = PageCopier(num_threads=3), np.full((256, 4096), 7, np.uint8)
    for count in (255, 256):
        target, pages = np.zeros_like(source), list(range(count))
        copier.copy(addresses(target, pages), addresses(source, pages), 4096)
        assert (target[:count] == 7).all() and (copier._threads is not None) == (count == 256)


def test_memcpy_copies_runs_and_batch_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, memmove = list[int](), ctypes.memmove

    def noted(to: int, source: int, num_bytes: int) -> None:
        sizes.append(num_bytes)
        memmove(to, source, num_bytes)

    monkeypatch.setattr("ctypes.memmove", noted)
    source, target = np.full((256, 8192), 7, np.uint8), np.zeros((256, 8192), np.uint8)
    to, chosen = addresses(target, [0, 1, 2, 4, 5]), addresses(source, [3, 4, 5, 6, 9])
    PageCopier(method="memcpy").copy(to, chosen, 8192)
    assert sizes == [3 * 8192, 8192, 8192] and (target[[0, 1, 2, 4, 5]] == 7).all()
    batch, pages = PageCopier(num_threads=3, method="batch"), list(range(256))
    batch.copy(addresses(target, pages), addresses(source, pages), 8192)
    assert (target == 7).all() and batch._threads is None


def test_copy_refused_a_thread_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier, source = PageCopier(num_threads=3), np.full((3, 1 << 20), 7, np.uint8)
    first, second = np.zeros_like(source), np.zeros_like(source)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refused)
        copier.copy(addresses(first, [0, 1, 2]), addresses(source, [0, 1, 2]), 1 << 20)
    assert (first == 7).all()
    first[:] = 0
    for _ in range(2):
        copier.copy(addresses(second, [0, 1, 2]), addresses(source, [0, 1, 2]), 1 << 20)
    assert (second == 7).all() and not first.any()


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def pool(formats: tuple[str, ...] = (ROT,)) -> BlockReprManager:
    shape = LayerShape(16, TOKENS, HEADS, SIZE, formats)
    dice = np.random.default_rng(2)
    keys = dice.standard_normal((16, TOKENS, HEADS, SIZE)).astype(np.float32)
    return BlockReprManager({0: shape}, {0: lambda blocks: keys[blocks]})


def test_rows_keep_their_bytes_as_more_are_taken() -> None:
    built = pool()
    built.update(0, np.arange(16, dtype=np.int32))
    kept = KeptRows(built)
    rows = kept.take(16)
    kept.copy(0, rows, np.arange(16, dtype=np.int32))
    wanted = built.sources(0)[ROT].pool
    assert np.array_equal(kept.sources(0)[ROT].pool[rows], wanted)
    others = kept.take(2 * FIRST_ROWS)
    grown = kept.sources(0)[ROT].pool
    assert len(grown) > max(others.max(), rows.max())
    assert np.array_equal(grown[rows], wanted)
    assert not set(rows.tolist()) & set(others.tolist())


@pytest.mark.parametrize(
    ("parts", "num_rows"), [([3000, 64], 4096), ([16] * 70, 2048), ([1, 1024, 7167], 8192)]
)
def test_as_many_rows_are_allocated_as_are_counted(parts: list[int], num_rows: int) -> None:
    kept = KeptRows(pool())
    for part in parts:
        kept.take(part)
    assert len(kept.sources(0)[ROT].pool) == num_rows_for(sum(parts)) == num_rows


def test_sources_are_the_pools_after_calibration_too() -> None:
    built = pool((ROT, "mix2"))
    assert not built.is_calibrated(0), "one of the formats needs axes"
    kept = KeptRows(built)
    kept.take(4)
    first = kept.sources(0)["mix2"]
    assert kept.sources(0)["mix2"] is first and first.axes is None
    mu = np.ones((HEADS, SIZE), np.float32)
    built.calibrate(0, mu, some_axes())
    assert built.is_calibrated(0)
    later = kept.sources(0)["mix2"]
    assert later.axes is built.sources(0)["mix2"].axes is not None
    assert np.array_equal(later.mu, mu)


def test_workers_are_told_hot_slots_once() -> None:
    request, store = SimpleNamespace(request_id="a"), SimpleNamespace(stored_blocks=[0])
    state: Any = SimpleNamespace(request=request, store=store)
    one = Resident(state, 8, "r")
    told = [one.news(1, 1, 0, hot, 10, 1).hot_blocks for hot in ((), (5, 6), (5, 6), (7, 6))]
    assert told == [(), (5, 6), (), (7, 6)]
    one.begin_anew(0)
    assert one.news(1, 1, 0, (7, 6), 10, 1).hot_blocks == (7, 6)


def test_earlier_arena_unmaps_with_its_last_reader() -> None:
    sequences, mapped = ResidentSequences(KeptRows(pool())), list[Any]()
    memories = list[weakref.ref[np.ndarray]]()
    sequences.arena_of = lambda: mapped[-1]
    for number, name in enumerate("ab"):
        mapped[:] = [SimpleNamespace(file_id=(1, number), memory=np.zeros(64, np.uint8))]
        memories.append(weakref.ref(mapped[0].memory))
        places = np.zeros(1, np.int64)
        row = ResidentRow(name, number, number, True, 0)
        kept = KeptBlocks(0, places, places, (1, number))
        sequences.begin_step([replace(row, kept=(kept,))])
    mapped.clear()
    for ended, is_mapped in (("x", [True, True]), ("a", [False, True]), ("b", [False, False])):
        sequences.end(ended)
        sequences.begin_step([])
        gc.collect()
        assert [memory() is not None for memory in memories] == is_mapped


def resident_worker(num_blocks: int = 8) -> ResidentWorker:
    layer = Cache(num_blocks, 64, torch.float32).layer()
    config = SparseConfig(
        residency="host", sparse_topk=512, dense_layers=(), min_context_tokens=256
    )
    return ResidentWorker(config, [layer], slot_places([layer], [layer.name], 0))


def test_request_ending_before_key_change_is_forgotten() -> None:
    """Only `SparseRows` names this request."""
    worker = resident_worker()
    worker.begin_resident(ResidentStep((ResidentRow("a", 7, 3, True, 0),)))
    worker.begin_step(SparseRows(ended=("a",)))
    assert not worker.residents


def test_lost_preemption_message_begins_request_anew() -> None:
    """All its blocks are on the device again."""
    worker = resident_worker()
    rows = ResidentRow("a", 7, 3, True, 5), ResidentRow("b", 6, 4, True, 0)
    worker.begin_resident(ResidentStep(rows))
    worker.start_over()
    assert worker.residents.take_lost() == {3}
    worker.begin_resident(ResidentStep((ResidentRow("a", 5, 3, True, 0),)))
    assert not worker.residents.is_lost("a") and worker.residents.is_lost("b")


def test_row_planned_before_known_loss_reports_once() -> None:
    """A loss is reported by the first block, which may be another's by then."""
    worker = resident_worker()
    step = ResidentStep((ResidentRow("a", 7, 3, True, 5),))
    worker.begin_resident(step)
    worker.start_over()
    assert worker.residents.take_lost() == {3}
    worker.begin_resident(step)
    worker.gave_up(*worker.layers)
    assert worker.residents.is_lost("a") and not worker.residents.take_lost()
    # Two steps later another begins in block 3.
    worker.begin_resident(ResidentStep())
    worker.begin_resident(ResidentStep((ResidentRow("b", 6, 3, True, 5),)))
    for lost in ({3}, set()):
        worker.gave_up(*worker.layers)
        assert worker.residents.take_lost() == lost


def test_unnamed_rows_needing_the_arena_are_lost() -> None:
    residents = resident_worker().residents
    residents.begin_step((ResidentRow("a", 7, 3, True, 5), ResidentRow("b", 6, 4, True, 0)))
    for first_block, has_gaps, lost in ((3, False, {3}), (4, False, set()), (9, True, {9})):
        residents.lose_unnamed(first_block, has_gaps)
        assert residents.take_lost() == lost


@pytest.mark.parametrize("missing", [[], [2, 4, 5], [2, 3, 4, 5]])
def test_arena_blocks_sketches_are_read_or_built(
    monkeypatch: pytest.MonkeyPatch, missing: list[int]
) -> None:
    """The layer's pages stand for the arena."""
    monkeypatch.setattr(resident_worker_module, "BUILD_PAGES", 2)
    worker, positions = resident_worker(), np.arange(2, 6)
    (layer,) = worker.layers.values()
    built = worker.sketches
    built.update(layer.index, np.arange(8, dtype=np.int32))
    wanted = built.sources(layer.index)[ROT].pool
    sequence = ResidentSequence("a")
    slots = worker._pages.on_device(layer, layer.pages.tensor, np.arange(8))
    sketches = addresses(wanted.reshape(8, -1), list(range(8)))
    sketches[missing] = -1
    sequence.kept(0, slots, sketches)
    sequence.rows = worker._kept.take(8)
    worker._keep_away(layer, sequence, positions)
    kept = worker._kept.sources(layer.index)[ROT].pool[sequence.rows]
    assert np.array_equal(kept[positions], wanted[positions])
    assert not kept[[0, 1, 6, 7]].any() and sequence.has_read
    counted = worker.take_counters()
    numbers = [counted.get(f"sparse_{how}_blocks", 0) for how in ("loaded", "built")]
    assert numbers == [4 - len(missing), len(missing)]
    assert ("sparse_build_s" in counted) == bool(missing)


def some_axes() -> Axes:
    from hotkv_sparse.axes import AxesEstimate

    dice = np.random.default_rng(3)
    estimate = AxesEstimate(HEADS, SIZE)
    estimate.add(
        dice.standard_normal((256, HEADS, SIZE)).astype(np.float32),
        dice.standard_normal((256, 2 * HEADS, SIZE)).astype(np.float32),
    )
    found = estimate.axes(min_tokens=1)
    assert found is not None
    return found[1]


def arena_of(path: Path, start_number: int) -> Arena:
    size = 1 << 20
    numbers = np.zeros(words.WORD_COUNT, np.uint64)
    numbers[[words.OLDEST_START, words.LATEST_START, 1]] = start_number, start_number, 1
    path.write_bytes(bytes(words.words_offset_bytes(size)) + numbers.tobytes())
    with path.open("rb") as file:
        return Arena(file.fileno(), size, words.words_offset_bytes(size), words.WORD_COUNT)


def test_request_stored_anew_reads_new_arena_only(tmp_path: Path) -> None:
    """With "auto" the request is whole on the device when the server comes back empty."""
    residents = resident_worker().residents
    for name, start_number in (("old", 2), ("new", 1)):
        arena = arena_of(tmp_path / name, start_number)
        residents.arena_of = lambda arena=arena: arena  # type: ignore[misc]
        nowhere = np.full(4, -1, np.int64)
        kept = KeptBlocks(0, np.arange(4, dtype=np.int64) << 12, nowhere, arena.file_id)
        pin = ResidencyOpened("a", 1, 1, start_number)
        row = ResidentRow("a", 7, 3, True, 0, kept=(kept,), pin=pin)
        residents.begin_step((row,))
        sequence = residents.of_step[7]
        assert sequence.addresses[0] == arena.memory.ctypes.data
        sequence.has_read = True
        assert not residents.take_lost(), name
        if name == "old":
            earlier = weakref.ref(arena)
    assert earlier() is None


def test_places_are_known_though_the_server_died(tmp_path: Path) -> None:
    """The worker's connection may end before the scheduler's."""
    residents, arena = resident_worker().residents, arena_of(tmp_path / "arena", 1)
    residents.arena_of = lambda arena=arena: arena  # type: ignore[misc]
    residents.begin_step((ResidentRow("a", 7, 3, True, 0),))
    residents.arena_of = lambda: None
    kept = KeptBlocks(0, np.arange(4, dtype=np.int64), np.full(4, -1, np.int64), arena.file_id)
    residents.begin_step((ResidentRow("a", 7, 3, True, 4, kept=(kept,)),))
    assert residents.of_step[7].addresses[0] == arena.memory.ctypes.data
    residents.end("a")
    residents.begin_step(())
    earlier = weakref.ref(arena)
    del arena
    assert earlier() is None


def test_places_in_a_later_mapped_arena_count(tmp_path: Path) -> None:
    """The scheduler's connection may be there before the worker's."""
    residents, arena = resident_worker().residents, arena_of(tmp_path / "arena", 1)
    nowhere = np.full(2, -1, np.int64)
    first, next_ = (
        KeptBlocks(at, np.array([at, at + 1], np.int64) << 12, nowhere, arena.file_id)
        for at in (0, 2)
    )
    lost = replace(first, file_id=(0, 0))
    for kept in (lost,), (first,), (next_,):
        residents.begin_step((ResidentRow("a", 7, 3, True, 0, kept=kept),))
    assert not (residents.of_step[7].addresses >= 0).any()
    residents.arena_of = lambda: arena
    residents.begin_step((ResidentRow("a", 7, 3, True, 4),))
    found = residents.of_step[7].addresses[:4] - arena.memory.ctypes.data
    assert found.tolist() == [block << 12 for block in range(4)]
    assert not residents.of_step[7].unmapped


@pytest.mark.parametrize("freed", [10, 20])
def test_row_with_broken_selection_spoils_no_other(freed: int) -> None:
    """Both hot sets are discarded.

    freed: blocks from the first up to this index have left the device.
    """
    num_blocks, hot = 24, 24
    worker = resident_worker(2 * (num_blocks + hot) + 1)
    (layer,) = worker.layers.values()
    pages = layer.pages.tensor
    memory = pages.view(torch.uint8).reshape(-1).numpy()
    arena: Any = SimpleNamespace(memory=memory, file_id=(1, 1), holds=lambda _: True)
    worker.residents.arena_of = lambda: arena
    # They stand for the arena too: each block is its own copy.
    blocks = np.arange(1, 2 * num_blocks + 1, dtype=np.int32).reshape(2, num_blocks)
    slots = 2 * num_blocks + 1 + np.arange(2 * hot).reshape(2, hot)
    context, nowhere = num_blocks * TOKENS - 5, np.full(num_blocks, -1, np.int64)
    rows = tuple(
        ResidentRow(
            name,
            int(own[-1]),
            int(own[0]),
            True,
            freed,
            tuple(of_hot.tolist()),
            (KeptBlocks(0, own.astype(np.int64) * layer.pages.page_bytes, nowhere, (1, 1)),),
            ResidencyOpened(name, 1, 1, 1),
            context,
            1,
        )
        for name, own, of_hot in zip("ab", blocks, slots, strict=True)
    )
    written = tuple(blocks[:, -1].tolist())
    tables, lengths = blocks.copy(), np.full(2, context, np.int32)
    tables[:, 1:freed] = 0
    batch = Batch(np.arange(3, dtype=np.int32), lengths, tables, np.full(2, -1, np.int64))

    def query_of(token: int) -> np.ndarray:
        assert not token, "the second row breaks"
        return np.ones((QUERIES, 64), np.float32)

    worker.begin_step(SparseRows(written, ("a", "b")))
    worker.begin_resident(ResidentStep(rows))
    rewrite = worker.attend(layer, object(), lambda: batch, query_of)
    assert rewrite is not None and rewrite.pages is not None
    assert not worker.residents.take_lost() and rewrite.seq_lens.tolist() == [context, context]
    for row in range(2):
        found = rewrite.pages[torch.from_numpy(rewrite.tables[row, :num_blocks])]
        assert torch.equal(found, pages[torch.from_numpy(blocks[row])])


def test_a_layer_whose_selection_goes_on_breaking_rests() -> None:
    worker = resident_worker(25)
    (layer,) = worker.layers.values()
    blocks = np.arange(1, 25, dtype=np.int32)[None]
    context, queries = np.array([24 * TOKENS - 5], np.int32), []

    def query_of(token: int) -> np.ndarray:
        queries.append(token)
        raise RuntimeError("broken")

    batch = Batch(np.arange(2, dtype=np.int32), context, blocks, np.full(1, -1, np.int64))
    for _ in range(MAX_IN_A_ROW + 2):
        worker.begin_step(SparseRows((24,), ("a",)))
        worker.begin_resident(ResidentStep((ResidentRow("a", 24, 1, True, 0),)))
        assert worker.attend(layer, object(), lambda: batch, query_of) is None
    assert len(queries) == MAX_IN_A_ROW
