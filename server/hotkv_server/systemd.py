"""Notifies systemd (sd_notify) of the server's state, if systemd has started the server. A notice
that can't be sent is logged, and the server continues."""

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
    """Sends notices, such as `READY=1`, to systemd, all in one message. Does nothing if systemd
    does not expect notices (the environment variable NOTIFY_SOCKET is not set)."""
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
    """Returns the socket for all notices to systemd. The socket stays open, because the server may
    be unable to open another: clients may use up all descriptors that the server may have. Without
    a socket the server could not signal systemd's watchdog, and systemd would kill it."""
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    return socket.socket(socket.AF_UNIX, kind)


def extension(seconds: float) -> str:
    """Returns the notice that asks systemd for `seconds` more to start or to stop."""
    return f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}"


@contextlib.contextmanager
def patience(what: str, progress: Callable[[], int]) -> Iterator[None]:
    """While the `with` block runs, asks systemd again and again for more time to start or stop the
    server, as long as the number that `progress` returns rises. Asks on a thread, because the code
    in the block may occupy the calling thread.

    what: what the server is doing, for systemd's status line.
    progress: function that returns how many bytes the block has processed.
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
