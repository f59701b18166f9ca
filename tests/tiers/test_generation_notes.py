"""Tests `GenerationNotes`, a server's record of flushes for the next server, in several folders:
where they disagree, it counts for nothing."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotkv_server.tiers.book.generations import GenerationBook, GenerationStanding, Record
from hotkv_server.tiers.drive.generation_notes import (
    GENERATIONS_FILE,
    GenerationNotes,
    NotesFolder,
    text_of,
)

FP, OTHER = "aa", "bb"
standings = st.builds(GenerationStanding, st.integers(0, 2**62), st.booleans(), st.booleans())
records = st.builds(
    Record, st.integers(0, 99), st.dictionaries(st.sampled_from(["valkey", "s3"]), standings)
)


def book_of(
    generation: int = 7, local: int = 3, *, is_verified: bool = True, is_unraised: bool = False
) -> GenerationBook:
    standing = GenerationStanding(generation, is_verified, is_unraised)
    return GenerationBook(("valkey",), {FP: Record(local, {"valkey": standing})})


def folders(tmp_path: Path, *, has_blocks: bool = True) -> list[NotesFolder]:
    made = [NotesFolder(tmp_path / name, has_blocks) for name in ("arena", "disk")]
    for one in made:
        one.path.mkdir(exist_ok=True)
    return made


@given(st.dictionaries(st.sampled_from([FP, OTHER]), records), st.integers(0, 5))
def test_a_book_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, known: dict[str, Record], base: int
) -> None:
    notes = GenerationNotes([NotesFolder(tmp_path_factory.mktemp("notes"))])
    book = GenerationBook((), known, base, 200)
    notes.write(text_of(book))
    again = notes.read(())
    assert (again.records, again.base, again.last) == (known, base, 200)


@pytest.mark.parametrize("has_blocks", [False, True])
def test_folder_without_file_confirms_no_block(tmp_path: Path, has_blocks: bool) -> None:
    arena, disk = folders(tmp_path, has_blocks=has_blocks)
    GenerationNotes([disk]).write(text_of(book_of()))
    record = GenerationNotes([arena, disk]).read(("valkey",)).records[FP]
    assert (
        record.stores["valkey"] == GenerationStanding(7, not has_blocks, False)
        and record.local == 3
    )


def test_what_files_disagree_on_is_not_vouched_for(tmp_path: Path) -> None:
    arena, disk = folders(tmp_path)
    GenerationNotes([arena]).write(text_of(book_of(7, 3)))
    GenerationNotes([disk]).write(text_of(book_of(9, 2, is_unraised=True)))
    # The settings now name a second store.
    found = GenerationNotes([arena, disk]).read(("valkey", "s3")).records[FP]
    assert found.stores == {
        "valkey": GenerationStanding(9, False, True, acknowledged=-1),
        "s3": GenerationStanding(),
    }
    assert found.local == 3
    GenerationNotes([arena]).write(text_of(book_of(9, is_verified=False)))
    found = GenerationNotes([arena, disk]).read(("valkey",)).records[FP]
    assert found.stores["valkey"] == GenerationStanding(9, False, True, acknowledged=-1)


@pytest.mark.parametrize("in_disk", [None, book_of(local=2), book_of(local=3)])
def test_missing_book_is_saved_before_blocks(
    tmp_path: Path, in_disk: GenerationBook | None
) -> None:
    """After a reboot only the disk's folder is left, and without the record no block on the disk
    can be read. `in_disk`: None (a new disk), an older record (a failed write), or the same."""
    arena, disk = folders(tmp_path)
    GenerationNotes([arena]).write(text_of(book_of(local=3)))
    if in_disk is not None:
        GenerationNotes([disk]).write(text_of(in_disk))
    book = GenerationNotes([arena, disk]).read(("valkey",))
    is_saved = in_disk is not None and in_disk.local(FP) == 3
    assert book.are_seals_saved == (book.saved >= book.revision) == is_saved
    GenerationNotes([arena, disk]).write(text_of(book))
    assert GenerationNotes([disk]).read(("valkey",)).local(FP) == 3
    assert GenerationNotes([arena, disk]).read(("valkey",)).are_seals_saved


DEEP, HUGE = "[" * 100_000, '{"format": 2, "key_spaces": {}, "base": 1e999, "last": 0}'


@pytest.mark.parametrize(
    "text",
    ["pipe", "", "{", "[]", '{"format": 1}', '{"format": 2, "key_spaces": 3}', DEEP, HUGE],
    ids=range(8),
)
def test_unreadable_file_says_nothing(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / GENERATIONS_FILE
    os.mkfifo(path) if text == "pipe" else path.write_text(text)
    book = GenerationNotes([NotesFolder(tmp_path, has_blocks=True)]).read(("valkey",))
    assert not book.records and "can't be used" in caplog.text


def test_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, disk = folders(tmp_path)
    notes = GenerationNotes([arena, disk])
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino) or fsync(fd))
    notes.write(text_of(book_of(7)))
    assert {(one.path / GENERATIONS_FILE).stat().st_ino for one in (arena, disk)} <= synced
    (disk.path / f"{GENERATIONS_FILE}.new").mkdir()
    with pytest.raises(OSError, match=GENERATIONS_FILE):
        notes.write(text_of(book_of(9)))
    assert GenerationNotes([arena]).read(()).records[FP].stores["valkey"].generation == 9
    assert GenerationNotes([disk]).read(()).records[FP].stores["valkey"].generation == 7


@pytest.mark.parametrize("is_unraised", [False, True])
def test_server_without_blocks_leaves_its_notes(tmp_path: Path, is_unraised: bool) -> None:
    book, notes = book_of(is_unraised=is_unraised), GenerationNotes([NotesFolder(tmp_path)])
    book.records[OTHER] = Record(0, {"valkey": GenerationStanding(7, True)})
    notes.discard(book)
    notes.write(text_of(book))
    notes.discard(book)
    assert (tmp_path / GENERATIONS_FILE).exists() == is_unraised
