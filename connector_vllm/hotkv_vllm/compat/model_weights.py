"""Computes the identity of the weights that an engine has loaded: the weights of its model, of a
draft model, and of other models that the model's config names.

Parts of vLLM that this module reads: `ModelConfig.model`, `model_weights`, `revision`, `hf_config`,
`seed`, `trust_remote_code` and `code_revision`, `MultiModalConfig.mm_encoder_fp8_scale_path`,
`LoadConfig.load_format`, `SpeculativeConfig.draft_load_config`, `envs.VLLM_USE_MODELSCOPE` and
`envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH`.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

from vllm import envs

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.fingerprint import digest, draft_model

# -------------------------------------------------------------------------------------------- files

# Equal identities mean equal weights. An identity never contains a path.
#
# A model from a hub is identified by the commit of its revision. Any other model is identified by a
# digest over its files. The digest covers the names and sizes of all weights files. Small weights
# files are read as a whole. Of a large safetensors file, the header and pieces of each tensor are
# read. Of other large weights files, 4 KiB (SAMPLE_BYTES) of every mebibyte are read. Configuration
# files and the model's own Python code are read as a whole.
#
# Names, sizes and headers alone would not be enough, because fine-tuned models have the same names,
# sizes and headers. Training changes a part of every tensor that it trains. But it may train a
# single expert, or the embeddings of a few tokens. So pieces of each expert in a stacked tensor are
# read, and embeddings as a whole.


WHOLE_FILE_BYTES = 8 << 20
SAMPLE_BYTES = 4096
STRIDE_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
MAX_HEADER_BYTES = 256 << 20
MAX_SLICES = 4096
"""The digest of a weights file covers samples of each tensor. A stacked tensor (such as all experts
of a layer) is sampled slice by slice (expert by expert) if it has at most this many slices;
otherwise it is sampled as a whole."""
MAX_LINKS = 40
SUBFOLDERS = (
    *("audio_tokenizer", "whisper-large-v3", "adapters/retrieval", "adapters/text-matching"),
    *("adapters/classification", "adapters/clustering"),
)
"""Subfolders from which vLLM loads further weights (MiMo-Audio, Kimi-Audio, Jina v5)."""
OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Fields of a model's config (Ultravox has them) that name other models. vLLM loads further weights
from these models."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt")
SIDE_FILES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "config.json",
    "adapter_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "params.json",
    # Settings of the model's processors for images, video and sound.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

FROM_FILES = frozenset(
    (
        *("auto", "hf", "safetensors", "pt", "mistral", "fastsafetensors", "instanttensor"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state"),
    )
)
"""Values of `LoadConfig.load_format` with which vLLM reads the weights from the model's files. With
other values, including values that plugins define, weights may come from elsewhere, such as another
process, a service or a copy of old files (`npcache`), so the model's files don't identify them."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
"""Matches a model's folder in the hub's cache. Its path contains the repository and the commit."""
_OTHERS_CODE = re.compile(r'"([^"]+)--')
"""Matches the repository in a class's name in `auto_map`, such as "org/model--modeling.Model"."""
_EMBEDDINGS = re.compile(r"embed|wte|wpe")
"""Matches names of embedding tensors. These are read as a whole, because a model uses single rows
of them: even a change of a single row matters."""


def is_commit(revision: str) -> bool:
    """Returns True if a revision is a full commit hash, which identifies the files' bytes. A branch
    or a tag does not identify them."""
    return bool(_COMMIT.fullmatch(revision))


def hub_snapshot(path: str) -> tuple[str, str] | None:
    """Returns the repository and the commit of a model's folder in the hub's cache; None for
    another path.

    Source: `EngineArgs.__post_init__` in vLLM 0.32 replaces a repository's name by this path if
    HF_HUB_OFFLINE is set.
    """
    found = _SNAPSHOT.fullmatch(path)
    return (found[1].replace("--", "/", 1), found[2]) if found else None


def files_identity(path: Path) -> str:
    """Computes the identity of a model from its files: a weights file, or a folder with weights
    files. Raises OSError, or ValueError if the folder has no weights files."""
    files = _weights_files(path)
    if not files:
        raise ValueError(f"{path} has no weights files ({', '.join(WEIGHT_SUFFIXES)})")
    digest = hashlib.sha256(b"hotkv-weights-3\0")
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for begin, end in _sampled_ranges(file, stream, size):
                stream.seek(begin)
                for at in range(begin, end, CHUNK_BYTES):
                    digest.update(stream.read(min(CHUNK_BYTES, end - at)))
    for side in _side_files(path):
        digest.update(side.name.encode() + b"\0" + side.read_bytes())
    return "content:" + digest.hexdigest()


