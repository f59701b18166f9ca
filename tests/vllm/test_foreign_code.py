"""Other packages' code is in the key space, by version or bytes."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from hotkv_vllm.compat import foreign_code
from hotkv_vllm.compat.fingerprint import digest
from hotkv_vllm.compat.foreign_code import code_of

PACKAGE = "hostile_plug"
SOURCE = "class Thing:\n    pass\n\n\ndef register():\n    pass\n"


class Plug:
    """A package with a plugin of vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = folder / PACKAGE / "__init__.py"
        self.info = folder / f"{PACKAGE}.dist-info"
        self.module.parent.mkdir()
        self.module.write_text(SOURCE)

    def install(self, version: str, direct_url: str = "") -> None:
        self.info.mkdir(exist_ok=True)
        (self.info / "METADATA").write_text(f"Name: {PACKAGE}\nVersion: {version}\n")
        (self.info / "top_level.txt").write_text(f"{PACKAGE}\n")
        group = f"[{foreign_code.DEFAULT_PLUGINS_GROUP}]\n"
        (self.info / "entry_points.txt").write_text(f"{group}plug = {PACKAGE}:register\n")
        if direct_url:
            (self.info / "direct_url.json").write_text(direct_url)
        self.forget()

    def edit(self, line: str) -> None:
        self.module.write_text(SOURCE + line)
        self.forget()

    @staticmethod
    def forget() -> None:
        """Packages are read anew, as another engine would."""
        foreign_code._identity.cache_clear()
        foreign_code._distributions.cache_clear()
        importlib.invalidate_caches()

    @property
    def thing(self) -> type:
        found: type = importlib.import_module(PACKAGE).Thing
        return found


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Plug(tmp_path)
    sys.modules.pop(PACKAGE, None)
    Plug.forget()


def engine(**parallel: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker", "worker_extension_cls": ""}
            | parallel
        )
    )


def test_vllm_alone_has_no_foreign_code() -> None:
    assert foreign_code.foreign_code(engine()) == {}
    assert {code_of(name) for name in ("", "vllm.x", "torch.nn", "hotkv_vllm.x", "json")} == {""}


def test_a_plugin_stands_with_its_version(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug.install("1.0")
    one = foreign_code.foreign_code(engine())
    assert one == {"plugins": {"plug": f"{PACKAGE}:register@{PACKAGE}==1.0"}}
    plug.install("1.1")
    assert foreign_code.foreign_code(engine()) != one
    monkeypatch.setenv("VLLM_PLUGINS", "hotkv")
    assert foreign_code.foreign_code(engine()) == {}
    monkeypatch.setenv("VLLM_PLUGINS", "hotkv,plug")
    assert foreign_code.foreign_code(engine())["plugins"].keys() == {"plug"}


@pytest.mark.parametrize("direct_url", ["", '{"dir_info": {"editable": true}}', "none at all"])
def test_code_without_fixed_version_counts_its_bytes(plug: Plug, direct_url: str) -> None:
    if direct_url != "none at all":
        plug.install("1.0", direct_url)
    else:
        plug.forget()
    one = code_of(f"{PACKAGE}.deeper")
    plug.edit("x = 1\n")
    assert (code_of(f"{PACKAGE}.deeper") != one) == (direct_url != "")


def test_each_use_of_a_package_is_seen(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug.install("1.0")
    monkeypatch.setenv("VLLM_PLUGINS", "hotkv")
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("LlamaForCausalLM", f"{PACKAGE}.models:Llama")
    monkeypatch.setattr(foreign_code, "current_platform", plug.thing())
    workers = {"worker_cls": f"{PACKAGE}.Worker", "worker_extension_cls": plug.thing}
    code = f"@{PACKAGE}==1.0"
    assert foreign_code.foreign_code(engine(**workers)) == {
        "model_classes": {"LlamaForCausalLM": f"{PACKAGE}.models:Llama{code}"},
        "platform": f"{PACKAGE}:Thing{code}",
        "workers": [f"{PACKAGE}:Worker{code}", f"{PACKAGE}:Thing{code}"],
    }


def test_objects_in_a_config_stand_with_their_code(plug: Plug) -> None:
    plug.install("1.0")
    value, kind = SimpleNamespace(a=plug.thing()), SimpleNamespace(a=plug.thing)
    before = digest(value), digest(kind)
    plug.install("2.0")
    assert digest(value) != before[0] and digest(kind) != before[1]
