"""Writes the generated files of deploy/: the settings' part of the Helm chart's schema, and the
plain Kubernetes manifest.

`python -m tools.chart` writes them; with `--check` the status is 1 if one is out of date. The
schema needs hotkv's extra `server`, the manifest helm.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

from hotkv_server.settings import Settings
from hotkv_server.settings.sources import leaves
from tools import helm

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "hotkv"
SCHEMA = CHART / "values.schema.json"
MANIFEST = ROOT / "deploy" / "kubernetes" / "hotkv.yaml"
OF_THE_CHART = ("runtime_dir", "arena.dir", "tiers.disk.path", "security.admin_socket")
"""They follow from the chart's value `directories`, so `settings` must not have them."""
WRITTEN = ("security.audit_file",)
"""Files that the server writes: no Secret can provide them."""
HELMS_OWN = ("# Source:", "helm.sh/chart:", "app.kubernetes.io/managed-by:")
HEAD = """\
# hotkv on every node with engines, for those who don't use Helm: kubectl apply -f hotkv.yaml.
# It is the chart deploy/helm/hotkv with its default values, written by `python -m tools.chart`.
#
# Change in this file: the image; the size of the arena (arena.bytes in the ConfigMap, and the pod's
# memory: the arena, 1/128 of it, and 2 GiB), which is small here; who may connect (security); which
# nodes (a nodeSelector). Changed settings take effect when the pods start again:
# kubectl -n hotkv rollout restart daemonset/hotkv
#
# The arena and the sockets are in directories of the node, so both outlive the pod: the next pod on
# the node continues with the cache, and engines connect to it by themselves. vllm.yaml is an
# example of an engine. For nodes with engines on GPUs apply the patch gpu.yaml.
#
# User namespaces (hostUsers: false) hide the user ids of engines from the server: do not use them,
# or use TCP with TLS.
apiVersion: v1
kind: Namespace
metadata:
  name: hotkv
  labels:
    # Only this level allows pods to mount directories of the node.
    pod-security.kubernetes.io/enforce: privileged
"""


def schema(present: dict[str, Any]) -> dict[str, Any]:
    """What is written by hand in `present` stays."""
    made = Settings.model_json_schema()
    definitions = made.pop("$defs")
    for name in OF_THE_CHART:
        *tables, leaf = name.split(".")
        table = made
        for part in tables:
            table = definitions[table["properties"][part]["$ref"].rpartition("/")[2]]
        del table["properties"][leaf]
    for one in (made, *definitions.values()):
        _simplify(one)
    names = {name: info for name, info in leaves(Settings) if name not in (*OF_THE_CHART, *WRITTEN)}
    paths = [
        name
        for name, info in names.items()
        if Path in (info.annotation, *get_args(info.annotation))
    ]
    secret = [name for name in names if name.startswith("security.") and name not in paths]
    secrets = present["properties"]["secrets"]["properties"]
    own = {name: present["$defs"][name] for name in ("Labels", "SecretKey")}
    new_secrets = {
        kind: {**secrets[kind], "propertyNames": {"enum": sorted(allowed)}}
        for kind, allowed in (("files", paths), ("values", secret))
    }
    properties = {
        **present["properties"],
        "settings": made,
        "secrets": {**present["properties"]["secrets"], "properties": new_secrets},
    }
    return {**present, "properties": properties, "$defs": {**own, **definitions}}


def _simplify(model: dict[str, Any]) -> None:
    """Removes what only Python needs, and defaults, which the server knows."""
    for noise in ("title", "default", "ge", "gt", "le"):
        model.pop(noise, None)
    for inner in model.get("properties", {}).values():
        _simplify(inner)


def schema_text() -> str:
    return json.dumps(schema(json.loads(SCHEMA.read_text())), indent=2) + "\n"


def manifest() -> str:
    """Raises HelmError."""
    lines = [
        line.rstrip()
        for line in helm.render(CHART, command=("template", "--skip-tests")).splitlines()
        if not line.lstrip().startswith(HELMS_OWN)
    ]
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the chart's schema and the manifest.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    # The manifest is made with the schema.
    for path, make in ((SCHEMA, schema_text), (MANIFEST, manifest)):
        try:
            text = make()
        except helm.HelmError as error:
            print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if options.check and path.read_text() != text:
            print(f"{path.relative_to(ROOT)} is old: python -m tools.chart", file=sys.stderr)
            return 1
        if not options.check:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
