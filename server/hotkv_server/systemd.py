"""Notifies systemd (sd_notify), if it has started the server. A failed notice is logged."""

import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

BEAT_S = 5.0
EXTENSION_S = 30.0


def notify(*lines: str) -> None:
    """Sends lines such as `READY=1` in one message. Does nothing without NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        to = "\0" + address[1:] if address.startswith("@") else address
        _notifier().sendto("\n".join(lines).encode(), to)
    except OSError as error:
        log.warning("systemd not told %s: %s", lines[0], error)


@functools.cache
def _notifier() -> socket.socket:
    """Stays open: clients may use up all descriptors, and without a socket for its watchdog
    systemd would kill the server."""
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    return socket.socket(socket.AF_UNIX, kind)


def extension(seconds: float) -> str:
    """Asks for more time to start or stop."""
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"


@contextlib.contextmanager
def patience(what: str, progress: Callable[[], int]) -> Iterator[None]:
    """Asks systemd for more time, on a thread, as long as the number from `progress` rises.

    what: for systemd's status line.
    progress: bytes that the `with` block has processed.
    """
    over = threading.Event()

    def beat() -> None:
        before = progress()
        while not over.wait(BEAT_S):
            now = progress()
            if now > before:
                notify(extension(EXTENSION_S), f"STATUS={what}: {now >> 20} MiB")
            before = now

    notify(f"STATUS={what}")
    thread = threading.Thread(target=beat, name="hotkv-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
