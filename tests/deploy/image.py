"""Builds the image and runs it as the Helm chart's pods do: probes, kill, restart on the same
directories, drain. `python -m tests.deploy.image [--folder DIR] [--release DIR]`; `--release` takes
that release's image and chart, `--prepare` prints how to build an image over the small Debian.

buildah builds the unchanged Dockerfile over a small Debian, kept in DIR, without a registry. Its
isolation `chroot` leaves a read-only root, seccomp and cgroups untested. Needs root,
`mmdebstrap`, `buildah`, helm (or npm), the package index and minutes.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hotkv_proto
from tests.deploy import debian
from tests.deploy.debian import Steps, program, run
from tests.deploy.dockerfile import ROOT
from tests.deploy.objects import Objects
from tests.support.ports import free_port
from tests.support.waiting import wait_for
from tools import chart, check_dist, helm
from tools import release as release_files

PACKAGES = ("python3", "python3-venv", "ca-certificates", "passwd")
BASE, IMAGE = "docker.io/library/python:3.12-slim", f"hotkv:{hotkv_proto.__version__}"
READY_S, STOP_S = 180.0, 60.0
CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_RAW"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
"""buildah's defaults, dropped by name: after a drop of `all`, buildah would add them again."""


class Buildah:
    def __init__(self, folder: Path) -> None:
        store = [f"--root={folder / 'store'}", f"--runroot={folder / 'runroot'}"]
        self.command = [program("buildah"), *store, "--storage-driver=vfs"]

    def __call__(self, *arguments: str | Path) -> str:
        return run(*self.command, *arguments).strip()

    def has(self, image: str) -> bool:
        done = subprocess.run(
            [*self.command, "inspect", "--type=image", image], capture_output=True
        )
        return done.returncode == 0


class Pod:
    """Run as a kubelet would, with folders of this machine as volumes."""

    def __init__(self, buildah: Buildah, rendered: Objects, folder: Path) -> None:
        self._buildah = buildah
        self._rendered = rendered
        self.log = folder / "server.log"
        self._places = {
            name: volume["hostPath"]["path"]
            for name, volume in rendered.volumes.items()
            if "hostPath" in volume
        }
        for name in ("admin", "kernels", "tmp", "settings"):
            self._places[name] = str(folder / name)
        self._mounts = [
            f"--volume={self._places[mount['name']]}:{mount['mountPath']}"
            for mount in rendered.server["volumeMounts"]
        ]
        for place in self._places.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        (folder / "settings" / "hotkv.toml").write_text(rendered.settings_file)
        self._container = buildah("from", "--pull-never", IMAGE)
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def target(self) -> str:
        return f"unix:{self._places['sockets']}/grpc.sock"

    def remove(self) -> None:
        self.kill()
        self._buildah("rm", self._container)
        for place in self._places.values():
            shutil.rmtree(place, ignore_errors=True)

    def _command(self, user: int, *command: str) -> list[str]:
        environment = self._rendered.environment.items()
        variables = [f"--env={k}={value}" for k, value in environment if isinstance(value, str)]
        added = self._rendered.directories["securityContext"]["capabilities"]["add"]
        dropped = [f"--cap-drop=CAP_{name}" for name in CAPABILITIES if user or name not in added]
        options = ["--isolation=chroot", f"--user={user}:{user}", *dropped]
        options += [*self._mounts, *variables]
        return [*self._buildah.command, "run", *options, self._container, "--", *command]

    def initialise(self) -> str:
        run(*self._command(0, *self._rendered.directories["command"]))
        owners = {
            name: f"{os.stat(place).st_uid} {os.stat(place).st_mode & 0o777:o}"
            for name, place in self._places.items()
            if name in ("arena", "sockets", "admin")
        }
        return json.dumps(owners)

    def start(self) -> float:
        """Seconds until the readiness probe succeeds."""
        begun_s = time.monotonic()
        command = self._command(self._user, "hotkv-server", *self._rendered.server["args"])
        with self.log.open("wb") as sink:
            self._server = subprocess.Popen(command, stderr=sink, start_new_session=True)
        wait_for(lambda: self.probe("readinessProbe"), "ready", READY_S)
        return time.monotonic() - begun_s

    @property
    def _user(self) -> int:
        user: int = self._rendered.pod["securityContext"]["runAsUser"]
        return user

    def probe(self, name: str) -> bool:
        live = ["--live"] if name == "livenessProbe" else []
        words = self._command(self._user, "hotkv", "ping", *live, "--timeout-s", "3")
        return subprocess.run(words, capture_output=True).returncode == 0

    def pid(self) -> int:
        assert self._server is not None
        session = os.getsid(self._server.pid)
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                is_python = b"python" in words[0] and words[1].endswith(b"/hotkv-server")
                if is_python and os.getsid(int(folder.name)) == session:
                    return int(folder.name)
        raise AssertionError("there is no server")

    def kill(self) -> None:
        if self._server is not None and self._server.poll() is None:
            os.kill(self.pid(), signal.SIGKILL)
            self._server.wait(STOP_S)

    def stop(self) -> tuple[int, float]:
        """Exit status, and seconds from SIGTERM to the end."""
        assert self._server is not None
        begun_s = time.monotonic()
        os.kill(self.pid(), signal.SIGTERM)
        return self._server.wait(STOP_S), time.monotonic() - begun_s

    def logged(self, words: str) -> str:
        """The last such line of the log."""
        lines = [line for line in self.log.read_text().splitlines() if words in line]
        assert lines, f"no {words!r} in the log"
        return lines[-1]


