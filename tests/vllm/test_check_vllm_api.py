"""The comparisons of the connector with vLLM's sources see what a new version may change, and cope
without the package index."""

import io
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import check_vllm_reuse, vllm_sources
from tools.check_vllm_api import compare, main
from tools.vllm_sources import Unreachable, installed, release

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


# The same for places that forbid reuse.
FORBIDS = [
    (
        "vllm/config/vllm.py",
        "        self.try_verify_and_update_config()\n",
        "        if self.is_new:\n            self.cache_config.enable_prefix_caching = False\n",
        "VllmConfig.__post_init__: self.cache_config.enable_prefix_caching = False "
        "if self.is_new: no answer",
    ),
    (
        "vllm/model_executor/layers/attention/attention.py",
        'self.attn_backend.get_name() == "FLASHINFER"',
        'self.attn_backend.get_name() == "FLEX_ATTENTION"',
        "(self.attn_backend.get_name() == 'FLEX_ATTENTION' or "
        "self.attn_backend.get_name() == 'TRITON_MLA'): no answer",
    ),
    (
        "vllm/v1/core/sched/scheduler.py",
        "enable_caching=self.cache_config.enable_prefix_caching",
        "enable_caching=self.cache_config.enable_prefix_caching and not self.is_odd",
        "enable_caching=self.cache_config.enable_prefix_caching and (not self.is_odd): no answer",
    ),
    (
        "vllm/pooling_params.py",
        'self.task in ["token_embed", "token_classify"]',
        'self.task in ["token_embed", "plug"]',
        "if self.skip_reading_prefix_cache is None and self.task in ['token_embed', 'plug']: no",
    ),
    (
        "vllm/v1/kv_cache_interface.py",
        "    non_causal: bool = False\n",
        "    non_causal: bool = True\n",
        "FullAttentionSpec: non_causal: bool = True: no answer",
    ),
    (
        "vllm/platforms/cuda.py",
        "\nlogger = ",
        "\nreplace(config, enable_prefix_caching=is_even)\n"
        "setattr(config, 'enable_prefix_caching', is_odd)\n"
        "config['enable_prefix_caching'] = 0\n"
        "OVERRIDES = {'enable_prefix_caching': False}\nlogger = ",
        "enable_prefix_caching=is_even: no answer",
    ),
]


class Changed:
    """The installed vLLM with all of `changes`."""

    name = "a later vLLM"

    def __init__(self, changes: Sequence[tuple[str, str, str, str]]) -> None:
        self._installed, self._changes = installed(), changes

    def paths(self) -> list[str]:
        return self._installed.paths()

    def read(self, path: str) -> str | None:
        text = self._installed.read(path)
        for file, before, after, _ in self._changes if text is not None else ():
            if file == path:
                assert before in text
                text = text.replace(before, after, 1)
        return text


def test_what_a_later_version_changes_is_named() -> None:
    found = compare(Changed(CHANGES), is_newest=False)
    for *_, what in CHANGES:
        assert any(what in problem for problem in found), f"{what}: {found}"
    assert len(found) < 60


def test_each_new_place_that_forbids_reuse_is_named() -> None:
    found = check_vllm_reuse.compare(Changed(FORBIDS), all_places=True)
    for *_, what in FORBIDS:
        assert any(what in problem for problem in found), f"{what}: {found}"
    new = [problem for problem in found if "no answer" in problem]
    # The four ways to set a flag that stand in one file of `FORBIDS` beside the other five.
    assert len(new) == len(FORBIDS) + 3
    # Of three places the condition, the value or the place's text has changed.
    gone = {problem.split(":")[0] for problem in found if problem not in new}
    assert gone >= {"vllm/pooling_params.py", "vllm/v1/core/sched/scheduler.py"}


def test_the_installed_vllm_forbids_nothing_without_an_answer() -> None:
    assert check_vllm_reuse.compare(installed()) == []


class Index:
    """A package index with two releases of vLLM, that can go away."""

    def __init__(self) -> None:
        self.is_there, self.asked = True, 0

    def __call__(self, request: Any, timeout: float) -> Any:
        if not self.is_there:
            raise OSError("no route to host")
        url = request if isinstance(request, str) else request.full_url
        self.asked += 1
        page = Answer(self._page() if url.endswith("/vllm/") else self._archive())
        page.url = url
        return page

    @staticmethod
    def _page() -> bytes:
        files = ("vllm-0.33.0.tar.gz", "vllm-0.33.1.tar.gz", "vllm-0.33.2rc1.tar.gz")
        return b"".join(b'<a href="/files/%s#sha256=0">' % name.encode() for name in files)

    @staticmethod
    def _archive() -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in ("vllm/kept.py", "vllm/kernel.cu", "setup.py"):
                entry = tarfile.TarInfo(f"vllm-0.33.1/{name}")
                entry.size = 6
                archive.addfile(entry, io.BytesIO(b"x = 1\n"))
        return packed.getvalue()


class Answer(io.BytesIO):
    url = ""


def test_sources_are_fetched_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What can't be compared is named; without the index, sources that were fetched before do."""
    index = Index()
    monkeypatch.setattr(urllib.request, "urlopen", index)
    index.is_there = False
    with pytest.raises(Unreachable, match="no route to host"):
        release((0, 33), tmp_path)
    index.is_there = True
    for _ in range(2):
        found = release((0, 33), tmp_path)
        assert (found.name, found.paths()) == ("vLLM 0.33.1", ["vllm/kept.py"])
        assert (found.read("vllm/kept.py"), found.read("vllm/no.py")) == ("x = 1\n", None)
    assert index.asked == 3
    with pytest.raises(Unreachable, match=r"has no sources of vLLM 0\.34"):
        release((0, 34), tmp_path)
    index.is_there = False
    assert release((0, 33), tmp_path).read("vllm/kept.py") == "x = 1\n"

    monkeypatch.setattr("tools.check_vllm_api.CACHE", tmp_path)
    monkeypatch.setattr("tools.check_vllm_api.compare", lambda *_, **__: [])
    monkeypatch.setattr("tools.check_vllm_api.LEFT_OUT", {"own": {}, "offloading": {}})
    assert main() == 0
    assert (
        f"NOT CHECKED against vLLM 0.32: {vllm_sources.INDEX} can't be reached (no route to host)"
        in capsys.readouterr().out
    )


def test_sources_that_arrive_in_part_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Index._archive()
    monkeypatch.setattr(urllib.request, "urlopen", Index())
    monkeypatch.setattr(Index, "_archive", staticmethod(lambda: whole[: len(whole) // 2]))
    with pytest.raises(Unreachable, match="can't be read"):
        release((0, 33), tmp_path)
    monkeypatch.setattr(Index, "_archive", staticmethod(lambda: whole))
    assert release((0, 33), tmp_path).paths() == ["vllm/kept.py"]
