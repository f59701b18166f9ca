"""Runs podman in new namespaces, so that its mounts, processes and routes end with the test run.
Needs root. Containers run without cgroups, and with limits no higher than this machine's, since not
every machine allows more (`LEFT_OUT`)."""

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
# A script that runs a command in the new namespaces. The shell is the first process of the PID
# namespace, so it reaps orphaned processes. podman's records of running containers and networks are
# outside of its image store; the script puts them on tmpfs, so they vanish with the namespaces.
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
"""The interval of the image's HEALTHCHECK."""
START_S = 30.0
LEFT_OUT = (
    "cgroups: none (crun --cgroup-manager=disabled)",
    "health checks: asked by this test every 10 s, as podman leaves that to systemd's timers",
)


def enter(folder: Path, module: str, arguments: Sequence[str]) -> int:
    """Runs a module in new namespaces and returns its exit status. All processes of the namespaces
    end when the module or this process ends."""
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
    """Returns this machine's hard resource limits under Docker's names. -1: unlimited."""
    names = ("memlock", "nofile", "nproc")
    numbers = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in names}
    return {name: resource.getrlimit(number)[1] for name, number in numbers.items()}


class Podman:
    """A podman with its own image store.

    environment: environment variables for podman's processes.
    """

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
        # Set for this process too, so that all processes that podman starts,
        # such as conmon, inherit it.
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
        """Serves Docker's API on `socket` while the context is open, in this process's network
        namespace."""
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
        """Runs the container's health check in a thread, at the image's interval, until the context
        ends."""
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
