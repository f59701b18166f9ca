"""Identity of weights by their files: what it tells apart, and whether these may be others than
those that were loaded."""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotkv_vllm.compat import model_weights


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def test_weights_identity_is_content_not_path(tmp_path: Path) -> None:
    big = {f"t{i}": np.random.default_rng(i).bytes(3 << 20) for i in range(4)}
    for name in ("one", "two", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    safetensors(tmp_path / "one" / "model.safetensors", big)
    safetensors(tmp_path / "two" / "model.safetensors", big)
    safetensors(
        tmp_path / "tuned" / "model.safetensors", big | {"t2": bytes(255 - b for b in big["t2"])}
    )
    one, two, tuned = (
        model_weights.files_identity(tmp_path / name) for name in ("one", "two", "tuned")
    )
    assert one == two != tuned
    (tmp_path / "two" / "config.json").write_text('{"a": 1}')
    assert model_weights.files_identity(tmp_path / "two") != one
    with pytest.raises(ValueError, match="no weights files"):
        model_weights.files_identity(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 9, struct.pack("<Q", 20) + b"not json at all ....", b"x" * (9 << 20)]
)
def test_weights_identity_of_damaged_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    first = model_weights.files_identity(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data + b"y")
    assert model_weights.files_identity(tmp_path) != first


def safetensors_of(path: Path, name: str, data: bytes, shape: tuple[int, ...]) -> str:
    text = json.dumps(
        {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, len(data)]}}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return model_weights.files_identity(path)


@pytest.mark.parametrize(
    "name, shape",
    [("model.embed_tokens.weight", (1024, 10 << 10)), ("experts.w2", (64, 16, 10 << 10))],
)
def test_weights_identity_tells_one_row_of_embeddings_and_one_expert(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    file, data = (
        tmp_path / "model.safetensors",
        np.random.default_rng(1).integers(0, 256, np.prod(shape), np.uint8),
    )
    seen = {safetensors_of(file, name, data.tobytes(), shape)}
    rows = data.reshape(shape[0], -1)
    for index in (0, 1, 17, shape[0] - 2, shape[0] - 1):
        rows[index] ^= 1
        seen.add(safetensors_of(file, name, data.tobytes(), shape))
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("shape", "num_slices"),
    [
        ((model_weights.MAX_SLICES, 2, 8), model_weights.MAX_SLICES),
        ((model_weights.MAX_SLICES + 1, 2, 8), 1),
        ((3, 2, 8), 3),
        ((3, 16), 1),
        ((1, 2, 8), 1),
    ],
)
def test_slices_of_a_tensor_are_sampled_as_long_as_they_are_few(
    shape: tuple[int, ...], num_slices: int
) -> None:
    size = int(np.prod(shape)) * 4096
    pieces = model_weights._pieces("experts.w2", {"data_offsets": [64, 64 + size], "shape": shape})
    assert len(pieces) == 3 * num_slices
    assert {begin for begin, _ in pieces} >= {
        64 + number * (size // num_slices) for number in range(num_slices)
    }
    assert max(end for _, end in pieces) == 64 + size


def test_a_tensor_without_values_is_read_as_nothing() -> None:
    assert not model_weights._pieces("experts.w2", {"data_offsets": [64, 64], "shape": [0, 2, 8]})


def test_what_changed_since_a_moment(tmp_path: Path) -> None:
    """Files in place, files moved there, and links that lead elsewhere now."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "current").symlink_to(tmp_path / "link")
    path = tmp_path / "current"

    def is_new_after(change: Callable[[], object]) -> bool:
        # File systems' clocks go by some milliseconds.
        time.sleep(0.02)
        moment_s = time.time()
        assert not model_weights.changed_since(path, moment_s)
        time.sleep(0.02)
        change()
        return model_weights.changed_since(path, moment_s)

    def switch() -> None:
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").rename(tmp_path / "link")

    def move() -> None:
        (tmp_path / "two" / "new").write_bytes(b"x")
        (tmp_path / "two" / "new").rename(tmp_path / "two" / "model.safetensors")

    assert is_new_after(lambda: (tmp_path / "one" / "model.safetensors").write_bytes(b"x"))
    assert is_new_after(switch) and is_new_after(move)
    assert is_new_after(lambda: (tmp_path / "two" / "modeling.py").write_text("pass"))
    assert not is_new_after(lambda: (tmp_path / "one" / "model.safetensors").write_bytes(b"y"))


def test_when_this_process_began() -> None:
    code = (
        "import time; from hotkv_vllm.compat.model_weights import process_start_s as began; "
        "print(time.time(), began())"
    )
    before_s = time.time()
    now_s, began_s = map(
        float,
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, text=True
        ).stdout.split(),
    )
    assert before_s - 0.02 <= began_s <= now_s


def test_commits_name_weights_and_branches_do_not() -> None:
    assert (
        model_weights.is_commit("0" * 40)
        and not model_weights.is_commit("main")
        and not model_weights.is_commit("v1.0")
    )
