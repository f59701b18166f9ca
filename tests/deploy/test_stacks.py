"""hotkv in vLLM production-stack, KServe, llm-d and Dynamo: each file of deploy/kubernetes/stacks
has fields that the stack has, and makes a pod that Kubernetes takes and that finds the server."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import hotkv_proto
from tests.deploy import objects
from tests.deploy.objects import VERSIONS
from tests.deploy.stacks import STACKS, Item, llm_d_base
from tests.deploy.test_offloading import HOST_NAMESPACES, check_connector
from tools import helm

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with kubernetes-validate")
FOLDER = objects.KUBERNETES / "stacks"
MANIFEST = objects.of_manifest()


def read(name: str) -> Item:
    item: Item = objects.yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return item


def check_fields(name: str, item: Item) -> None:
    jsonschema.Draft202012Validator(STACKS[name].schema).validate(item)


def arguments(container: Item) -> list[str]:
    return [*container.get("command", []), *container.get("args", [])]


def test_each_stack_has_its_file() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == STACKS.keys()


@pytest.mark.parametrize("name", STACKS)
def test_fields_are_those_of_the_stack(name: str) -> None:
    check_fields(name, read(name))
    wrong: Any = copy.deepcopy(read(name))
    place = wrong
    while isinstance(inner := next(reversed(place.values())), dict) and "containers" not in inner:
        place = inner
    place["volume"] = []
    with pytest.raises(jsonschema.ValidationError):
        check_fields(name, wrong)


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
@pytest.mark.parametrize("name", STACKS)
def test_the_pod_is_one_for_kubernetes(name: str, version: str) -> None:
    pod = STACKS[name].pod(read(name))
    item = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": pod}
    objects.validate(item, version)
    (container,) = pod["containers"]
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert len(places) == len(set(places)), "two volumes at one place"
    assert {mount["name"] for mount in container["volumeMounts"]} <= {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.parametrize("name", STACKS)
def test_the_engine_finds_the_server(name: str) -> None:
    stack = STACKS[name]
    pod = stack.pod(read(name))
    (container,) = pod["containers"]
    assert container["name"] == stack.container
    words = arguments(container)
    assert words.count("--kv-transfer-config") == 1 and "--no-enable-prefix-caching" not in words
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    shared = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    check_connector(words, objects.num_bytes(shared.get("sizeLimit", "1024Gi")))
    sockets = mounts["/run/hotkv"]
    assert sockets["readOnly"] and volumes[sockets["name"]] == MANIFEST.volumes["sockets"] | {
        "name": sockets["name"]
    }
    group = MANIFEST.pod["securityContext"]["runAsGroup"]
    assert pod["securityContext"]["supplementalGroups"] == [group]
    assert not HOST_NAMESPACES & pod.keys()


@pytest.mark.parametrize("name", STACKS)
def test_the_image_is_one_with_hotkv(name: str) -> None:
    pod = STACKS[name].pod(read(name))
    image = pod["containers"][0]["image"]
    assert re.fullmatch(rf"\w+-hotkv:{re.escape(hotkv_proto.__version__)}", image), image
    assert "deploy/vllm.Dockerfile" in (FOLDER / f"{name}.yaml").read_text()


def test_kustomize_merges_the_patch_of_llm_d(tmp_path: Path) -> None:
    """The guides give the Deployment another name before patches see it."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "deployment.yaml").write_text(objects.yaml.safe_dump(llm_d_base()))
    named = {"resources": ["deployment.yaml"], "namePrefix": "gpu-vllm-"}
    (base / "kustomization.yaml").write_text(objects.yaml.safe_dump(named))
    patches = [{"path": "llm-d.yaml", "target": {"kind": "Deployment"}}]
    over = {"resources": ["base"], "patches": patches}
    (tmp_path / "kustomization.yaml").write_text(objects.yaml.safe_dump(over))
    shutil.copy(FOLDER / "llm-d.yaml", tmp_path)
    try:
        rendered = helm.kustomize(tmp_path)
    except helm.HelmError as error:
        if "no kubectl here" not in str(error):
            raise
        pytest.skip(str(error))
    found = objects.Objects.read(rendered).one("Deployment")
    assert found["metadata"]["name"] == "gpu-vllm-decode"

    def by_names(pod: Item) -> Item:
        (container,) = pod["containers"]
        for item in (container["volumeMounts"], pod["volumes"]):
            item.sort(key=lambda one: one["name"])
        return pod

    pod = found["spec"]["template"]["spec"]
    assert by_names(pod) == by_names(STACKS["llm-d"].pod(read("llm-d")))
    objects.validate(found, VERSIONS[-1])
