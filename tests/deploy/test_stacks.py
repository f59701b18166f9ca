"""Tests that in deploy/kubernetes/stacks each engine finds the server, may use its sockets, and
has enough memory. The stacks (their fields of November 2026) are not run."""

import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import hotkv_proto
from tests.deploy import objects
from tests.deploy.objects import HOST_NAMESPACES, VERSIONS, check_connector

FOLDER = objects.KUBERNETES / "stacks"
MANIFEST = objects.of_manifest()
Item = dict[str, Any]


class Part(NamedTuple):
    """What concerns hotkv in a stack's file.

    words: the engine's arguments.
    pod: None if the file has not Kubernetes' form.
    """

    words: list[str]
    image: str
    mounts: list[Item]
    volumes: list[Item]
    groups: list[int]
    shm_size: str
    pod: Item | None = None


def of_production_stack(values: Item) -> Part:
    """The chart mounts /dev/shm only with `tensorParallelSize`, and turns prefix caching off by
    default."""
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    config, image = model["vllmConfig"], f"{model['repository']}:{model['tag']}"
    assert config["enablePrefixCaching"] and config["tensorParallelSize"]
    lists = model["extraVolumeMounts"], model["extraVolumes"]
    groups = engine["securityContext"]["supplementalGroups"]
    return Part(config["extraArgs"], image, *lists, groups, model["shmSize"])


def of_pod(pod: Item, container_name: str, shm_size: str, words: list[str] | None = None) -> Part:
    (container,) = pod["containers"]
    assert container["name"] == container_name
    lists = container["volumeMounts"], pod["volumes"]
    groups = pod["securityContext"]["supplementalGroups"]
    return Part(words or container["args"], container["image"], *lists, groups, shm_size, pod)


def of_kserve(service: Item) -> Part:
    """As KServe's preset combines them: it splits VLLM_ADDITIONAL_ARGS like a shell, and merges
    its volume `dshm`."""
    pod = service["spec"]["template"]
    (more,) = (one for one in pod["containers"][0]["env"] if one["name"] == "VLLM_ADDITIONAL_ARGS")
    (shm,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "dshm")
    return of_pod(pod, "main", shm["sizeLimit"], shlex.split(more["value"]))


def of_llm_d(patch: Item) -> Part:
    """llm-d's guides set no limit for /dev/shm."""
    assert patch["metadata"]["name"] == "decode"
    return of_pod(patch["spec"]["template"]["spec"], "modelserver", "1024Gi")


def of_dynamo(graph: Item) -> Part:
    (worker,) = (one for one in graph["spec"]["components"] if one["type"] == "worker")
    return of_pod(worker["podTemplate"]["spec"], "main", worker["sharedMemorySize"])


STACKS: dict[str, Callable[[Item], Part]] = {
    "production-stack": of_production_stack,
    "kserve": of_kserve,
    "llm-d": of_llm_d,
    "dynamo": of_dynamo,
}


def test_each_stack_has_its_file() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == STACKS.keys()


@pytest.mark.parametrize("name", STACKS)
def test_the_engine_finds_the_server(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    part = STACKS[name](objects.yaml.safe_load(text))
    assert part.words.count("--kv-transfer-config") == 1
    check_connector(part.words, objects.num_bytes(part.shm_size))
    (mount,) = (one for one in part.mounts if one["mountPath"] == "/run/hotkv")
    (volume,) = (one for one in part.volumes if one["name"] == mount["name"])
    assert mount["readOnly"]
    assert volume == MANIFEST.volumes["sockets"] | {"name": mount["name"]}
    assert part.groups == [MANIFEST.pod["securityContext"]["runAsGroup"]]
    assert not any(f"{namespace}:" in text for namespace in HOST_NAMESPACES)
    image = rf"\w+-hotkv:{re.escape(hotkv_proto.__version__)}"
    assert re.fullmatch(image, part.image) and "deploy/vllm.Dockerfile" in text


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("name", ["kserve", "llm-d", "dynamo"])
def test_the_pod_is_one_for_kubernetes(name: str, version: str) -> None:
    part = STACKS[name](objects.yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}}
    objects.validate({**head, "spec": part.pod}, version)
