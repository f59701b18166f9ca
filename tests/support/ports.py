"""Free TCP ports, for servers that must be given one."""

import itertools
import os
import random
import socket
from pathlib import Path

FIRST_PORT = 10_000
_held: list[socket.socket] = []


def free_port() -> int:
    """No other test gets the port while this process runs. It is below the range of outgoing
    connections, which could take it before the server listens."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, max(kernels, FIRST_PORT + 10_000))
    start = random.Random(os.urandom(8)).randrange(len(ports))
    for port in itertools.chain(ports[start:], ports[:start]):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # The kernel frees an abstract socket name when this process ends.
            claim.bind(f"\0hotkv-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        _held.append(claim)
        return port
    raise OSError("no free port")


def free_ports(count: int) -> list[int]:
    return [free_port() for _ in range(count)]
