"""The systemd drop-in of GPU nodes, applied to the unit that it extends."""

import re
import shutil
import subprocess
from pathlib import Path

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
