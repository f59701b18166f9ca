"""Identity of a model's weights: equal only where the weights are.

Never a path. A revision's commit where the model comes from a hub; else a digest of the files: all names, sizes and small files
whole, of each tensor in a safetensors file its header entry and bytes from its begin, middle and end, of other large files a page
in every mebibyte. Fine-tunes share index and headers, so these alone would not do.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

WHOLE_FILE_BYTES = 8 << 20
SAMPLE_BYTES = 4096
STRIDE_BYTES = 1 << 20
MAX_HEADER_BYTES = 256 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt")
SIDE_FILES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "params.json",
    # What makes embeddings of images, video and sound.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    """True for a full commit hash, which names bytes; a branch or a tag does not."""
    return bool(_COMMIT.fullmatch(revision))


def files_identity(path: Path) -> str:
    """Digest of a weights file, or of all weights files of a folder. Raises OSError, or ValueError where there are none."""
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file() and f.suffix in WEIGHT_SUFFIXES)
    if not files:
        raise ValueError(f"{path} has no weights files ({', '.join(WEIGHT_SUFFIXES)})")
    digest = hashlib.sha256(b"hotkv-weights-2\0")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for begin, end in _sampled_ranges(file, stream, size):
                stream.seek(begin)
                digest.update(stream.read(end - begin))
    if path.is_dir():
        for name in SIDE_FILES:
            side = path / name
            if side.is_file():
                digest.update(name.encode() + b"\0" + side.read_bytes())
    return "content:" + digest.hexdigest()


def _sampled_ranges(file: Path, stream: BinaryIO, size: int) -> Iterable[tuple[int, int]]:
    if size <= WHOLE_FILE_BYTES:
        return [(0, size)]
    if file.suffix == ".safetensors":
        ranges = _tensor_ranges(stream, size)
        if ranges:
            return ranges
    return [(at, min(at + SAMPLE_BYTES, size)) for at in range(0, size, STRIDE_BYTES)] + [(size - SAMPLE_BYTES, size)]


def _tensor_ranges(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Header, and samples of every tensor; nothing where the header can't be read."""
    header_bytes = int.from_bytes(stream.read(8), "little")
    data = 8 + header_bytes
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        return []
    try:
        entries = json.loads(stream.read(header_bytes))
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    ranges = [(0, data)]
    for begin, end in spans:
        middle = (begin + end) // 2
        for at in (begin, middle, end - SAMPLE_BYTES):
            first = data + max(begin, at)
            ranges.append((first, min(first + SAMPLE_BYTES, data + end)))
    return ranges
