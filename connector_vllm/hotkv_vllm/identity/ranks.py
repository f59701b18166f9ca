"""Lets the ranks of an engine agree on one key space (a model in a configuration) when they
register their KV caches.

A slot in the server holds a shard (part of a block) of each rank that has KV of its own, ordered by
pipeline stage and within a stage by tensor-parallel rank. A rank does not know the layers and sizes
of the other ranks. So each rank posts a note with its own key space, or with the reason why it
can't take part, and reads the notes of all ranks. All ranks compute the engine's key space from the
same notes, so they all get the same key space, or all refuse. If a rank's note is missing, the
other ranks stop waiting after AGREE_TIMEOUT_S and refuse.

The notes are posted to the key-value store of torch's process group. vLLM's collectives are not
used, because a collective that timed out would make its group unusable for vLLM.
"""

import itertools
import pickle
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from hotkv_proto.groups import GroupSpec
from hotkv_proto.keys import KeySpace
from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.checks import RankPlace
from hotkv_vllm.compat.model_weights import UNREAD

AGREE_TIMEOUT_S = 300.0
"""A rank waits at most this long for the notes of the other ranks (their descriptions of
themselves), seconds."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_SHARDS = 31
"""The most shards (parts of the ranks) in a slot that the server accepts."""
_JOINED = frozenset({"groups", "page_format", "extra"})
"""Fields of `KeySpace` that describe the layers of a rank. Pipeline stages have different layers,
so they may differ in these fields. In all other fields all ranks must agree."""
_rounds = itertools.count()


class RankStore(Protocol):
    """The part of `torch.distributed.Store` that this module uses."""

    def set(self, key: str, value: bytes) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RankNote:
    """The description of itself that a rank posts for the other ranks.

    place: the rank's position in the engine.
    host: id of the machine on which the rank runs (`this_host`).
    space: the rank's own key space, with its own shard only; None if the rank can't use the cache.
    shard_bytes: bytes of the rank's shard of a block, per group; 0 if the rank has no layer of the
        group.
    why_off: why the rank can't use the cache; empty if it can.
    """

    place: RankPlace
    host: str
    space: KeySpace | None
    shard_bytes: tuple[int, ...] = ()
    why_off: str = ""


class MissingNoteError(Unsupported):
    """Raised if the note of a rank (its description of itself for the other ranks) has not arrived
    in time. Other ranks may have received all notes and agreed on a key space (a model in a
    configuration)."""


def this_host() -> str:
    """Returns an id of this machine, which is the same in all containers on the machine. The id is
    the kernel's id of the last boot, or the machine's name if the kernel does not provide it."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def agree(note: RankNote, num_ranks: int, engine_id: str) -> tuple[KeySpace, RankPlace]:
    """Exchanges notes (a rank's description of itself) with all ranks, and derives the engine's key
    space. Returns the key space, which is the same in all ranks, and this rank's place (its
    position in the engine, and the index of its shard in each slot). Blocks until the notes of all
    ranks have arrived, for at most AGREE_TIMEOUT_S.

    Raises Unsupported, with the reason, if the engine can't use the cache. A rank that itself can't
    use the cache posts its note and raises at once. The other ranks read the notes of all ranks; if
    all notes have arrived, these ranks all raise with the same reason.

    note: this rank's note.
    engine_id: vLLM's id of the engine; part of the keys under which the notes are posted.
    """
    if num_ranks == 1:
        return decide([note], note.place.rank)
    store, prefix = process_group_store(), f"hotkv/{engine_id}/{next(_rounds)}"
    if note.space is None:
        store.set(f"{prefix}/{note.place.rank}", pickle.dumps(note))
        raise Unsupported(note.why_off)
    return decide(exchange(store, prefix, note, num_ranks, AGREE_TIMEOUT_S), note.place.rank)


def process_group_store() -> RankStore:
    """Returns the key-value store with which torch has set up its process groups. Raises
    Unsupported if torch has no such store."""
    from torch.distributed import distributed_c10d

    try:
        store: RankStore = distributed_c10d._get_default_store()
    except (AttributeError, ValueError) as error:
        raise Unsupported(f"the engine's ranks can't exchange what they found ({error})") from None
    return store


def exchange(
    store: RankStore, prefix: str, note: RankNote, num_ranks: int, timeout_s: float
) -> list[RankNote]:
    """Posts this rank's note (its description of itself) to `store`, torch's key-value store, and
    returns the notes of all ranks. Raises MissingNoteError if a note does not arrive within
    `timeout_s`.

    prefix: prefix of the keys in the store; must be new in each call.
    """
    until_s = time.monotonic() + timeout_s
    rank = 0
    try:
        store.set(f"{prefix}/{note.place.rank}", pickle.dumps(note))
        notes = []
        for rank in range(num_ranks):
            key = f"{prefix}/{rank}"
            store.wait([key], timedelta(seconds=max(0.001, until_s - time.monotonic())))
            notes.append(_parsed(store.get(key)))
    except RuntimeError as error:
        said = str(error).splitlines()
        raise MissingNoteError(
            f"rank {rank} has not said within {timeout_s:.0f} s what it found "
            f"({said[0] if said else 'no answer'})"
        ) from None
    return notes


