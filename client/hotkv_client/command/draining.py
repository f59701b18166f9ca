"""`hotkv drain --wait`: makes a server drain (refuse new work and end its work in flight), and
waits until the server has ended."""

import socket
import time
from collections.abc import Callable
from typing import Any

from hotkv_client import channels
from hotkv_client.admin import AdminClient
from hotkv_proto.errors import HotKVError, Reason

POLL_S = 0.2
TOLD_S = 2.0
"""Interval at which `drain` reports its progress."""
CLOSING_S = 60.0
"""Longest time that a server may need to write its files after its last work has ended."""
CONNECT_S = 5.0


def drain(
    client: AdminClient, target: str, timeout_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Makes the server drain (refuse new work and end its work in flight), and waits until the
    server has ended. It has ended when its admin socket is closed, or when another server answers
    there.

    Returns the server's answer (the number of leases and transfers at the start), to which this
    function adds the waiting time (`waited_s`). Raises HotKVError in two cases: the server refuses
    to drain; or the server still runs CLOSING_S after the time limit for work in flight. This limit
    is in the server's answer.

    timeout_s: longest wait for work in flight; 0: the server's default.
    say: called every TOLD_S with a text about the remaining work.
    """
    pid, began_s = client.info()["pid"], time.monotonic()
    answer = client.drain(timeout_s)
    limit_s = answer["timeout_ms"] / 1000 + CLOSING_S
    told_s = began_s
    while True:
        waited_s = time.monotonic() - began_s
        now = _live(client, target, pid)
        if now is None:
            return {**answer, "waited_s": waited_s}
        if time.monotonic() >= told_s + TOLD_S:
            told_s = time.monotonic()
            say(now)
        if waited_s > limit_s:
            raise HotKVError(
                Reason.DRAINING,
                f"the server (pid {pid}) is still there after {waited_s:.0f} s: {now}; its log "
                "says what it waits for",
            )
        time.sleep(POLL_S)


def _live(client: AdminClient, target: str, pid: int) -> str | None:
    """Returns a text about the work that process `pid` has not finished; None if the process has
    ended."""
    if not is_listening(target):
        return None
    try:
        info = client.info()
    except HotKVError as error:
        return error.message if is_listening(target) else None
    if info["pid"] != pid or info["state"] == "ready":
        # Another server process has answered: the drained server has ended, and the next server has
        # already started.
        return None
    counters = info["counters"]
    return (
        f"{counters['leases']:.0f} leases held, "
        f"{counters['transfers_in_flight']:.0f} transfers in flight"
    )


def is_listening(target: str) -> bool:
    """Returns whether a process listens on the admin socket of a target. A host that does not
    answer in time counts as listening."""
    address = channels.admin_target(target)
    try:
        if channels.is_unix(address):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(address.removeprefix("unix:").removeprefix("//"))
            return True
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True
    return True
