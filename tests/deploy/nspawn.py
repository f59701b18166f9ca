"""Tests the systemd unit in a booted Debian container: start, reload, watchdog, kill, upgrade,
stop; blocks stored at the start must survive each. `python -m tests.deploy.nspawn [--folder DIR]
[--release DIR]` installs the working tree, or a release, as deploy/README.md describes. Needs
root, `mmdebstrap`, `systemd-nspawn`, the package index and minutes."""

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hotkv_proto
from tests.deploy import debian
from tests.deploy.debian import Steps, program, run
from tests.deploy.dockerfile import ROOT
from tests.support.waiting import wait_for
from tools import check_dist

DEPLOY = ROOT / "deploy"
UNIT = "hotkv-server.service"
PACKAGES = ("systemd", "systemd-sysv", "python3-venv", "ca-certificates", "procps")
NEXT_VERSION = "0.1.999"
TARGET = "unix:/run/hotkv/grpc.sock"
PYTHON = "/opt/hotkv/bin/python"
KERNELS = "/var/cache/hotkv"
AS_HOTKV = ("runuser", "-u", "hotkv", "--", "env", f"NUMBA_CACHE_DIR={KERNELS}")
COMPILE = (*AS_HOTKV, "hotkv-server", "compile")
QUIET = ("--register=no", "--keep-unit", "--quiet")
BOOT_S = 240.0
WATCHDOG_S = 150.0
"""Until systemd has killed a hung server: WatchdogSec, and TimeoutAbortSec if the first signal
does not end it."""
STOP_S = 60.0


class Machine:
    """Without network. Leaving the `with` block powers it off."""

    def __init__(self, root: Path, log: Path) -> None:
        self._log, self._leader = log, 0
        options = ["--private-network", "--console=read-only", "--boot", f"--directory={root}"]
        command = [program("systemd-nspawn"), *QUIET, *options]
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> "Machine":
        wait_for(lambda: bool(self._find_leader()) and self._is_up(), "it boots", BOOT_S)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(self.journal("-n", "60"), self._log.read_text()[-2000:], file=sys.stderr)
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _find_leader(self) -> int:
        """The container's first process, as the host numbers it."""
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                status = (folder / "status").read_text()
                ids = re.search(r"^NSpid:\t(.*)$", status, re.MULTILINE)
                if ids is None or ids[1].split()[1:] != ["1"]:
                    continue
                if self._process.pid in _ancestors(int(folder.name)):
                    self._leader = int(folder.name)
        return self._leader

    def _is_up(self) -> bool:
        done = self._enter("systemctl", "is-system-running")
        return done.stdout.strip() in ("running", "degraded")

    def _enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--root")
        return subprocess.run(
            [program("nsenter"), f"--target={self._leader}", *spaces, "--", *command],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
        )

    def run(self, *command: str) -> str:
        done = self._enter(*command)
        assert not done.returncode, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def journal(self, *more: str) -> str:
        return self._enter("journalctl", "--no-pager", "-u", UNIT, *more).stdout

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, UNIT)

    def blocks(self, action: str) -> str:
        return self.run(PYTHON, "/opt/blocks.py", action, TARGET)

    def is_serving(self) -> bool:
        done = self._enter("/opt/hotkv/bin/hotkv", "ping", "--timeout-s", "2")
        return done.returncode == 0


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        pid = int(stat.split()[1])


