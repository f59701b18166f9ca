"""Tests messages about a Valkey server's problems: they name the setting, and no secret. Also
unusual replies, and settings."""

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from hotkv_server.settings.tiers import ValkeySettings
from hotkv_server.tiers.protocol import NO_GENERATION, Read, Write
from hotkv_server.tiers.remote.client import LostError, quoted
from hotkv_server.tiers.valkey.connection import Login, read_login
from hotkv_server.tiers.valkey.stream import _words, connect
from tests.contracts.flush_contract import flush, generation
from tests.contracts.tier_contract import Bench
from tests.support.waiting import wait_for
from tests.tiers.valkey_support import Server, bench_over, running

SECRET = "s3cr3t-of-hotkv"
CLIENT = b"%7\r\n+server\r\n+valkey\r\n+version\r\n+9\r\n+proto\r\n:3\r\n+id\r\n:1\r\n"
HELLO = CLIENT + b"+mode\r\n+standalone\r\n+role\r\n+master\r\n+modules\r\n*0\r\n"
ABSENT = b":0\r\n"
NO_INFO = b"$0\r\n"


@contextlib.contextmanager
def scripted(
    *script: bytes, by_name: Mapping[bytes, bytes] | None = None, **options: object
) -> Iterator[Bench]:
    """A fake server that answers each connection's commands with `script`, in order. PORT: the
    server's.

    by_name: answers these commands instead. `A||B`: A first, then B.
    """

    def answer(client: socket.socket) -> None:
        replies = list(script)
        told = {name: reply.split(b"||") for name, reply in (by_name or {}).items()}
        with client:
            while command := client.recv(1 << 16):
                for name in re.findall(rb"(?:^|\r\n)\*\d\r\n\$\d+\r\n([A-Z]+)", command):
                    if left := told.get(name):
                        reply = left.pop(0) if len(left) > 1 else left[0]
                        client.sendall(reply.replace(b"PORT", b"%d" % port) + b"\r\n")
                    elif replies:
                        client.sendall(replies.pop(0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                threading.Thread(target=answer, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=serve, daemon=True).start()
        with bench_over(f"127.0.0.1:{port}", **options) as bench:
            yield bench


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(mode=0o600)
    path.write_text(SECRET + "\n")
    return path


def problem_of(bench: Bench) -> str:
    wait_for(bench.tier.problem, "no problem is known")
    return bench.tier.problem()


@pytest.mark.parametrize(
    ("config", "user", "words"),
    [
        ({"password": SECRET}, None, "asks for a password: set password_file"),
        ({"password": "right"}, "default", "rejects user and password"),
        ({"user": f"kv on >{SECRET} ~other/* +@all"}, "kv", "allow it ~hotkv/1/*"),
    ],
)
def test_server_refusing_the_user_shows_no_password(
    tmp_path: Path,
    password_file: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, str],
    user: str | None,
    words: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    login = {} if user is None else {"user": user, "password_file": password_file}
    with (
        running(tmp_path / "server", **config) as server,
        bench_over(f"unix:{server.path}", **login) as bench,
    ):
        assert words in problem_of(bench)
        assert bench.read([1], [0]).tolist() == [Read.FAILED]
        assert SECRET not in repr(bench.tier) + bench.tier.problem() + caplog.text
        if user == "default":
            # Read at the next try to connect.
            password_file.write_text("right")
            wait_for(lambda: not bench.tier.problem(), "the new password is not read")


NO_HELLO = "notice\nrename-command HELLO HELLO2"


def test_a_server_that_knows_no_hello(tmp_path: Path, password_file: Path) -> None:
    # Before version 6: RESP2, with another null.
    with (
        running(tmp_path / "server", password=SECRET, loglevel=NO_HELLO) as server,
        bench_over(f"unix:{server.path}", password_file=password_file) as bench,
    ):
        bench.fill([1], [0])
        assert bench.write([1, 1], [0, 0]).tolist() == [Write.STORED, Write.PRESENT]
        bench.check_read([1], [3])
        assert bench.read([2], [4]).tolist() == [Read.ABSENT]


def test_a_server_without_hello_and_without_a_password() -> None:
    script = [b"-ERR unknown command\r\n", b"+OK\r\n", ABSENT, ABSENT, b"$-1\r\n"]
    with scripted(*script, connections=1) as bench:
        assert bench.read([1], [0]).tolist() == [Read.ABSENT]


@pytest.mark.parametrize("code", ["ERR", "NOPERM", "NOAUTH", "OTHER"])
def test_server_may_repeat_unknown_words(
    password_file: Path, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    said = f"-{code} unknown command, with args beginning with: '3' 'AUTH' '{SECRET}'\r\n".encode()
    with scripted(said, said, said, password_file=password_file) as bench:
        assert "does not accept" in problem_of(bench)
        assert SECRET not in repr(bench.tier) + bench.tier.problem() + caplog.text


def test_a_replica(server: Server) -> None:
    with bench_over(f"unix:{server.path}", connections=1) as bench:
        bench.fill([1], [0])
        bench.write([1], [0])
        server.client.replicaof("127.0.0.1", 1)
        # After the connect, so only a write shows it.
        assert bench.write([2], [0]).tolist() == [Write.FAILED]
        assert "is a read-only replica: give the primary's address" in problem_of(bench)
        server.client.replicaof("NO", "ONE")
        wait_for(lambda: not bench.tier.problem(), "the problem stays")
        bench.check_read([1], [3])


def test_a_replica_without_hello_never_seems_well(tmp_path: Path) -> None:
    with running(tmp_path / "server", loglevel=NO_HELLO) as server:
        server.client.replicaof("127.0.0.1", 1)
        with bench_over(f"unix:{server.path}") as bench:
            assert "is a read-only replica: give the primary's address" in problem_of(bench)


@pytest.mark.parametrize(
    ("said", "instead", "cluster", "words"),
    [
        (b"+master", b"+replica", False, "is a read-only replica"),
        (b"+master", b"+slave", False, "is a read-only replica"),
        (b"+standalone", b"+sentinel", False, "is a sentinel"),
        (b"+standalone", b"+sentinel", True, "is a sentinel"),
        (b"+standalone", b"+cluster", False, "set cluster = true"),
        (b"+standalone", b"+standalone", True, "is no cluster"),
        (HELLO, b"+OK\r\n", False, "what is no answer"),
    ],
)
def test_a_server_of_another_kind(said: bytes, instead: bytes, cluster: bool, words: str) -> None:
    hello = HELLO.replace(said, instead)
    with scripted(hello, ABSENT, connections=1, cluster=cluster) as bench:
        assert words in problem_of(bench)


def test_too_many_clients(server: Server) -> None:
    server.client.config_set("maxclients", 1)
    with bench_over(f"127.0.0.1:{server.port}") as bench:
        assert "too many clients: raise its maxclients" in problem_of(bench)
        server.client.config_set("maxclients", 100)
        wait_for(lambda: not bench.tier.problem(), "the problem stays")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (b"-LOADING Valkey is loading the dataset in memory", "still loads its data"),
        (b"-MOVED 3999 127.0.0.1:6381", "is a cluster"),
        (b"-CLUSTERDOWN Hash slot not served", "is a cluster"),
        (b"-BUSY Valkey is busy running a script", "runs a script"),
        (b"-MASTERDOWN Link with MASTER is down", "has lost its primary"),
        (b"-NOPERM No permissions to access a key", "forbids this user"),
        (b"-READONLY You can't write", "read-only replica"),
        (b"-DENIED Running in protected mode", "is in protected mode"),
    ],
)
def test_errors_that_speak_about_the_whole_server(
    error: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted(HELLO, ABSENT, error + b"\r\n", b"_\r\n", connections=1) as bench:
        assert bench.read([1, 2], [0, 1]).tolist() == [Read.FAILED] * 2
        # A new connection may already have ended the problem, so the test looks for it in the log.
        assert words in caplog.text
    with scripted(HELLO, error + b"\r\n", connections=1) as bench:
        assert words in problem_of(bench)


def test_read_only_user_loses_no_read(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with bench_over(f"unix:{server.path}") as bench:
        bench.fill([1], [0])
        bench.write([1], [0])
        server.client.execute_command("ACL", "SETUSER", "default", "-set", "-incrby")
        for number in range(2, 12):
            assert bench.write([number], [0]).tolist() == [Write.FAILED]
            bench.check_read([1], [3])
            assert generation(bench.tier, "new") == NO_GENERATION and flush(bench.tier) is None
        assert not bench.tier.problem() and caplog.text.count("refuses writes") == 1
        assert caplog.text.count("no usable generation of fingerprint=new") == 1
        server.client.execute_command("ACL", "SETUSER", "default", "+set")
        assert bench.write([2], [0]).tolist() == [Write.STORED]


@pytest.mark.parametrize("code", [b"OOM", b"MISCONF", b"NOREPLICAS"])
def test_a_server_that_takes_no_more_is_full(code: bytes) -> None:
    script = [HELLO, ABSENT, b"-" + code + b" no\r\n", b"+OK\r\n", b"-ERR no\r\n"]
    with scripted(*script, connections=1) as bench:
        codes = bench.write([1, 2, 3], [0, 1, 2]).tolist()
        assert codes == [Write.FULL, Write.STORED, Write.FAILED]
        assert not bench.tier.problem()


@pytest.mark.parametrize(
    ("removed", "expected", "words"),
    [
        (b":1", NO_GENERATION, ""),
        (b":0", None, ""),
        (b"-NOPERM no", None, "forbids this user"),
        (b"-ERR no", None, ""),
    ],
)
def test_full_servers_flush_counts_by_removing_generation(
    removed: bytes, expected: int | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    of_generation = [b"$0\r\n\r\n", b"_\r\n", b"$2\r\n77\r\n", b"-OOM no\r\n", removed + b"\r\n"]
    with scripted(HELLO, ABSENT, *of_generation, connections=1) as bench:
        assert flush(bench.tier) == expected
        # A new connection may already have ended the problem, so the test looks for it in the log.
        assert words in caplog.text if words else not bench.tier.problem()


@pytest.mark.parametrize(
    ("replies", "ask", "expected", "words"),
    [
        ([b"-ERR no"], lambda bench: bench.probe([1]).tolist(), [Read.FAILED], ""),
        ([b"+OK"], lambda bench: bench.probe([1]).tolist(), [Read.FAILED], "EXISTS with 'OK'"),
        ([b":1"], lambda bench: bench.write([1], [0]).tolist(), [Write.FAILED], "SET with 1"),
        ([b"+x"], lambda bench: bench.tier.forget([b"a"]), None, "UNLINK with 'x'"),
        ([b":1", b"-ERR no"], lambda bench: bench.tier.forget([b"a", b"b"]), None, ""),
        (
            [NO_INFO, b"_", b"-ERR no", b"_"],
            lambda bench: generation(bench.tier),
            None,
            "begins no",
        ),
        (
            [NO_INFO, b"_", b"-NOAUTH no", b"_"],
            lambda bench: generation(bench.tier),
            None,
            "password",
        ),
        (
            [NO_INFO, b"_", b"-OOM no", b"_"],
            lambda bench: generation(bench.tier),
            NO_GENERATION,
            "",
        ),
        ([NO_INFO, b"_", b"$1\r\n9", b":8"] * 8, lambda bench: flush(bench.tier), None, "loses"),
    ],
)
def test_odd_replies(
    replies: list[bytes],
    ask: Callable[[Bench], object],
    expected: object,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    script = [one + b"\r\n" for one in replies]
    with scripted(HELLO, ABSENT, *script, connections=1) as bench:
        assert ask(bench) == expected
        wait_for(lambda: words in caplog.text, "it is not said")
        assert words or not bench.tier.problem()


OWN = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$0\r\n\r\n:PORT\r\n$1\r\nx"
"""The answering server has all hash slots."""
WITH_REPLICA = OWN.replace(b"*3\r\n:0", b"*4\r\n:0") + b"\r\n*0"
RAISED = {b"SET": b"_", b"GET": b"$2\r\n77", b"INCRBY": b":9223372036854775807"}
FULL = {**RAISED, b"INCRBY": b"-OOM no", b"UNLINK": b":1"}
NO_MAP, AWAY = "a map of slots that can't be", "is a cluster of which a server is away"
OTHER = OWN + b"||" + OWN.replace(b"$0\r\n", b"$9\r\nlocalhost")
NONE = OWN + b"||" + OWN.replace(b"16383", b"6111")


def read_one(bench: Bench) -> object:
    return bench.read([1], [0]).tolist()


@pytest.mark.parametrize(
    ("replies", "ask", "expected", "words"),
    [
        ({}, read_one, [Read.ABSENT], ""),
        ({b"CLUSTER": b":1"}, read_one, [Read.FAILED], NO_MAP),
        ({b"CLUSTER": b"*1\r\n:1"}, read_one, [Read.FAILED], NO_MAP),
        ({b"CLUSTER": OWN.replace(b":16383", b":-1")}, read_one, [Read.FAILED], NO_MAP),
        ({b"CLUSTER": OWN.replace(b"16383", b"16384")}, read_one, [Read.FAILED], NO_MAP),
        ({b"CLUSTER": OWN.replace(b":PORT", b"_")}, read_one, [Read.FAILED], NO_MAP),
        # Slot 7305 of CHECK_KEY, or 6230 of the block, is lacking.
        ({b"CLUSTER": OWN.replace(b"16383", b"7304")}, read_one, [Read.FAILED], AWAY),
        ({b"CLUSTER": OWN.replace(b":0", b":6231", 1)}, read_one, [Read.FAILED], AWAY),
        ({b"CLUSTER": b"*0"}, read_one, [Read.FAILED], AWAY),
        ({b"GET": b"-MOVED 1 here"}, read_one, [Read.FAILED], "redirects to what is no server"),
        ({b"GET": b"-MOVED 1 :123456"}, read_one, [Read.FAILED], "redirects to what is no server"),
        ({b"GET": b"-MOVED 1 :PORT"}, read_one, [Read.FAILED], AWAY),
        ({b"GET": b"-ASK 1 :PORT", b"ASKING": b"-NOPERM"}, read_one, [Read.FAILED], "+asking"),
        # The map is read again (here a broken one) after MOVED, not after ASK.
        (
            {b"GET": b"-MOVED 1 :PORT||_", b"CLUSTER": OWN + b"||:1"},
            read_one,
            [Read.FAILED],
            NO_MAP,
        ),
        ({b"GET": b"-ASK 1 :PORT||_", b"CLUSTER": OWN + b"||:1"}, read_one, [Read.ABSENT], ""),
        (RAISED, lambda bench: flush(bench.tier), (1 << 63) - 1, ""),
        ({**RAISED, b"CLUSTER": WITH_REPLICA}, lambda bench: flush(bench.tier), None, "WAIT"),
        (FULL, lambda bench: flush(bench.tier), NO_GENERATION, ""),
        ({**FULL, b"CLUSTER": WITH_REPLICA}, lambda bench: flush(bench.tier), None, "WAIT"),
        # Slot 6112, the generation's, has another owner or none.
        ({**RAISED, b"CLUSTER": OTHER}, lambda bench: flush(bench.tier), None, "no replica"),
        ({**RAISED, b"CLUSTER": NONE}, lambda bench: flush(bench.tier), None, "no replica"),
    ],
)
def test_what_a_server_of_a_cluster_says(
    replies: dict[bytes, bytes],
    ask: Callable[[Bench], object],
    expected: object,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    hello = HELLO.replace(b"standalone", b"cluster")[:-2]
    others = {b"HELLO": hello, b"CLUSTER": OWN, b"EXISTS": b":0", b"GET": b"_", b"WAIT": b"-ERR no"}
    others[b"ASKING"] = b"+OK"
    with scripted(by_name={**others, **replies}, cluster=True, connections=1) as bench:
        assert ask(bench) == expected
        assert words in caplog.text if words else not bench.tier.problem()


def test_servers_words_are_quoted_printably() -> None:
    assert quoted(b"a\x1b[31m\x00\xff" + b"x" * 999) == repr("a?[31m?\ufffd" + "x" * 192)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0, "No such file"),
        ("\n", 0o600, "must have 1 to 4096"),
        (SECRET, 0o644, "can be read by every user"),
    ],
)
def test_a_password_file_that_is_wrong(
    server: Server, password_file: Path, text: str | None, mode: int, words: str
) -> None:
    if text is None:
        password_file.unlink()
    else:
        password_file.write_text(text)
        password_file.chmod(mode)
    with bench_over(f"unix:{server.path}", password_file=password_file) as bench:
        assert str(password_file) in problem_of(bench) and words in problem_of(bench)


def test_a_login_does_not_show_its_password(password_file: Path) -> None:
    login = read_login(ValkeySettings(address="a:1", password_file=password_file))
    assert login == Login("default", SECRET.encode())
    assert SECRET not in repr(login)


def test_a_host_that_no_resolver_knows() -> None:
    said = str(_words(socket.gaierror(socket.EAI_NONAME, "Name not known")))
    assert said == "can't be reached: Name not known"


def test_a_connect_that_fails_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(socket, "socket", Noted)
    settings = ValkeySettings(address=f"unix:{tmp_path}/none")
    with pytest.raises(LostError, match="No such file"):
        connect(settings, None, time.monotonic() + 60)
    assert [one.fileno() for one in made if one.family == socket.AF_UNIX] == [-1]


def test_an_address_that_no_system_call_takes() -> None:
    with bench_over("..:6379", connections=1) as bench:
        assert "can't be asked" in problem_of(bench)
        assert bench.read([1], [0]).tolist() == [Read.FAILED]


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"address": "unix:run/v.sock"}, "address", "must be absolute"),
        ({"address": "unix:/" + "x" * 107}, "address", "at most 107 bytes"),
        ({"address": "localhost"}, "address", "must be unix:/path, host:port"),
        ({"address": f"redis://u:{SECRET}@host:1"}, "address", "settings of their own"),
        ({"address": f"u:{SECRET}@host:6379"}, "address", "settings of their own"),
        ({"address": "::1:6379"}, "address", "must be unix:/path, host:port"),
        ({"address": "host:0"}, "address", "from 1 to 65535"),
        ({"address": "host:65536"}, "address", "from 1 to 65535"),
        ({"address": "host:²"}, "address", "from 1 to 65535"),
        ({"address": "h:1", "password": SECRET}, "password", "Extra inputs"),
        ({"address": "h:1", "user": "kv"}, "", "user needs password_file"),
        ({"address": "unix:/v", "tls": True}, "", "a Unix socket has no TLS"),
        ({"address": "h:1", "tls": True, "cert_file": "c"}, "", "must be set together"),
        ({"address": "h:1", "ca_file": "c"}, "", "need tls = true"),
        ({"address": "a:1,b:2"}, "", "cluster"),
        ({"address": "unix:/run/v.sock", "cluster": True}, "", "cluster"),
        ({"address": "a:1", "cluster": True, "database": 1}, "", "cluster"),
        ({"address": "a:1", "cluster": True, "tls": True, "server_name": "b"}, "", "server_name"),
        ({"address": "a:1,b", "cluster": True}, "address", "must be unix:/path, host:port"),
        ({"address": "a:1,,b:2", "cluster": True}, "address", "must be unix:/path, host:port"),
        ({"address": "h:1", "connections": 0}, "connections", "greater than or equal to 1"),
        ({"address": "h:1", "ttl_s": 0}, "ttl_s", "greater than or equal to 1"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ValkeySettings(**given)
    (error,) = caught.value.errors()
    assert error["loc"] == ((field,) if field else ())
    assert words in error["msg"]
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("address", ["valkey.example:6379", "[::1]:6379", "10.0.0.1:1"])
def test_addresses_over_tcp(address: str) -> None:
    host, port = ValkeySettings(address=address).host_and_port
    assert (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") == address
    assert not ValkeySettings(address=address).unix_path
