"""The daemon: bind, map, prefault a first part, then ready; on SIGTERM drain, then stop.

Owns the order of start and stop, and the lock on the runtime directory: the second server on one
directory refuses. Where the core's books turn out to be wrong it closes nothing and saves nothing,
but ends like one that was killed, with BROKEN_STATUS.
"""

import asyncio
import ctypes
import errno
import gc
import logging
import mmap
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

import hotkv
from hotkv import native
from hotkv.keys import KeySpace
from hotkv_server import systemd
from hotkv_server.access import check_places, make_access_control, make_endpoints, tenant_shares
from hotkv_server.core.cache import CacheCore
from hotkv_server.core.policies import POLICIES
from hotkv_server.core.values import CoreConfig
from hotkv_server.dataplane.host import HostCopyEngine
from hotkv_server.dataplane.plan import Region
from hotkv_server.device.start import CudaError, CudaPart, look_in_background, open_part, placer
from hotkv_server.http_endpoint import HttpServer
from hotkv_server.integrity.verifier import Verifier
from hotkv_server.memory import left_behind, limits, sigbus
from hotkv_server.memory.arena import ARENA_FILE, LOCK_FILE, BusyError, NodeMemory, clear, lock_file
from hotkv_server.memory.left_behind import write_owner
from hotkv_server.rpc.descriptors import DescriptorServer
from hotkv_server.rpc.server import RpcServer
from hotkv_server.runtime.health import keep_checking
from hotkv_server.runtime.node import STALLED_WORK_S, Node
from hotkv_server.runtime.recovery import take_over
from hotkv_server.security.path_checks import UnsafeError, check_files, check_runtime_dir
from hotkv_server.security.tickets import Tickets
from hotkv_server.settings import EventSettings, Settings

if TYPE_CHECKING:
    from hotkv_server.events.publisher import ZmqPublisher

log = logging.getLogger(__name__)

BROKEN_STATUS = 70
"""Exit status after a broken invariant (EX_SOFTWARE); a service manager starts the server again."""
LAST_WORDS_S = 0.5
"""How long a server whose invariant broke goes on, to say so."""
STOP_S = 40.0
"""Longest time that a stop takes beside draining: transfers in flight, sessions, files."""
PRIVATE_UMASK = 0o077
"""Nothing that the server makes is open to others, unless it says so itself."""
ARENA_MODE = 0o600
"""Clients get descriptors, so nobody else need open the files."""
MAX_BLOCKS_PER_CALL = 1 << 17
"""The event loop serves nobody else during a call: some 20 ms to find so many."""
UNUSED_LIBRARIES = ("libllvmlite", "openblas")
"""The compiler behind numba's cached kernels, and numpy's linear algebra."""
M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter from a copy thread that has just ended its
piece."""


class StartError(Exception):
    """The server can't start; the message says what to do."""


def lock_runtime_dir(directory: Path) -> int:
    """Descriptor of the locked directory. Raises StartError, with the other server's pid, where it
    is taken."""
    try:
        check_runtime_dir(directory)
        check_files([directory / LOCK_FILE])
        return lock_file(directory / LOCK_FILE)
    except UnsafeError as error:
        raise StartError(f"runtime_dir: {error}") from error
    except BusyError as error:
        raise StartError(f"runtime_dir: {error}") from error
    except OSError as error:
        raise StartError(
            f"runtime_dir: {error}; choose a directory this user may write, with --runtime-dir"
        ) from error


