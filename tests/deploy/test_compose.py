"""Tests that compose.yaml fits the Dockerfiles, the server's settings and the connector, and
that Compose accepts it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import hotkv_proto
from hotkv_server.daemon import STOP_S
from hotkv_server.security.page_access import read_token
from hotkv_server.settings import Settings, load_settings
from tests.deploy import objects
from tests.deploy.dockerfile import ROOT, is_sent, parse
from tests.deploy.objects import HOST_NAMESPACES, check_connector

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")

FILES = ("compose.yaml", "compose.gpu.yaml")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


@pytest.fixture
def settings(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Settings:
    final = parse((ROOT / "Dockerfile").read_text())[-1]
    (place,) = (word for word in final.last("ENV").split() if word.startswith("HOTKV_ARENA__DIR="))
    monkeypatch.setenv(*place.split("="))
    run, *flags = services["hotkv"]["command"]
    assert run == "run"
    return load_settings(None, [flag.replace("${HOTKV_ARENA:-8GiB}", "8GiB") for flag in flags], "")


@pytest.mark.parametrize("files", [FILES[:1], FILES])
def test_compose_takes_it(files: tuple[str, ...]) -> None:
    found = objects.of_compose(*files, MODEL="of/mine")
    assert found["vllm"]["command"][0] == "--model=of/mine"
    assert not HOST_NAMESPACES & (found["vllm"].keys() | found["hotkv"].keys())


def test_offloading_file_gives_gpus_to_engines_only() -> None:
    found = objects.of_compose("compose.yaml", "compose.offloading.yaml")
    added = yaml.safe_load((ROOT / "compose.offloading.yaml").read_text())["services"]
    assert set(added) == {"vllm"} and "devices" in json.dumps(added)
    assert not HOST_NAMESPACES & (found["vllm"].keys() | found["hotkv"].keys())
    check_connector(found["vllm"]["command"], int(added["vllm"]["shm_size"][:-2]) << 30)


def test_the_cache_outlives_the_container(services: dict[str, Any], settings: Settings) -> None:
    server, vllm = services["hotkv"], services["vllm"]
    arena = f"{settings.arena_dir}:{settings.arena_dir}"
    assert arena in server["volumes"] and arena in services["directories"]["volumes"]
    uid = parse((ROOT / "Dockerfile").read_text())[-1].last("USER")
    assert f"chown {uid} {settings.arena_dir}\n" in services["directories"]["command"][0]
    assert float(server["stop_grace_period"].rstrip("s")) >= settings.drain_timeout_s + STOP_S
    assert f"sockets:{settings.runtime_dir}" in server["volumes"]
    assert f"sockets:{settings.runtime_dir}:ro" in vllm["volumes"]
    assert vllm["group_add"] == [uid.partition(":")[2]]


def test_engines_do_not_get_the_admin_socket(services: dict[str, Any], settings: Settings) -> None:
    """Engines run as root there: file modes would not stop them."""
    mounted = [volume.split(":")[1] for volume in services["vllm"]["volumes"]]
    assert not any(settings.admin_socket.is_relative_to(place) for place in mounted)
    # The health check and `hotkv` use it.
    target = services["hotkv"]["environment"]["HOTKV_TARGET"]
    assert target == f"unix:{settings.admin_socket}"
    assert any(settings.admin_socket.is_relative_to(place) for place in services["hotkv"]["tmpfs"])


def test_the_status_page_has_a_token_that_stays(
    services: dict[str, Any], settings: Settings, tmp_path: Path
) -> None:
    token = settings.http.token_file
    assert token is not None
    for name, mode in (("directories", ""), ("hotkv", ":ro")):
        assert f"page:{token.parent}{mode}" in services[name]["volumes"]
    assert not any(volume.startswith("page:") for volume in services["vllm"]["volumes"])
    assert f"exec hotkv cat {token} " in (ROOT / "compose.yaml").read_text()
    (script,) = services["directories"]["command"]
    script = script.replace("10001:10001", f"{os.geteuid()}:{os.getegid()}")
    for place in (settings.arena_dir, token.parent):
        (own := tmp_path / place.name).mkdir()
        script = script.replace(str(place), str(own))
    made = []
    for _ in range(2):
        subprocess.run([*services["directories"]["entrypoint"], script], check=True)
        made.append(read_token(tmp_path / token.parent.name / token.name))
    assert len(made[0]) == 32 and made[0] == made[1]
    (tmp_path / token.parent.name / token.name).unlink()
    subprocess.run([*services["directories"]["entrypoint"], script], check=True)
    assert read_token(tmp_path / token.parent.name / token.name) != made[0]


def test_the_engine_finds_the_server(services: dict[str, Any], settings: Settings) -> None:
    config = objects.transfer_config(services["vllm"]["command"])
    assert config["kv_connector_extra_config"]["hotkv.target"] == f"unix:{settings.grpc_socket}"
    assert int(services["vllm"]["environment"]["VLLM_CPU_KVCACHE_SPACE"]) < int(
        services["vllm"]["shm_size"].removesuffix("gb")
    )


def test_images_are_built_from_files_that_are_sent(services: dict[str, Any]) -> None:
    assert {service["image"].partition(":")[2] for service in services.values()} == {
        hotkv_proto.__version__
    }
    recipe = ROOT / services["vllm"]["build"]["dockerfile"]
    (stage,) = parse(recipe.read_text())
    ignored = (ROOT / ".dockerignore").read_text()
    for _, text in (step for step in stage.steps if step[0] == "COPY"):
        for source in text.split()[:-1]:
            assert Path(ROOT / source).exists() and is_sent(source, ignored)


def test_gpus_come_with_the_library_that_copies() -> None:
    """Docker mounts only the named capabilities' libraries; libcuda belongs to `compute`."""
    found = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]
    for name in ("hotkv", "vllm"):
        (device,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        named = set(device["capabilities"])
        assert "gpu" in named and (named == {"gpu"} or "compute" in named)
