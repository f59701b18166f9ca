"""Tests that systemd's own tools accept the unit, and that it fits the server."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hotkv_proto import limits
from hotkv_server.daemon import BROKEN_STATUS, STOP_S
from hotkv_server.node.health import CHECK_S
from hotkv_server.settings import load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "hotkv-server.service"
DROP_IN = DEPLOY / "hotkv-server-gpu.conf"
MAX_EXPOSURE = 1.5
"""On the scale of `systemd-analyze security`, 0 to 10."""
ANALYZE = shutil.which("systemd-analyze")

needs_systemd = pytest.mark.skipif(
    ANALYZE is None, reason="systemd-analyze is not installed (Debian: apt install systemd)"
)


def service() -> dict[str, list[str]]:
    """The entries of the unit's [Service]."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and (match := re.fullmatch(r"(\w+)=(.*)", line)):
            found.setdefault(match[1], []).append(match[2])
    return found


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ANALYZE), *arguments], capture_output=True, text=True, timeout=60)


@needs_systemd
@pytest.mark.parametrize("has_drop_in", [False, True])
def test_systemd_finds_nothing_wrong(tmp_path: Path, has_drop_in: bool) -> None:
    """/bin/true stands in for the server's program."""
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text()
        .replace("/opt/hotkv/bin/hotkv-server", "/bin/true")
        .replace("file:/etc/hotkv/hotkv.toml", "man:true")
    )
    if has_drop_in:
        folder = tmp_path / f"{UNIT.name}.d"
        folder.mkdir()
        shutil.copy(DROP_IN, folder / "gpu.conf")
    done = analyze("verify", str(unit))
    about_us = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert (done.returncode, about_us) == (0, [])


@needs_systemd
def test_the_unit_is_confined() -> None:
    done = analyze("security", "--offline=yes", "--no-pager", str(UNIT))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is too old to look at a file (needs 250)")
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stderr
    print(f"exposure {exposure[1]}")
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout


def test_the_unit_has_no_setting_twice() -> None:
    twice = {name for name, values in service().items() if len(values) > 1}
    assert twice == {"SystemCallFilter"}, "an allow list, less a group"


def test_nothing_takes_the_arena_or_the_sockets_away() -> None:
    settings, unit = load_settings(DEPLOY / "hotkv.toml", [], "test"), service()
    assert settings.runtime_dir == Path("/run", *unit["RuntimeDirectory"])
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert any(settings.arena_dir.is_relative_to(path) for path in unit["ReadWritePaths"])
    assert unit["RemoveIPC"] == ["no"], "systemd would remove what the user has in /dev/shm"
    assert "DynamicUser" not in unit, "it implies RemoveIPC"
    assert "PrivateUsers" not in unit, "user ids of engines would be lost"
    assert "MemoryDenyWriteExecute" not in unit, "kernels are compiled"
    # Without /proc/meminfo the server would fill an arena that is too large, until the kernel
    # kills it.
    assert limits.MEMINFO.is_relative_to("/proc")
    assert unit.get("ProcSubset", ["all"]) == ["all"]


def test_times_fit_what_the_server_does() -> None:
    """Even if the server does not ask systemd for more time."""
    settings, unit = load_settings(DEPLOY / "hotkv.toml", [], "test"), service()
    assert int(unit["WatchdogSec"][0]) > 10 * CHECK_S
    minutes = int(unit["TimeoutStopSec"][0].removesuffix("min"))
    assert 60 * minutes > settings.drain_timeout_s + STOP_S
    assert unit["Restart"] == ["on-failure"]
    assert str(BROKEN_STATUS) not in unit["RestartPreventExitStatus"]


def test_the_drop_in_changes_what_is_there() -> None:
    texts = (path.read_text() for path in (UNIT, DROP_IN))
    unit, added = (dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)) for text in texts)
    assert added.keys() - unit.keys() == {"DeviceAllow", "ExecStartPre", "Wants"}
    assert (unit["PrivateDevices"], added["PrivateDevices"]) == ("yes", "no")
    assert unit["DevicePolicy"] == "closed" and unit["LimitMEMLOCK"] == "infinity"
    cache = Path("/var/cache") / unit["CacheDirectory"]
    for value in re.findall(r"=(/\S+)", added["Environment"]):
        assert Path(value).is_relative_to(cache)
    assert DROP_IN.name in UNIT.read_text()
