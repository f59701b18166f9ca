"""Ranks decide alike: one key space, or none uses hotkv. `RankNote`s come in any order, and some
ranks fail."""

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, distributed_c10d

from hotkv_proto.groups import GroupKind, GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_vllm.compat import Unsupported, checks
from hotkv_vllm.compat.checks import RankPlace
from hotkv_vllm.compat.model_weights import UNREAD
from hotkv_vllm.identity import ranks
from hotkv_vllm.identity.ranks import RankNote
from hotkv_vllm.metadata import HotKVHandshake
from hotkv_vllm.worker import layout
from tests.vllm.harness import prompt


def space(sizes: list[int], names: list[tuple[str, ...]], stage: int) -> KeySpace:
    groups = tuple(
        GroupSpec(GroupKind.FULL_ATTENTION, 16, (size or 1,), 0, name)
        for size, name in zip(sizes, names, strict=True)
    )
    parts = {"page_format": f"format {stage // 2}", "extra": ("all", f"layers of {stage}")}
    return KeySpace("model", "weights", "bfloat16", groups, 16, **parts)


def notes_of(stages: list[list[int]], tp_size: int, replicas: int) -> list[RankNote]:
    """stages: layers of each group, by stage; a layer has 8 bytes per rank.
    tp_size: tensor-parallel ranks per stage.
    replicas: neighbours with the same KV.
    """
    notes = []
    for stage, layers in enumerate(stages):
        names = [
            tuple(f"layer.{stage}.{group}.{i}" for i in range(count))
            for group, count in enumerate(layers)
        ]
        for rank in range(tp_size):
            place = RankPlace(stage * tp_size + rank, 0, 0, rank % replicas == 0, stage)
            sizes = [8 * count for count in layers]
            notes.append(RankNote(place, "here", space(sizes, names, stage), tuple(sizes)))
    return notes


def test_ranks_wait_for_those_that_still_read_weights() -> None:
    notes = notes_of([[2]], 3, 1)
    assert ranks.decide(notes, 0)[0].weights_identity == "weights"
    notes[1] = other_space(weights_identity=UNREAD)(notes[1])
    for rank in range(3):
        assert ranks.decide(notes, rank)[0].weights_identity == UNREAD
    notes[2] = other_space(weights_identity="others", dtype="float16")(notes[2])
    with pytest.raises(Unsupported, match="dtype"):
        ranks.decide(notes, 0)


def other_space(**change: Any) -> Callable[[RankNote], RankNote]:
    return lambda note: (
        note if note.space is None else replace(note, space=replace(note.space, **change))
    )


def more_groups(note: RankNote) -> RankNote:
    if note.space is None:
        return note
    groups = replace(note.space, groups=note.space.groups[:1] * 4)
    return replace(note, space=groups, shard_bytes=note.shard_bytes[:1] * 4)


SHAPES = st.tuples(
    st.integers(1, 3).flatmap(
        lambda groups: st.lists(
            st.lists(st.integers(0, 3), min_size=groups, max_size=groups), min_size=1, max_size=3
        )
    ),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (8, 1), (16, 1)]),
)
DAMAGES: list[Callable[[RankNote], RankNote]] = [
    lambda note: replace(note, space=None, why_off=f"trouble of {note.place.rank}"),
    lambda note: replace(note, host="elsewhere"),
    other_space(weights_identity="others"),
    other_space(extra=("else",)),
    more_groups,
]


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_ranks_decide_alike_whatever_the_order(shape: Any, data: st.DataObject) -> None:
    stages, (tp_size, replicas) = shape
    notes = notes_of(stages, tp_size, replicas)
    damaged = data.draw(
        st.lists(st.tuples(st.integers(0, len(notes) - 1), st.sampled_from(DAMAGES)), max_size=2)
    )
    for rank, damage in damaged:
        notes[rank] = damage(notes[rank])
    decided, places = [], {}
    for rank in range(len(notes)):
        try:
            found, places[rank] = ranks.decide(data.draw(st.permutations(notes)), rank)
            decided.append(found)
        except Unsupported as error:
            decided.append(str(error))
    assert all(one == decided[0] for one in decided)
    if any(note.space is None for note in notes):
        assert "trouble of" in decided[0]
    if isinstance(decided[0], KeySpace):
        check_slot(decided[0], notes, places)
    elif not damaged:
        lacks_layers = any(not sum(sizes) for sizes in zip(*stages, strict=True))
        assert lacks_layers or "different shards" in decided[0]


def check_slot(found: KeySpace, notes: list[RankNote], places: dict[int, RankPlace]) -> None:
    """A replica uses the shard of the rank before it."""
    writers = [note for note in notes if note.place.is_writer]
    assert found.num_shards == len(writers) <= ranks.MAX_SHARDS
    shard = -1
    for rank, note in enumerate(notes):
        shard += note.place.is_writer
        assert places[rank] == replace(note.place, num_shards=len(writers), shard_index=shard)
        for group, size in zip(found.groups, note.shard_bytes, strict=True):
            assert group.shard_bytes[shard] == size
    for index, group in enumerate(found.groups):
        names = [name for note in notes for name in note.space.groups[index].layer_names]
        assert group.layer_names == tuple(dict.fromkeys(names))


