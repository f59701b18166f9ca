"""The Kubernetes manifest agrees with the schemas of several versions, and with the server, image
and command that it names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hotkv
from hotkv_client import cli
from hotkv_server.daemon import STOP_S
from hotkv_server.settings import Settings, load_settings
from tests.deploy.dockerfile import parse

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (extra dev)"
)

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy" / "kubernetes" / "hotkv.yaml"
VERSIONS = ("1.28", "1.31", "1.34")
SPARE_BYTES = 1 << 30
"""What the server needs at least beside its arena."""
BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def objects() -> dict[str, Any]:
    return {item["kind"]: item for item in yaml.safe_load_all(MANIFEST.read_text())}


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * BINARY[quantity[-2:]]


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = objects()["DaemonSet"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """What the server makes of the manifest's configuration."""
    config = tmp_path / "hotkv.toml"
    config.write_text(objects()["ConfigMap"]["data"]["hotkv.toml"])
    return load_settings(config, [], "test")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["Namespace", "ConfigMap", "DaemonSet", "Service"])
def test_objects_fit_their_schemas(kind: str, version: str) -> None:
    kubernetes_validate.validate(objects()[kind], version, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    wrong = objects()["DaemonSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_objects_are_in_one_namespace_and_find_each_other() -> None:
    found = objects()
    assert {
        item["metadata"].get("namespace", item["metadata"]["name"]) for item in found.values()
    } == {"hotkv"}
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_arena_and_sockets_outlive_the_pod(pod: dict[str, Any], settings: Settings) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in (*pod["containers"], *pod["initContainers"]):
        mounted = {
            mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]
        }
        for place in (settings.arena_dir, settings.runtime_dir):
            assert mounted[str(place)]["hostPath"] == {
                "path": str(place),
                "type": "DirectoryOrCreate",
            }
    assert settings.arena_dir.is_relative_to("/dev/shm") and settings.arena.keep
    given = set(re.findall(r"/\S+/\S+", pod["initContainers"][0]["command"][-1].splitlines()[0]))
    assert given == {str(settings.arena_dir), str(settings.runtime_dir)}
    update = objects()["DaemonSet"]["spec"]["updateStrategy"]["rollingUpdate"]
    assert update["maxSurge"] == 0, "two servers can't have one arena"


def test_probes_are_commands_that_exist(pod: dict[str, Any]) -> None:
    server = pod["containers"][0]
    for name, is_live in (
        ("startupProbe", False),
        ("readinessProbe", False),
        ("livenessProbe", True),
    ):
        program, *arguments = server[name]["exec"]["command"]
        options = cli.parser().parse_args(arguments)
        assert (program, options.command, options.live) == ("hotkv", "ping", is_live)
        assert options.timeout_s < server[name]["timeoutSeconds"]


def test_numbers_agree(pod: dict[str, Any], settings: Settings) -> None:
    server, final = pod["containers"][0], parse((ROOT / "Dockerfile").read_text())[-1]
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_timeout_s + STOP_S
    assert num_bytes(server["resources"]["limits"]["memory"]) >= settings.arena.bytes + SPARE_BYTES
    assert (
        server["ports"][0]["containerPort"]
        == settings.http.port
        == objects()["Service"]["spec"]["ports"][0]["port"]
    )
    assert settings.http.host == "0.0.0.0", "Prometheus is not in the pod"
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * settings.arena.bytes / (
        1 << 30
    )
    uid, gid = map(int, final.last("USER").split(":"))
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (uid, gid)
    assert f"chown {uid}:{gid}" in pod["initContainers"][0]["command"][-1]
    assert {container["image"] for container in (*pod["containers"], *pod["initContainers"])} == {
        f"hotkv:{hotkv.__version__}"
    }


def test_the_server_is_confined(pod: dict[str, Any]) -> None:
    security = pod["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_the_example_of_an_engine_fits(pod: dict[str, Any], settings: Settings) -> None:
    """The comment at the top of the manifest, as a pod."""
    lines = [
        line.removeprefix("#")
        for line in MANIFEST.read_text().splitlines()
        if line.startswith("#   ")
    ]
    spec = yaml.safe_load("\n".join(lines))["spec"]
    spec["containers"][0]["image"] = "vllm/vllm-openai"
    example = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": spec}
    kubernetes_validate.validate(example, VERSIONS[-1], strict=True)
    transfer = json.loads(spec["containers"][0]["args"][1])
    assert transfer["kv_connector_extra_config"]["hotkv.target"] == f"unix:{settings.grpc_socket}"
    (volume,), (mount,) = spec["volumes"], spec["containers"][0]["volumeMounts"]
    assert volume["hostPath"]["path"] == mount["mountPath"] == str(settings.runtime_dir)
    assert spec["securityContext"]["supplementalGroups"] == [pod["securityContext"]["runAsGroup"]]