def blocks(action: str, target: str) -> str:
    return run(sys.executable, Path(__file__).with_name("blocks.py"), action, target).strip()


BUD = (
    *("--isolation=chroot", "--pull-never", "--network=host"),
    f"--volume={debian.CERTIFICATES}:{debian.CERTIFICATES}:ro",
)


def prepare(buildah: Buildah, folder: Path, steps: Steps) -> None:
    with steps.step("a small Debian, in place of python:3.12-slim") as seen:
        root = debian.make_root(folder / "root", PACKAGES)
        python = root / "usr/bin/python"
        if not python.is_symlink():
            python.symlink_to("python3")
        if not buildah.has(BASE):
            made = buildah("from", "scratch")
            packed = folder / "base.tar"
            options = ["--exclude=./dev/*", f"--directory={root}", f"--file={packed}"]
            run("tar", *options, "--create", ".")
            buildah("add", "--quiet", made, packed, "/")
            packed.unlink()
            buildah("commit", "--quiet", made, BASE)
            buildah("rm", made)
        seen.append(run("chroot", root, "python", "--version").strip())


def provide(buildah: Buildah, release: Path | None, steps: Steps) -> None:
    with steps.step("the image") as seen:
        if release is None:
            # buildah builds all layers anew, so hotkv is copied and the packages installed
            # again.
            buildah("bud", "--quiet", *BUD, f"--tag={IMAGE}", ROOT)
        else:
            archive = check_dist.one(release, f"hotkv-*-image-{release_files.processor()}.oci.tar")
            buildah("tag", buildah("pull", "--quiet", f"oci-archive:{archive}"), IMAGE)
            seen.append(archive.name)
        (image,) = json.loads(buildah("images", "--json", IMAGE))
        seen.append(f"{IMAGE}, {image['size']}")


def walk(pod: Pod, steps: Steps) -> None:
    with steps.step("the init container's script gives the directories away") as seen:
        seen.append(pod.initialise())
    with steps.step("the probes say no while no server runs"):
        assert not pod.probe("readinessProbe") and not pod.probe("livenessProbe")
    with steps.step("the server starts as user 10001, with the chart's settings") as seen:
        seen.append(f"ready after {pod.start():.1f} s")
        seen.append(pod.logged("ready version").partition(" ready ")[2])
        assert pod.probe("livenessProbe")
    with steps.step("an engine stores blocks") as seen:
        seen.append(blocks("store", pod.target))
    with steps.step("kill -9: the next pod goes on with the cache") as seen:
        pod.kill()
        assert not pod.probe("readinessProbe"), "a dead server is ready"
        pod.initialise()
        seen.append(f"ready after {pod.start():.1f} s, {blocks('check', pod.target)}")
        seen.append(pod.logged("restored blocks").partition(" restored ")[2])
    with steps.step("SIGTERM drains: status 0, and the next pod has the blocks") as seen:
        status, took_s = pod.stop()
        assert not status, f"status {status}"
        pod.start()
        seen.append(f"stopped in {took_s:.1f} s, {blocks('check', pod.target)}")


@contextlib.contextmanager
def a_pod(buildah: Buildah, folder: Path, packed: Path) -> Iterator[Pod]:
    tag = f"/dev/shm/hotkv-image-{os.getpid()}"
    port = free_port()
    places = (f"directories.arena={tag}/arena", f"directories.sockets={tag}/run")
    small = ("settings.arena.bytes=64MiB", f"settings.http.port={port}")
    rendered = Objects.read(helm.render(packed, sets=(*places, *small)))
    pod = Pod(buildah, rendered, Path(tempfile.mkdtemp(dir=folder)))
    try:
        yield pod
    except AssertionError:
        print(pod.log.read_text(), file=sys.stderr)
        raise
    finally:
        pod.remove()
        shutil.rmtree(tag, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the image and runs it.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hotkv-image")
    parser.add_argument("--built", action="store_true", help="run the image of the last run")
    parser.add_argument("--release", type=Path, help="run the image of this folder")
    parser.add_argument("--prepare", action="store_true", help="make only what is built upon")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.folder.mkdir(parents=True, exist_ok=True)
    steps, buildah = Steps(), Buildah(options.folder)
    if options.prepare:
        prepare(buildah, options.folder, steps)
        flags = {"--buildah": buildah.command, "--bud": BUD}
        words = " ".join(f"{name} {shlex.quote(' '.join(one))}" for name, one in flags.items())
        print(f"make release RELEASE_FLAGS={shlex.quote(words)}")
        return 0
    if not options.built:
        if options.release is None:
            prepare(buildah, options.folder, steps)
        provide(buildah, options.release, steps)
    packed = chart.CHART
    if options.release is not None:
        packed = check_dist.one(options.release, "hotkv-*.tgz")
    with a_pod(buildah, options.folder, packed) as pod:
        walk(pod, steps)
    print("all of it works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