def raise_file_limit() -> None:
    """Each session holds some descriptors; the soft limit is often 1024, and only the hard one is
    meant."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_memory(settings: Settings, *, reset: bool) -> NodeMemory:
    """Arena and table; says what the machine does not grant. Raises StartError, CudaError."""
    arena = settings.arena
    granted = limits.cgroup_bytes()
    if granted < arena.bytes:
        log.warning(
            "arena.bytes=%d is more than the memory limit of this service or container (%d "
            "bytes): unless most of the arena is there "
            "already, the kernel will kill the server; raise the limit or lower "
            "arena.bytes",
            arena.bytes,
            granted,
        )
    if limits.memlock_bytes() < arena.bytes:
        log.info(
            "locked memory is limited to %d bytes: enough for engines on CPU, too little to "
            "pin "
            "the arena",
            limits.memlock_bytes(),
        )
    warn_of_others(settings)
    try:
        if reset:
            clear(settings.arena_dir)
        with systemd.patience(
            "bringing the arena in", lambda: limits.allocated_bytes(settings.arena_dir / ARENA_FILE)
        ):
            memory = NodeMemory.open(
                settings.arena_dir,
                arena.bytes,
                arena.slab_bytes,
                arena.capacity,
                secrets.randbits(62) | 1,
                ARENA_MODE,
                prefault=arena.prefault,
                place=placer(arena.numa),
            )
        write_owner(settings.arena_dir, settings.runtime_dir.absolute(), hotkv.__version__)
    except BusyError as error:
        raise StartError(f"arena.dir: {error}") from error
    except OSError as error:
        full = (
            "; not enough memory is free: lower arena.bytes"
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT)
            else ""
        )
        raise StartError(f"arena: {error}{full}") from error
    if arena.prefault and memory.leftover is None and not memory.arena.huge_bytes:
        log.warning("no huge pages, so copies are slower: %s", limits.why_no_huge_pages())
    return memory


def warn_of_others(settings: Settings) -> None:
    """Says so if arenas of other servers, above all of those that are gone, leave too little memory
    for this one."""
    directory = settings.arena_dir.absolute()
    folder = (
        left_behind.SHARED_MEMORY
        if directory.is_relative_to(left_behind.SHARED_MEMORY)
        else directory.parent
    )
    others = [other for other in left_behind.find(folder) if other.path != directory]
    gone_bytes = sum(other.num_bytes for other in others if other.is_stale)
    try:
        space = os.statvfs(folder)
    except OSError:
        return
    free_bytes = min(space.f_bavail * space.f_frsize, limits.available_bytes())
    missing_bytes = (
        settings.arena.bytes - limits.allocated_bytes(settings.arena_dir / ARENA_FILE) - free_bytes
    )
    if missing_bytes > 0 and any(other.num_bytes for other in others):
        log.warning(
            "%d MiB are missing for the arena, and other arenas in %s hold %d MiB, those whose "
            "server is gone %d MiB of it: `hotkv-server "
            "arenas --folder %s` lists them, and with --remove-stale gives the memory of the "
            "latter back",
            missing_bytes >> 20,
            folder,
            sum(other.num_bytes for other in others) >> 20,
            gone_bytes >> 20,
            folder,
        )


def listen_http(settings: Settings, node: Node) -> HttpServer | None:
    """HTTP, where it is wanted. Raises StartError."""
    http = settings.http
    try:
        return HttpServer(http.host, http.port, node) if http.port >= 0 else None
    except OSError as error:
        raise StartError(
            f"http.port: can't listen on {http.host}:{http.port} ({error.strerror}); choose "
            "another with --http.port (0 for any free one, "
            "-1 for none), and an address of this machine for http.host"
        ) from error


def watch_all(
    node: Node,
    settings: Settings,
    cuda: CudaPart,
    http: HttpServer | None,
    publisher: "ZmqPublisher | None",
) -> None:
    """Names everything that must be alive besides what the node watches itself."""
    health, copies = node.health, node.copy_engine
    health.watch("a copy thread", copies.is_alive, copies.stalled_s, STALLED_WORK_S)
    health.watch_fault(cuda.fault)
    health.watch("the thread that brings the arena in", node.memory.filling.is_alive)
    if cuda.pinner is not None:
        health.watch("the thread that pins the arena", cuda.pinner.is_alive)
    for path in (settings.grpc_socket, settings.descriptor_socket, settings.admin_socket):
        health.watch(f"the socket {path.name}", path.is_socket)
    if http is not None:
        health.watch("the HTTP thread", http.is_alive, http.stalled_s)
    if publisher is not None:
        health.watch("the event publisher", publisher.is_alive, publisher.stalled_s, STALLED_WORK_S)


class Herald:
    """Tells gRPC's health service and systemd how the server is."""

    def __init__(self, node: Node, rpc: RpcServer, cuda: CudaPart) -> None:
        self._node = node
        self._rpc = rpc
        self._cuda = cuda
        self._said = ""

    async def tell(self) -> None:
        """How it is now; feeds the watchdog where all is well."""
        node, problems = self._node, self._node.health.problems(time.monotonic())
        draining = node.core.draining
        self._rpc.set_health(is_ready=not problems and not draining, is_alive=not problems)
        background = (node.memory.filling.progress(), self._cuda.progress())
        says = "; ".join(
            filter(
                None,
                (*(problems or ["serving"] * (not draining)), "draining" * draining, *background),
            )
        )
        if says != self._said:
            self._said = says
            systemd.notify(
                f"STATUS={says}",
                *(
                    ["STOPPING=1", systemd.extension(node.drain_timeout_s + STOP_S)]
                    if draining
                    else []
                ),
            )
        if not problems:
            systemd.notify("WATCHDOG=1")


