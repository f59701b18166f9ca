"""A loader of random weights for vLLM engines: `load_format="hotkv-random"`, for a folder that has
only config.json.

Always true: equal names and shapes get equal weights on equal devices. They are so large that every
token of the context changes the logprobs; those of vLLM's `load_format="dummy"` are so small that
wrong KV would change nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

NAME = "hotkv-random"
PLUGIN = "hotkv-bench"
ROWS = 4096
"""Drawn at once: in float32 they need twice the memory of bfloat16."""


def register() -> None:
    """vLLM's general plugin; vLLM calls it in each of an engine's processes."""
    import torch
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
            with torch.no_grad():
                for name, weights in model.named_parameters():
                    generator = torch.Generator(weights.device).manual_seed(crc32(name.encode()))
                    for rows in weights.data.split(ROWS):
                        drawn = torch.randn(rows.shape, generator=generator, device=weights.device)
                        if weights.dim() < 2:
                            rows.copy_(1 + 0.1 * drawn)
                        else:
                            share = 0.05 if "embed" in name else 1.5 * rows.shape[-1] ** -0.5
                            rows.copy_(share * drawn)

    register_model_loader(NAME)(RandomLoader)


def plugged_in(folder: Path, plugins: str) -> Mapping[str, str]:
    """An engine's environment, in which vLLM finds this loader, and loads no plugins but it and
    `plugins`, a list with commas. Makes a package in `folder`."""
    about = folder / "plugins" / "hotkv_bench-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hotkv-bench\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:register\n"
    (about / "entry_points.txt").write_text(entry)
    paths = [str(about.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_PLUGINS": ",".join(filter(None, [PLUGIN, plugins])),
    }
