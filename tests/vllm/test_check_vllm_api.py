"""The comparisons of the connector with vLLM's sources see what a new version may change, and cope
without the package index."""

import io
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.changed_sources import Replaced
from tools import check_vllm_api, check_vllm_reuse
from tools.vllm_sources import Unreachable, installed, release

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
PARALLEL, CORE = "vllm/config/parallel.py", "vllm/v1/engine/core.py"
UTILS, SCHEDULER = "vllm/v1/core/kv_cache_utils.py", "vllm/v1/core/sched/scheduler.py"
# File, what stands there, what a later version might have instead, and what is to be said of it.
CHANGES = [
    (UTILS, "def resolve_dcp_kv", "def dcp_kv", "resolve_dcp_kv_block_size is not there"),
    (PARALLEL, " tensor_parallel_size: int", " tp: int", "no attribute tensor_parallel_size"),
    (BASE, " failed_recving: set", " failed: set", "no parameter failed_recving"),
    (BASE, "wait_for_save(self):", "wait_for_save(self, step: int):", "does not take step as"),
    (BASE, "@property\n    def requires_kv", "def requires_kv", "is a method in vLLM"),
    (BASE, "def take_events(", "def take(self): ...\n    def take_events(", "neither overridden"),
    (CORE, "self._reset_caches()", "self._drop_caches()", "is called by release_kv"),
]
# The same for places that forbid reuse.
SCHEDULED = "enable_caching=self.cache_config.enable_prefix_caching"
FORBIDS = [
    (
        "vllm/config/vllm.py",
        "        self.try_verify_and_update_config()\n",
        "        if self.is_new:\n            self.cache_config.enable_prefix_caching = False\n",
        "self.cache_config.enable_prefix_caching = False if self.is_new: no answer",
    ),
    (SCHEDULER, SCHEDULED, f"{SCHEDULED} and not self.is_odd", "(not self.is_odd): no answer"),
    (
        "vllm/pooling_params.py",
        'self.task in ["token_embed", "token_classify"]',
        'self.task in ["token_embed", "plug"]',
        "self.task in ['token_embed', 'plug']: no answer",
    ),
    (
        "vllm/v1/kv_cache_interface.py",
        "non_causal: bool = False\n",
        "non_causal: bool = True\n",
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


def test_what_a_later_version_changes_is_named() -> None:
    found = check_vllm_api.compare(Replaced(installed(), CHANGES), is_newest=False)
    for *_, what in CHANGES:
        assert any(what in problem for problem in found), f"{what}: {found}"
    assert len(found) < 60


def test_each_new_place_that_forbids_reuse_is_named() -> None:
    assert check_vllm_reuse.compare(installed()) == []
    found = check_vllm_reuse.compare(Replaced(installed(), FORBIDS), all_places=True)
    for *_, what in FORBIDS:
        assert any(what in problem for problem in found), f"{what}: {found}"
    new = [problem for problem in found if "no answer" in problem]
    # The last row sets the flag in four ways.
    assert len(new) == len(FORBIDS) + 3
    gone = {problem.split(":")[0] for problem in found if problem not in new}
    assert gone >= {"vllm/pooling_params.py", SCHEDULER}


class Index:
    """A package index with releases of vLLM, that can go away. `archive`: what it sends."""

    def __init__(self) -> None:
        self.is_there, self.asked = True, 0
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name in ("vllm/kept.py", "vllm/kernel.cu", "setup.py"):
                entry = tarfile.TarInfo(f"vllm-0.33.1/{name}")
                entry.size = 6
                archive.addfile(entry, io.BytesIO(b"x = 1\n"))
        self.archive = packed.getvalue()

    def __call__(self, request: Any, timeout: float) -> Any:
        if not self.is_there:
            raise OSError("no route to host")
        url = request if isinstance(request, str) else request.full_url
        self.asked += 1
        files = ("vllm-0.33.0.tar.gz", "vllm-0.33.1.tar.gz", "vllm-0.33.2rc1.tar.gz")
        page = "".join(f'<a href="/files/{name}#sha256=0">' for name in files)
        answer: Any = Answer(page.encode() if url.endswith("/vllm/") else self.archive)
        answer.url = url
        return answer


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
    # An archive that arrives in part is not kept.
    whole, index.archive = index.archive, index.archive[: len(index.archive) // 2]
    with pytest.raises(Unreachable, match="can't be read"):
        release((0, 33), tmp_path)
    index.archive, index.asked = whole, 0
    for _ in range(2):
        found = release((0, 33), tmp_path)
        assert (found.name, found.paths()) == ("vLLM 0.33.1", ["vllm/kept.py"])
        assert (found.read("vllm/kept.py"), found.read("vllm/no.py")) == ("x = 1\n", None)
    assert index.asked == 3
    with pytest.raises(Unreachable, match=r"has no sources of vLLM 0\.34"):
        release((0, 34), tmp_path)
    index.is_there = False
    assert release((0, 33), tmp_path).read("vllm/kept.py") == "x = 1\n"
    monkeypatch.setattr(check_vllm_api, "CACHE", tmp_path)
    monkeypatch.setattr(check_vllm_api, "compare", lambda *_, **__: [])
    monkeypatch.setattr(check_vllm_api, "LEFT_OUT", {"own": {}, "offloading": {}})
    assert check_vllm_api.main() == 0
    assert "NOT CHECKED against vLLM 0.32: " in capsys.readouterr().out