def _parsed(data: bytes) -> RankNote:
    note: Any = pickle.loads(data)  # noqa: S301 - from this engine's own ranks, over the store that vLLM trusts too
    assert isinstance(note, RankNote), "another program posts notes under this engine's name"
    return note


def decide(notes: Sequence[RankNote], rank: int) -> tuple[KeySpace, RankPlace]:
    """Computes the key space (a model in a configuration) of the engine from the notes of all
    ranks. Returns the key space, and the place of `rank` (its position in the engine, and the index
    of its shard in each slot). The order of the notes does not matter.

    Raises Unsupported if a rank can't use the cache, if the ranks are on several machines, if they
    hold more than MAX_SHARDS different shards, or if their key spaces contradict each other.
    """
    notes = sorted(notes, key=lambda note: note.place.rank)
    for note in notes:
        if note.space is None:
            raise Unsupported(
                note.why_off if len(notes) == 1 else f"rank {note.place.rank}: {note.why_off}"
            )
    if len({note.host for note in notes}) > 1:
        raise Unsupported(
            "the engine's ranks are on several machines; hotkv keeps KV of engines that are on one"
        )
    if any(_space(note).weights_identity == UNREAD for note in notes):
        # Other ranks have read the weights' files already; all open their sessions later.
        notes = [
            replace(note, space=replace(_space(note), weights_identity=UNREAD)) for note in notes
        ]
    _check(notes)
    writers = [note for note in notes if note.place.is_writer]
    if len(writers) > MAX_SHARDS:
        raise Unsupported(
            f"the engine's ranks hold {len(writers)} different shards; at most {MAX_SHARDS} are "
            "supported"
        )
    space = _joined(notes, writers)
    mine = next(note.place for note in notes if note.place.rank == rank)
    # Ranks that hold a copy of a shard come right after the rank that writes the shard, so they get
    # the same index.
    shard_index = sum(writer.place.rank <= rank for writer in writers) - 1
    return space, replace(mine, num_shards=len(writers), shard_index=shard_index)


def _check(notes: Sequence[RankNote]) -> None:
    """Raises Unsupported, with the names of the fields that differ, if the ranks' key spaces (each
    is a model in a configuration) contradict each other."""
    first = _space(notes[0])
    differing = {
        field.name
        for note in notes
        for field in fields(KeySpace)
        if field.name not in _JOINED and _differs(first, note, field.name)
    }
    for note in notes:
        leader = next(other for other in notes if other.place.stage == note.place.stage)
        differing |= {name for name in _JOINED if _differs(_space(leader), note, name)}
        if [_rule(group) for group in _space(note).groups] != [
            _rule(group) for group in first.groups
        ]:
            differing.add("groups")
    if differing:
        raise Unsupported(
            f"the ranks do not agree on the key space ({', '.join(sorted(differing))})"
        )


def _space(note: RankNote) -> KeySpace:
    assert note.space is not None
    return note.space


def _differs(space: KeySpace, note: RankNote, name: str) -> bool:
    return bool(getattr(space, name) != getattr(_space(note), name))


def _rule(group: GroupSpec) -> tuple[Any, ...]:
    """Returns the properties of a KV cache group that must be equal in all pipeline stages. The
    size of the group's sliding window is not among them, because a stage without a layer of the
    group may not know the size."""
    return group.kind, group.block_tokens, group.window_tokens > 0


def _joined(notes: Sequence[RankNote], writers: Sequence[RankNote]) -> KeySpace:
    """Returns the key space (a model in a configuration) of the whole engine, made from the key
    spaces of its ranks. It has the shard sizes of all `writers`, and the layers of all ranks in the
    order of the ranks. The page format, and each entry of `KeySpace.extra`, appears once if it is
    equal in all pipeline stages, otherwise once per stage.

    writers: the notes of the ranks that store a shard (some ranks only hold a copy of another
        rank's shard).
    """
    groups = []
    for index, group in enumerate(_space(notes[0]).groups):
        sizes = tuple(writer.shard_bytes[index] for writer in writers)
        if not sum(sizes):
            raise Unsupported(f"no rank has a layer of KV cache group {index}")
        each = [_space(note).groups[index] for note in notes]
        names = tuple(dict.fromkeys(name for one in each for name in one.layer_names))
        groups.append(
            replace(
                group,
                shard_bytes=sizes,
                layer_names=names,
                window_tokens=max(one.window_tokens for one in each),
            )
        )
    stages = {note.place.stage: _space(note) for note in notes}
    formats = [space.page_format for space in stages.values()]
    return replace(
        _space(notes[0]),
        groups=tuple(groups),
        page_format=formats[0] if len(set(formats)) == 1 else "|".join(formats),
        extra=_joined_extra({stage: space.extra for stage, space in stages.items()}),
    )


def _joined_extra(extras: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns `KeySpace.extra` (further identifying texts) for the whole engine: first the texts
    that all pipeline stages have, then the other texts, each with the number of its stage.

    extras: `KeySpace.extra` of each stage's key space, by number of the stage.
    """
    common = [
        part
        for part in next(iter(extras.values()))
        if all(part in extra for extra in extras.values())
    ]
    return (
        *common,
        *(
            f"stage {stage}: {part}"
            for stage, extra in extras.items()
            for part in extra
            if part not in common
        ),
    )
