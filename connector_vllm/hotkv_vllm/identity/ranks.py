"""The ranks' agreement on one key space, when they register their KV caches.

A slot has a shard of each rank with KV of its own, by pipeline stage and tensor-parallel rank. No
rank knows the others' layers and sizes. So each posts a note with its own key space, or why it
can't take part, and computes the engine's from all: all get the same, or all refuse.

Notes go through the store of torch's process group: a collective that timed out would make its
group unusable for vLLM.
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
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAX_SHARDS = 31
"""In a slot."""
_JOINED = frozenset({"groups", "page_format", "extra"})
"""Fields of `KeySpace` in which pipeline stages may differ."""
_rounds = itertools.count()


class RankStore(Protocol):
    """Part of `torch.distributed.Store`."""

    def set(self, key: str, value: bytes) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RankNote:
    """space: with the rank's own shard only; None if it can't use the cache.
    shard_bytes: per group; 0 without a layer of it.
    """

    place: RankPlace
    host: str
    space: KeySpace | None
    shard_bytes: tuple[int, ...] = ()
    why_off: str = ""


class MissingNoteError(Unsupported):
    """A note has not come in time. Ranks that have all notes may have agreed."""


def this_host() -> str:
    """The same in all containers of a machine."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def agree(note: RankNote, num_ranks: int, engine_id: str) -> tuple[KeySpace, RankPlace]:
    """The engine's key space, and this rank's place. Blocks for at most AGREE_TIMEOUT_S.

    Raises Unsupported. A rank that can't use the cache posts its note and raises at once; those
    that have all notes raise with one reason.
    """
    if num_ranks == 1:
        return decide([note], note.place.rank)
    store, prefix = process_group_store(), f"hotkv/{engine_id}/{next(_rounds)}"
    if note.space is None:
        store.set(f"{prefix}/{note.place.rank}", pickle.dumps(note))
        raise Unsupported(note.why_off)
    return decide(exchange(store, prefix, note, num_ranks, AGREE_TIMEOUT_S), note.place.rank)


def process_group_store() -> RankStore:
    """Raises Unsupported."""
    from torch.distributed import distributed_c10d

    try:
        store: RankStore = distributed_c10d._get_default_store()
    except (AttributeError, ValueError) as error:
        raise Unsupported(f"the engine's ranks can't exchange what they found ({error})") from None
    return store


def exchange(
    store: RankStore, prefix: str, note: RankNote, num_ranks: int, timeout_s: float
) -> list[RankNote]:
    """All notes by rank. Raises MissingNoteError.

    prefix: must be new in each call.
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
    """The engine's key space, and the place of `rank`.

    Raises Unsupported if a rank can't use the cache, the ranks are on several machines or hold
    more than MAX_SHARDS shards, or their key spaces contradict each other.
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
        # Others have read the files already; all open their sessions later.
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
    # Ranks with a copy come right after the writer, so they get its index.
    shard_index = sum(writer.place.rank <= rank for writer in writers) - 1
    return space, replace(mine, num_shards=len(writers), shard_index=shard_index)


def _check(notes: Sequence[RankNote]) -> None:
    """Raises Unsupported with the fields that differ."""
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
    """Equal in all stages. Not the window's size, which a stage without such a layer may not
    know."""
    return group.kind, group.block_tokens, group.window_tokens > 0


def _joined(notes: Sequence[RankNote], writers: Sequence[RankNote]) -> KeySpace:
    """Shards of all `writers`, whom others copy; layers of all ranks in their order. Page format
    and `extra` stand once if equal in all stages, else once per stage."""
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
