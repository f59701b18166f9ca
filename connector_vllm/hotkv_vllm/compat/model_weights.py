"""Identity of the weights that an engine has loaded: of its model, a draft model, and models
that the config names. `read_beside_loading` wraps `BaseModelLoader.load_model`."""

import functools
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.fingerprint import digest, draft_model
from hotkv_vllm.file_digests import file_digest

# -------------------------------------------------------------------------------------------- files

# Equal identities mean equal bytes of all weights files; an identity never has a path.
#
# A hub's model is identified by its revision's commit, any other by a digest over names and
# bytes of its weights and configuration files and of its own Python code.


UNREAD = "unread"
"""In place of the identity while files are being read. An engine with it neither loads nor
stores."""
READ_WAIT_S = 2.0
"""How long an engine's start waits for the reading, which begins with vLLM's loading."""
MAX_LINKS = 40
SUBFOLDERS = (
    *("audio_tokenizer", "whisper-large-v3", "adapters/retrieval", "adapters/text-matching"),
    *("adapters/classification", "adapters/clustering"),
)
"""With further weights (MiMo-Audio, Kimi-Audio, Jina v5)."""
OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Fields of a config (Ultravox's) that name other models with further weights."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt")
SIDE_FILES = (
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "config.json",
    "adapter_config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "params.json",
    # Of processors for images, video and sound.
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
"""Values of `LoadConfig.load_format` that read the model's files. With others, also of plugins,
weights may come from a process, a service or old copies (`npcache`)."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
"""A model's folder in the hub's cache: repository and commit."""
_OTHERS_CODE = re.compile(r'"([^"]+)--')
"""Repository in a class of `auto_map`, such as "org/model--modeling.Model"."""


def is_commit(revision: str) -> bool:
    """A full hash: a branch or a tag does not identify bytes."""
    return bool(_COMMIT.fullmatch(revision))


def hub_snapshot(path: str) -> tuple[str, str] | None:
    """Repository and commit of a folder in the hub's cache; None for another path. With
    HF_HUB_OFFLINE, vLLM puts this folder in place of the repository's name
    (`EngineArgs.__post_init__`, vLLM 0.32)."""
    found = _SNAPSHOT.fullmatch(path)
    return (found[1].replace("--", "/", 1), found[2]) if found else None


def files_identity(path: Path) -> str:
    """Of a weights file or a folder with some. Blocks while they are read. Raises OSError, or
    ValueError without weights files."""
    files = _weights_files(path)
    if not files:
        raise ValueError(f"{path} has no weights files ({', '.join(WEIGHT_SUFFIXES)})")
    found = hashlib.sha256(b"hotkv-weights-4\0")
    folder, began_s = Path(envs.VLLM_CACHE_ROOT) / "hotkv" / "weights", process_start_s()
    for file in files:
        found.update(f"{file.name}\0{file_digest(file, folder, began_s)}\0".encode())
    for side in _side_files(path):
        found.update(side.name.encode() + b"\0" + side.read_bytes())
    return "content:" + found.hexdigest()


def changed_since(path: Path, moment_s: float) -> bool:
    """Whether a file, the folder or a symbolic link on the way was created, moved or written
    after `moment_s` (since the epoch). Raises OSError."""
    files = [*_weights_files(path), *_side_files(path)]
    times = [place.stat().st_ctime for place in (path, *files)]
    times += [
        link.lstat().st_ctime for place in (path, *files) for link in _links(place.absolute())
    ]
    return max(times) > moment_s


def process_start_s() -> float:
    """By the system's clock, up to 10 ms late; a forked process begins with the fork. Raises
    OSError."""
    # Stopped between the readings of both clocks, the difference would be too small.
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
    if not path.is_dir():
        return []
    places = (folder / name for folder in _folders(path) for name in SIDE_FILES)
    return [*filter(Path.is_file, places), *sorted(path.glob("*.py"))]


def _folders(path: Path) -> list[Path]:
    """The model's, and those of its `SUBFOLDERS` that exist."""
    return [path, *filter(Path.is_dir, (path / name for name in SUBFOLDERS))]


def _links(path: Path) -> Iterator[Path]:
    """Symbolic links followed to resolve an absolute path, at most MAX_LINKS."""
    for _ in range(MAX_LINKS):
        link = next(
            (place for place in (*reversed(path.parents), path) if place.is_symlink()), None
        )
        if link is None:
            return
        yield link
        path = Path(os.path.normpath(link.parent / link.readlink() / path.relative_to(link)))


# ------------------------------------------------------------------------------------------- models


def weights_identity(vllm_config: Any) -> str:
    """Of all models, by commit or files; of random weights, by config and seed. Also covers
    Python code and scales from elsewhere. Blocks while files are read. Raises Unsupported, or
    OSError."""
    models = _models(vllm_config)
    name = "+".join(_model_identity(model, load) + _code(model) for model, load in models)
    return "+scales:".join([name, *map(files_identity, _scales(models[0][0]))])


def begin_reading(vllm_config: Any, named: str = "") -> "Future[str]":
    """`weights_identity` in a thread. The future raises Unsupported or OSError.

    named: the user's name of the weights, which is then the result.
    """
    answer: Future[str] = Future()
    if named:
        answer.set_result(named)
        return answer

    def read() -> None:
        try:
            answer.set_result(weights_identity(vllm_config))
        except (Unsupported, OSError) as error:
            answer.set_exception(error)
        except Exception as error:  # noqa: BLE001 - callback edge: whoever asks for the result logs it
            answer.set_exception(Unsupported(f"{type(error).__name__}: {error}"))

    try:
        threading.Thread(target=read, name="hotkv-weights", daemon=True).start()
    except RuntimeError as error:
        answer.set_exception(OSError(str(error)))
    return answer


SAYS_UNREAD = (
    "hotkv: the weights' files are being read, because their contents decide with which engines "
    "this one shares KV; until that is done it neither loads nor stores"
)


def read_by(reading: "Future[str]", wait_s: float) -> str:
    """UNREAD if the result is not there within `wait_s`. Raises what the future raises."""
    try:
        return reading.result(wait_s)
    except TimeoutError:
        if reading.done():
            raise
        return UNREAD


def read_beside_loading() -> None:
    """Reads the files while vLLM loads them, so that the disk is read once."""
    load_model = BaseModelLoader.load_model
    if hasattr(load_model, "hotkv_reads"):
        return

    @functools.wraps(load_model)
    def reading(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if _will_need_identity(vllm_config.kv_transfer_config):
            begin_reading(vllm_config)
        return load_model(self, vllm_config, *args, **kwargs)

    reading.hotkv_reads = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = reading


def _will_need_identity(transfer: Any) -> bool:
    """Whether hotkv is a connector and the user has not named the weights."""
    if transfer is None:
        return False
    extra = transfer.kv_connector_extra_config
    names = json.dumps([transfer.kv_connector, extra], default=str)
    return "HotKV" in names and "weights_identity" not in names


def _code(model: Any) -> str:
    """Commits of Python code from other repositories or another revision; code that the hub's
    cache lacks is left out. Raises Unsupported if it may come from ModelScope, whose cache is
    not read."""
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
    path = model.multimodal_config and model.multimodal_config.mm_encoder_fp8_scale_path
    return [Path(path)] if path else []


def weights_may_be_older(vllm_config: Any) -> bool:
    """Whether files have changed since this process began, so that it may have loaded the old
    ones. True if unknown."""
    models = _models(vllm_config)
    paths = [_weights_path(model) for model, load in models if load.load_format != "dummy"]
    paths += _scales(models[0][0])
    try:
        began_s = process_start_s()
        return any(path.exists() and changed_since(path, began_s) for path in paths)
    except OSError:
        return True


def _models(vllm_config: Any) -> list[tuple[Any, Any]]:
    """(model's config, load config): the model, a draft model with weights of its own, and
    models that these name."""
    load, draft = vllm_config.load_config, draft_model(vllm_config)
    models = [(vllm_config.model_config, load)]
    if draft is not None:
        models.append((draft, vllm_config.speculative_config.draft_load_config or load))
    # A drafter that is a part of the model is covered by its identity.
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
        # Hugging Face's cache may have another version than ModelScope, so its commit proves
        # nothing.
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
