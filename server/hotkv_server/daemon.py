"""The daemon: bind, map, prefault, then ready; on SIGTERM drain, then stop.

Owns the order of start and stop, and the lock on the runtime directory: the second server on one directory refuses.
"""

import asyncio
import ctypes
import gc
import logging
import mmap
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hotkv
from hotkv import native
from hotkv.keys import KeySpace
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.values import CoreConfig
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.http_endpoint import HttpServer
from hotkv_server.memory.arena import BusyError, NodeMemory, clear, lock_file
from hotkv_server.rpc.descriptors import DescriptorServer
from hotkv_server.rpc.server import RpcServer
from hotkv_server.runtime.node import Node
from hotkv_server.runtime.takeover import take_over
from hotkv_server.runtime.verify import Verifier
from hotkv_server.settings import EventSettings, Settings

if TYPE_CHECKING:
    from hotkv_server.events.publisher import ZmqPublisher

log = logging.getLogger(__name__)

STALLED_LOOP_S = 5.0
UNUSED_LIBRARIES = ("libllvmlite", "openblas")
"""The compiler behind numba's cached kernels, and numpy's linear algebra."""
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter from a copy thread that has just ended its piece."""


class StartError(Exception):
    """The server can't start; the message says what to do."""


def lock_runtime_dir(directory: Path) -> int:
    """Descriptor of the locked directory. Raises StartError, with the other server's pid, where it is taken."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        return lock_file(directory / "lock")
    except BusyError as error:
        raise StartError(f"runtime_dir: {error}") from error
    except OSError as error:
        raise StartError(f"runtime_dir: {error}; choose a directory this user may write, with --runtime-dir") from error


def notify_systemd(state: str) -> None:
    """Tells systemd, where it listens (sd_notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
            notifier.connect("\0" + address[1:] if address.startswith("@") else address)
            notifier.sendall(state.encode())


async def feed_watchdog(is_healthy: Callable[[], bool]) -> None:
    """Tells systemd's watchdog, where it asks for it, that the event loop and the copy threads are alive; a server that hangs is killed."""
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 2e6
    while interval_s > 0:
        if is_healthy():
            notify_systemd("WATCHDOG=1")
        await asyncio.sleep(interval_s)


def trim_memory() -> None:
    """Gives back what only the start needed: free heap, and the file pages of libraries that a server at work does not use."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in unused_library_pages(Path("/proc/self/smaps").read_text()):
        libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def unused_library_pages(smaps: str) -> list[tuple[int, int]]:
    """Address ranges of read-only mappings of UNUSED_LIBRARIES that are whole copies of their file.

    The kernel brings back what is used again. A mapping with anonymous pages (relocated data) is left alone: those exist nowhere else.
    """
    ranges: list[tuple[int, int]] = []
    candidate: tuple[int, int] | None = None
    for line in smaps.splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0]:
            named = len(head) == 6 and any(library in head[5] for library in UNUSED_LIBRARIES)
            start, end = (int(part, 16) for part in head[0].split("-"))
            candidate = (start, end) if named and head[1] in ("r-xp", "r--p") else None
        elif head[0] == "Anonymous:" and candidate is not None and int(head[1]) == 0:
            ranges.append(candidate)
    return ranges


def make_publisher(settings: EventSettings) -> "ZmqPublisher | None":
    """What publishes events, where the settings ask for it. Raises StartError."""
    if not settings.endpoint:
        return None
    try:
        import zmq

        from hotkv_server.events.publisher import ZmqPublisher
    except ImportError as missing:
        raise StartError(f"events.endpoint is set, but {missing.name} is not installed: pip install 'hotkv[events]'") from missing
    host = socket.gethostname()

    def topic_of(number: int, key_space: KeySpace) -> str:
        return settings.topic.format(host=host, model=key_space.model, tenant=key_space.tenant, key_space=number)

    try:
        return ZmqPublisher(
            settings.endpoint,
            settings.replay_endpoint,
            topic_of,
            buffer_steps=settings.buffer_steps,
            buffer_bytes=settings.buffer_bytes,
            int_hashes=settings.int_hashes,
        )
    except zmq.ZMQError as error:
        raise StartError(
            f"events: {error}; is {settings.endpoint} or {settings.replay_endpoint or '(no replay_endpoint)'} in use?"
        ) from error


async def serve(settings: Settings, *, reset: bool = False) -> None:
    """Runs the server until SIGTERM, SIGINT or a drain by an operator has ended it. Raises StartError.

    `reset`: forget what an earlier server has left.
    """
    started_s = time.monotonic()
    lock_fd = lock_runtime_dir(settings.runtime_dir)
    native.load("hotkv.kernels")
    try:
        if reset:
            clear(settings.arena_dir)
        memory = NodeMemory.open(
            settings.arena_dir,
            settings.arena.bytes,
            settings.arena.slab_bytes,
            settings.arena.capacity,
            secrets.randbits(62) | 1,
            prefault=settings.arena.prefault,
        )
    except BusyError as error:
        raise StartError(f"arena.dir: {error}") from error
    except OSError as error:
        raise StartError(f"arena: {error}") from error
    config = CoreConfig(
        settings.arena.bytes,
        settings.arena.slab_bytes,
        settings.arena.capacity,
        lease_ttl_s=settings.leases.ttl_s,
        unadmitted_share=settings.leases.unadmitted_share,
        held_share=settings.leases.held_share,
        check_stride=settings.integrity.stride,
    )
    core = CacheCore(config, memory.table, POLICIES[settings.policy](config.capacity))
    verifier = Verifier(core, Region(memory.arena.address, memory.arena.num_bytes, "the arena"))
    try:
        take_over(core, memory, verifier, settings.integrity.start_check_s if settings.integrity.stride else None)
    except OSError as error:
        raise StartError(f"arena.dir: {error}") from error
    publisher = make_publisher(settings.events)
    copy_engine = HostCopyEngine(settings.copy_.num_threads)
    node = Node(core, memory, copy_engine, publisher, verifier)
    node.start(settings.integrity.scrub_bytes_per_s)

    def is_ready() -> bool:
        return not node.core.draining and copy_engine.is_alive() and time.monotonic() - node.last_tick_s < STALLED_LOOP_S

    mode = int(settings.security.socket_mode, 8)
    try:
        rpc = RpcServer(node, settings.grpc_socket, mode, settings.tcp_address, has_descriptor_socket=True)
        uids = frozenset({os.getuid(), 0, *settings.security.allowed_uids})
        descriptors = DescriptorServer(node, settings.descriptor_socket, mode, uids)
        http = HttpServer(settings.http.host, settings.http.port, node, is_ready) if settings.http.port >= 0 else None
    except (OSError, RuntimeError) as error:
        raise StartError(f"can't listen: {error}") from error
    await rpc.start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.drain, settings.drain_timeout_s)
    if settings.arena.prefault:
        threading.Thread(target=memory.collapse_rest, name="hotkv-huge-pages", daemon=True).start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    trim_memory()
    log.info(
        "ready version=%s socket=%s arena_bytes=%d huge_bytes=%d copy_threads=%d http_port=%s kernels=%s start_s=%.2f",
        hotkv.__version__, settings.grpc_socket, settings.arena.bytes, memory.arena.huge_bytes, settings.copy_.num_threads,
        http.port if http else "none", native.available(), time.monotonic() - started_s,
    )  # fmt: skip
    notify_systemd(f"READY=1\nSTATUS=serving on {settings.grpc_socket}")

    watchdog = asyncio.create_task(feed_watchdog(copy_engine.is_alive))
    await node.drained.wait()
    watchdog.cancel()
    notify_systemd("STOPPING=1")
    await rpc.set_serving(False)
    await rpc.stop(0.5)
    await node.close()
    descriptors.close()
    if http is not None:
        http.close()
    copy_engine.close()
    if publisher is not None:
        publisher.close()
    if settings.arena.keep:
        node.save_use()
        memory.release()
    else:
        memory.remove()
    os.close(lock_fd)
    log.info("stopped")
