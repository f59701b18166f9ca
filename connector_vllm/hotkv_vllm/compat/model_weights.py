"""The identity of the weights that an engine has loaded, those of a draft model included.

Reads `ModelConfig.model`, `model_weights`, `revision`, `hf_config` and `seed`,
`LoadConfig.load_format` and `SpeculativeConfig.draft_load_config`. `weight_files` takes the digest
of the files.
"""

from pathlib import Path
from typing import Any

from hotkv_vllm.compat import Unsupported
from hotkv_vllm.compat.fingerprint import digest, draft_model
from hotkv_vllm.compat.weight_files import (
    changed_since,
    files_identity,
    is_commit,
    process_start_s,
)


def weights_identity(vllm_config: Any) -> str:
    """Identity of the weights, those of a draft model included: commit, content digest, or (random
    weights) config and seed.

    Raises Unsupported, OSError.
    """
    return "+draft:".join(_model_identity(model, load) for model, load in _models(vllm_config))


def weights_may_be_older(vllm_config: Any) -> bool:
    """Whether files that `weights_identity` reads have changed since this process began: it may
    have loaded what they were before. True also if that can't be seen.
    """
    paths = [
        _weights_path(model) for model, load in _models(vllm_config) if load.load_format != "dummy"
    ]
    try:
        began_s = process_start_s()
        return any(path.exists() and changed_since(path, began_s) for path in paths)
    except OSError:
        return True


def _models(vllm_config: Any) -> list[tuple[Any, Any]]:
    """Configs of the models whose weights decide KV bytes, each with how it is loaded."""
    target, draft = vllm_config.model_config, draft_model(vllm_config)
    models = [(target, vllm_config.load_config)]
    if draft is not None and draft.model != target.model:
        models.append(
            (draft, vllm_config.speculative_config.draft_load_config or vllm_config.load_config)
        )
    return models


def _weights_path(model: Any) -> Path:
    return Path(getattr(model, "model_weights", "") or model.model)


def _model_identity(model: Any, load: Any) -> str:
    if load.load_format == "dummy":
        return f"dummy:{digest(model.hf_config)}:{model.seed}"
    path = _weights_path(model)
    if not path.exists():
        return _hub_identity(str(model.model), model.revision)
    try:
        return files_identity(path)
    except ValueError as error:
        raise Unsupported(f"{error}; set hotkv.weights_identity") from None


def _hub_identity(repo: str, revision: Any) -> str:
    commit = getattr(revision, "commit_hash", None) or revision
    if commit and is_commit(str(commit)):
        return f"hub:{repo}@{commit}"
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