def test_differently_cut_or_packed_stages_dont_share() -> None:
    even, uneven = (
        ranks.decide(notes_of(stages, 1, 1), 0)[0] for stages in ([[2], [2]], [[1], [3]])
    )
    other = notes_of([[2], [2]], 1, 1)
    other[1] = other_space(page_format="packed")(other[1])
    assert len({one.fingerprint for one in (even, uneven, ranks.decide(other, 0)[0])}) == 3
    # What stages agree on stands once, as for one rank.
    stages = ("stage 0: layers of 0", "stage 1: layers of 1")
    assert even.page_format == "format 0" and even.extra == ("all", *stages)


def exchanged(notes: list[RankNote], num_ranks: int, timeout_s: float) -> dict[int, str]:
    """Fingerprints, or why hotkv is off. Ranks beyond `notes` post none."""
    store, came_to = HashStore(), {}

    def rank(note: RankNote) -> None:
        number = note.place.rank
        try:
            notes = ranks.exchange(store, "engine", note, num_ranks, timeout_s)
            came_to[number] = ranks.decide(notes, number)[0].fingerprint.hex()
        except Unsupported as error:
            came_to[number] = str(error)

    threads = [threading.Thread(target=rank, args=(note,)) for note in notes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return came_to


def test_notes_reach_all_ranks_missing_one_named() -> None:
    notes = notes_of([[2], [1]], 2, 1)
    assert len(set(exchanged(notes, 4, 20.0).values())) == 1
    notes[2] = replace(notes[2], space=None, why_off="no room")
    assert exchanged(notes, 4, 20.0) == dict.fromkeys(range(4), "rank 2: no room")
    came_to = exchanged(notes_of([[2], [1]], 1, 1)[:1], 2, 0.1)
    assert list(came_to) == [0]
    assert came_to[0].startswith("rank 1 has not said within 0 s what it found")


def test_ranks_meet_in_the_process_groups_store(monkeypatch: pytest.MonkeyPatch) -> None:
    note = notes_of([[1]], 2, 1)[0]
    assert ranks.agree(note, 1, "engine")[1].rank == note.place.rank
    with pytest.raises(Unsupported, match="can't exchange what they found"):
        ranks.agree(note, 2, "engine")
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    assert ranks.process_group_store() is store
    # It says so without waiting for others.
    with pytest.raises(Unsupported, match="no room"):
        ranks.agree(replace(note, space=None, why_off="no room"), 2, "engine")
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    with pytest.raises(Unsupported, match="can't exchange what they found"):
        ranks.agree(note, 2, "engine")


def test_rank_tells_others_whatever_breaks(
    engine: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RankNote] = []

    def agree(note: RankNote, num_ranks: int, engine_id: str) -> Any:
        told.append(note)
        return ranks.decide([note], 0)

    def describe(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(ranks, "agree", agree)
    monkeypatch.setattr(layout, "describe", describe)
    errors = Unsupported("unsupported"), OSError("no file"), KeyError("layer"), AssertionError()
    for error in errors:
        one = engine()
        assert told[-1].space is None
        assert told[-1].why_off in (str(error), f"{type(error).__name__}: {error}")
        assert one.worker.get_handshake_metadata() == HotKVHandshake(None, told[-1].why_off)
        assert one.generate("a", prompt(1, 200), 1)[1] == 0 and not server.sessions


def test_rank_that_missed_a_note_tells_others(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At wake-up it tells the others."""
    told: list[RankNote] = []

    def agree(note: RankNote, num_ranks: int, engine_id: str) -> Any:
        told.append(note)
        return ranks.decide(ranks.exchange(HashStore(), "", note, 2, 0.01), 0)

    monkeypatch.setattr(ranks, "agree", agree)
    one = engine()
    one.worker.unregister_kv_caches()
    one.worker.restore_kv_caches()
    assert [note.why_off[:23] for note in told] == ["", "rank 1 has not said wit"]


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"nnodes_within_dp": 2}, "several machines"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"distributed_executor_backend": "external_launcher"}, "external launcher"),
    ],
)
def test_impossible_is_refused_without_asking_others(parallel: dict[str, Any], words: str) -> None:
    sizes = {"prefill_context_parallel_size": 1, "nnodes_within_dp": 1, "world_size": 2}
    shape = sizes | {"distributed_executor_backend": "mp"}
    alone = {"distributed_executor_backend": "external_launcher", "world_size": 1}
    for fine in (shape, shape | alone):
        checks.check_ranks(SimpleNamespace(parallel_config=SimpleNamespace(**fine)))
    with pytest.raises(Unsupported, match=words):
        checks.check_ranks(SimpleNamespace(parallel_config=SimpleNamespace(**shape | parallel)))
