"""Equal identities of weights mean equal bytes of all files; and when a kept digest is believed."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hotkv_vllm import file_digests
from hotkv_vllm.compat.model_weights import files_identity
from hotkv_vllm.file_digests import RACY_S, file_digest

EARLIER_S = time.time() - 3600


def tensors() -> dict[str, torch.Tensor]:
    """bf16, and an int8 matrix with scales."""
    of = torch.Generator().manual_seed(1)
    return {
        "model.embed_tokens.weight": torch.randn(256, 96, generator=of).bfloat16(),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(64, 96, generator=of).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(2304, 2304, generator=of).bfloat16(),
        "model.layers.0.mlp.experts.w2": torch.randn(8, 16, 96, generator=of).bfloat16(),
        "model.layers.1.mlp.down_proj.qweight": torch.randint(
            -128, 128, (64, 96), generator=of, dtype=torch.int8
        ),
        "model.layers.1.mlp.down_proj.scales": torch.rand(64, generator=of).half(),
    }


def save(folder: Path, form: str, named: dict[str, torch.Tensor]) -> Path:
    """Returns the folder, or the GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "gguf":
        path = folder / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, tensor in named.items():
            raw = tensor.view(torch.int8) if tensor.dtype == torch.bfloat16 else tensor
            writer.add_tensor(name, raw.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
    (folder / "config.json").write_text("{}")
    names = list(named)
    shards = [names] if form == "safetensors" else [names[:3], names[3:]]
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: named[name].contiguous() for name in shard}, folder / file)
    return folder


def edit(tensor: torch.Tensor, kind: str, at: int) -> torch.Tensor:
    """One bit of each element of a row, column or element changed."""
    changed = tensor.clone()
    raw = changed.view(torch.int8 if tensor.dtype == torch.int8 else torch.int16)
    rows = raw.reshape(-1, raw.shape[-1])
    row, column = at % rows.shape[0], at % rows.shape[1]
    place = {
        "row": (row, slice(None)),
        "column": (slice(None), column),
        "element": (row, column),
    }[kind]
    rows[place] ^= 1
    return changed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, str]]]:
    """Path and identity."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
    # So that files have several chunks.
    patch.setattr(file_digests, "CHUNK_BYTES", 1 << 20)
    found = {}
    for form in ("safetensors", "sharded", "gguf"):
        path = save(tmp_path_factory.mktemp(form), form, tensors())
        found[form] = path, files_identity(path)
    yield found
    patch.undo()


@given(
    form=st.sampled_from(["safetensors", "sharded", "gguf"]),
    name=st.sampled_from(sorted(tensors())),
    kind=st.sampled_from(["row", "column", "element"]),
    at=st.integers(0, 1 << 20),
)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_edit_of_any_tensor_changes_identity(
    saved: dict[str, tuple[Path, str]],
    tmp_path: Path,
    form: str,
    name: str,
    kind: str,
    at: int,
) -> None:
    named = tensors()
    named[name] = edit(named[name], kind, at)
    with TemporaryDirectory(dir=tmp_path) as folder:
        assert files_identity(save(Path(folder), form, named)) != saved[form][1]


def test_equal_files_elsewhere_have_one_identity(
    saved: dict[str, tuple[Path, str]], tmp_path: Path
) -> None:
    for form, (_, identity) in saved.items():
        assert files_identity(save(tmp_path / form, form, tensors())) == identity


def test_digest_names_no_chunk_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", 4)
    found = set()
    for data in (b"", b"aaaa", b"aaaabbbb", b"bbbbaaaa", b"aaaabbb", b"aaaaaaaa"):
        path = tmp_path / "file"
        path.write_bytes(data)
        found.add(file_digest(path, None, 0.0))
    assert len(found) == 6


# ------------------------------------------------------------------------------------ kept digests


class Reader:
    """Asks as a new process would."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.folder = tmp_path / "model.safetensors", tmp_path / "kept"
        self.file.write_bytes(b"weights")
        self.reads = 0
        self.patch = monkeypatch
        read = file_digests._read

        def counted(path: Path, stamp: file_digests.Stamp) -> str:
            self.reads += 1
            return read(path, stamp)

        monkeypatch.setattr(file_digests, "_read", counted)
        monkeypatch.setattr(file_digests, "RACY_S", -1.0)
        monkeypatch.setattr(file_digests, "_file_system", lambda _: "ext4")

    def ask(self, began_s: float | None = None) -> str:
        file_digests._known.clear()
        return file_digest(self.file, self.folder, began_s or time.time() + 60)

    def record(self) -> Path:
        (record,) = self.folder.glob("*.json")
        return record


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


