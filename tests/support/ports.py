"""TCP ports for servers that are told theirs."""

import itertools
import os
import random
import socket
from pathlib import Path

FIRST_PORT = 10_000
_held: list[socket.socket] = []


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nothing listens at. No other test gets it while this process
    runs, and no connection that the kernel makes: it is below the kernel's own range.

    A port that was bound for a moment would not do: until its server listens there, any outgoing
    connection may be given it.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT, max(kernels, FIRST_PORT + 10_000))
    start = random.Random(os.urandom(8)).randrange(len(ports))
    for port in itertools.chain(ports[start:], ports[:start]):
        claim = socket.socket(socket.AF_UNIX)
        try:
            # An abstract name: the kernel frees it when this process ends.
            claim.bind(f"\0hotkv-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
            continue
        _held.append(claim)
        return port
    raise OSError("no free port")


def free_ports(count: int) -> list[int]:
    """Returns different ports, each as `free_port` gives it."""
    return [free_port() for _ in range(count)]
