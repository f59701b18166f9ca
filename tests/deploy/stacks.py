"""The pod of an engine that four stacks make of the files in deploy/kubernetes/stacks.

From their charts, CRDs and guides of November 2026, in our words: the fields that our files use,
and the stack's additions to a pod. Names of fields are the stack's; another field fails in `check`.
The stacks themselves were not run.
"""

import copy
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.deploy import objects

Item = dict[str, Any]

POD_FIELDS: Item = {"type": "object"}
"""A pod's fields are checked against Kubernetes' own schema."""
NUMBER, TEXT = {"type": "integer"}, {"type": "string"}


def fields(required: str, /, **properties: Item) -> Item:
    """Returns the schema of an object with these fields and no others. `required` names those that
    must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: Item) -> Item:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = fields("name", name=TEXT)
VLLM_CONFIG = fields(
    "extraArgs enablePrefixCaching",
    enablePrefixCaching={"const": True},
    tensorParallelSize=NUMBER,
    extraArgs=listed(TEXT),
)
MODEL = fields(
    "name repository tag modelURL replicaCount requestCPU requestMemory requestGPU",
    **dict.fromkeys(("name", "repository", "tag", "modelURL", "requestMemory", "shmSize"), TEXT),
    **dict.fromkeys(("replicaCount", "requestCPU", "requestGPU"), NUMBER),
    vllmConfig=VLLM_CONFIG,
    extraVolumes=listed(POD_FIELDS),
    extraVolumeMounts=listed(POD_FIELDS),
)
PRODUCTION_STACK = fields(
    "servingEngineSpec",
    servingEngineSpec=fields("modelSpec", securityContext=POD_FIELDS, modelSpec=listed(MODEL)),
)
KSERVE = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "serving.kserve.io/v1alpha2"},
    kind={"const": "LLMInferenceService"},
    metadata=METADATA,
    spec=fields(
        "model template",
        model=fields("uri", uri={"type": "string", "pattern": "^(hf|s3|pvc|oci)://"}, name=TEXT),
        replicas=NUMBER,
        router=fields("", scheduler=POD_FIELDS, route=POD_FIELDS, gateway=POD_FIELDS),
        template=POD_FIELDS,
    ),
)
COMPONENT = fields(
    "name type podTemplate",
    name=TEXT,
    type={"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
    replicas=NUMBER,
    sharedMemorySize=TEXT,
    podTemplate=fields("spec", spec=POD_FIELDS),
)
DYNAMO = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "nvidia.com/v1beta1"},
    kind={"const": "DynamoGraphDeployment"},
    metadata=METADATA,
    spec=fields("components", components=listed(COMPONENT)),
)
LLM_D = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "apps/v1"},
    kind={"const": "Deployment"},
    metadata=METADATA,
    spec=fields("template", template=fields("spec", spec=POD_FIELDS)),
)


def shared_memory(name: str, size: str | None) -> tuple[Item, Item]:
    """Returns the mount of /dev/shm and its volume; None: without a limit."""
    limit = {} if size is None else {"sizeLimit": size}
    volume = {"name": name, "emptyDir": {"medium": "Memory", **limit}}
    return {"name": name, "mountPath": "/dev/shm"}, volume


def of_production_stack(values: Item) -> Item:
    """Returns the pod. The chart adds /dev/shm, of 20Gi by default, if `tensorParallelSize` is
    given."""
    engine = values["servingEngineSpec"]
    (model,) = engine["modelSpec"]
    mounts, volumes = list(model["extraVolumeMounts"]), list(model["extraVolumes"])
    if "tensorParallelSize" in model["vllmConfig"]:
        mount, volume = shared_memory("shm", model.get("shmSize", "20Gi"))
        mounts.append(mount)
        volumes.append(volume)
    container = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "command": ["vllm", "serve", model["modelURL"], *model["vllmConfig"]["extraArgs"]],
        "resources": {
            "requests": {"cpu": str(model["requestCPU"]), "memory": model["requestMemory"]},
            "limits": {"nvidia.com/gpu": str(model["requestGPU"])},
        },
        "volumeMounts": mounts,
    }
    return {
        "securityContext": engine["securityContext"],
        "containers": [container],
        "volumes": volumes,
    }


def of_shell(line: str) -> list[str]:
    """Returns the words of a shell that evaluates a line."""
    command = ["bash", "-c", "eval \"printf '%s\\\\0' $LINE\""]
    done = subprocess.run(command, env={"LINE": line}, check=True, capture_output=True, text=True)
    return done.stdout.rstrip("\0").split("\0")


def of_kserve(service: Item) -> Item:
    """Returns the pod. The preset's shell evaluates `vllm serve` with VLLM_ADDITIONAL_ARGS; it has
    a /dev/shm of 1Gi. The service's template is merged into it by names."""
    mount, volume = shared_memory("dshm", "1Gi")
    preset = {
        "containers": [{"name": "main", "image": "llm-d", "volumeMounts": [mount]}],
        "volumes": [volume],
    }
    pod: Item = objects.merged(preset, service["spec"]["template"])
    (main,) = pod["containers"]
    (more,) = (one["value"] for one in main["env"] if one["name"] == "VLLM_ADDITIONAL_ARGS")
    main["args"] = ["serve", "/mnt/models", *of_shell(more)]
    return pod


def llm_d_base() -> Item:
    """Returns the Deployment of the guides: they run `vllm serve` in the container `modelserver`,
    with an unlimited /dev/shm."""
    mount, volume = shared_memory("shm", None)
    server = {"name": "modelserver", "image": "vllm", "command": ["vllm", "serve"]}
    server |= {"resources": {"limits": {"nvidia.com/gpu": "2"}}, "volumeMounts": [mount]}
    pod = {"containers": [server], "volumes": [volume], "enableServiceLinks": False}
    labels = {"llm-d.ai/role": "decode"}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }


def of_llm_d(patch: Item) -> Item:
    deployment = objects.merged(llm_d_base(), patch)
    pod: Item = deployment["spec"]["template"]["spec"]
    return pod


def of_dynamo(graph: Item) -> Item:
    """Returns the pod. The operator adds /dev/shm of `sharedMemorySize` to the container `main`."""
    (worker,) = (one for one in graph["spec"]["components"] if one["type"] == "worker")
    pod: Item = copy.deepcopy(worker["podTemplate"]["spec"])
    mount, volume = shared_memory("shared-memory", worker.get("sharedMemorySize", "8Gi"))
    (main,) = pod["containers"]
    main["volumeMounts"].append(mount)
    pod["volumes"].append(volume)
    return pod


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack.

    schema: of its file.
    pod: makes the pod of the file.
    """

    schema: Item
    pod: Callable[[Item], Item]
    container: str


STACKS = {
    "production-stack": Stack(PRODUCTION_STACK, of_production_stack, "vllm"),
    "kserve": Stack(KSERVE, of_kserve, "main"),
    "llm-d": Stack(LLM_D, of_llm_d, "modelserver"),
    "dynamo": Stack(DYNAMO, of_dynamo, "main"),
}
