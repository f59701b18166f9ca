"""Tests that the plain manifests fit the schemas of several Kubernetes versions, and the server,
image and command that they name."""

import copy
from pathlib import Path
from typing import Any

import pytest

import hotkv_proto
from hotkv_client.command import cli
from hotkv_server.settings import Settings, load_settings
from tests.deploy import objects
from tests.deploy.dockerfile import parse
from tests.deploy.objects import HOST_NAMESPACES, ROOT, VERSIONS, Objects, check_connector


@pytest.fixture(scope="module")
def manifest() -> Objects:
    return objects.of_manifest()


@pytest.fixture
def settings(manifest: Objects, tmp_path: Path) -> Settings:
    config = tmp_path / "hotkv.toml"
    config.write_text(manifest.settings_file)
    return load_settings(config, [], "test")


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_their_schemas(version: str) -> None:
    """hotkv.yaml comes from the chart; `test_chart.py` validates it."""
    for item in objects.of_manifest("vllm.yaml").all:
        objects.validate(item, version)


def test_arena_and_sockets_outlive_the_pod(manifest: Objects, settings: Settings) -> None:
    for container in (manifest.server, manifest.directories):
        mounted = {m["mountPath"]: manifest.volumes[m["name"]] for m in container["volumeMounts"]}
        for place in map(str, (settings.arena_dir, settings.runtime_dir)):
            expected = {"path": place, "type": "DirectoryOrCreate"}
            assert mounted[place]["hostPath"] == expected
    assert settings.arena_dir.is_relative_to("/dev/shm") and settings.arena.keep
    update = manifest.one("DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update["maxSurge"] == 0, "two servers can't have one arena"


def test_engines_do_not_see_the_admin_socket(manifest: Objects, settings: Settings) -> None:
    folder = str(settings.admin_socket.parent)
    (mount,) = (m for m in manifest.server["volumeMounts"] if m["mountPath"] == folder)
    assert "emptyDir" in manifest.volumes[mount["name"]]
    assert not settings.admin_socket.is_relative_to(settings.runtime_dir)
    assert manifest.environment["HOTKV_TARGET"] == f"unix:{settings.admin_socket}"


def test_numbers_agree(manifest: Objects, settings: Settings) -> None:
    server, security = manifest.server, manifest.pod["securityContext"]
    (port,) = manifest.one("Service")["spec"]["ports"]
    assert server["ports"][0]["containerPort"] == settings.http.port == port["port"]
    assert settings.http.host == "0.0.0.0", "Prometheus is not in the pod"
    startup, gib = server["startupProbe"], settings.arena.bytes / (1 << 30)
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * gib
    user = parse((ROOT / "Dockerfile").read_text())[-1].last("USER")
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert {server["image"], manifest.directories["image"]} == {f"hotkv:{hotkv_proto.__version__}"}


def test_engines_find_the_server(settings: Settings, manifest: Objects) -> None:
    engine = objects.of_manifest("vllm.yaml").one("Deployment")
    pod = engine["spec"]["template"]["spec"]
    (vllm,) = pod["containers"]
    config = objects.transfer_config(vllm["args"])
    assert config["kv_connector_extra_config"]["hotkv.target"] == f"unix:{settings.grpc_socket}"
    (mount,) = (m for m in vllm["volumeMounts"] if m["name"] == "hotkv")
    (volume,) = (v for v in pod["volumes"] if v["name"] == "hotkv")
    assert volume["hostPath"]["path"] == mount["mountPath"] == str(settings.runtime_dir)
    assert mount["readOnly"], "an engine has nothing to write there"
    groups = pod["securityContext"]["supplementalGroups"]
    assert groups == [manifest.pod["securityContext"]["runAsGroup"]]
    assert not pod["enableServiceLinks"], "a Service called vllm would set VLLM_PORT"


def test_shared_cache_fits_cpu_engines_shared_memory() -> None:
    """A CPU engine's shared KV cache is a file in /dev/shm."""
    pod = objects.of_manifest("vllm.yaml").one("Deployment")["spec"]["template"]["spec"]
    (vllm,) = pod["containers"]
    (gib,) = (item["value"] for item in vllm["env"] if item["name"] == "VLLM_CPU_KVCACHE_SPACE")
    (mount,) = (m for m in vllm["volumeMounts"] if m["mountPath"] == "/dev/shm")
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    room_bytes = objects.num_bytes(volume["emptyDir"]["sizeLimit"])
    assert int(gib) << 30 < room_bytes < objects.num_bytes(vllm["resources"]["limits"]["memory"])


@pytest.mark.parametrize(
    ("base", "kind", "patch"),
    [
        ("hotkv.yaml", "DaemonSet", "gpu.yaml"),
        ("vllm.yaml", "Deployment", "vllm-gpu.yaml"),
        ("vllm.yaml", "Deployment", "vllm-offloading.yaml"),
    ],
)
def test_patches_for_gpus_fit(base: str, kind: str, patch: str) -> None:
    before, added = objects.of_manifest(base).one(kind), objects.of_manifest(patch).one(kind)
    # kustomize matches by kind, apiVersion, name and namespace.
    assert before["apiVersion"] == added["apiVersion"]
    for at in ("name", "namespace"):
        assert before["metadata"][at] == added["metadata"][at]
    after = objects.merged(copy.deepcopy(before), added)
    for version in (VERSIONS[0], VERSIONS[-1]):
        objects.validate(after, version)
    old, new = (item["spec"]["template"]["spec"] for item in (before, after))
    assert not HOST_NAMESPACES & new.keys() and new["runtimeClassName"] == "nvidia"
    assert len(new["containers"]) == 1, "the patch names another container"
    rights = [pod["containers"][0].get("securityContext") for pod in (old, new)]
    assert rights[0] == rights[1]


def test_offloading_tier_fits_engines_shared_memory() -> None:
    base, patch = (objects.of_manifest(f"vllm{name}.yaml") for name in ("", "-offloading"))
    engine = objects.merged(base.one("Deployment"), patch.one("Deployment"))
    pod = engine["spec"]["template"]["spec"]
    (shm,) = (one for one in pod["volumes"] if one["name"] == "shm")
    check_connector(pod["containers"][0]["args"], objects.num_bytes(shm["emptyDir"]["sizeLimit"]))


def test_gpu_kernels_are_cached_where_writable(manifest: Objects) -> None:
    patch = objects.of_manifest("gpu.yaml").one("DaemonSet")
    patched = objects.merged(copy.deepcopy(manifest.one("DaemonSet")), patch)
    server: dict[str, Any] = patched["spec"]["template"]["spec"]["containers"][0]
    values = {item["name"]: item.get("value") for item in server["env"]}
    writable = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    for name in ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert any(Path(values[name]).is_relative_to(place) for place in writable), name


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_use_http_or_existing_commands(manifest: Objects, name: str) -> None:
    """`hotkv ping` starts Python each time: only where the kubelet can't reach the HTTP port."""
    is_live = name == "livenessProbe"
    asked = {"path": "/livez" if is_live else "/readyz", "port": "metrics"}
    assert manifest.server[name]["httpGet"] == asked
    assert "metrics" in {port["name"] for port in manifest.server["ports"]}
    for local in ("http.host=127.0.0.1", "http.port=0", "http.port=-1"):
        server = objects.of_chart(sets=(f"settings.{local}",)).server
        program, *arguments = server[name]["exec"]["command"]
        options = cli.parser().parse_args(arguments)
        assert (program, options.command, options.live) == ("hotkv", "ping", is_live)
        assert options.timeout_s < server[name]["timeoutSeconds"]


def test_nodes_with_gpus_take_the_pod() -> None:
    """GPU nodes usually have this taint. Namespaces of the host can be turned on."""
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    own = "tolerations[0].key=spot"
    pod = objects.of_chart(sets=("gpu.enabled=true", "gpu.hostPID=true", own)).pod
    assert pod["tolerations"] == [{"key": "spot"}, taint]
    assert HOST_NAMESPACES & pod.keys() == {"hostPID"} and pod["hostPID"] is True
    assert "tolerations" not in objects.of_chart().pod
    patch = objects.of_manifest("gpu.yaml").one("DaemonSet")
    assert patch["spec"]["template"]["spec"]["tolerations"] == [taint]
    # With vLLM's own offloading the engines copy, so the server needs no GPU.
    pod = objects.of_chart("gpu-offloading").pod
    assert not HOST_NAMESPACES & pod.keys() and "runtimeClassName" not in pod
    assert pod["tolerations"] and pod["nodeSelector"]
