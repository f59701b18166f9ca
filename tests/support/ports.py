"""Free TCP ports, for servers that must be given a port number."""

import itertools
import os
import random
import socket
from pathlib import Path

FIRST_PORT = 10_000
_held: list[socket.socket] = []


def free_port() -> int:
    """Returns a port of 127.0.0.1 on which nobody listens. While this process runs, no other test
    gets the port.

    The port is below the range from which the kernel chooses ports for outgoing connections. A port
    from this range could be taken by such a connection before the server listens on it.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, max(kernels, FIRST_PORT + 10_000))
    start = random.Random(os.urandom(8)).randrange(len(ports))
    for port in itertools.chain(ports[start:], ports[:start]):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # Claims the port by an abstract socket name, which the kernel
            # frees when this process ends.
            claim.bind(f"\0hotkv-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        _held.append(claim)
        return port
    raise OSError("no free port")


def free_ports(count: int) -> list[int]:
    """Returns `count` different ports from `free_port`."""
    return [free_port() for _ in range(count)]
