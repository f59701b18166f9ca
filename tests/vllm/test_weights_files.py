"""The identity of weights' files, and whether they may be newer than the loaded weights."""

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import huggingface_hub
import numpy as np
import pytest
from vllm import models as own_models_of_vllm
from vllm.model_executor import model_loader
from vllm.model_executor import models as models_of_vllm

from hotkv_vllm.compat import Unsupported, key_space, model_weights
from hotkv_vllm.compat.model_weights import changed_since, files_identity

PLAIN = {"trust_remote_code": False, "code_revision": None, "multimodal_config": None}
"""vLLM loads neither code nor scales from elsewhere."""


def safetensors(path: Path, **tensors: np.ndarray) -> Path:
    """uint8 arrays; returns the path."""
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        offsets = [at, at := at + data.size]
        header[name] = {"dtype": "U8", "shape": data.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    parts = [struct.pack("<Q", len(text)), text, *(data.tobytes() for data in tensors.values())]
    path.write_bytes(b"".join(parts))
    return path


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


def test_weights_identity_is_content_not_path(tmp_path: Path) -> None:
    big = {f"t{i}": noise(3 << 20) for i in range(4)}
    for name in ("one", "two", "tuned"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tuned = {"t2": 255 - big["t2"]} if name == "tuned" else {}
        safetensors(tmp_path / name / "model.safetensors", **big | tuned)
    one, two, tuned = (files_identity(tmp_path / name) for name in ("one", "two", "tuned"))
    assert one == two != tuned
    for side in ("config.json", "preprocessor_config.json"):
        before = files_identity(tmp_path / "two")
        (tmp_path / "two" / side).write_text('{"a": 1}')
        assert files_identity(tmp_path / "two") != before
    with pytest.raises(ValueError, match="no weights files"):
        files_identity(tmp_path)


def test_what_changed_since_a_moment(tmp_path: Path) -> None:
    """Files change in place, are moved, or a link has a new target."""
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    for file in (one, two):
        file.parent.mkdir()
        file.write_bytes(b"x")
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "current").symlink_to(tmp_path / "link")

    def is_new_after(change: Callable[[], object]) -> bool:
        # Time stamps advance by milliseconds.
        time.sleep(0.02)
        moment_s = time.time()
        assert not changed_since(tmp_path / "current", moment_s)
        time.sleep(0.02)
        change()
        return changed_since(tmp_path / "current", moment_s)

    def switch() -> None:
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").rename(tmp_path / "link")

    def move() -> None:
        (two.parent / "new").write_bytes(b"x")
        (two.parent / "new").rename(two)

    assert is_new_after(lambda: one.write_bytes(b"x"))
    assert is_new_after(switch) and is_new_after(move)
    assert is_new_after(lambda: (two.parent / "modeling.py").write_text("pass"))
    assert not is_new_after(lambda: one.write_bytes(b"y"))


def test_when_this_process_began() -> None:
    reader, writer = os.pipe()
    before_s = time.time()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, repr(model_weights.process_start_s()).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader) as answer:
        assert before_s - 0.02 <= float(answer.read()) <= time.time()


def test_whether_an_engine_may_have_loaded_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [(SimpleNamespace(multimodal_config=None), SimpleNamespace(load_format="auto"))]
    monkeypatch.setattr(model_weights, "_models", lambda _: models)
    monkeypatch.setattr(model_weights, "_weights_path", lambda _: tmp_path)
    monkeypatch.setattr(model_weights, "process_start_s", lambda: time.time() + 60)
    assert not model_weights.weights_may_be_older(None)
    monkeypatch.setattr(model_weights, "process_start_s", lambda: time.time() - 60)
    assert model_weights.weights_may_be_older(None)
    monkeypatch.setattr(model_weights, "process_start_s", lambda: Path("/none").stat())
    assert model_weights.weights_may_be_older(None), "who can't find it out must doubt"


@pytest.mark.parametrize("place", ["folder", "hub"])
@pytest.mark.parametrize(
    "load_format", ["ipc_cache", "modelexpress", "npcache", "tensorizer", "of_a_plugin"]
)
def test_weights_from_elsewhere_arent_named_by_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str, place: str
) -> None:
    (tmp_path / "model.bin").write_bytes(b"of another version")
    path, revision = (str(tmp_path), None) if place == "folder" else ("org/model", "0" * 40)
    model = SimpleNamespace(model=path, revision=revision, **PLAIN)
    load = SimpleNamespace(load_format="auto")
    monkeypatch.setattr(model_weights, "_models", lambda _: [(model, load)])
    assert model_weights.weights_identity(None)
    load.load_format = load_format
    with pytest.raises(Unsupported, match=r"set hotkv\.weights_identity"):
        model_weights.weights_identity(None)
    (tmp_path / "model.bin").unlink()
    load.load_format = "dummy"
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    with pytest.raises(Unsupported, match=r"other replicas; set hotkv\.weights_identity"):
        model_weights.weights_identity(None)
    load.load_format, model.model = "auto", str(tmp_path)
    with pytest.raises(Unsupported, match=r"no weights files.*set hotkv\.weights_identity"):
        model_weights.weights_identity(None)