async def end_broken(node: Node, herald: Herald) -> NoReturn:
    """Says that the books are wrong, and ends the process as a kill would."""
    node.abandon()
    await herald.tell()
    await asyncio.sleep(LAST_WORDS_S)
    log.critical("ends status=%d; the next start keeps the blocks that hold", BROKEN_STATUS)
    logging.shutdown()
    os._exit(BROKEN_STATUS)


async def wait_for_end(node: Node) -> None:
    """Returns when the node has drained or an invariant has broken."""
    waits = [asyncio.create_task(event.wait()) for event in (node.drained, node.health.broken)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def return_large_blocks() -> None:
    """From now on malloc gives large blocks back when they are freed; else it would keep some as
    large as the largest messages."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def trim_memory() -> None:
    """Gives back what only the start needed: free heap, and the file pages of libraries that a
    server at work does not use."""
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # Not smaps: for an arena of small pages the kernel takes seconds to count them.
    for start, end in unused_library_pages(Path("/proc/self/maps").read_text()):
        if not has_own_pages(start, end):
            libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def unused_library_pages(maps: str) -> list[tuple[int, int]]:
    """Address ranges of read-only mappings of UNUSED_LIBRARIES; the kernel brings back what is used
    again."""
    ranges = []
    for line in maps.splitlines():
        addresses, mode, *_, name = line.split(maxsplit=5)
        if mode in ("r-xp", "r--p") and any(library in name for library in UNUSED_LIBRARIES):
            start, _, end = addresses.partition("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def has_own_pages(start: int, end: int) -> bool:
    """True where some pages of the range are not those of its file (relocated data): they exist
    nowhere else."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = np.frombuffer(
            os.pread(
                pagemap.fileno(), (end - start) // mmap.PAGESIZE * 8, start // mmap.PAGESIZE * 8
            ),
            np.uint64,
        )
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return bool(np.any(swapped | (present & ~of_file & np.uint64(1))))


def make_publisher(settings: EventSettings) -> "ZmqPublisher | None":
    """What publishes events, where the settings ask for it. Raises StartError."""
    if not settings.endpoint:
        return None
    try:
        import zmq

        from hotkv_server.events.publisher import ZmqPublisher
    except ImportError as missing:
        raise StartError(
            f"events.endpoint is set, but {missing.name} is not installed: pip install "
            "'hotkv[events]'"
        ) from missing
    host = socket.gethostname()

    def topic_of(number: int, key_space: KeySpace) -> str:
        return settings.topic.format(
            host=host, model=key_space.model, tenant=key_space.tenant, key_space=number
        )

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
            f"events: {error}; is {settings.endpoint} or "
            f"{settings.replay_endpoint or '(no replay_endpoint)'} in use?"
        ) from error


