"""The systemd drop-in and the Kubernetes patch of GPU nodes, applied to the unit and the manifest
that they extend."""

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT, DROP_IN = DEPLOY / "hotkv-server.service", DEPLOY / "hotkv-server-gpu.conf"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(
    ANALYZE is None, reason="systemd-analyze is not installed (Debian: apt install systemd)"
)
def test_systemd_takes_the_drop_in(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text()
        .replace("/opt/hotkv/bin/hotkv-server", "/bin/true")
        .replace("file:/etc/hotkv/hotkv.toml", "man:true")
    )
    folder = tmp_path / f"{UNIT.name}.d"
    folder.mkdir()
    shutil.copy(DROP_IN, folder / "gpu.conf")
    done = subprocess.run(
        [str(ANALYZE), "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    about_us = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert (done.returncode, about_us) == (0, [])


def test_the_drop_in_changes_what_is_there() -> None:
    unit, added = (
        dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
        for path in (UNIT, DROP_IN)
    )
    assert {name for name in added if name not in unit} == {"DeviceAllow", "ExecStartPre", "Wants"}
    assert (
        unit["PrivateDevices"] == "yes"
        and added["PrivateDevices"] == "no"
        and unit["DevicePolicy"] == "closed"
    )
    cache = Path("/var/cache") / unit["CacheDirectory"]
    assert all(
        Path(value).is_relative_to(cache) for value in re.findall(r"=(/\S+)", added["Environment"])
    )
    assert unit["LimitMEMLOCK"] == "infinity"
    assert DROP_IN.name in UNIT.read_text()


def _merged(into: Any, patch: Any) -> Any:
    """As `kubectl patch` does it for what the patch has: maps are merged, lists of things with
    names by name, others replaced."""
    if isinstance(into, dict) and isinstance(patch, dict):
        return {
            **into,
            **{
                key: _merged(into[key], value) if key in into else value
                for key, value in patch.items()
            },
        }
    if isinstance(into, list) and all(
        isinstance(item, dict) and "name" in item for item in [*into, *patch]
    ):
        found = {item["name"]: item for item in into}
        for item in patch:
            found[item["name"]] = (
                _merged(found[item["name"]], item) if item["name"] in found else item
            )
        return list(found.values())
    return patch


def test_the_patch_fits_the_manifest() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra dev)")
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (extra dev)"
    )
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "hotkv.yaml").read_text())
    before = next(item for item in documents if item["kind"] == "DaemonSet")
    patch = yaml.safe_load((DEPLOY / "kubernetes" / "gpu.yaml").read_text())
    # What kustomize finds the object of a patch by.
    for at in ("apiVersion", "kind"):
        assert patch[at] == before[at]
    for at in ("name", "namespace"):
        assert patch["metadata"][at] == before["metadata"][at]
    after = _merged(copy.deepcopy(before), patch)
    for version in ("1.28", "1.34"):
        kubernetes_validate.validate(after, version, strict=True)
    pod = after["spec"]["template"]["spec"]
    assert pod["hostPID"] and pod["hostIPC"] and pod["runtimeClassName"] == "nvidia"
    (server,) = pod["containers"]
    assert (
        server["securityContext"]
        == before["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    )
    values = {item["name"]: item["value"] for item in server["env"]}
    writable = {mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")}
    for name in ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert any(Path(values[name]).is_relative_to(place) for place in writable), name
