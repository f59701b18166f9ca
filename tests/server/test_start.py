"""Tests the server's start: mistakes are named, by `--check` too, and a failed start leaves no
files."""

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import event as numba_event
from pydantic import ByteSize

from demo.processes import ROOT, Server
from hotkv_client.admin import AdminClient
from hotkv_client.paged_engine import PagedEngine
from hotkv_proto import limits
from hotkv_proto.command_line import INTERRUPTED
from hotkv_proto.errors import HotKVError
from hotkv_proto.table import TableGeometry
from hotkv_proto.words import file_bytes
from hotkv_server.memory.arena import table_memory_bytes
from hotkv_server.memory.state import ServerState
from hotkv_server.settings import Settings, load_settings, sources
from hotkv_server.settings.storage import ArenaSettings, entries_for
from hotkv_server.startup import StartError, process
from hotkv_server.startup import arena as arena_module
from hotkv_server.startup import progress as progress_module
from hotkv_server.startup.arena import open_memory
from hotkv_server.startup.preflight import check_arena_room
from hotkv_server.startup.progress import Progress
from tests.doubles import faults
from tests.server.certificates import Authority
from tests.server.faulty import folder
from tests.support import daemons
from tests.support.ports import free_port
from tests.support.waiting import wait_for

__all__ = ["folder"]

ARENA = ["--arena.bytes", "16MiB", "--http.port", "-1"]


