"""Engines on GPUs through the second door (docs/doors.md): compose file, manifest and values name
the connector only by its name, and no container gets namespaces of the host."""

import copy
import json
from typing import Any

import pytest

from tests.deploy import objects
from tests.deploy.dockerfile import ROOT
from tests.deploy.objects import HOST_NAMESPACES, check_connector

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")


def test_compose_gives_gpus_to_the_engine_only() -> None:
    services = objects.of_compose("compose.yaml", "compose.offloading.yaml")
    added = yaml.safe_load((ROOT / "compose.offloading.yaml").read_text())["services"]
    assert set(added) == {"vllm"} and "devices" in json.dumps(added)
    assert not HOST_NAMESPACES & (services["vllm"].keys() | services["hotkv"].keys())
    check_connector(services["vllm"]["command"], int(added["vllm"]["shm_size"][:-2]) << 30)


def test_the_manifest_of_an_engine_needs_no_namespace_of_the_host() -> None:
    before = objects.of_manifest("vllm.yaml").one("Deployment")
    patch = objects.of_manifest("vllm-offloading.yaml").one("Deployment")
    after = objects.merged(copy.deepcopy(before), patch)
    for version in ("1.28", "1.34"):
        objects.validate(after, version)
    pod: dict[str, Any] = after["spec"]["template"]["spec"]
    assert not HOST_NAMESPACES & pod.keys() and pod["runtimeClassName"] == "nvidia"
    (engine,) = pod["containers"]
    (shm,) = (one for one in pod["volumes"] if one["name"] == "shm")
    check_connector(engine["args"], objects.num_bytes(shm["emptyDir"]["sizeLimit"]))


def test_the_chart_needs_no_gpu_for_it() -> None:
    found = objects.of_chart("gpu-offloading")
    assert not HOST_NAMESPACES & found.pod.keys() and "runtimeClassName" not in found.pod
    assert found.pod["tolerations"] and found.pod["nodeSelector"]
