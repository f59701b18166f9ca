"""`hotkv drain --wait`: drains a server and waits until it has ended."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotkv_client import targets
from hotkv_client.admin import AdminClient
from hotkv_proto.command_line import counted
from hotkv_proto.errors import HotKVError, Reason

POLL_S = 0.2
TOLD_S = 2.0
"""Between reports of progress."""
CLOSING_S = 60.0
"""That a server may need to write its files after its last work."""
CONNECT_S = 5.0


def drain(
    client: AdminClient, target: str, timeout_s: float, say: Callable[[str, float], None]
) -> dict[str, Any]:
    """Drains the server, and waits until its admin socket is closed or another server answers
    there.

    Returns the server's answer with `waited_s` added. Raises HotKVError if the server refuses, or
    still runs CLOSING_S after the answer's time limit for work in flight.

    timeout_s: for work in flight; 0: the server's default.
    say: gets, every TOLD_S, a text about the remaining work, and the share of the work that has
        ended.
    """
    pid, began_s = client.info()["pid"], time.monotonic()
    answer = client.drain(timeout_s)
    most = max(1, answer["lease_count"] + answer["transfer_count"])
    limit_s = answer["timeout_ms"] / 1000 + CLOSING_S
    told_s = began_s
    while True:
        waited_s = time.monotonic() - began_s
        now = _live(client, target, pid)
        if now is None:
            return {**answer, "waited_s": waited_s}
        if time.monotonic() >= told_s + TOLD_S:
            told_s = time.monotonic()
            say(now.text, 1 - min(now.num_left, most) / most)
        if waited_s > limit_s:
            raise HotKVError(
                Reason.DRAINING,
                f"the server (pid {pid}) is still there after {waited_s:.0f} s: {now.text}; its "
                "log says what it waits for",
            )
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Left:
    """Work that a server has not finished. `num_left`: leases and transfers."""

    text: str
    num_left: int


def _live(client: AdminClient, target: str, pid: int) -> Left | None:
    """Of process `pid`; None if it has ended."""
    if not is_listening(target):
        return None
    try:
        info = client.info()
    except HotKVError as error:
        return Left(error.message, 0) if is_listening(target) else None
    if info["pid"] != pid or info["state"] == "ready":
        # The next server has already started.
        return None
    leases, transfers = (int(info["counters"][name]) for name in ("leases", "transfers_in_flight"))
    return Left(
        f"{counted(leases, 'lease')} held, {counted(transfers, 'transfer')} in flight",
        leases + transfers,
    )


def is_listening(target: str) -> bool:
    """A host that does not answer in time counts as listening."""
    address = targets.admin_target(target)
    try:
        if targets.is_unix(address):
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
