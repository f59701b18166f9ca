"""Kubernetes objects of the plain manifests and the Helm chart. Tests of the chart are skipped
if helm is absent and can't be downloaded."""

import functools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotkv_vllm.config import ConnectorConfig
from hotkv_vllm.plugin import CONNECTORS
from tests.support.programs import program
from tools import chart, helm

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed (extra dev)"
)

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
EXAMPLES = chart.CHART / "examples"
VERSIONS = ("1.28", "1.31", "1.34")
HOST_NAMESPACES = {"pid", "ipc", "hostPID", "hostIPC"}
BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Objects:
    all: tuple[dict[str, Any], ...]

    @staticmethod
    def read(text: str) -> "Objects":
        return Objects(tuple(item for item in yaml.safe_load_all(text) if item))

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = (item for item in self.all if item["kind"] == kind)
        return found

    @property
    def kinds(self) -> set[str]:
        return {item["kind"] for item in self.all}

    @property
    def pod(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.one("DaemonSet")["spec"]["template"]["spec"]
        return spec

    @property
    def server(self) -> dict[str, Any]:
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def directories(self) -> dict[str, Any]:
        (found,) = self.pod["initContainers"]
        return dict(found)

    @property
    def settings_file(self) -> str:
        text: str = self.one("ConfigMap")["data"]["hotkv.toml"]
        return text

    @property
    def environment(self) -> dict[str, Any]:
        """Name to value or `valueFrom` source, of the server's container."""
        return {
            item["name"]: item.get("value", item.get("valueFrom")) for item in self.server["env"]
        }

    @property
    def volumes(self) -> dict[str, dict[str, Any]]:
        return {volume["name"]: volume for volume in self.pod["volumes"]}


def of_manifest(name: str = "hotkv.yaml") -> Objects:
    return Objects.read((KUBERNETES / name).read_text())


@functools.cache
def of_chart(*values: str, sets: tuple[str, ...] = ()) -> Objects:
    """`values`: names of example files; `sets`: `--set` values."""
    try:
        helm.find()
    except helm.HelmError as error:
        pytest.skip(str(error))
    files = [EXAMPLES / f"{name}.yaml" for name in values]
    return Objects.read(helm.render(chart.CHART, *files, sets=sets))


def of_compose(*files: str, **environment: str) -> dict[str, Any]:
    command = [program("docker-compose"), *(w for file in files for w in ("-f", ROOT / file))]
    where = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run([*command, "config"], capture_output=True, env=where, timeout=60)
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    return services


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * BINARY[quantity[-2:]]


def validate(item: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(item, version, strict=True)


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return read


def merged(into: Any, patch: Any) -> Any:
    """As `kubectl patch` merges: maps by key, lists of named items by name; other values are
    replaced."""
    if isinstance(into, dict) and isinstance(patch, dict):
        return {
            **into,
            **{
                key: merged(into[key], value) if key in into else value
                for key, value in patch.items()
            },
        }
    if isinstance(into, list) and all(
        isinstance(item, dict) and "name" in item for item in [*into, *patch]
    ):
        found = {item["name"]: item for item in into}
        for item in patch:
            found[item["name"]] = (
                merged(found[item["name"]], item) if item["name"] in found else item
            )
        return list(found.values())
    return patch


def check_connector(arguments: list[str], shm_bytes: int) -> None:
    """The server's socket is right, and the primary tier fits into the container's shared
    memory."""
    config = transfer_config(arguments)
    assert config["kv_connector"] in dict(CONNECTORS)
    assert "kv_connector_module_path" not in config
    extra = config["kv_connector_extra_config"]
    assert ConnectorConfig.from_extra_config(extra).target == "unix:/run/hotkv/grpc.sock"
    assert extra["cpu_bytes_to_use"] < shm_bytes
