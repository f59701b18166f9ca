"""What people and machines use to look after a server: health, reflection, channelz, HTTP, systemd,
the command line."""

import json
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import Server
from hotkv_client.admin import AdminClient
from hotkv_client.channels import admin_target
from hotkv_client.command import cli
from hotkv_client.hints import HintClient
from hotkv_client.testing import PagedEngine
from hotkv_proto.keys import KeySpace
from tests.server.page_support import get
from tests.server.places import store
from tests.server.support import http_port, number_of

Make = Callable[..., PagedEngine]


def test_health_reflection_and_channelz(server: Server) -> None:
    with grpc.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in (
            "",
            "hotkv.v1.CacheService",
            "hotkv.v1.SessionService",
            "hotkv.v1.EventService",
            "hotkv.v1.AdminService",
        ):
            assert (
                health.Check(health_pb2.HealthCheckRequest(service=name)).status
                == health_pb2.HealthCheckResponse.SERVING
            )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        )
        names = {service.name for service in answer.list_services_response.service}
        assert {
            "hotkv.v1.CacheService",
            "hotkv.v1.SessionService",
            "hotkv.v1.SparseService",
            "grpc.health.v1.Health",
        } <= names
        assert (
            not {"hotkv.v1.AdminService", "hotkv.v1.EventService", "grpc.channelz.v1.Channelz"}
            & names
        )
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="hotkv.v1.CacheService"
        )
        answer = next(
            reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        )
        assert answer.file_descriptor_response.file_descriptor_proto
    with grpc.insecure_channel(admin_target(server.target)) as channel:
        assert (
            channelz_pb2_grpc.ChannelzStub(channel)
            .GetServers(channelz_pb2.GetServersRequest(start_server_id=0))
            .server
        )


def test_http(server: Server) -> None:
    port = http_port(server)
    for path in ("/livez", "/readyz"):
        assert get(port, path).text == "ok\n"
    # `test_metrics` has all of them.
    text = get(port, "/metrics").text
    for name in ("process_open_fds", "hotkv_stored_blocks_total", "hotkv_event_readers"):
        assert re.search(rf"^{name} [0-9.e+]+$", text, re.MULTILINE), name
    assert re.search(r'^hotkv_refused_total{reason="overloaded"} [0-9.e+]+$', text, re.MULTILINE)
    assert get(port, "/../etc/passwd").status == 404


def test_the_command_line(server: Server, engine: Make) -> None:
    one = engine(engine_id="cli-engine", model="cli-model")
    tokens = list(range(16 * 3 + 5))
    hashes = prompt_hashes(one.key_space, tokens)
    store(one, hashes[:2])
    assert "cli-model" in server.cli("status")
    assert "cli-engine" in server.cli("sessions")
    assert hashes[0].hex()[:16] in server.cli("blocks", "--limit", "1000")
    for command in (
        ["status"],
        ["sessions"],
        ["blocks"],
        ["explain", hashes[0].hex()],
        ["evict", "--key-space", "1", hashes[0].hex()],
    ):
        assert json.loads(server.cli(*command, "--json"))
    store(one, hashes[:2])
    with AdminClient(server.target) as admin:
        space = number_of(admin, "cli-model")
    by_tokens = server.cli("explain", "--key-space", str(space), *map(str, tokens))
    assert f"key space {space}: 32 of 48 tokens hit" in by_tokens
    assert "never stored" in by_tokens
    assert "evicted 2 blocks" in server.cli("evict", "--all", "--key-space", str(space))
    assert "evicted" in server.cli("explain", "--key-space", str(space), *map(str, tokens))


def prompt_hashes(key_space: KeySpace, tokens: list[int]) -> list[bytes]:
    from hotkv_proto.keys import token_block_hashes

    return token_block_hashes(
        tokens, key_space.hash_block_tokens, key_space.hash_algorithm, key_space.hash_seed
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["evict", "zz"], 2, "'zz' is no hexadecimal block hash"),
        (["evict"], 1, "give exactly one of them"),
        (["explain", "@/nowhere"], 2, "/nowhere"),
        (["blocks", "--key-space", "4000"], 1, "key_space_id 4000 is unknown"),
        (["blocks", "--limit", "-3"], 1, "page_size"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    words: str,
) -> None:
    assert cli.main([*arguments, "--target", server.target]) == status
    assert words in capsys.readouterr().err


def test_no_server_is_said_plainly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["status", "--target", f"unix:{tmp_path}/grpc.sock", "--timeout-s", "2"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_the_client_is_light() -> None:
    heavy = {"torch", "numba", "pydantic", "vllm", "llvmlite", "prometheus_client"}
    code = f"import sys, hotkv_client; print(sorted({heavy!r} & sys.modules.keys()))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_only_whole_copies_of_unused_libraries_are_given_back() -> None:
    from hotkv_server.startup.process import has_own_pages, unused_library_pages

    maps = """7f0000000000-7f0000001000 r-xp 00000000 fe:00 1   /x/libllvmlite.so
7f0000001000-7f0000002000 r--p 00001000 fe:00 1   /x/libllvmlite.so
7f0000002000-7f0000003000 rw-p 00002000 fe:00 1   /x/libllvmlite.so
7f0000003000-7f0000004000 r-xp 00000000 fe:00 2   /x/libc.so
7f0000004000-7f0000005000 r--p 00000000 00:00 0
"""
    assert unused_library_pages(maps) == [
        (0x7F0000000000, 0x7F0000001000),
        (0x7F0000001000, 0x7F0000002000),
    ]
    with open(__file__, "rb") as file:
        pages = mmap.mmap(
            file.fileno(),
            mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    view = np.frombuffer(pages, np.uint8)
    address = view.ctypes.data
    assert view[0] and not has_own_pages(address, address + mmap.PAGESIZE)
    pages[0] = 1
    assert has_own_pages(address, address + mmap.PAGESIZE)


def test_a_client_that_is_closed_says_so(server: Server) -> None:
    """gRPC would end the process."""
    with AdminClient(server.target) as admin, HintClient(server.target) as hints:
        pass
    for use in (admin.info, lambda: next(admin.events()), hints.outcomes):
        with pytest.raises(ValueError, match="closed"):
            use()