def install(root: Path, package: Path, deploy: Path, arena: str) -> None:
    """As deploy/README.md describes for a package of a distribution.

    deploy: has the systemd unit and the settings file.
    """

    def inside(*command: str) -> None:
        options = ["--pipe", f"--bind-ro={debian.CERTIFICATES}", f"--directory={root}"]
        run(program("systemd-nspawn"), *QUIET, *options, "--", *command)

    for name in ("opt/hotkv", "etc/hotkv", "var/cache/hotkv"):
        shutil.rmtree(root / name, ignore_errors=True)
    wheels = root / "opt" / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    shutil.copy(package, wheels)
    shutil.copy(Path(__file__).with_name("blocks.py"), root / "opt")
    inside("python3", "-m", "venv", "/opt/hotkv")
    inside("/opt/hotkv/bin/pip", "install", "-qq", f"/opt/wheels/{package.name}[server,events]")
    for source, target in (
        (deploy / "hotkv.sysusers", root / "usr/lib/sysusers.d/hotkv.conf"),
        (deploy / "hotkv-server.service", root / f"usr/lib/systemd/system/{UNIT}"),
        (deploy / "hotkv.toml", root / "etc/hotkv/hotkv.toml"),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    settings = root / "etc/hotkv/hotkv.toml"
    settings.write_text(settings.read_text().replace('bytes = "64GiB"', f'bytes = "{arena}"', 1))
    for name in ("hotkv", "hotkv-server"):
        link = root / "usr/bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"/opt/hotkv/bin/{name}")
    inside("systemd-sysusers", "/usr/lib/sysusers.d/hotkv.conf")
    inside("install", "-d", "-o", "hotkv", "-g", "hotkv", "-m", "0700", KERNELS)
    inside(*COMPILE)
    inside("systemctl", "enable", "--quiet", UNIT)


def walk(machine: Machine, steps: Steps) -> None:
    with steps.step("the unit starts by itself, and says that it serves") as seen:
        wait_for(machine.is_serving, "it serves", BOOT_S)
        seen += [machine.show("StatusText"), machine.run("hotkv-server", "--version")]
        seen.append(f"user {machine.run('ps', '-o', 'user=', '-p', machine.show('MainPID'))}")
    with steps.step("blocks are stored") as seen:
        seen.append(machine.blocks("store"))
    with steps.step("systemctl reload takes up a changed setting") as seen:
        before = machine.show("MainPID")
        machine.run("sed", "-i", 's/^log_level = .*/log_level = "debug"/', "/etc/hotkv/hotkv.toml")
        machine.run("systemctl", "reload", UNIT)
        said = "settings reloaded changed=log_level"
        wait_for(lambda: said in machine.journal("-b"), said, BOOT_S)
        assert machine.show("MainPID") == before, "it was restarted"
        seen += [said, machine.blocks("check")]
    with steps.step("a server that hangs (SIGSTOP) is killed and restarted") as seen:
        before = machine.show("MainPID")
        machine.run("systemctl", "kill", "--kill-who=main", "-s", "STOP", UNIT)
        wait_for(lambda: machine.show("NRestarts") == "1", "another server", WATCHDOG_S)
        wait_for(machine.is_serving, "it serves", BOOT_S)
        assert machine.show("MainPID") != before
        assert "Watchdog timeout" in machine.journal("-b")
        seen.append(machine.blocks("check"))
    with steps.step("a server that is killed (SIGKILL) is restarted") as seen:
        machine.run("systemctl", "kill", "--kill-who=main", "-s", "KILL", UNIT)
        wait_for(lambda: machine.show("NRestarts") == "2", "another server", BOOT_S)
        wait_for(machine.is_serving, "it serves", BOOT_S)
        seen.append(machine.blocks("check"))
    with steps.step(f"an upgrade to {NEXT_VERSION}, and a restart") as seen:
        wheel = f"/opt/wheels/hotkv-{NEXT_VERSION}-py3-none-any.whl"
        machine.run("/opt/hotkv/bin/pip", "install", "-qq", "--no-index", "--no-deps", wheel)
        machine.run(*COMPILE)
        machine.run("systemctl", "restart", UNIT)
        assert f"ready version={NEXT_VERSION}" in machine.journal("-b")
        seen.append(machine.blocks("check"))
    with steps.step("a stop: status 0, arena and sockets' directory stay") as seen:
        machine.run("systemctl", "stop", UNIT)
        result = machine.show("Result"), machine.show("ExecMainStatus"), machine.show("ActiveState")
        assert result == ("success", "0", "inactive")
        seen.append(machine.run("hotkv-server", "arenas").splitlines()[-1])
        machine.run("test", "-d", "/run/hotkv")
    with steps.step("a start finds the blocks") as seen:
        machine.run("systemctl", "start", UNIT)
        seen.append(machine.blocks("check"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the systemd unit for real.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hotkv-nspawn")
    parser.add_argument("--arena", default="64MiB")
    parser.add_argument("--release", type=Path, help="install from the files of this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    steps, folder = Steps(), options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with steps.step("a Debian with systemd") as seen:
        root = debian.make_root(folder / "root", PACKAGES)
        seen.append(str(root))
    with steps.step("hotkv is installed in it"):
        if options.release is None:
            package, deploy = debian.wheel(folder, hotkv_proto.__version__), DEPLOY
        else:
            package = check_dist.one(options.release, "hotkv-*.whl")
            shutil.rmtree(folder / "deploy", ignore_errors=True)
            archive = check_dist.one(options.release, "hotkv-*-deploy.tar.gz")
            deploy = check_dist.unpack(archive, folder / "deploy")
        install(root, package, deploy, options.arena)
        shutil.copy(debian.wheel(folder, NEXT_VERSION), root / "opt" / "wheels")
    with Machine(root, folder / "console.log") as machine:
        walk(machine, steps)
    print("all of it works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