@pytest.mark.parametrize(
    "where",
    [
        "text",
        "audio",
        "model/whisper-large-v3",
        "model/audio_tokenizer",
        "model/adapters/retrieval",
    ],
)
def test_weights_beside_the_models_own_count(tmp_path: Path, where: str) -> None:
    for name in ("model", "text", "audio", where):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "model.bin").write_bytes(b"1")
    ids = {f"{name}_model_id": str(tmp_path / name) for name in ("text", "audio")}
    path, config = str(tmp_path / "model"), SimpleNamespace(**ids)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(model=path, revision=None, hf_config=config, **PLAIN),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
    )
    before = model_weights.weights_identity(engine)
    (tmp_path / where / "model.bin").write_bytes(b"2")
    assert model_weights.weights_identity(engine) != before


def test_every_way_of_loading_weights_was_reviewed() -> None:
    """A new way may read from elsewhere."""
    elsewhere = {"dummy", "ipc_cache", "modelexpress", "npcache", "tensorizer"}
    assert set(get_args(model_loader.LoadFormats)) == model_weights.FROM_FILES | elsewhere
    folders = [Path(*models_of_vllm.__path__), Path(*own_models_of_vllm.__path__)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    more = re.compile(r"secondary_weights|load_file\(|torch\.load\(|get_hf_file_bytes\(")
    found = {file.stem for file in files if more.search(file.read_text())}
    beside = {"jina", "kimi_audio", "mimo_audio", "ultravox"}
    # Reviewed: they read within the folder or the checkpoint.
    within = {"clef_omni", "roberta", "adapters", "qwen3_dflash"}
    assert found - {"clef_flash", "d3"} == beside | within


def test_hub_model_is_named_by_loaded_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cache, newest, loaded = tmp_path / "models--org--model", "1" * 40, "2" * 40
    for folder in (cache / "refs", cache / "snapshots" / newest):
        folder.mkdir(parents=True)
    (cache / "refs" / "main").write_text(newest)

    def name(revision: str | None, place: str = "org/model", **code: Any) -> str:
        model = SimpleNamespace(model=place, revision=revision, **PLAIN | code)
        assert key_space._model_name(model) == "org/model"
        load = SimpleNamespace(load_format="auto")
        monkeypatch.setattr(model_weights, "_models", lambda _: [(model, load)])
        return model_weights.weights_identity(None)

    names = [
        name(revision)
        for revision in (loaded, huggingface_hub.ResolvedRevision(loaded), "main", None)
    ]
    assert names == [f"hub:org/model@{commit}" for commit in (loaded, loaded, newest, newest)]
    # With HF_HUB_OFFLINE vLLM passes the folder in the hub's cache.
    assert name("main", str(cache / "snapshots" / newest)) == names[-1]
    with pytest.raises(Unsupported, match=r"set hotkv\.weights_identity"):
        name("v1.0")
    # Code of another repository counts.
    config = SimpleNamespace(auto_map={"A": "org/model--m.A", "B": ["none/x--m.B", "m.C"]})
    code = {"trust_remote_code": True, "hf_config": config}
    assert name(loaded, **code) == f"hub:org/model@{loaded}+code:hub:org/model@{newest}"
    config.auto_map = {"A": "m.A"}
    assert name(loaded, **code) == f"hub:org/model@{loaded}"
    assert name(loaded, code_revision="main", **code).endswith(f"+code:hub:org/model@{newest}")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    for revision, more in (("main", {}), (loaded, {"code_revision": "main", **code})):
        with pytest.raises(Unsupported, match=r"set hotkv\.weights_identity"):
            name(revision, **more)


@pytest.mark.parametrize(
    ("connector", "extra", "reads"),
    [
        (None, {}, False),
        ("HotKVConnector", {}, True),
        ("HotKVOffloadingConnector", {"cpu_bytes_to_use": 1}, True),
        ("HotKVConnector", {"hotkv.weights_identity": "mine"}, False),
        ("MultiConnector", {"connectors": [{"kv_connector": "HotKVConnector"}]}, True),
        ("NixlConnector", {}, False),
    ],
    ids=str,
)
def test_files_are_read_beside_vllms_loading(
    monkeypatch: pytest.MonkeyPatch, connector: str | None, extra: dict[str, Any], reads: bool
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        model_loader.BaseModelLoader, "load_model", lambda *_, **__: seen.append("loads")
    )
    monkeypatch.setattr(model_weights, "begin_reading", lambda _: seen.append("reads"))
    model_weights.read_beside_loading()
    model_weights.read_beside_loading()
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    config = SimpleNamespace(kv_transfer_config=transfer if connector else None)
    model_loader.BaseModelLoader.load_model(None, config, None)  # type: ignore[arg-type]
    assert seen == ["reads"] * reads + ["loads"]
