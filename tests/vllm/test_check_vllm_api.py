"""The comparison of the connector with vLLM's sources sees what a new version may change, and copes
without the package index."""

import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tools import vllm_sources
from tools.check_vllm_api import compare, main
from tools.vllm_sources import Installed, Unreachable, Wheel

CONNECTOR_BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
# File, what stands there, what a later version might have instead, and what is to be said of it.
CHANGES = [
    (
        "vllm/v1/core/kv_cache_utils.py",
        "def resolve_dcp_kv_block_size(",
        "def dcp_block_size(",
        "resolve_dcp_kv_block_size is not there",
    ),
    (
        "vllm/config/parallel.py",
        "    tensor_parallel_size: int",
        "    tp_size: int",
        "ParallelConfig has no attribute tensor_parallel_size",
    ),
    (
        "vllm/v1/core/sched/output.py",
        "    num_scheduled_tokens: dict",
        "    scheduled: dict",
        "has no attribute num_scheduled_tokens",
    ),
    (
        CONNECTOR_BASE,
        "    failed_recving: set",
        "    failed_loads: set",
        "KVConnectorTransferResults has no parameter failed_recving",
    ),
    (
        CONNECTOR_BASE,
        "self, connector_output: KVConnector",
        "self, output: KVConnector",
        "update_connector_output does not take output",
    ),
    (
        CONNECTOR_BASE,
        "    def wait_for_save(self):",
        "    def wait_for_save(self, step: int):",
        "wait_for_save does not take step as",
    ),
    (
        CONNECTOR_BASE,
        "    @property\n    def requires_kv_delivery",
        "    def requires_kv_delivery",
        "requires_kv_delivery is a method in vLLM",
    ),
    (
        CONNECTOR_BASE,
        "    def take_events(self)",
        "    def take_notes(self): ...\n\n    def take_events(self)",
        "take_notes is neither overridden",
    ),
    (
        "vllm/v1/engine/core.py",
        "            self._reset_caches()",
        "            self._drop_caches()",
        "_reset_caches is called by release_kv",
    ),
]


class Changed:
    """The installed vLLM with all of `CHANGES`."""

    name = "a later vLLM"

    def __init__(self) -> None:
        self._installed = Installed()
        self.used: set[str] = set()

    def read(self, path: str) -> str | None:
        text = self._installed.read(path)
        for file, before, after, what in CHANGES if text is not None else ():
            if file == path:
                assert before in text
                text = text.replace(before, after, 1)
                self.used.add(what)
        return text


def test_what_a_later_version_changes_is_named() -> None:
    found = compare(Changed(), is_newest=False)
    for *_, what in CHANGES:
        assert any(what in problem for problem in found), f"{what}: {found}"
    assert len(found) < 60


def test_without_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What can't be compared is named; a wheel that was read before is compared from what was kept
    of it."""

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr("tools.check_vllm_api.CACHE", tmp_path)
    monkeypatch.setattr("tools.check_vllm_api.compare", lambda *_, **__: [])
    assert main() == 0
    assert (
        f"NOT CHECKED against vLLM 0.33: {vllm_sources.INDEX} can't be reached (no route to host)"
        in capsys.readouterr().out
    )
    folder = tmp_path / "vllm-0.33.0"
    (folder / "vllm").mkdir(parents=True)
    (folder / "names.txt").write_text("vllm/kept.py\nvllm/other.py")
    (folder / "vllm" / "kept.py").write_text("x = 1\n")
    wheel = Wheel((0, 33), tmp_path)
    assert (wheel.name, wheel.read("vllm/kept.py"), wheel.read("vllm/nowhere.py")) == (
        "vLLM 0.33.0",
        "x = 1\n",
        None,
    )
    with pytest.raises(Unreachable, match="can't be read"):
        wheel.read("vllm/other.py")