def started(
    folder: Path, *flags: str, check: bool = False, before: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`before` runs the server's command, such as `env`. Without it, the server is forked."""
    arguments = ["run", "--runtime-dir", str(folder / "run"), "--arena.dir", str(folder / "arena")]
    arguments += [*ARENA, *flags, *(["--check"] if check else [])]
    if not before:
        return daemons.run(*arguments, timeout_s=60, environment=environment)
    command = [*before, sys.executable, "-m", "hotkv_server", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


def left_in(folder: Path) -> set[str]:
    """All files and folders."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def taken() -> Iterator[int]:
    """A TCP port that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def mistakes(folder: Path, elsewhere: Path, port: int) -> dict[str, list[str]]:
    """Flags with which a start must fail, by pattern of the message. `port` is in use."""
    certificate, key = Authority(elsewhere, "authority").issue("server")
    key.chmod(0o644)
    (elsewhere / "zmq.py").write_text("raise ImportError('as if it were not there', name='zmq')\n")
    disk = ["--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "16TiB"]
    return {
        "chmod o-rwx": [
            *("--security.tls.key", str(key), "--security.tls.certificate", str(certificate))
        ],
        "lower arena.bytes": ["--arena.bytes", "100TiB"],
        "zmq is not installed": ["--events.endpoint", "tcp://*:0"],
        f"http.port: can't listen on .*{port}": ["--http.port", str(port)],
        "http.token_file: .*chmod o-rwx": ["--http.token-file", str(key)],
        "tcp_address: can't listen": [
            *("--tcp-address", f"127.0.0.1:{port}", "--security.tcp-insecure", "true")
        ],
        "longer than 107 bytes; choose": ["--runtime-dir", str(folder / ("long" * 30))],
        "another server uses .*admin.sock": [
            *("--security.admin-socket", str(elsewhere / "admin.sock"))
        ],
        "arena.numa": ["--arena.numa", "977"],
        "copy.cuda is on": ["--copy.cuda", "on"],
        "tiers.disk": disk,
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tcp-address", "localhost:99999"], "port up to 65535"),
        (["--tcp-address", ":0"], "tcp_address is ':0'; write host:port, such as 0.0.0.0:50051"),
        (["--tcp-address", "::1:0"], "write host:port, such as 0.0.0.0:50051 or [::]:50051"),
        (["--tcp-address", f"{'h' * 64}:0"], "tcp_address: can't listen on hhh"),
        (["--http.host", "h" * 64, "--http.port", "0"], "http.port: can't listen on hhh"),
        (["--security.admin-socket", "/proc/a/b"], "security.admin_socket: "),
    ],
)
def test_addresses_that_can_not_be_are_named(folder: Path, flags: list[str], words: str) -> None:
    done = started(folder, *flags, "--security.tcp-insecure", "true", check=True)
    assert done.returncode == 1 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["grpc.sock", "fd.sock"])
def test_admin_socket_differs_from_engines_sockets(folder: Path, name: str) -> None:
    path = folder / "run" / name
    done = started(folder, "--security.admin-socket", str(path), check=True)
    assert done.returncode == 1
    assert f"security.admin_socket: engines use {path}; choose another" in done.stderr


@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
def test_all_errors_are_said_before_anything_starts(
    folder: Path, tmp_path: Path, taken: int, check: bool
) -> None:
    wrong = mistakes(folder, tmp_path, taken)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    flags = [flag for some in wrong.values() for flag in some]
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "admin.sock"))
        other.listen()
        done = started(folder, *flags, check=check, before=["env"], PYTHONPATH=path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for words in wrong:
        assert re.search(words, done.stderr), (words, done.stderr)
    left = {"long" * 30, f"{'long' * 30}/lock"}
    assert left_in(folder) <= (set() if check else left)


@pytest.mark.parametrize("flag", ["--events.endpoint", "--events.replay-endpoint"])
def test_busy_address_of_events_is_named(folder: Path, taken: int, flag: str) -> None:
    flags = {"--events.endpoint": "tcp://*:0", flag: f"tcp://0.0.0.0:{taken}"}
    done = started(folder, *itertools.chain(*flags.items()), check=True)
    assert done.returncode == 1 and not left_in(folder)
    assert "events: Address already in use" in done.stderr and f":{taken} " in done.stderr


def test_busy_socket_of_events_stays(folder: Path, tmp_path: Path) -> None:
    """ZMQ would delete it. One without a listener is left from earlier, and no mistake."""
    path = tmp_path / "events.sock"
    flags = ("--events.endpoint", f"ipc://{path}")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        done = started(folder, *flags, check=True)
        assert done.returncode == 1 and f"another program listens on ipc://{path}" in done.stderr
        socket.socket(socket.AF_UNIX).connect(str(path))
    assert started(folder, *flags, check=True).returncode == 0 and path.exists()


def test_check_passes_beside_the_server_that_runs(folder: Path) -> None:
    port = str(free_port())
    with Server(folder, "16MiB", "--http.port", port) as server:
        server.wait_ready()
        done = started(folder, "--http.port", port, check=True)
        assert done.returncode == 0, done.stderr
        assert f"in use by hotkv-server with pid {server.pid}" in done.stderr
        assert server.status()["state"].startswith("ready")


def test_late_failed_start_leaves_only_earlier_files(
    folder: Path,
) -> None:
    """Addresses are bound after the arena is made, so its files must be removed."""
    port = str(free_port())
    tcp = ("--tcp-address", f"127.0.0.1:{port}", "--security.tcp-insecure", "true")
    twice = ("--http.port", port, *tcp)
    limited = ("/bin/sh", "-c", 'ulimit -l 64 && exec "$@"', "sh")
    done = started(folder, *twice, before=limited)
    assert done.returncode == 1 and "http.port: can't" in done.stderr
    assert "locked memory is limited to 65536 bytes: enough for engines on CPU" in done.stderr
    assert not left_in(folder)
    with Server(folder, "16MiB") as server:
        server.wait_ready()
        PagedEngine(server.target, engine_id="one").connect().close()
    before = left_in(folder)
    assert any(name.endswith("/arena") for name in before)
    for flags, words in (
        (twice, "http.port: can't"),
        (("--events.endpoint", f"tcp://*:{port}", *tcp), "tcp_address: can't"),
    ):
        done = started(folder, *flags)
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
        assert before <= left_in(folder) and not list(folder.rglob("*.sock"))
    # What can't be used is deleted, but not the ledger.
    (arena,) = folder.rglob("arena/arena")
    (arena.parent / "ledger").write_bytes(b"counts")
    (arena.parent / "state.json").write_text("[]")
    assert started(folder, *twice).returncode == 1
    assert (arena.parent / "ledger").read_bytes() == b"counts" and not arena.exists()


def test_a_start_whose_end_fails_too_leaves_nothing(folder: Path) -> None:
    """One port has two listeners, and then the node can't close."""
    port, point = free_port(), "hotkv_server.node.node:Node.close"
    command = [*faults.command("break", point, "refuse", folder), *ARENA, "--http.port", str(port)]
    command += ["--runtime-dir", str(folder / "run"), "--arena.dir", str(folder / "arena")]
    command += ["--tcp-address", f"127.0.0.1:{port}", "--security.tcp-insecure", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"injected at {point}" in done.stderr
    assert not left_in(folder)


def test_memory_full_after_arena_leaves_no_arena(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file after the arena fails. An earlier server's arena stays, and is free."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arena = ArenaSettings(bytes=ByteSize(1 << 24), dir=folder / "a")
    settings = Settings(runtime_dir=folder, arena=arena)
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "write_owner", full)
        with pytest.raises(StartError, match="lower arena"):
            open_memory(settings, reset=False)
    assert not left_in(folder)
    memory = open_memory(settings, reset=False)
    memory.save_state(ServerState(arena.slab_size, ()))
    memory.release()
    monkeypatch.setattr(arena_module, "write_owner", full)
    with pytest.raises(StartError, match="lower arena"):
        open_memory(settings, reset=False)
    assert "a/arena" in left_in(folder)
    monkeypatch.undo()
    open_memory(settings, reset=False).remove()


def test_room_check_demands_what_start_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an earlier arena, there must be room for a table only."""
    free_bytes = 0
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))
    arena = ArenaSettings(bytes=ByteSize(1 << 24), dir=folder / "a")
    settings = Settings(runtime_dir=folder, arena=arena)
    geometry = TableGeometry.for_capacity(arena.capacity, 1, arena.most_bytes)

    def fits(num_bytes: int) -> bool:
        """Check and start must agree."""
        nonlocal free_bytes
        free_bytes = num_bytes
        results = []
        for step in (check_arena_room, lambda _: open_memory(settings, reset=False)):
            try:
                memory = step(settings)
            except StartError as error:
                assert "MiB free, arena and table need " in str(error)
                results.append(False)
            else:
                results.append(True)
        assert results[0] == results[1]
        if results[0]:
            memory.save_state(ServerState(arena.slab_size, ()))
            memory.release()
        return results[0]

    table_bytes = table_memory_bytes(geometry, entries_for(arena.bytes))
    new_bytes = arena.bytes + 2 * table_bytes
    assert not fits(new_bytes - 1) and fits(new_bytes)

    def lose_half() -> None:
        """As if the earlier server had never allocated it."""
        with (folder / "a" / "arena").open("r+b") as file:
            file.truncate(arena.bytes // 2)
            file.truncate(file_bytes(arena.most_bytes))

    lose_half()
    assert not fits(table_bytes - 1) and fits(table_bytes)
    lose_half()
    settings.arena.prefault = False
    with pytest.raises(StartError, match=r"lower arena\.bytes"):
        check_arena_room(settings)


def program_or_skip(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_shared_memory_that_is_full_is_named(folder: Path) -> None:
    command = 'mount -t tmpfs -o size=8m,mode=700 tmpfs "$0" && exec "$@"'
    mount = (program_or_skip("unshare"), "--mount", "/bin/sh", "-c", command, str(folder / "arena"))
    (folder / "arena").mkdir(mode=0o700)
    if os.geteuid() or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    said = started(folder, before=mount).stderr
    assert "MiB free, arena and table need " in said
    assert "lower arena.bytes (16 MiB), or enlarge the file system" in said


def test_unwritable_directory_is_named(folder: Path) -> None:
    """Without Linux capabilities, file modes restrict even root."""
    drop: tuple[str, ...] = ()
    if os.geteuid() == 0:
        drop = (program_or_skip("setpriv"), "--inh-caps=-all", "--bounding-set=-all")
    (folder / "run").mkdir(mode=0o555)
    said = started(folder, before=drop).stderr
    assert "runtime_dir: [Errno 13] Permission denied" in said
    assert "choose a directory this user may write" in said
    (folder / "run").chmod(0o755)
    (folder / "shut").mkdir(mode=0o600)
    for name, words in (
        ("arena.dir", "arena.dir: [Errno 13]"),
        ("tiers.disk.path", "is no folder"),
    ):
        said = started(folder, f"--{name}", f"{folder}/shut/a/b", before=drop, check=True).stderr
        assert words in said and "Traceback" not in said
    flags = ("--arena.dir", "/proc/a", "--security.admin-socket", str(folder / ("x" * 120)))
    said = started(folder, *flags, check=True).stderr
    assert "arena.dir: [Errno 2]" in said and "security.admin_socket: can't listen on" in said


def test_missing_huge_pages_are_said_once(tmp_path: Path) -> None:
    """File systems on disks have no huge pages for shared mappings."""
    with Server(tmp_path, "16MiB") as server:
        server.wait_ready()
        if server.counter("arena_huge_page_bytes"):
            pytest.skip("this kernel gives huge pages on the file system of the temporary folder")
        assert "no huge pages, so copies are slower: " in server.log.read_text()


def test_a_server_without_standard_streams_serves_and_stops(folder: Path) -> None:
    """`<&- >&- 2>&-` in a shell. The event loop must not get the descriptors 0 to 2."""
    arguments = ["run", "--runtime-dir", str(folder / "run"), "--arena.dir", str(folder / "arena")]
    command = shlex.join([sys.executable, "-m", "hotkv_server", *arguments, *ARENA])
    with subprocess.Popen(["sh", "-c", f"exec {command} <&- >&- 2>&-"], cwd=ROOT) as process:
        target = f"unix:{folder}/run/grpc.sock"

        def serves() -> bool:
            assert process.poll() is None
            with contextlib.suppress(HotKVError), AdminClient(target, 1.0) as admin:
                return admin.ping()
            return False

        wait_for(serves)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


INTERRUPTED_OPENING = """
import os, signal, sys
from hotkv_server import cli, daemon

def interrupted(*arguments, **more):
    os.kill(os.getpid(), signal.SIGINT)
    return opens(*arguments, **more)

opens, daemon.OpenedNode.open = daemon.OpenedNode.open, interrupted
sys.exit(cli.main())
"""


def test_ctrl_c_during_start_leaves_nothing(folder: Path) -> None:
    arguments = ["run", "--runtime-dir", str(folder / "run"), "--arena.dir", str(folder / "arena")]
    command = [sys.executable, "-c", INTERRUPTED_OPENING, *arguments, *ARENA]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == INTERRUPTED and "INFO" in done.stderr
    assert "ERROR" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not left_in(folder)


# Limits


def limited(**limits: str) -> tuple[str, ...]:
    return (program_or_skip("prlimit"), *(f"--{name}={value}" for name, value in limits.items()))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"nofile": "10"}, "limit of open files is 10, too low"),
        ({"nofile": str(process.MIN_DESCRIPTORS - 1)}, "raise it to 128 or more (LimitNOFILE"),
        ({"as": str(900 << 20)}, "limit of address space is 900 MiB, and this arena needs 2576 M"),
    ],
)
@pytest.mark.parametrize("check", [True, False], ids=["check", "start"])
def test_limit_too_low_to_serve_is_named(
    folder: Path, limits: dict[str, str], words: str, check: bool
) -> None:
    done = started(folder, check=check, before=limited(**limits))
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not left_in(folder)


def test_with_the_lowest_limits_engines_connect(folder: Path) -> None:
    most_bytes = (16 << 20) + process.OWN_ADDRESS_BYTES
    limits = limited(nofile=str(process.MIN_DESCRIPTORS), **{"as": str(most_bytes)})
    flags = ["--events.endpoint", f"tcp://127.0.0.1:{free_port()}"]
    flags += ["--tiers.disk.path", str(folder / "disk"), "--tiers.disk.bytes", "16MiB"]
    command = [*limits, sys.executable, "-m", "hotkv_server", "run"]
    with Server(folder, "16MiB", *flags, command=command) as server:
        server.wait_ready()
        engines = [PagedEngine(server.target, engine_id=f"{n}").connect(60) for n in range(4)]
        assert server.status()["state"].startswith("ready")
        for engine in engines:
            engine.close()


def test_memory_without_servers_own_room_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(runtime_dir=folder, arena=ArenaSettings(bytes=ByteSize(1 << 24)))
    for granted_mib, is_enough in ((16, False), (144, False), (160, True)):
        monkeypatch.setattr(limits, "machine_bytes", lambda granted=granted_mib << 20: granted)
        with contextlib.nullcontext() if is_enough else pytest.raises(StartError) as refused:
            check_arena_room(settings)
        assert is_enough or f"or container ({granted_mib} MiB)" in str(refused.value)


# Progress

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["settings", "arena", "restore"]),
        st.sampled_from([0.1, 1.9, 2.1, 6.0, 29.0, 95.0]),
        st.booleans(),
    ),
    max_size=6,
)


@given(STEPS)
def test_lines_of_a_start_name_the_present_work(steps: list[tuple[str, float, bool]]) -> None:
    """The clock is made up. A kernel may be compiled in a step's second half."""
    now_s, said, expected = 0.0, list[str](), list[str]()
    dispatcher = SimpleNamespace(py_func=limited)
    with (
        mock.patch.object(progress_module, "time", SimpleNamespace(monotonic=lambda: now_s)),
        mock.patch.object(progress_module.log, "info", lambda form, *of: said.append(form % of)),
    ):
        progress = Progress()
        progress.watch_compiler()
        num_compiled = 0
        for what, took_s, compiles in steps:
            progress.at(what, lambda: ": 3 MiB")
            began_s, compiling = now_s, False
            while now_s - began_s < took_s:
                now_s += 0.125
                if compiles and not compiling and now_s - began_s > took_s / 2:
                    compiling = True
                    numba_event.start_event("numba:compile", {"dispatcher": dispatcher})
                progress._look()
                if now_s - began_s in (2, 5, 10, 30, 60, 90):
                    name = f"kernel {num_compiled + 1}, {__name__}.limited (`hotkv-server compile`"
                    work = f"compiling {name} does it ahead)" if compiling else f"{what}: 3 MiB"
                    expected.append(f"starting: {work}, {now_s - began_s:.0f} s so far")
            if compiling:
                numba_event.end_event("numba:compile", {"dispatcher": dispatcher})
                num_compiled += 1
        progress.end()
    assert said == expected


# Settings

SECRET = "correct-horse"


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--arena.byte", "1GiB"], {}, "--arena.byte is no setting; did you mean --arena.bytes?"),
        (["--zzzzz"], {}, "--zzzzz is no setting; --help-settings lists them"),
        (["--arena.bytes"], {}, "server: argument --arena.bytes: expected one argument"),
        (["--arena", "8GiB"], {}, "--arena takes a table in JSON; for one setting write --arena."),
        ([], {"HOTKV_LOGLEVEL": "info"}, "HOTKV_LOGLEVEL is no setting; did you mean HOTKV_LOG_L"),
        ([], {"HOTKV_ARENA_BYTES": "1"}, "did you mean HOTKV_ARENA__BYTES?"),
        ([], {"HOTKV_ARENA__BYTE": "1"}, "arena.byte is no setting; did you mean arena.bytes?"),
        ([], {"HOTKV_ARENA__ZZZ": "1"}, "arena.zzz is no setting; --help-settings lists them"),
        ([], {"HOTKV_TIERS__S3": f'{{"bucket": "abc", "key": "{SECRET}"}}'}, "tiers.s3.key is no"),
        (["--tiers.valkey.address", f"u:{SECRET}@h:1"], {}, "tiers.valkey.address: must be unix:/"),
        ([], {"HOTKV_SECURITY__ALLOWED_UIDS": "1,2"}, "HOTKV_SECURITY or a variable that begins"),
        ([], {"HOTKV_SECURITY__TENANTS": '[{"name": "", "uids": [1], "uid": 1}]'}, "a tenant has"),
        (["--security.admin-token-sha256", SECRET], {}, "admin_token_sha256.0: String should"),
        (
            ["--security.admin-on-tcp", "true", "--security.admin-token-sha256", "a" * 64],
            {},
            "security.admin_on_tcp needs tcp_address",
        ),
        (["--runtime-dir", "/tmp/" + "x" * 300], {}, "runtime_dir has a name of more than 255"),
        (["--tiers.disk.path", os.fsdecode(b"/\xff")], {}, "tiers.disk.path is not UTF-8"),
        ([], {"HOTKV_SECURITY__TENANTS": "[" * 100_000}, "is nested too deeply"),
    ],
)
def test_typo_is_one_line_with_suggestion(
    folder: Path, flags: list[str], environment: dict[str, str], words: str
) -> None:
    done = started(folder, *flags, check=True, **environment)
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.splitlines()) == 1 and SECRET not in done.stderr