def test_a_file_is_read_once(reader: Reader) -> None:
    assert reader.ask() == reader.ask() and reader.reads == 1
    file_digest(reader.file, reader.folder, 0.0)
    assert reader.reads == 1


@pytest.mark.parametrize("place", range(6))
def test_digest_of_another_state_is_not_believed(reader: Reader, place: int) -> None:
    reader.ask()
    kept = json.loads(reader.record().read_text())
    kept["stamp"][place] = "/other" if place == 0 else kept["stamp"][place] + 1
    kept["digest"] = "0" * 64
    reader.record().write_text(json.dumps(kept))
    assert reader.ask() != "0" * 64 and reader.reads == 2


def test_a_file_that_changed_is_read_again(reader: Reader) -> None:
    before = reader.ask()
    times = reader.file.stat()
    reader.file.write_bytes(b"WEIGHTS")
    os.utime(reader.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reader.ask() != before and reader.reads == 2


def test_digest_of_a_fresh_file_isnt_kept(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "RACY_S", RACY_S)
    reader.ask()
    assert not list(reader.folder.glob("*.json"))


@pytest.mark.parametrize(("kind", "reads"), [("squashfs", 2), ("fuse", 2), ("", 2), ("xfs", 1)])
def test_image_and_gateway_times_are_not_believed(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, kind: str, reads: int
) -> None:
    monkeypatch.setattr(file_digests, "_file_system", lambda _: kind)
    reader.ask()
    reader.ask()
    assert reader.reads == reads


def test_ranks_of_one_start_share_a_digest_everywhere(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "_file_system", lambda _: "fuse")
    reader.ask(EARLIER_S)
    reader.ask(EARLIER_S)
    assert reader.reads == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record.write_text("{"),
        lambda record: record.write_text("[]"),
        lambda record: record.chmod(0o666),
        lambda record: (record.rename(record.with_name("x")), record.symlink_to("x")),
        lambda record: record.parent.chmod(0o777),
    ],
    ids=["damaged", "no record", "writable", "link", "folder writable"],
)
def test_record_others_could_write_is_not_believed(reader: Reader, spoil: object) -> None:
    first = reader.ask()
    assert callable(spoil)
    spoil(reader.record())
    assert reader.ask() == first and reader.reads == 2


def test_unusable_folder_costs_only_time(reader: Reader) -> None:
    reader.folder.write_text("a file")
    assert reader.ask() == reader.ask() and reader.reads == 2


def test_file_changing_while_read_is_refused(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads = file_digests._on_threads

    def changing(pieces: list[tuple[int, int, int]]) -> list[bytes]:
        found = on_threads(pieces)
        reader.file.write_bytes(b"others")
        return found

    monkeypatch.setattr(file_digests, "_on_threads", changing)
    with pytest.raises(OSError, match="changed while it was read"):
        reader.ask()


def test_a_process_waits_for_another_that_reads(reader: Reader) -> None:
    reader.ask()
    record = reader.record()
    kept = record.read_text()
    record.unlink()
    file_digests._known.clear()
    with file_digests._turn(record.with_suffix(".lock")):
        other = threading.Thread(target=reader.ask)
        other.start()
        record.write_text(kept)
        record.chmod(0o600)
    other.join()
    assert reader.reads == 1


def test_the_file_system_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        b"2 1 8:2 / /models rw shared:1 - squashfs /dev/loop0 ro\n"
        b"3 1 8:3 / /models/with\\040space rw - xfs /dev/sdb rw\n"
        b"4 1 8:4 / /models\xc3\xa4 rw - fuse.gateway none rw\n"
    )
    monkeypatch.setattr(file_digests, "MOUNTS", mounts)
    for path, kind in (
        ("/model", "ext4"),
        ("/models/a", "squashfs"),
        ("/models/with space/a", "xfs"),
        ("/modelsä/a", "fuse.gateway"),
        ("/modelsb", "ext4"),
    ):
        assert file_digests._file_system(path) == kind
    monkeypatch.setattr(file_digests, "MOUNTS", tmp_path / "none")
    assert file_digests._file_system("/a") == ""


def test_a_large_file_is_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(1).bytes(50_500))
    many = file_digest(path, None, 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    file_digests._known.clear()
    assert file_digest(path, None, 0.0) == many