def changed_since(path: Path, moment_s: float) -> bool:
    """Returns True if a file that `files_identity` reads was created, moved or written after
    `moment_s`. Changes of the folder, and of symbolic links in the paths, count too. Raises
    OSError.

    moment_s: a time of the system's clock, seconds since the epoch.
    """
    files = [*_weights_files(path), *_side_files(path)]
    times = [place.stat().st_ctime for place in (path, *files)]
    times += [
        link.lstat().st_ctime for place in (path, *files) for link in _links(place.absolute())
    ]
    return max(times) > moment_s


def process_start_s() -> float:
    """Returns the time at which this process began, by the system's clock. The result is up to 10
    ms later than the true time. A forked process begins with the fork. Raises OSError."""
    # If the process is stopped between the readings of the two clocks, the difference is too small.
    boot_s = max(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) for _ in range(3))
    hertz = os.sysconf("SC_CLK_TCK")
    began_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return boot_s + (began_ticks + 1) / hertz


def _weights_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = (one for folder in _folders(path) for one in folder.iterdir() if one.is_file())
    return sorted(one for one in found if one.suffix in WEIGHT_SUFFIXES)


def _side_files(path: Path) -> list[Path]:
    """Returns the files in a model's folder, besides the weights files, that decide how the model
    computes: its configuration, and its own Python code."""
    if not path.is_dir():
        return []
    places = (folder / name for folder in _folders(path) for name in SIDE_FILES)
    return [*filter(Path.is_file, places), *sorted(path.glob("*.py"))]


def _folders(path: Path) -> list[Path]:
    """Returns a model's folder, and those of its `SUBFOLDERS` that exist."""
    return [path, *filter(Path.is_dir, (path / name for name in SUBFOLDERS))]


def _links(path: Path) -> Iterator[Path]:
    """Yields the symbolic links that are followed when an absolute path is resolved, at most
    MAX_LINKS."""
    for _ in range(MAX_LINKS):
        link = next(
            (place for place in (*reversed(path.parents), path) if place.is_symlink()), None
        )
        if link is None:
            return
        yield link
        path = Path(os.path.normpath(link.parent / link.readlink() / path.relative_to(link)))


def _sampled_ranges(file: Path, stream: BinaryIO, size: int) -> Iterable[tuple[int, int]]:
    if size <= WHOLE_FILE_BYTES:
        return [(0, size)]
    if file.suffix == ".safetensors":
        ranges = _tensor_ranges(stream, size)
        if ranges:
            return ranges
    return [(at, min(at + SAMPLE_BYTES, size)) for at in range(0, size, STRIDE_BYTES)] + [
        (size - SAMPLE_BYTES, size)
    ]