@pytest.mark.parametrize("name", sources.GONE)
def test_setting_that_is_gone_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name not in dict(sources.leaves(Settings))
    config = tmp_path / "hotkv.toml"
    config.write_text(f"{name} = 1\n")
    config.chmod(0o600)
    said = re.escape(f"{name} is no setting any more: {sources.GONE[name]}; remove it")
    with pytest.raises(ValueError, match=said):
        load_settings(config, [], "hotkv-server run")
    with pytest.raises(ValueError, match=said):
        load_settings(None, [sources.flag_of(name), "1"], "hotkv-server run")
    monkeypatch.setenv(sources.variable_of(name), "1")
    with pytest.raises(ValueError, match=said):
        load_settings(None, [], "hotkv-server run")


def test_variables_of_others_are_none_of_the_servers() -> None:
    """Kubernetes sets some for a service named hotkv."""
    others = ("HOTKV_PORT", "HOTKV_PORT_9433_TCP_ADDR", "HOTKV_SERVICE_HOST", "HOTKV_TARGET")
    others += ("HOTKV_HTTP_PORT", "HOTKV_ARENA_SERVICE_PORT", "HOTKV_VENV", "HOTKV_ARENA__BYTES")
    assert sources.wrong_variables(Settings, dict.fromkeys(others, "1")) == []


