"""The newest supported vLLM, which `tools/next_vllm.py` builds in a folder."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("HOTKV_NEXT_VLLM", Path(__file__).parents[2] / ".venv-next"))
MARKS = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (FOLDER / "vllm").is_dir(), reason=f"`make test-long` builds vLLM in {FOLDER}"
    ),
]
