"""Tests what demo, benchmarks and tests choose for a processor, and what they show of an ended
engine's log."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demo.logs import MOST_LINES, root_lines
from demo.machine import (
    LINEAR_TOKENS,
    MOST_PREFILL_S,
    STEP_TOKENS,
    WARM_UP_TOKENS,
    dtype_for,
    fitting_tokens,
)
from demo.processes import Child

MOST = 4050
CORE = "(EngineCore pid=7) ERROR 11-30 12:11:35 [core.py:1510] "
WORKER = "(Worker_TP1 pid=8) ERROR 11-30 12:11:34 [multiproc_executor.py:9] "
CLIENT = """Traceback (most recent call last):
  File "llm.py", line 1, in main
    raise RuntimeError
RuntimeError: Engine core initialization failed. See root cause above."""
ROOT = [
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in run',
    "ValueError: too small",
]
HARMLESS = [*ROOT[:2], "KeyError: harmless"]


def lines(prefix: str, texts: list[str]) -> str:
    return "".join(f"{prefix}{text}\n" for text in texts)


def work(num_tokens: int) -> float:
    return num_tokens * (1 + num_tokens / LINEAR_TOKENS)


@pytest.mark.parametrize("has_avx512", [False, True])
@pytest.mark.parametrize("has_amx", [False, True])
def test_float32_where_bfloat16_would_be_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_avx512: bool, has_amx: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert dtype_for(str(tmp_path)) == ("auto" if has_avx512 or has_amx else "float32")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16"}))
    assert dtype_for(str(tmp_path)) == dtype_for("org/model") == "auto"


@given(warm_up_s=st.floats(0, 1000))
def test_a_prompt_is_the_longest_that_fits(warm_up_s: float) -> None:
    found = fitting_tokens(warm_up_s, MOST)
    assert WARM_UP_TOKENS <= found <= MOST
    token_s = warm_up_s / work(WARM_UP_TOKENS)
    assert found == WARM_UP_TOKENS or token_s * work(found) <= MOST_PREFILL_S
    assert found == MOST or token_s * work(found + STEP_TOKENS) > MOST_PREFILL_S


def test_the_deepest_processs_traceback_is_shown() -> None:
    core = lines(CORE, ["EngineCore failed to start.", *ROOT])
    assert root_lines(core + CLIENT) == ROOT
    worker = lines(WORKER, HARMLESS) + lines(WORKER, ["then", *ROOT])
    waited = lines(CORE, [*ROOT[:2], "Exception: WorkerProc initialization failed"])
    assert root_lines(worker + waited + CLIENT) == ROOT
    assert root_lines(CLIENT) == CLIENT.splitlines()


def test_traceback_keeps_the_exceptions_behind_it() -> None:
    link = "The above exception was the direct cause of the following exception:"
    chain = [*ROOT, "", link, "", *ROOT[:2], "RuntimeError: wrapped"]
    assert root_lines(lines(CORE, HARMLESS) + lines(CORE, ["then", *chain]) + CLIENT) == chain


def test_a_log_without_traceback_ends_with_its_end() -> None:
    log = lines("", [f"line {number}" for number in range(99)])
    assert root_lines(log) == log.splitlines()[-MOST_LINES:]
    long = [ROOT[0], *["  frame"] * 99, ROOT[-1]]
    shown = root_lines(lines(CORE, long))
    assert len(shown) == MOST_LINES + 1 and shown[0] == ROOT[0] and shown[-1] == ROOT[-1]


def test_a_childs_error_says_why_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("engine", [sys.executable, "-c", ""], log, {})
    child.process.wait(60)
    log.write_text(lines(CORE, ROOT) + CLIENT)
    said = str(child.error("ended"))
    assert ROOT[-1] in said and "See root cause above" not in said
