"""Runs podman in new namespaces, so that mounts, processes and routes end with the run. Needs
root. Without cgroups, and with this machine's limits at most (`LEFT_OUT`)."""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.debian import program, run

INSIDE = "HOTKV_COMPOSE_INSIDE"
# The shell is the PID namespace's first process, so it reaps orphans. podman's records of
# running containers and networks lie on tmpfs and vanish with the namespaces.
ENTER = """
mount -t tmpfs none /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || exit 1
mount -t tmpfs -o mode=1777 none /dev/shm && mount -t tmpfs none "$1" || exit 1
for place in /run /etc/containers /var/lib/containers; do
  [ -d $place ] || continue
  upper=$1/over$place/upper work=$1/over$place/work
  mkdir -p "$upper" "$work"
  mount -t overlay -o "lowerdir=$place,upperdir=$upper,workdir=$work" overlay $place || exit 1
done
shift
"$@"
exit $?
"""
CLONE_NEWNET = 0x40000000
HEALTH_S = 10.0
"""The image's HEALTHCHECK interval."""
START_S = 30.0
LEFT_OUT = (
    "cgroups: none (crun --cgroup-manager=disabled)",
    "health checks: asked by this test every 10 s, as podman leaves that to systemd's timers",
)


def enter(folder: Path, module: str, arguments: Sequence[str]) -> int:
    """Returns the module's exit status. All processes end with the module or with this process."""
    place = folder / "run"
    place.mkdir(exist_ok=True)
    spaces = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = ["sh", "-c", ENTER, "sh", str(place), sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(
        [program("unshare"), *spaces, *command], env={**os.environ, INSIDE: "1"}
    )
    try:
        return child.wait()
    finally:
        child.kill()
        child.wait()
        place.rmdir()


def leave_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    run(program("ip"), "link", "set", "lo", "up")


def hard_limits() -> dict[str, int]:
    """This machine's, under Docker's names; -1: unlimited."""
    names = ("memlock", "nofile", "nproc")
    numbers = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in names}
    return {name: resource.getrlimit(number)[1] for name, number in numbers.items()}


class Podman:
    """Has its own image store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        state = folder / "run"
        self.socket = state / "podman.sock"
        runtime, settings = state / "crun", state / "containers.conf"
        runtime.write_text(f'#!/bin/sh\nexec {program("crun")} --cgroup-manager=disabled "$@"\n')
        runtime.chmod(0o755)
        limits = [
            f"{name}={most}:{most}" for name, most in hard_limits().items() if name != "memlock"
        ]
        settings.write_text(
            f"""[containers]
cgroups = "disabled"
default_ulimits = {json.dumps(limits)}
[network]
network_backend = "netavark"
network_config_dir = "{state}/networks"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
image_copy_tmp_dir = "{folder}"
env = ["DISABLE_HC_SYSTEMD=true", "TMPDIR={folder}"]
[engine.runtimes]
crun = ["{runtime}"]
"""
        )
        self.environment = {**os.environ, "CONTAINERS_CONF": str(settings)}
        # podman's children, such as conmon, inherit it.
        os.environ["CONTAINERS_CONF"] = str(settings)
        place = [f"--root={folder / 'store'}", f"--runroot={state / 'runroot'}"]
        self.command = [program("podman"), *place, f"--tmpdir={state / 'libpod'}"]
        self.command += ["--storage-driver=overlay"]

    def __call__(self, *arguments: str | Path) -> str:
        return run(*self.command, *arguments).strip()

    def forget(self) -> None:
        self("rm", "--all", "--force", "--volumes")
        self("volume", "rm", "--all", "--force")

    def has(self, image: str) -> bool:
        done = subprocess.run([*self.command, "image", "exists", image])
        return done.returncode == 0

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(self("container", "inspect", container))
        return dict(found)

    @contextlib.contextmanager
    def service(self) -> Iterator[None]:
        """Serves Docker's API on `socket`, in this process's network namespace."""
        with (self._folder / "service.log").open("ab") as log:
            served = subprocess.Popen(
                [*self.command, "system", "service", "--time=0", f"unix://{self.socket}"],
                stdout=log,
                stderr=log,
            )
        try:
            deadline_s = time.monotonic() + START_S
            while not self.socket.is_socket():
                if served.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"no podman: {(self._folder / 'service.log').read_text()}")
                time.sleep(0.1)
            yield
        finally:
            served.terminate()
            served.wait()
            self.socket.unlink(missing_ok=True)

    @contextlib.contextmanager
    def health_checks(self, container: str) -> Iterator[None]:
        """Asks at the image's interval, in a thread."""
        ended, words = threading.Event(), [*self.command, "healthcheck", "run", container]

        def ask() -> None:
            while not ended.wait(HEALTH_S):
                subprocess.run(words, capture_output=True)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