def _tensor_ranges(stream: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Returns the byte ranges to read of a safetensors file: its header, and pieces of every
    tensor. Empty if the header can't be read.

    stream: the file, at its start.
    size: size of the file, bytes.
    """
    header_bytes = int.from_bytes(stream.read(8), "little")
    data = 8 + header_bytes
    if header_bytes > min(MAX_HEADER_BYTES, size - 8):
        return []
    try:
        entries = json.loads(stream.read(header_bytes))
        pieces = sorted(
            piece
            for name, entry in entries.items()
            if name != "__metadata__"
            for piece in _pieces(name, entry)
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [(0, data), *((data + begin, data + end) for begin, end in pieces)]


def _pieces(name: str, entry: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the byte ranges of a tensor to read: for an embedding, the whole tensor; for other
    tensors, pieces of each slice, at the slice's beginning, middle and end. Offsets count from the
    end of the file's header.

    If the tensor has three axes or more, a slice is an entry of the first axis (for example an
    expert of a layer). The whole tensor is a single slice if it has fewer axes, or more than
    MAX_SLICES such entries.

    entry: the tensor's entry in the file's header.
    """
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    if len(shape) > 1 and _EMBEDDINGS.search(name):
        return [(begin, end)]
    num_slices = shape[0] if len(shape) > 2 and 0 < shape[0] <= MAX_SLICES else 1
    size = (end - begin) // num_slices
    pieces = []
    for first in range(begin, begin + num_slices * size, size or 1):
        for at in (first, first + size // 2, first + size - SAMPLE_BYTES):
            piece = max(first, at)
            pieces.append((piece, min(piece + SAMPLE_BYTES, first + size)))
    return pieces


# ------------------------------------------------------------------------------------------- models


def weights_identity(vllm_config: Any) -> str:
    """Returns the identity of the weights of all the engine's models (`_models`). A model is
    identified by its commit, or by the digest of its files. A model with random weights is
    identified by a digest of its config and by the seed. The identity also covers Python code and
    scales that the engine loads from elsewhere.

    Raises Unsupported if the weights can't be identified, OSError if files can't be read.
    """
    models = _models(vllm_config)
    name = "+".join(_model_identity(model, load) + _code(model) for model, load in models)
    return "+scales:".join([name, *map(files_identity, _scales(models[0][0]))])


def _code(model: Any) -> str:
    """Returns the commits of Python code that the model loads from other repositories, or from
    another revision than its weights. Code that is missing in the hub's cache is left out. Raises
    Unsupported if the code may come from ModelScope, whose cache this module does not read."""
    if not model.trust_remote_code:
        return ""
    places = set(_OTHERS_CODE.findall(json.dumps(getattr(model.hf_config, "auto_map", {}))))
    if model.code_revision and not _weights_path(model).exists():
        places.add(str(model.model))
    names = ""
    for repo in sorted(places):
        try:
            names += f"+code:{_hub_identity(repo, model.code_revision)}"
        except Unsupported:
            if envs.VLLM_USE_MODELSCOPE:
                raise
    return names


def _scales(model: Any) -> list[Path]:
    """Returns the file with scales for the attention of an image encoder, if the engine has one."""
    path = model.multimodal_config and model.multimodal_config.mm_encoder_fp8_scale_path
    return [Path(path)] if path else []


def weights_may_be_older(vllm_config: Any) -> bool:
    """Returns True if files that `weights_identity` reads have changed since this process began.
    The process may then have loaded their old contents. Also returns True if the times can't be
    determined."""
    models = _models(vllm_config)
    paths = [_weights_path(model) for model, load in models if load.load_format != "dummy"]
    paths += _scales(models[0][0])
    try:
        began_s = process_start_s()
        return any(path.exists() and changed_since(path, began_s) for path in paths)
    except OSError:
        return True


def _models(vllm_config: Any) -> list[tuple[Any, Any]]:
    """Returns the configs of the models whose weights decide KV bytes, each with its load config.
    These are the model itself, a draft model that has its own weights, and other models that the
    configs of these two name."""
    load, draft = vllm_config.load_config, draft_model(vllm_config)
    models = [(vllm_config.model_config, load)]
    if draft is not None:
        models.append((draft, vllm_config.speculative_config.draft_load_config or load))
    # Drops the drafter (speculative decoding) if it is a part of the model itself: the model's
    # identity then covers its weights already.
    places = [(model.model, model.revision, of.load_format) for model, of in models]
    models = models[:1] if places[0] == places[-1] else models
    return models + [
        (SimpleNamespace(model=name, revision=None, trust_remote_code=False), load)
        for model, load in models
        for field in OTHER_MODELS
        if load.load_format != "dummy" and (name := getattr(model.hf_config, field, None))
    ]


def _weights_path(model: Any) -> Path:
    return Path(getattr(model, "model_weights", "") or model.model)


def _model_identity(model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        if envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH:
            raise Unsupported(
                "elastic expert parallelism has added this replica, and its weights come from "
                "other replicas; set hotkv.weights_identity"
            )
        return f"dummy:{digest(model.hf_config)}:{model.seed}"
    if load.load_format not in FROM_FILES:
        raise Unsupported(
            f"load_format {load.load_format} may take weights from elsewhere than the model's "
            "files; set hotkv.weights_identity"
        )
    path = _weights_path(model)
    if snapshot := hub_snapshot(str(path)):
        return _hub_identity(*snapshot)
    if not path.exists():
        return _hub_identity(str(model.model), model.revision)
    try:
        return files_identity(path)
    except ValueError as error:
        raise Unsupported(f"{error}; set hotkv.weights_identity") from None


def _hub_identity(repo: str, revision: Any) -> str:
    commit = getattr(revision, "resolved", revision)
    if is_commit(str(commit)):
        return f"hub:{repo}@{commit}"
    if envs.VLLM_USE_MODELSCOPE:
        # vLLM loads the model from ModelScope. The cache of Hugging Face's hub may have another
        # version of it, so its commit proves nothing.
        raise Unsupported(
            f"the revision of {repo} is not known (VLLM_USE_MODELSCOPE); set hotkv.weights_identity"
        )
    try:
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=["config.json"]
            )
        )
    except (ImportError, OSError, ValueError) as error:
        raise Unsupported(
            f"the revision of {repo} is not known ({error}); set hotkv.weights_identity"
        ) from None
    if not is_commit(folder.name):
        raise Unsupported(f"the revision of {repo} is not known; set hotkv.weights_identity")
    return f"hub:{repo}@{folder.name}"