async def serve(settings: Settings, *, reset: bool = False) -> None:
    """Runs the server until SIGTERM, SIGINT or a drain by an operator has ended it. Raises
    StartError.

    `reset`: forget what an earlier server has left.
    """
    started_s = time.monotonic()
    os.umask(PRIVATE_UMASK)
    sigbus.install()
    return_large_blocks()
    raise_file_limit()
    lock_fd = lock_runtime_dir(settings.runtime_dir)
    try:
        check_places(settings)
    except (UnsafeError, OSError) as error:
        raise StartError(f"refused to start: {error}") from error
    native.load("hotkv.kernels")
    if settings.integrity.stride:
        # Else the first store would wait for it, for seconds where it is not compiled yet.
        native.load("hotkv_server.integrity.kernels")
    looking = look_in_background(settings.copy_)
    try:
        memory = open_memory(settings, reset=reset)
        cuda = open_part(
            settings, memory, HostCopyEngine(settings.copy_.num_threads), looking.result()
        )
    except CudaError as error:
        raise StartError(str(error)) from error
    config = CoreConfig(
        settings.arena.bytes,
        settings.arena.slab_bytes,
        settings.arena.capacity,
        lease_ttl_s=settings.leases.ttl_s,
        unadmitted_share=settings.leases.unadmitted_share,
        held_share=settings.leases.held_share,
        max_blocks_per_call=MAX_BLOCKS_PER_CALL,
        client_memory_bytes=settings.client_memory_bytes,
        check_stride=settings.integrity.stride,
        tenants=tenant_shares(settings.security),
        is_backed=False,
        makes_room=False,
    )
    core = CacheCore(config, memory.table, POLICIES[settings.policy](config.capacity))
    verifier = Verifier(core, Region(memory.arena.address, memory.arena.num_bytes, "the arena"))
    try:
        take_over(
            core,
            memory,
            verifier,
            settings.integrity.start_check_s if settings.integrity.stride else None,
        )
    except OSError as error:
        raise StartError(f"arena.dir: {error}") from error
    publisher = make_publisher(settings.events)
    node = Node(core, memory, cuda.copy_engine, publisher, verifier, cuda.devices)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(node.health.on_loop_error)
    node.start(settings.integrity.scrub_bytes_per_s)
    gate, tickets, endpoints = (
        make_access_control(settings.security),
        Tickets(),
        make_endpoints(settings),
    )
    try:
        rpc = RpcServer(node, gate, tickets, endpoints)
        uids = frozenset({os.getuid(), 0, *settings.security.allowed_uids})
        descriptors = DescriptorServer(
            node, settings.descriptor_socket, endpoints.socket_mode, uids, gate, tickets
        )
    except (OSError, RuntimeError, ValueError, UnsafeError) as error:
        raise StartError(f"can't listen: {error}") from error
    http = listen_http(settings, node)
    await rpc.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.drain, settings.drain_timeout_s)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    trim_memory()
    log.info(
        "ready version=%s socket=%s arena_bytes=%d filled_bytes=%d huge_bytes=%d copy_threads=%d "
        "http_port=%s tcp_port=%s kernels=%s "
        "start_s=%.2f",
        hotkv.__version__,
        settings.grpc_socket,
        settings.arena.bytes,
        memory.filling.filled_bytes,
        memory.arena.huge_bytes,
        settings.copy_.num_threads,
        http.port if http else "none",
        rpc.tcp_port or "none",
        native.available(),
        time.monotonic() - started_s,
    )
    systemd.notify("READY=1")
    cuda.start()
    if settings.arena.prefault:

        def on_filled(filled_bytes: int, coming_bytes: int) -> None:
            loop.call_soon_threadsafe(node.grow, filled_bytes, coming_bytes)

        def backed() -> Iterator[int]:
            for num_entries in memory.records.back_rest():
                loop.call_soon_threadsafe(node.core.back_entries, num_entries)
                yield num_entries

        # The pinner settles what it is about to pin.
        memory.filling.start(on_filled, settles=cuda.pinner is None, first=backed())
    watch_all(node, settings, cuda, http, publisher)
    herald = Herald(node, rpc, cuda)
    checking = asyncio.create_task(keep_checking(node.health, herald.tell), name="health")
    node.health.watch_task(checking)
    await wait_for_end(node)
    if node.health.breach:
        await end_broken(node, herald)
    checking.cancel()
    await herald.tell()
    await rpc.stop(0.5)
    await node.close()
    descriptors.close()
    if http is not None:
        http.close()
    memory.filling.close()
    cuda.close()
    if publisher is not None:
        publisher.close()
    if settings.arena.keep:
        node.save_use()
        memory.release()
    else:
        memory.remove()
    os.close(lock_fd)
    log.info("stopped")