def test_an_empty_path_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty path must not be the working directory, where a disk tier would write."""
    (config := tmp_path / "hotkv.toml").write_text(
        'runtime_dir = ""\n[tiers.disk]\npath = "/var/lib/hotkv"\n[http]\ntoken_file = ""\n'
        '[tiers.s3]\nbucket = "abc"\nca_file = ""\n'
    )
    monkeypatch.setenv("HOTKV_TIERS__DISK__PATH", "")
    found = load_settings(config, ["--arena.dir", ""], "run")
    assert found.runtime_dir == Settings().runtime_dir
    assert (found.tiers.disk.path, found.arena.dir, found.http.token_file) == (None, None, None)
    assert found.tiers.s3 is not None and found.tiers.s3.ca_file is None
    named = load_settings(config, ["--tiers.disk.path", ".", "--runtime-dir", "."], "run")
    assert (named.tiers.disk.path, named.runtime_dir) == (Path("."), Path("."))
    # Without this path, clients without a certificate would come in. So the start fails.
    tls = [f"--security.tls.{name}" for name in ("certificate", "key", "client-ca")]
    flags = ["--tcp-address", "127.0.0.1:0", tls[0], "/cert", tls[1], "/key", tls[2], ""]
    flags += ["--security.tenants", json.dumps([{"name": "a", "token_sha256": ["0" * 64]}])]
    assert load_settings(config, flags, "run").security.tls.client_ca == Path(".")


NO_NUMBA = "sys.modules['numba'] = None"


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "words"),
    [
        ("run", {"HOTKV_DISABLE_NUMBA": "1"}, "", "HOTKV_DISABLE_NUMBA is set"),
        *(
            (arguments, {}, NO_NUMBA, "numba is not installed: pip install numba")
            for arguments in ("run", "simulate --trace x")
        ),
    ],
)
def test_without_numba_nothing_starts(
    arguments: str, variables: dict[str, str], code: str, words: str
) -> None:
    start = f"sys.exit(main({arguments.split()}))"
    program = f"import sys; {code}\nfrom hotkv_server.cli import main; {start}"
    command, env = [sys.executable, "-c", program], os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1 and done.stderr.startswith(f"hotkv-server: {words}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[arena]\nbytes = = 3\n", "broken.toml: .*line 2"),
        ("x = " + "[" * 100_000, "broken.toml: .*recursion"),
        (r'runtime_dir = "/a\u0000"', "runtime_dir has a NUL"),
        ("#" * (5 << 20) + "\n = 1", "broken.toml: .*line 2"),
        ("#" * (16 << 20) + "\n", "broken.toml: it has more than 16777216 bytes"),
    ],
    ids=["syntax", "deep", "nul", "large", "too large"],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (config := tmp_path / "broken.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_settings(config, [], "run")


def test_help_lists_every_setting_with_its_default() -> None:
    shown = sources.listing(Settings)
    for name, info in sources.leaves(Settings):
        assert f"\n{sources.flag_of(name)}\n    {info.description}\n" in shown, name
    part = shown.split("\n--copy.threads\n")[1].split("\n--")[0]
    assert "Default: 0. Variable: HOTKV_COPY__THREADS" in part
    assert "factory" not in shown and "Undefined" not in shown
    assert shown == sources.listing(Settings), "each reload would say that it needs a restart"


def test_container_ends_at_sigterm_during_start(folder: Path) -> None:
    """The kernel ignores signals to a container's first process that has no handler."""
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.geteuid() or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of processes need root and unshare")
    command = [sys.executable, "-m", "hotkv_server", "run", "--runtime-dir", str(folder / "run")]
    command += ["--arena.dir", str(folder / "arena"), *ARENA]
    with subprocess.Popen([*alone, *command], stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stderr is not None
        try:
            assert any("starting version" in line for line in outer.stderr)
            (server,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(server), signal.SIGTERM)
            # 0 if the server drained already.
            assert outer.wait(60) in (128 + signal.SIGTERM, 0)
        finally:
            outer.kill()
